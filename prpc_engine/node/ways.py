"""The transports of a node, by their names: those of the machine, or those that a simulation has in
their place.
"""

from __future__ import annotations

from dataclasses import replace

from prpc_engine import errors
from prpc_engine.settings.config import TlsSettings
from shard import (
    Node,
    ShardError,
    ShmTransport,
    Slab,
    TcpTransport,
    Transport,
    UnixTransport,
    runtime,
)

CONTROL = "control"  # tcp to a master, whose messages are all small: on one lane


def make_transports(identity: Node, slab: Slab, tls: TlsSettings | None) -> dict[str, Transport]:
    """Those named shm, unix, tcp and CONTROL. Raises ConfigError for unreadable certificates."""
    if runtime.transports is not None:
        return runtime.transports(identity, slab)
    one_lane = replace(identity, limits=replace(identity.limits, connections_per_peer=1))
    try:
        return {
            "shm": ShmTransport(identity, slab),
            "unix": UnixTransport(identity, slab),
            "tcp": TcpTransport(identity, slab, tls),
            CONTROL: TcpTransport(one_lane, slab, tls),
        }
    except ShardError as error:
        raise errors.ConfigError(str(error)) from error
