"""A shared-nothing engine in pure Python: pinned processes, rings and slabs in shared memory, one
reactor each.

with shard.ShardGroup(2) as group:
    print(group.submit_to(1, math.sqrt, 2.0).result())
"""

from __future__ import annotations

import logging

from shard import interpreter as interpreter  # first of all: what follows relies on it

# isort: split
# then this: it instruments the modules imported after it, where it is asked to
from shard import failpoints as failpoints

# isort: split
from shard import runtime as runtime
from shard import traces as traces
from shard.checks import is_count, is_finite
from shard.errors import (
    AddressInUseError,
    AuthenticationError,
    BackpressureError,
    CancelledError,
    ClosedError,
    FailpointError,
    ForeignProtocolError,
    ForkedError,
    LocalProtocolError,
    PeerLostError,
    ProtocolError,
    RemoteProtocolError,
    ShardError,
    ShmFull,
    UnreachableError,
)
from shard.group.core_locks import CoreLocks
from shard.group.cpu import auto_shards, bind_memory, oversubscribed, pin, restore, usable_cores
from shard.group.group import ShardGroup
from shard.group.group_statistics import GroupStatistics, ShardStatistics
from shard.group.payload import RemoteTraceback
from shard.group.pipe import Pipe
from shard.group.process import Shard, this_shard
from shard.group.restart import RestartPolicy
from shard.group.sharded import Sharded
from shard.group.topology import Core, Topology, format_ranges, read_topology
from shard.group.trimming import Trimmer
from shard.loop.control import ControlLoop, control_loop
from shard.loop.driver import TOOK_LEAD, Driver
from shard.loop.future import VALUE, Future, Gathered, Waiter, call_outside_asyncio, gather, shield
from shard.loop.gate import Gate
from shard.loop.idle import polling_enabled
from shard.loop.interrupts import belongs_to_engine
from shard.loop.reactor import Reactor
from shard.loop.stall import STALL_BUDGET_S
from shard.loop.sync import Condition, Semaphore
from shard.loop.task import CONTEXT, Task, behalf
from shard.loop.task_class import BULK, LATENCY, TaskClass, class_of, in_class
from shard.loop.task_group import CancelScope, TaskGroup
from shard.loop.timers import Timer, Timers
from shard.loop.waits import run_blocking, sleep, yield_now
from shard.memory.counters import ClassStatistics, CounterRow, Counters, quantile_ns
from shard.memory.device_memory import (
    DeviceBlock,
    DeviceMemory,
    bytes_of,
    device_block,
    is_device,
)
from shard.memory.handle import Ring
from shard.memory.huge_pages import HugePageOffer, huge_page_policy, read_huge_page_offer
from shard.memory.lease_table import Held, Lease
from shard.memory.leases import held_by_this_process, is_lent
from shard.memory.limits import DEFAULT_LIMITS, Limits
from shard.memory.memory_order import require_store_order, store_fence
from shard.memory.memory_room import MemoryRoom, read_memory_room
from shard.memory.ring import RingConsumer, RingProducer
from shard.memory.segment import Segment, collect_garbage, find_garbage
from shard.memory.slab import Slab
from shard.memory.slab_statistics import SlabStatistics
from shard.one_line import ONE_LINE, escaped
from shard.shortage import shortage_in
from shard.state_table import StateTable
from shard.transport import BETWEEN_HOSTS, Connection, Listener, Node, Traffic, Transport
from shard.transport.identity import JOB_SECRET, USER_SECRET, PeerIdentity
from shard.transport.memory import MemoryConnection, MemoryTransport, Weather
from shard.transport.shared_port import DistributedPort, SocketDistributor
from shard.transport.shm import ShmTransport
from shard.transport.tcp import TcpListener, TcpTransport
from shard.transport.unix import UnixTransport
from shard.transport.unix_rendezvous import is_bound
from shard.transport.verbs import VerbsTransport
from shard.transport.verbs_device import (
    VerbsPort,
    verbs_ports,
    verbs_providers,
    verbs_rails,
    verbs_refusal,
)
from shard.transport.verbs_domain import VerbsOptions, verbs_dmabuf_refusal

__all__ = [
    "BETWEEN_HOSTS",
    "BULK",
    "CONTEXT",
    "DEFAULT_LIMITS",
    "JOB_SECRET",
    "LATENCY",
    "ONE_LINE",
    "STALL_BUDGET_S",
    "USER_SECRET",
    "TOOK_LEAD",
    "VALUE",
    "AddressInUseError",
    "AuthenticationError",
    "BackpressureError",
    "CancelScope",
    "CancelledError",
    "ClosedError",
    "Condition",
    "Connection",
    "ControlLoop",
    "Core",
    "CoreLocks",
    "ClassStatistics",
    "CounterRow",
    "Counters",
    "DistributedPort",
    "Driver",
    "FailpointError",
    "ForeignProtocolError",
    "ForkedError",
    "DeviceBlock",
    "DeviceMemory",
    "Future",
    "Gate",
    "Gathered",
    "GroupStatistics",
    "Held",
    "HugePageOffer",
    "Lease",
    "Limits",
    "Listener",
    "LocalProtocolError",
    "MemoryRoom",
    "MemoryConnection",
    "MemoryTransport",
    "Node",
    "PeerIdentity",
    "PeerLostError",
    "Pipe",
    "ProtocolError",
    "Reactor",
    "RemoteProtocolError",
    "RemoteTraceback",
    "RestartPolicy",
    "Ring",
    "RingConsumer",
    "RingProducer",
    "Segment",
    "Semaphore",
    "Shard",
    "ShardError",
    "ShardGroup",
    "ShardStatistics",
    "Sharded",
    "ShmFull",
    "ShmTransport",
    "Slab",
    "SlabStatistics",
    "StateTable",
    "SocketDistributor",
    "Task",
    "TaskClass",
    "TaskGroup",
    "TcpListener",
    "TcpTransport",
    "Timer",
    "Timers",
    "Topology",
    "Traffic",
    "Transport",
    "Trimmer",
    "UnixTransport",
    "VerbsOptions",
    "VerbsPort",
    "VerbsTransport",
    "UnreachableError",
    "Waiter",
    "Weather",
    "auto_shards",
    "behalf",
    "belongs_to_engine",
    "bind_memory",
    "bytes_of",
    "call_outside_asyncio",
    "class_of",
    "control_loop",
    "device_block",
    "collect_garbage",
    "escaped",
    "failpoints",
    "find_garbage",
    "format_ranges",
    "gather",
    "held_by_this_process",
    "huge_page_policy",
    "in_class",
    "is_bound",
    "is_count",
    "is_device",
    "is_finite",
    "is_lent",
    "oversubscribed",
    "pin",
    "polling_enabled",
    "quantile_ns",
    "read_huge_page_offer",
    "read_memory_room",
    "read_topology",
    "require_store_order",
    "restore",
    "run_blocking",
    "runtime",
    "shield",
    "sleep",
    "store_fence",
    "this_shard",
    "shortage_in",
    "traces",
    "usable_cores",
    "verbs_dmabuf_refusal",
    "verbs_ports",
    "verbs_providers",
    "verbs_rails",
    "verbs_refusal",
    "yield_now",
]

logging.getLogger("shard").addFilter(ONE_LINE)
