"""Calls, tensors and key-value tables between processes, on shared memory and tcp, in pure Python."""

from __future__ import annotations

from prpc_engine import errors
from prpc_engine.call import Call
from prpc_engine.client import RpcClient
from prpc_engine.master import Master
from prpc_engine.service import RpcServer, RpcService, ServiceStatistics
from prpc_engine.slab import empty

__version__ = "0.1.0"

__all__ = ["Call", "Master", "RpcClient", "RpcServer", "RpcService", "ServiceStatistics", "empty", "errors"]
