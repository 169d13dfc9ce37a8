"""A shared-nothing engine in pure Python: pinned processes, rings and slabs in shared memory, one reactor each.

with shard.ShardGroup(2) as group:
    print(group.submit_to(1, math.sqrt, 2.0).result())
"""

from __future__ import annotations

from shard.counters import Counters
from shard.cpu import pin, restore, usable_cores
from shard.driver import Driver
from shard.errors import (
    AddressInUseError,
    AuthenticationError,
    BackpressureError,
    ClosedError,
    ForkedError,
    LocalProtocolError,
    PeerLostError,
    ProtocolError,
    RemoteProtocolError,
    ShardError,
    ShmFull,
    UnreachableError,
)
from shard.future import VALUE, Future
from shard.group import GroupStatistics, Shard, ShardGroup, this_shard
from shard.handle import Ring
from shard.limits import DEFAULT_LIMITS, Limits
from shard.reactor import Reactor
from shard.ring import RingConsumer, RingProducer
from shard.segment import collect_garbage, find_garbage
from shard.slab import Slab, SlabStatistics
from shard.timers import Timer, Timers
from shard.transport import Connection, Listener, Node, Traffic, Transport
from shard.transport.memory import MemoryTransport, Weather
from shard.transport.shm import ShmTransport
from shard.transport.tcp import TcpTransport

__all__ = [
    "DEFAULT_LIMITS",
    "VALUE",
    "AddressInUseError",
    "AuthenticationError",
    "BackpressureError",
    "ClosedError",
    "Connection",
    "Counters",
    "Driver",
    "ForkedError",
    "Future",
    "GroupStatistics",
    "Limits",
    "Listener",
    "LocalProtocolError",
    "MemoryTransport",
    "Node",
    "PeerLostError",
    "ProtocolError",
    "Reactor",
    "RemoteProtocolError",
    "Ring",
    "RingConsumer",
    "RingProducer",
    "Shard",
    "ShardError",
    "ShardGroup",
    "ShmFull",
    "ShmTransport",
    "Slab",
    "SlabStatistics",
    "TcpTransport",
    "Traffic",
    "Timer",
    "Timers",
    "Transport",
    "UnreachableError",
    "Weather",
    "collect_garbage",
    "find_garbage",
    "pin",
    "restore",
    "this_shard",
    "usable_cores",
]
