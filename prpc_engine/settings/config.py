"""Where a node's settings come from: arguments first, then the environment. A bad value is named
with what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import logging
import os
import socket
import stat
from dataclasses import dataclass
from typing import Any

from prpc_engine.errors import ConfigError, is_number
from prpc_engine.regular_file import read_regular_file
from prpc_engine.settings.address import NAME_LENGTH_MAX, Address
from prpc_engine.settings.user_secret import NO_SECRET, NoSecret, UserSecret, user_secret
from shard import Slab, huge_page_policy, polling_enabled

_log = logging.getLogger("prpc")

TRANSPORTS = ("shm", "unix", "tcp")  # used by default, in order of preference
ALL_TRANSPORTS = ("shm", "unix", "verbs", "tcp")  # those that may be named
SECRET_FILE_BYTES_MAX = 4096  # far more than a key of any cipher: what is longer is another file
TLS_FILE_BYTES_MAX = 4 << 20  # a bundle of all public CAs has some 250 KB
# bytes: 64 bits in hex digits, which nobody guesses; what is shorter is a word
SECRET_LENGTH_MIN = 16
NO_SECRET_TEXT = "none"  # as PRPC_SECRET
# all but 0600 and 0640, as a group may be one of this job's processes: a TLS key is refused, a
# secret is used with a warning
KEY_MODE_FORBIDDEN = 0o037
# in order of preference, with what is allowed
SECRET_VARIABLES = {"PRPC_SECRET_FILE": "a path", "PRPC_SECRET": f'a secret or "{NO_SECRET_TEXT}"'}
TLS_VARIABLES = {"cert": "PRPC_TLS_CERT", "key": "PRPC_TLS_KEY", "ca": "PRPC_TLS_CA"}
POLLING_VARIABLE = "PRPC_ENABLE_POLLING"  # of a group's shards
SLAB_BYTES_MAX = 8 << 30
SERVER_ID_MAX = (1 << 31) - 1
TIMEOUT_S_MAX = 3600.0  # of what waits for others to start: as long as the master holds a look-up
DEFAULT_ROOT = "root"  # of a job at its master
# How long a host that vanished stays a member; a process that died on the master's host goes at
# once.
LEASE_S = 5.0
# below: a busy machine ends sessions that live; above: nobody would wait for it
LEASE_S_MIN, LEASE_S_MAX = 0.1, 3600.0
# of one thread for another, as of calls: 46 days, and less than any clock or lock of Python takes
WAIT_S_MAX = 4_000_000.0


def secret_from(given: bytes | str | None, file: str | None = None) -> bytes:
    """The secret of a node: the argument, else that file, else the one named by PRPC_SECRET_FILE,
    else PRPC_SECRET, else what all processes of this user on this host share (user_secret.py). None
    at all (b""): NO_SECRET, or PRPC_SECRET=none. Raises ConfigError."""
    if given is not None:
        if isinstance(given, NoSecret | UserSecret):
            return given
        if not isinstance(given, bytes | str):
            raise ConfigError(f"secret= is {type(given).__name__}: bytes or a str are allowed")
        return _long_enough(
            _encoded(given, "secret=") if isinstance(given, str) else given, "secret="
        )
    path, where = (
        (file, f"secret file {file!r}")
        if file is not None
        else (variable_text("PRPC_SECRET_FILE"), "")
    )
    if path is not None:
        where = where or f"PRPC_SECRET_FILE={path!r}"
        try:
            secret = read_regular_file(path, SECRET_FILE_BYTES_MAX).strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
        if not secret:
            raise ConfigError(f"{where} is empty")
        _warn_of_others(path, where)
        return _long_enough(secret, where)
    text = variable_text("PRPC_SECRET")
    if text is None:
        return user_secret()
    if text == NO_SECRET_TEXT:
        return NO_SECRET
    return _long_enough(_encoded(text, "PRPC_SECRET"), "PRPC_SECRET")


def variable_text(name: str) -> str | None:
    """What that variable of the secret or of TLS says; None: it is not set. One that is set to
    nothing is refused: NAME=$UNSET of a script must not switch it off without a word. Raises
    ConfigError.
    """
    text = os.environ.get(name)
    if text == "":
        allowed = SECRET_VARIABLES.get(name, "a path")
        raise ConfigError(f"{name}='': {allowed} is allowed; unset it for the default")
    return text


@functools.cache  # a line for each file
def _warn_of_others(path: str, where: str) -> None:
    """A process of another user that reads the secret can call all services of the job."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return  # it was read, and is gone by now
    if mode & KEY_MODE_FORBIDDEN:
        _log.warning(
            "%s has mode %04o: others on this host may read or change it; chmod 600 %s "
            "(in Kubernetes, defaultMode: 0400 of the secret's volume)",
            *(where, mode, path),
        )


