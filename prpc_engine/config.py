"""Where a node's settings come from: arguments first, then the environment. A bad value is named with what is allowed."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from prpc_engine.errors import ConfigError
from shard import DEFAULT_LIMITS, Limits

TRANSPORTS = ("shm", "tcp")  # in order of preference
SLAB_BYTES_MAX = 8 << 30


def transports_from(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The transports a service may use, in its order of preference; None: all. Raises ConfigError."""
    chosen = TRANSPORTS if wanted is None else tuple(wanted)
    unknown = [name for name in chosen if name not in TRANSPORTS]
    if unknown or not chosen:
        raise ConfigError(f"transports={list(chosen)!r}: allowed are {', '.join(TRANSPORTS)}, at least one")
    return chosen


def secret_from(given: bytes | str | None) -> bytes:
    """The job's secret: the argument, else the file named by PRPC_SECRET_FILE, else PRPC_SECRET, else none (b"")."""
    if given is not None:
        return given.encode() if isinstance(given, str) else given
    path = os.environ.get("PRPC_SECRET_FILE")
    if path:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"PRPC_SECRET_FILE={path!r} cannot be read: {error.strerror}") from error
        if not secret:
            raise ConfigError(f"PRPC_SECRET_FILE={path!r} is empty")
        return secret
    return os.environ.get("PRPC_SECRET", "").encode()


def limits_from(given: Limits | None) -> Limits:
    """The argument, else the defaults."""
    return DEFAULT_LIMITS if given is None else given


def slab_bytes_max() -> int:
    """PRPC_SLAB_BYTES_MAX, or the default."""
    text = os.environ.get("PRPC_SLAB_BYTES_MAX")
    if text is None:
        return SLAB_BYTES_MAX
    if not text.isdigit() or int(text) < 1 << 20:
        raise ConfigError(f"PRPC_SLAB_BYTES_MAX={text!r}: a number of bytes from {1 << 20} on is allowed")
    return int(text)


def check_exposure(host: str, secret: bytes) -> None:
    """Refuse to listen where other hosts can connect while there is no secret. Raises ConfigError."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not secret:
        raise ConfigError(
            f"refusing to listen at {host}, which other hosts may reach, without a secret: set PRPC_SECRET_FILE to a file that only "
            "this job can read (or pass secret=), or listen at 127.0.0.1"
        )


def check_number(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int within bounds. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}: a whole number from {least} to {most} is allowed")
    return value
