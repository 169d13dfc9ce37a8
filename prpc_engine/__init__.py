"""Calls, tensors and key-value tables between processes, on shared memory and tcp, in pure
Python.
"""

from __future__ import annotations

import logging

from prpc_engine import errors, release
from prpc_engine.archive import Lazy, register
from prpc_engine.client.client import RpcClient
from prpc_engine.client.dealer import Dealer, ErrorCode, RpcRequest, RpcResponse
from prpc_engine.client.hedge import HedgePolicy
from prpc_engine.client.mailbox import Terminated
from prpc_engine.client.retry import RetryPolicy
from prpc_engine.cluster import Server, ServerConfig
from prpc_engine.master.client import CommInfo, MasterClient
from prpc_engine.master.master import Master
from prpc_engine.master.watch import TreeEvent
from prpc_engine.node.slab import empty
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.context import caller_name
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.method import bulk, idempotent, once
from prpc_engine.rpc.server import Bounds
from prpc_engine.rpc.stream import Stream, incoming
from prpc_engine.service.service import RpcService, ServiceStatistics
from prpc_engine.service.serving import RpcServer
from prpc_engine.settings.allow import AllowList, Rule
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.config import TlsSettings
from prpc_engine.settings.network import NetworkSettings
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import NO_SECRET
from shard import ONE_LINE, belongs_to_engine

__version__ = release.VERSION
logging.getLogger("prpc").addFilter(ONE_LINE)
belongs_to_engine(
    "prpc_engine",
    but=("cli", "demo", "perf", "pslite.launch", "settings.local_job", "simulation"),
    handlers=("rpc.server", "rpc.job", "service.service", "remote.running"),
)

__all__ = [
    "NO_SECRET",
    "AllowList",
    "Bounds",
    "Call",
    "ClusterSpec",
    "CommInfo",
    "Dealer",
    "Deferred",
    "ErrorCode",
    "HedgePolicy",
    "Lazy",
    "Master",
    "MasterClient",
    "NetworkSettings",
    "NodeConfig",
    "RetryPolicy",
    "RpcClient",
    "RpcRequest",
    "RpcResponse",
    "RpcServer",
    "RpcService",
    "Rule",
    "Server",
    "ServerConfig",
    "ServiceStatistics",
    "Stream",
    "Terminated",
    "TlsSettings",
    "TreeEvent",
    "bulk",
    "caller_name",
    "empty",
    "errors",
    "idempotent",
    "incoming",
    "once",
    "register",
]
