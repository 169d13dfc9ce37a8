"""Where a node of a DI-engine job listens, and which others it dials, as DI-engine writes that. No
I/O: names are looked up where they are used.

    tcp://host:port    a tcp port; nodes on one host go on over shared memory
    ipc:///path        a file that the node writes, with the addresses by which processes of this
                       host reach it (rendezvous_file.py)

Two texts are one NodePlace when they differ in the case of a name or in how a port is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address

ALLOWED = 'as DI-engine writes it: "tcp://host:port" or "ipc:///path/of/a.file"'


@dataclass(frozen=True)
class NodePlace:
    """One address of DI-engine: either `tcp` or `path` is set."""

    tcp: Address | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: object, what: str) -> NodePlace:
        """`what` names the setting in errors. Raises ConfigError."""
        if isinstance(text, str):
            scheme, separator, rest = text.strip().partition("://")
            if separator and scheme == "tcp":
                try:
                    return cls(tcp=Address.parse(rest, port_min=0))
                except ConfigError as error:
                    raise ConfigError(f"{what}={text!r}: {error}") from error
            if separator and scheme == "ipc" and rest.startswith("/"):
                return cls(path=rest)
        raise ConfigError(f"{what}={text!r:.200}: an address is expected {ALLOWED}")

    def __str__(self) -> str:
        return f"ipc://{self.path}" if self.tcp is None else f"tcp://{self.tcp}"
