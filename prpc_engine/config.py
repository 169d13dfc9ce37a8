"""Where a node's settings come from: arguments first, then the environment. A bad value is named with what is allowed."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.registry import NAME_LENGTH_MAX
from shard import DEFAULT_LIMITS, Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRANSPORTS = ("shm", "tcp")  # in order of preference
SLAB_BYTES_MAX = 8 << 30
SERVER_ID_MAX = (1 << 31) - 1
TIMEOUT_S_MAX = 3600.0  # of what waits for others to start: as long as the master holds a look-up


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
    """The argument, else [limits] of the TOML file named by PRPC_CONFIG, else the defaults. Raises ConfigError."""
    if given is not None:
        return given
    path = os.environ.get("PRPC_CONFIG")
    return load_limits(path) if path else DEFAULT_LIMITS


def load_limits(path: str) -> Limits:
    """[limits] of a TOML file such as configs/default.toml; what it does not name keeps its default. Raises ConfigError."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"PRPC_CONFIG={path!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    fields = {field.name: field.type for field in dataclasses.fields(Limits)}
    values: dict[str, Any] = {}
    for section, content in table.items():
        if section != "limits" or not isinstance(content, dict):
            raise ConfigError(f"{path}: unknown section or value {section!r}: only [limits] is allowed")
        for name, value in content.items():
            kind = float if fields.get(name) == "float" else int
            if name not in fields or isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
                raise ConfigError(
                    f"{path}: [limits] {name} = {value!r}: positive numbers are allowed for {', '.join(sorted(fields))}"
                )
            values[name] = kind(value)
    return Limits(**values)


def slab_bytes_max() -> int:
    """PRPC_SLAB_BYTES_MAX, or the default."""
    text = os.environ.get("PRPC_SLAB_BYTES_MAX")
    if text is None:
        return SLAB_BYTES_MAX
    if not text.isdecimal() or int(text) < 1 << 20:
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
            f"refusing to listen at {host}, which other hosts may reach, without a secret: set PRPC_SECRET_FILE to a file that "
            "only this job can read (or pass secret=), or listen at 127.0.0.1"
        )


def check_number(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int within bounds. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}: a whole number from {least} to {most} is allowed")
    return value


def check_name(name: object) -> None:
    """A service's name is a short, non-empty str. Raises ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise ConfigError(f"service name {name!r}: a str of 1 to {NAME_LENGTH_MAX} characters is allowed")


def check_timeout(timeout_s: object) -> None:
    """A wait that must end: a number of seconds from 0 on. Raises ConfigError."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= TIMEOUT_S_MAX:
        raise ConfigError(f"timeout_s={timeout_s!r}: 0 to {TIMEOUT_S_MAX:.0f} seconds are allowed")
