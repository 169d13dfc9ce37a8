"""host:port, as people write it in a cluster and in an .endpoint_map. No I/O here: names are looked
up where they are used.

    address = host ":" port
    host  = name | IPv4 address | "[" IPv6 address "]"
    name  = letters, digits, ".", "-" and "_"; never digits and dots alone, which is a mistyped IPv4
          address
    port  = decimal, 1 to 65535; 0, "any free one", only where the caller says so

Two texts are one Address when they differ in the case of a name, or in the way an IPv6 address or a
port is written.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from prpc_engine.errors import ConfigError

# characters of the name of a service, a root, or one component of a path at the master
NAME_LENGTH_MAX = 256

PORT_MAX = 65535
EXPECTED = "host:port expected, such as ps0.example:2222, 10.0.0.1:2222 or [fd00::1]:2222"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")  # 253: what DNS carries
_DIGITS = re.compile(r"[0-9]{1,9}")  # and no other alphabet's; more are no port either


@dataclass(frozen=True)
class Address:
    """One place to connect to; `host` in lower case, an IPv6 address without its brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, port_min: int = 1) -> Address:
        """Raises ConfigError, which says what is wrong with it and what is expected."""
        if not isinstance(text, str):
            raise _refusal(text, f"it is of type {type(text).__name__}, and a str is allowed")
        if "/" in text:
            raise _refusal(text, "it has a scheme or a path")
        host, colon, port = text.rpartition(":")
        if not colon:
            raise _refusal(text, "it has no port")
        if not _DIGITS.fullmatch(port) or not port_min <= int(port) <= PORT_MAX:
            raise _refusal(text, f"port {port!r} is no number from {port_min} to {PORT_MAX}")
        return cls(_canonical_host(host, text), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def moved(self, offset: int) -> Address:
        """The same host, so many ports further. Raises ConfigError where there is no such port."""
        if not self.port:
            raise ConfigError(
                f"{self} moved by {offset}: port 0 is any free one, "
                "so nobody knows the port beside it"
            )
        if not 1 <= self.port + offset <= PORT_MAX:
            raise ConfigError(
                f"{self} moved by {offset} is port {self.port + offset}: ports are 1 to {PORT_MAX}"
            )
        return Address(self.host, self.port + offset)


def _canonical_host(host: str, text: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            address = ipaddress.IPv6Address(host[1:-1])
            # an interface, such as eth0
            if address.scope_id and not _NAME.fullmatch(address.scope_id):
                raise ValueError
        except ValueError:
            raise _refusal(text, f"{host[1:-1]!r} is no IPv6 address") from None
        return str(address)
    if ":" in host:
        raise _refusal(text, "it has two ports, or an IPv6 address without brackets")
    if not _NAME.fullmatch(host):
        raise _refusal(text, f"host {host!r} is not made of letters, digits, '.', '-' and '_'")
    if not host.strip("0123456789."):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _refusal(text, f"{host!r} is no IPv4 address") from None
    return host.lower()


def _refusal(text: object, why: str) -> ConfigError:
    return ConfigError(f"{text!r:.200} is no address: {why}; {EXPECTED}")
