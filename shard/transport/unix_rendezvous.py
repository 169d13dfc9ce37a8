"""Where a process listens for others of its host: a Unix socket with an abstract name. shm and unix
meet like this.

    address  scheme "://" host "/" uid "/" token
    host     boot id of the machine, and inode of the network namespace, in which abstract names are
             looked up
    uid      of the process that listens, by its own account; dial() asks the kernel, and so does
             the door (handshake_io.py)
    token    random, 128 bits: the socket's name, not to be guessed

Nothing of it is in the file system, and it goes with the process, however that ends.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import socket
import struct
import time
from pathlib import Path

from shard.errors import ShardError, UnreachableError
from shard.loop.waits import sleep
from shard.transport.connecting import not_reached

LISTEN_BACKLOG = 256
# before another look whether there is room among those: the kernel does not tell
FULL_PAUSE_S = 0.01


@functools.cache  # a process that has no descriptor left still knows its host
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def boot_id() -> str:
    """Of this machine since it started, and of the network namespace that Unix sockets are looked
    up in.
    """
    return f"{_boot()}.{os.stat('/proc/self/ns/net').st_ino}"


def _parts(address: str) -> list[str]:
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    if len(parts) != 3:
        raise UnreachableError(
            f"{address!r} is no {scheme} address: {scheme}://host/uid/token expected"
        )
    return parts


def cannot_reach(address: str) -> str | None:
    """Why nobody there can be met from here, or None when it is worth a try. Raises
    UnreachableError for what is no address.
    """
    host, uid, _ = _parts(address)
    if host != boot_id():
        return "another host or network namespace"
    if uid != str(os.getuid()):
        return f"another user ({uid})"
    return None


def is_bound(address: str) -> bool:
    """Whether that process of this host listens, or one that it has forked has its socket yet.
    False for what is no address of this host. Does not connect.
    """
    try:
        if cannot_reach(address) is not None:
            return False
        names = Path("/proc/net/unix").read_text(errors="replace")
    except (UnreachableError, OSError):
        return False
    return f"@prpc.{_parts(address)[2]}" in names


def listen(scheme: str) -> tuple[socket.socket, str]:
    """A listening socket under a new name, and its address. Raises ShardError."""
    token = secrets.token_hex(16)
    address = f"{scheme}://{boot_id()}/{os.getuid()}/{token}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(f"\0prpc.{token}")
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise ShardError(
            f"cannot listen at a Unix socket for {scheme}: {error.strerror}"
        ) from error
    return sock, address


async def dial(address: str, deadline: float) -> socket.socket:
    """A socket that has connected to a process of our user, and does not block; a coroutine of the
    control loop, until time.monotonic() says `deadline`. Raises UnreachableError.
    """
    token = _parts(address)[2]
    try:
        sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
    except OSError as error:
        raise not_reached(address, error) from error
    try:
        while (failure := sock.connect_ex(f"\0prpc.{token}")) == errno.EAGAIN:
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"{address} accepted no connection in time: {LISTEN_BACKLOG} or so wait there"
                )
            await sleep(FULL_PAUSE_S)
        if failure:
            raise OSError(failure, os.strerror(failure))
        pid, uid = credentials(sock)
        if uid != os.getuid():
            # A user namespace of its own, most likely: both say the same number, and are two users.
            raise UnreachableError(
                f"process {pid} at {address} belongs to user {uid}, this one to {os.getuid()}"
            )
    except OSError as error:
        sock.close()
        raise not_reached(address, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel noted them when they connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
