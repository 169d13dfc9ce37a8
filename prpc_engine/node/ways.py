"""The transports of a node, by their names: those of the machine, or those that a simulation has in
their place.
"""

from __future__ import annotations

from dataclasses import replace

from prpc_engine import errors
from prpc_engine.settings.config import TlsSettings
from prpc_engine.settings.sections import TransportSection
from shard import (
    Node,
    ShardError,
    ShmTransport,
    Slab,
    TcpTransport,
    Transport,
    UnixTransport,
    VerbsOptions,
    VerbsTransport,
    runtime,
)

CONTROL = "control"  # tcp to a master, whose messages are all small: on one lane


def verbs_options(section: TransportSection) -> VerbsOptions:
    """Which RDMA devices are used, and how, as the settings say."""
    return VerbsOptions(
        device=section.verbs_device,
        gid_index=section.verbs_gid_index,
        service_level=section.verbs_service_level,
        traffic_class=section.verbs_traffic_class,
    )


def make_transports(
    identity: Node, slab: Slab, tls: TlsSettings | None, section: TransportSection
) -> dict[str, Transport]:
    """Those named shm, unix, verbs, tcp and CONTROL. Raises ConfigError for unreadable
    certificates.
    """
    if runtime.transports is not None:
        return runtime.transports(identity, slab)
    one_lane = replace(identity, limits=replace(identity.limits, connections_per_peer=1))
    try:
        return {
            "shm": ShmTransport(identity, slab),
            "unix": UnixTransport(identity, slab),
            "verbs": VerbsTransport(
                identity,
                slab,
                verbs_options(section),
                has_tls=tls is not None,
            ),
            "tcp": TcpTransport(identity, slab, tls),
            CONTROL: TcpTransport(one_lane, slab, tls),
        }
    except ShardError as error:
        raise errors.ConfigError(str(error)) from error
