"""Remote functions and references: the names of torch.distributed.rpc over this engine, for any
Python object, with arrays and tensors out of band.

    from prpc_engine import remote as rpc     # instead of: from torch.distributed import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2, init_method="tcp://127.0.0.1:29500")
    print(rpc.rpc_sync("worker1", math.sqrt, args=(2.0,)))
    future = rpc.rpc_async("worker1", math.sqrt, args=(2.0,))
    rref = rpc.remote("worker1", Model, kwargs={"width": 64})
    print(rref.rpc_sync().forward(batch))
    rpc.shutdown()

The life of a call: group (the verbs) -> members (whom) -> calls -> functions (its name) -> the
engine's client -> served, at the other side -> running (in which thread) -> outcomes (what was
raised), and back. RRefs: rref, values (both sides of one worker), numbering, references (who holds
what). The worker itself: worker; where workers meet: rendezvous; what is said
of a group that lacks some: attendance; when they part: termination; whose GPU a tensor is for:
device_maps, devices.
"""

from __future__ import annotations

from prpc_engine.remote import functions
from prpc_engine.remote.current import NoWorker, WorkerInfo
from prpc_engine.remote.device_maps import DeviceMap
from prpc_engine.remote.functions import UnknownFunction, ValueGone, async_execution, expose
from prpc_engine.remote.future import Future, collect_all, wait_all
from prpc_engine.remote.group import (
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    set_rpc_timeout,
    shutdown,
    statistics,
)
from prpc_engine.remote.members import UnknownWorker
from prpc_engine.remote.options import BackendType, Options
from prpc_engine.remote.rref import RRef
from shard import RemoteTraceback

# torch's names for the same
TensorPipeRpcBackendOptions = RpcBackendOptions = Options
PyRRef = RRef
_set_rpc_timeout = set_rpc_timeout

__all__ = [
    "BackendType",
    "DeviceMap",
    "Future",
    "NoWorker",
    "Options",
    "PyRRef",
    "RRef",
    "RemoteTraceback",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "UnknownFunction",
    "UnknownWorker",
    "ValueGone",
    "WorkerInfo",
    "async_execution",
    "collect_all",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "statistics",
    "wait_all",
]