def _encoded(text: str, where: str) -> bytes:
    """The bytes that a variable or an argument of the command line has, whatever they are."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:  # whose own text would show the secret
        raise ConfigError(
            f"{where}: a str that is no text of Unicode, at character {error.start}; pass bytes"
        ) from None


def _long_enough(secret: bytes, where: str) -> bytes:
    """A proof that was overheard can be tried against guesses, offline. The text says nothing of
    the secret but its length.
    """
    if len(secret) < SECRET_LENGTH_MIN:
        raise ConfigError(
            f"{where}: a secret of {len(secret)} bytes, at least {SECRET_LENGTH_MIN} are "
            "expected, and random ones: make it by (umask 077; openssl rand -hex 32 > FILE)"
            + ("; secret=NO_SECRET asks for none" if not secret else "")
        )
    return secret


def has_secret() -> bool:
    """Whether the environment gives this process a secret, or says that there shall be none. Raises
    ConfigError for a variable that is empty.
    """
    name = secret_variable()
    return bool(name) and variable_text(name) is not None


def secret_variable() -> str:
    """The variable that gives this process a secret, whatever it says; "": none does."""
    return next((name for name in SECRET_VARIABLES if name in os.environ), "")


@dataclass(frozen=True)
class TlsSettings:
    """TLS 1.3 for tcp: paths of PEM files. Every node of the job needs them, or none.

    cert  this node's certificate, followed by those between it and the CA
    key   its key, without a password; mode 0600, or 0640 at most
    ca    the CA of the job, not a public one: both sides must show a certificate that it signed,
          and the names in it are who the peer is for allow lists. "": the channel is encrypted, and
          the job's secret says who is there
    """

    cert: str
    key: str
    ca: str = ""


def check_tls(settings: TlsSettings, secret: bytes, where: str) -> TlsSettings:
    """Whether these files can be used, by their names, modes and sizes. Raises ConfigError, which
    begins with `where`.
    """
    if not isinstance(settings, TlsSettings):
        raise ConfigError(
            f"tls={settings!r:.100}: TlsSettings are expected, such as TlsSettings(cert=..., "
            "key=..., ca=...)"
        )
    if not settings.cert or not settings.key:
        raise ConfigError(
            f"{where}: cert={settings.cert!r}, key={settings.key!r}: "
            "TLS needs a certificate and its key at every node"
        )
    if not settings.ca and not secret:
        raise ConfigError(
            f"{where}: without a CA a secret is needed, or nobody knows who is at the other end: "
            "PRPC_TLS_CA, or PRPC_SECRET_FILE"
        )
    for name, path in dataclasses.asdict(settings).items():
        try:
            if path:
                read_regular_file(path, TLS_FILE_BYTES_MAX)
                mode = stat.S_IMODE(os.stat(path).st_mode)
                if name == "key" and mode & KEY_MODE_FORBIDDEN:
                    raise ConfigError(
                        f"{where}: key={path!r} has mode {mode:04o}: others may read or change "
                        f"it; chmod 600 {path} (at most "
                        "0640; in Kubernetes, defaultMode: 0400 of the secret's volume)"
                    )
        except OSError as error:
            raise ConfigError(
                f"{where}: {name}={path!r} cannot be read: {error.strerror}"
            ) from error
    return settings


def check_environment() -> None:
    """Refuse variables of the engine that it could not make sense of later, within a process of its
    own. Raises ConfigError.
    """
    try:
        huge_page_policy()
        polling_enabled(POLLING_VARIABLE, os.environ.get(POLLING_VARIABLE), default=False)
        Slab().close()  # PRPC_DEBUG_LEASES; it has no memory yet
    except ValueError as error:
        raise ConfigError(str(error)) from error


def slab_bytes_max() -> int:
    """PRPC_SLAB_BYTES_MAX, or the default."""
    text = os.environ.get("PRPC_SLAB_BYTES_MAX")
    if text is None:
        return SLAB_BYTES_MAX
    if not text.isdecimal() or int(text) < 1 << 20:
        raise ConfigError(
            f"PRPC_SLAB_BYTES_MAX={text!r}: a number of bytes from {1 << 20} on is allowed"
        )
    return int(text)


def check_exposure(host: str, secret: bytes) -> None:
    """Refuse to listen where other hosts can connect without a secret of the job: that of a user is
    one host's. Raises ConfigError."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and (not secret or isinstance(secret, UserSecret)):
        raise ConfigError(
            f"refusing to listen at {host}, which other hosts may reach, "
            "without a secret of the job: set PRPC_SECRET_FILE to a "
            "file that only this job can read (or pass secret=), or listen at 127.0.0.1"
        )


