"""The sections of NodeConfig, which are those of the file as well, and the arguments that replace
their settings. Types and ranges stand here alone, with the words that an error says them in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, TypedDict

import msgspec

from prpc_engine.settings.address import NAME_LENGTH_MAX, PORT_MAX, Address
from prpc_engine.settings.allow import AllowList
from prpc_engine.settings.config import (
    DEFAULT_ROOT,
    LEASE_S,
    LEASE_S_MAX,
    LEASE_S_MIN,
    TIMEOUT_S_MAX,
    TRANSPORTS,
    TlsSettings,
)
from prpc_engine.settings.network import CONNECTION_TIMEOUT_MS_MAX, CONNECTION_TIMEOUT_S, INT64_MAX
from shard import STALL_BUDGET_S, Limits, RestartPolicy

SHARDS_MAX = 64
AUTO = "auto"  # as a count of shards
ON_FAILURE = RestartPolicy("on-failure")

Switch = Annotated[bool, msgspec.Meta(description="true and false are allowed")]
Patience = Annotated[
    float,
    msgspec.Meta(
        ge=0, le=TIMEOUT_S_MAX, description=f"0 to {TIMEOUT_S_MAX:.0f} seconds are allowed"
    ),
]
Lease = Annotated[
    float,
    msgspec.Meta(
        ge=LEASE_S_MIN,
        le=LEASE_S_MAX,
        description=f"{LEASE_S_MIN} to {LEASE_S_MAX:.0f} seconds are allowed",
    ),
]
Name = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=NAME_LENGTH_MAX,
        description=f"a str of 1 to {NAME_LENGTH_MAX} characters is allowed",
    ),
]
SlowCall = Annotated[
    float,
    msgspec.Meta(
        gt=0, le=sys.float_info.max, description="more than 0 seconds are allowed, or None"
    ),
]
ConnectionTimeout = Annotated[
    float,
    msgspec.Meta(
        ge=1e-3,
        le=CONNECTION_TIMEOUT_MS_MAX / 1e3,
        description=f"0.001 to {CONNECTION_TIMEOUT_MS_MAX // 1000} seconds are allowed",
    ),
]
Folder = Annotated[str, msgspec.Meta(description='a folder is allowed, or "" for the working one')]
PortOffset = Annotated[
    int,
    msgspec.Meta(
        ge=-PORT_MAX,
        le=PORT_MAX,
        description=f"a whole number from -{PORT_MAX} to {PORT_MAX} is allowed, but for 0: "
        "data and control would share a port",
    ),
]
FlowControl = Annotated[
    int, msgspec.Meta(ge=1, le=INT64_MAX, description="a whole number from 1 on is allowed")
]
Device = Annotated[
    str,
    msgspec.Meta(
        description='"device" or "device:port", such as "mlx5_0:1", several of them with commas, '
        'or "all" is allowed'
    ),
]
GidIndex = Annotated[
    int, msgspec.Meta(ge=0, le=255, description="the index of a GID, 0 to 255, is allowed")
]
ServiceLevel = Annotated[int, msgspec.Meta(ge=0, le=15, description="0 to 15 is allowed")]
TrafficClass = Annotated[int, msgspec.Meta(ge=0, le=255, description="0 to 255 is allowed")]
Compression = Annotated[str, msgspec.Meta(description='"zlib", "zstd" and "lz4" are allowed')]


class NodeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[node]: where it listens, how it belongs to a job, and how it sends values.

    bind            "host:port" to listen at by tcp, port 0 for any free one
    advertise       "host" or "host:port" where others reach it by tcp, if not at what it binds
    transports      which may be used, in order of preference
    timeout_s       for the master to answer
    lease_s         how long rank and servers outlive the node's silence
    root            which job of those that share the master
    stall_budget_s  a handler that keeps the reactor for more seconds is named in the log; inf: none
                    is
    timing          measure how long each handler takes
    slow_call_s     the same, and handlers that take so many seconds are named in the log
    allow_pickle    send and accept any object as a pickle
    compression     of what is sent
    """

    bind: Address = Address("127.0.0.1", 0)
    advertise: Address | None = None
    transports: tuple[str, ...] = TRANSPORTS
    timeout_s: Patience = 10.0
    lease_s: Lease = LEASE_S
    root: Name = DEFAULT_ROOT
    stall_budget_s: float = STALL_BUDGET_S
    timing: Switch = False
    slow_call_s: SlowCall | None = None
    allow_pickle: Switch = False
    compression: Compression | None = None


class ShardsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[shards]: the processes of a node beside the one that makes it.

    count      how many; 0: none. "auto" is resolved as the settings are read
    polling    they, and threads that wait, never sleep
    pin_cores  True: each stays on a core that no other node of this host takes which is told the
               same; without shards the thread that communicates does. False: none is bound, the
               default of a role. None: each shard stays on one core, whatever other nodes do: two
               services of this host may take the same one
    restart    what becomes of one that dies
    """

    count: int = 0
    polling: Switch = False
    pin_cores: Switch | None = None
    restart: RestartPolicy = ON_FAILURE


class TransportSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[transport]: what one transport alone has.

    tcp_checksum         asks for checksums of tcp connections without TLS; one side is enough
    verbs_device         the RDMA device, or "device:port"; several with commas, or "all": messages
                         go over the first, and arrays are read over all; None: the first that may
                         be used
    verbs_gid_index      which of each port's GIDs; None: the best of them
    verbs_service_level  of its packets on InfiniBand
    verbs_traffic_class  of its packets' headers: on RoCE v2 its upper six bits are the DSCP
    """

    tcp_checksum: Switch = False
    verbs_device: Device | None = None
    verbs_gid_index: GidIndex | None = None
    verbs_service_level: ServiceLevel = 0
    verbs_traffic_class: TrafficClass = 0


class NetworkSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[network]: what a task of a cluster, and who does the same elsewhere, has beside that. A node
    without a role takes no notice of it.

    connection_timeout_s  how long a call waits for a connection to come back, when it has no
                          timeout of its own
    endpoint_map_folder   where `.endpoint_map` is; "": the working directory. In a file, relative
                          to that file
    data_port_offset      ports from control to data, where there is no `.endpoint_map`; None: tasks
                          tell each other
    flow_control_max      tensors and requests that may wait at a task; None: its own bound
    tensor_fuse           receives of one source and step leave together
    """

    connection_timeout_s: ConnectionTimeout = CONNECTION_TIMEOUT_S
    endpoint_map_folder: Folder = ""
    data_port_offset: PortOffset | None = None
    flow_control_max: FlowControl | None = None
    tensor_fuse: Switch = False


class NodeArguments(TypedDict, total=False):
    """What a program may pass, by name. None is as good as nothing: the file and the environment
    say.

    Meanings: the docstrings of NodeSection, ShardsSection, TransportSection, NetworkSection and
    NodeConfig.
    """

    shards: int | str | None
    polling: bool | None
    pin_cores: bool | None
    restart: str | RestartPolicy | None
    bind: str | None
    advertise: str | None
    transports: Sequence[str] | None
    timeout_s: float | None
    lease_s: float | None
    root: str | None
    stall_budget_s: float | None
    timing: bool | None
    slow_call_s: float | None
    allow_pickle: bool | None
    compression: str | None
    connection_timeout_s: float | None
    endpoint_map_folder: str | None
    data_port_offset: int | None
    flow_control_max: int | None
    tensor_fuse: bool | None
    secret: bytes | str | None
    limits: Limits | None
    tls: TlsSettings | None
    allow: AllowList | None


WHOLE = ("secret", "tls", "allow")  # settings outside of sections
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "node": NodeSection,
    "shards": ShardsSection,
    "transport": TransportSection,
    "network": NetworkSection,
}
LIMITS = [field.name for field in fields(Limits)]
SETTING_OF = {  # argument -> setting
    **{name: f"node.{name}" for name in NodeSection.__struct_fields__},
    "shards": "shards.count",
    "polling": "shards.polling",
    "pin_cores": "shards.pin_cores",
    "restart": "shards.restart",
    **{name: f"network.{name}" for name in NetworkSection.__struct_fields__},
    **{name: name for name in ("limits", *WHOLE)},
}
assert SETTING_OF.keys() == NodeArguments.__annotations__.keys()
