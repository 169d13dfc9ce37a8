"""What the system lets this process do: descriptors, locked memory, processes, ports, and who may
join its jobs.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from prpc_engine.errors import ConfigError
from prpc_engine.settings.config import (
    KEY_MODE_FORBIDDEN,
    NO_SECRET_TEXT,
    SECRET_FILE_BYTES_MAX,
    SECRET_LENGTH_MIN,
    has_secret,
)
from prpc_engine.settings.user_secret import folder_of_user, user_secret

# a peer over shared memory takes some six: its socket, and segments with their mappings
NOFILE_SMALL = 1024
NOFILE_TOO_SMALL = 128
MIB = 1 << 20


def open_files(host: Host) -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    soft, hard = host.limit(resource.RLIMIT_NOFILE)
    value = f"{_amount(soft)} (hard limit {_amount(hard)})"
    raise_it = "raise it: ulimit -n 65536, LimitNOFILE= of systemd, docker --ulimit nofile=65536"
    if soft != resource.RLIM_INFINITY and soft < NOFILE_TOO_SMALL:
        yield Finding("open files", value, "bad", raise_it)
    elif soft != resource.RLIM_INFINITY and soft < NOFILE_SMALL:
        yield Finding("open files", value, "warn", raise_it)
    else:
        yield Finding("open files", value)


def locked_memory(host: Host) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK; only RDMA devices need it, and only where there are any is it worth a
    word.
    """
    soft, _ = host.limit(resource.RLIMIT_MEMLOCK)
    value = "no limit" if soft == resource.RLIM_INFINITY else f"{soft / MIB:.3g} MiB"
    if soft != resource.RLIM_INFINITY and host.entries("sys/class/infiniband"):
        yield Finding(
            "locked memory", value, "warn", "RDMA registers memory against it: ulimit -l unlimited"
        )
    else:
        yield Finding("locked memory", value)


def _amount(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)


def start_method(host: Host) -> Iterator[Finding]:
    """How the user's own multiprocessing starts processes; the engine always spawns."""
    try:
        import multiprocess
    except FileNotFoundError as error:
        yield Finding(
            "start method",
            f"no shards: {error}",
            "bad",
            "let TMPDIR name a folder that takes a file; see `ulimit -f`",
        )
        return
    method = (
        multiprocess.get_start_method(allow_none=True)
        or f"{multiprocess.get_all_start_methods()[0]} (default)"
    )
    yield Finding(
        "start method",
        f"{method}; shards are spawned whatever it is, and a fork of an open service is refused",
    )


def loopback(host: Host) -> Iterator[Finding]:
    """Can this process listen on 127.0.0.1 and reach itself?"""
    try:
        with (
            host.listen(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 2.0),
        ):
            port_range = host.read("proc/sys/net/ipv4/ip_local_port_range")
            value = f"works; ports {'-'.join(port_range.split())}" if port_range else "works"
            yield Finding("loopback tcp", value)
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding(
            "loopback tcp",
            reason,
            "bad",
            "bring the interface up: ip link set lo up; or the sandbox forbids sockets",
        )


def secret(host: Host) -> Iterator[Finding]:
    """Where the job's secret comes from. Never the secret itself."""
    path = os.environ.get("PRPC_SECRET_FILE")
    try:
        has_secret()
    except ConfigError as error:
        yield Finding("job secret", str(error), "bad", "mend it, or unset it")
        return
    if path:
        yield from _secret_file(Path(path))
    elif os.environ.get("PRPC_SECRET") == NO_SECRET_TEXT:
        advice = "every user of this host may call what is served here: unset PRPC_SECRET"
        yield Finding(
            "job secret", f"none, as PRPC_SECRET={NO_SECRET_TEXT} asks for", "warn", advice
        )
    elif os.environ.get("PRPC_SECRET"):
        advice = (
            "other processes of this user can read it there: PRPC_SECRET_FILE with mode 0600 is "
            "better"
        )
        yield Finding("job secret", "from PRPC_SECRET", "ok", advice)
    else:
        try:
            user_secret()
            yield Finding(
                "job secret",
                f"this user's own, in {folder_of_user()}: services listen on this host alone",
            )
        except ConfigError as error:
            yield Finding("job secret", str(error), "bad", "or set PRPC_SECRET_FILE")


def _secret_file(path: Path) -> Iterator[Finding]:
    where = f"PRPC_SECRET_FILE={path}"
    try:
        status = path.stat()
    except OSError as error:
        yield Finding(
            "job secret",
            f"{where}: {error.strerror}",
            "bad",
            "make it: (umask 077; openssl rand -hex 32 > FILE)",
        )
        return
    if not stat.S_ISREG(status.st_mode) or status.st_size > SECRET_FILE_BYTES_MAX:
        advice = f"name a regular file of at most {SECRET_FILE_BYTES_MAX} bytes"
        yield Finding("job secret", f"{where}: no file that a secret is in", "bad", advice)
    elif not os.access(path, os.R_OK) or status.st_size < SECRET_LENGTH_MIN:
        advice = f"let it hold the job's secret, of {SECRET_LENGTH_MIN} bytes at least, mode 0600"
        yield Finding(
            "job secret", f"{where}: empty, too short, or not ours to read", "bad", advice
        )
    elif stat.S_IMODE(status.st_mode) & KEY_MODE_FORBIDDEN:
        yield Finding("job secret", f"{where}: others may read it", "warn", f"chmod 600 {path}")
    else:
        yield Finding("job secret", where)
