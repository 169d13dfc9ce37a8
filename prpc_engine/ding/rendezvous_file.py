"""The file at an ipc:// place: by what addresses processes of this host reach the node. All its I/O
is here.

    {"addresses": ["shm://...", "unix://..."]}

It is written under another name and moved into place, mode 0600, and removed by the node that wrote
it. A connection is authenticated as any other: the file is no secret. One that a node that was
killed has left is replaced; so is one of a node that lives, with a warning, as what that node has
forked may outlive it and look the same; and a socket, as DI-engine's nng leaves one there. Any
other file that has content is kept, and write() raises ConfigError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

import msgspec

from prpc_engine.errors import ConfigError, NotSent
from shard import is_bound

logger = logging.getLogger("prpc")
FILE_BYTES_MAX = 64 << 10


class RendezvousFile(msgspec.Struct):
    """What it says."""

    addresses: list[str]


def write(path: str, addresses: list[str]) -> None:
    """Raises ConfigError."""
    try:
        if any(map(is_bound, read(path))):
            logger.warning(
                "ipc://%s is another node's, which lives, or has left processes that it forked: "
                "others that attach there find this node from now on; give each its own listen_to",
                path,
            )
    except NotSent as error:
        if _holds_something(path):
            raise ConfigError(
                f"listen_to ipc://{path}: what is there is kept, as no node of this kind has "
                f"written it; name another path, or remove it ({error})"
            ) from error
    file = Path(path)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(
            unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb") as opened:
            opened.write(msgspec.json.encode(RendezvousFile(addresses)))
        unfinished.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{path}, by which other processes of this host find this one, cannot be written: "
            f"{error.strerror or error}"
        ) from error


def _holds_something(path: str) -> bool:
    """Whether a file is there, with content, that is no socket."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_size > 0 and stat.S_ISREG(status.st_mode)


def read(path: str) -> list[str]:
    """Raises NotSent where nobody has written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            content = msgspec.json.decode(opened.read(FILE_BYTES_MAX), type=RendezvousFile)
    except OSError as error:
        raise NotSent(f"nobody listens at ipc://{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise NotSent(f"ipc://{path} is no file of a node of this kind: {error}") from error
    if not content.addresses:
        raise NotSent(f"ipc://{path} names no address")
    return content.addresses


def remove(path: str, addresses: list[str]) -> None:
    """If it is still the one with these addresses."""
    with contextlib.suppress(OSError, NotSent):
        if read(path) == addresses:
            os.unlink(path)
