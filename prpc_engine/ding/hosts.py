"""Which host an address is of, asked of the machine: where a node listens, and where it dials.

    secret           listens at                               dials
    of the job       the address; all of this host's where    the address
                     it is a name for none of them
    of this user     the loopback, at the same port           the loopback, where it is an address
                                                              of this host

A user's secret is good on one host, so without one of the job nobody listens to others.
"""

from __future__ import annotations

import socket

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import wildcard_for
from prpc_engine.settings.user_secret import UserSecret

LOOPBACK = "127.0.0.1"
REMEDY = (
    "set PRPC_SECRET_FILE on all hosts of the job to a file that only this job can read, with the "
    "same content"
)


def listening_address(address: Address, secret: bytes) -> Address:
    """Raises ConfigError for an address of another host without a secret of the job."""
    if _is_loopback(address.host):
        return address
    is_own = is_own_host(address.host)
    if secret and not isinstance(secret, UserSecret):
        return address if is_own else Address(wildcard_for(address.host), address.port)
    if not is_own:
        raise ConfigError(
            f"{address} is no address of this host, and listening to others: {REMEDY}"
        )
    return Address(LOOPBACK, address.port)


def dialled_address(address: Address, secret: bytes) -> Address:
    """Raises ConfigError as above."""
    if _is_loopback(address.host) or (secret and not isinstance(secret, UserSecret)):
        return address
    if not is_own_host(address.host):
        raise ConfigError(f"{address} is on another host, and there is no secret: {REMEDY}")
    return Address(LOOPBACK, address.port)


def is_own_host(host: str) -> bool:
    """Whether a socket of this host can have that address; a name may take the resolver's time."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(where)
                return True
        except OSError:
            continue
    return False


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