IPV4_WILDCARD = "0.0.0.0"
IPV6_WILDCARD = "::"  # takes IPv4, too
WILDCARDS = (IPV4_WILDCARD, IPV6_WILDCARD)


def advertise_from(given: object, where: str) -> Address:
    """Where other nodes are told to connect: "host" or "host:port". Port 0, or none: the one bound.
    Raises ConfigError, which begins with `where`.
    """
    if not isinstance(given, str):
        raise ConfigError(f'{where}: "host" or "host:port" expected')
    has_port = ":" in given.rpartition("]")[2]
    try:
        address = Address.parse(given if has_port else f"{given}:0", port_min=0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if address.host in WILDCARDS:
        raise ConfigError(
            f"{where}: that is every address of a host; name one that other nodes reach this one at"
        )
    return address


def address_facing(host: str, port: int, bound: str) -> Address | None:
    """This host's own address on its way to that one: what nodes are told that bind every address,
    of IPv4 where that is all that `bound`, one of WILDCARDS, takes. None where there is no way.

    Nothing is sent: a datagram socket that is connected has looked its route up.
    """
    family = socket.AF_INET if bound == IPV4_WILDCARD else socket.AF_UNSPEC
    try:
        found = socket.getaddrinfo(host, port or 1, family, socket.SOCK_DGRAM)
    except OSError:
        return None
    for one, kind, protocol, _, where in found:
        with contextlib.suppress(OSError), socket.socket(one, kind, protocol) as sock:
            sock.connect(where)
            return Address(sock.getsockname()[0], 0)
    return None


def wildcard_for(host: str) -> str:
    """Every address, for those who reach that host: of IPv4 alone, which a host always has, unless
    the host is known by IPv6 alone.
    """
    if ":" in host:
        return IPV6_WILDCARD
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return IPV4_WILDCARD
    families = {each[0] for each in found}
    return IPV6_WILDCARD if families == {socket.AF_INET6} else IPV4_WILDCARD


def check_number(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int within bounds. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}: a whole number from {least} to {most} is allowed")
    return value


def check_name(name: object) -> None:
    """A service's name is a short, non-empty str. Raises ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise ConfigError(
            f"service name {name!r}: a str of 1 to {NAME_LENGTH_MAX} characters is allowed"
        )


def check_flag(name: str, value: object) -> None:
    """True or False. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.100}: True or False is allowed")


def check_made_of(name: str, value: object, kind: type) -> None:
    """An object of that class, whose defaults suffice, or None. Raises ConfigError."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{name}={value!r:.100}: None or a {kind.__name__} is allowed, such as "
            f"{kind.__name__}()"
        )


def check_wait(timeout_s: object) -> None:
    """A wait that may last as long as it takes: a number of seconds from 0 on, or None. Raises
    ConfigError.
    """
    check_seconds("timeout_s", timeout_s, WAIT_S_MAX, or_none=True)


def check_timeout(timeout_s: object, most: float = TIMEOUT_S_MAX) -> None:
    """A wait that must end: a number of seconds from 0 on. Raises ConfigError."""
    check_seconds("timeout_s", timeout_s, most)


def check_seconds(
    name: str, value: Any, most: float = TIMEOUT_S_MAX, or_none: bool = False
) -> None:
    """A number of seconds from 0 on, or None where that is allowed. Raises ConfigError."""
    if value is None and or_none:
        return
    if is_number(value) and 0 <= value <= most and _is_float(value):
        return
    raise ConfigError(
        f"{name}={value!r:.100}: 0 to {most:.0f} seconds are allowed"
        + (", or None" if or_none else "")
    )


def _is_float(value: Any) -> bool:
    """Whether clocks can add it: an int may be beyond every float, which inf allows by
    comparison.
    """
    try:
        float(value)
    except OverflowError:
        return False
    return True
