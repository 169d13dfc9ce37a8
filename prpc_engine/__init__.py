"""Calls, tensors and key-value tables between processes, on shared memory and tcp, in pure Python."""

from __future__ import annotations

import logging

from prpc_engine import errors, release
from prpc_engine.allow import AllowList
from prpc_engine.archive import Lazy, register
from prpc_engine.call import Call
from prpc_engine.client import RpcClient
from prpc_engine.cluster import Server, ServerConfig
from prpc_engine.cluster_spec import ClusterSpec
from prpc_engine.config import TlsSettings
from prpc_engine.context import caller_name
from prpc_engine.dealer import Dealer, ErrorCode, RpcRequest, RpcResponse
from prpc_engine.deferred import Deferred
from prpc_engine.hedge import HedgePolicy
from prpc_engine.mailbox import Terminated
from prpc_engine.master.client import CommInfo, MasterClient
from prpc_engine.master.master import Master
from prpc_engine.master.watch import TreeEvent
from prpc_engine.method import bulk, idempotent, once
from prpc_engine.retry import RetryPolicy
from prpc_engine.server import Bounds
from prpc_engine.service import RpcService, ServiceStatistics
from prpc_engine.serving import RpcServer
from prpc_engine.slab import empty
from prpc_engine.stream import Stream, incoming
from prpc_engine.user_secret import NO_SECRET
from shard import ONE_LINE

__version__ = release.VERSION
logging.getLogger("prpc").addFilter(ONE_LINE)

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
    "RetryPolicy",
    "RpcClient",
    "RpcRequest",
    "RpcResponse",
    "RpcServer",
    "RpcService",
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
