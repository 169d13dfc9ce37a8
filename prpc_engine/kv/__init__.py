"""Key-value tables over the engine: pull rows, push gradients, and the optimizer runs where the rows live.

    server:  TableServer(service)
    worker:  kv = TableWorker(service, expected_servers=2)
             kv.create_sparse("clicks", dim=9, optimizer={"name": "adagrad", "learning_rate": 0.05})
             rows = kv.pull("clicks", keys)
             kv.push("clicks", keys, grads)
             kv.save("/checkpoints/job", step=1000, keep=3)      # and kv.restore("/checkpoints/job") -> 1000

Where servers come and go, ElasticServer takes the place of TableServer, and TableWorker(service, elastic=True) finds them:
elastic.py.

The walk of a verb: worker -> partition -> lane -> (client, server) -> table -> index, optimizer.

Beside them stand ps-lite's names (KVWorker, KVServer, start, finalize, ...), which prpc_engine.kv.pslite holds: that package is
imported when the first of them is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from prpc_engine.kv.admission import Admission
from prpc_engine.kv.cache import Cache, CacheStatistics
from prpc_engine.kv.compression import Cast, Compressor, Int8, TopK
from prpc_engine.kv.consistency import Consistency, Ssp, Sync, WorkersBehind
from prpc_engine.kv.elastic import ElasticServer, ElasticStatistics
from prpc_engine.kv.epochs import RowsLost
from prpc_engine.kv.eviction import Eviction
from prpc_engine.kv.future import KVFuture
from prpc_engine.kv.imbalance import Balance, ServerShare, WorkerShare
from prpc_engine.kv.initializer import Constant, Initializer, Uniform
from prpc_engine.kv.lag import Lag
from prpc_engine.kv.optimizer import Adagrad, Adam, Add, Assign, Ftrl, Momentum, Optimizer, Sgd
from prpc_engine.kv.parameters import Parameters
from prpc_engine.kv.schedule import Cosine, Exponential, Polynomial, Schedule, WarmUp
from prpc_engine.kv.server import TableServer, TableShard
from prpc_engine.kv.session import EpochChanged, Versioned
from prpc_engine.kv.table import DenseTable, SparseTable, TableStatistics
from prpc_engine.kv.worker import TableWorker

if TYPE_CHECKING:
    from prpc_engine.kv.pslite import (
        ALL,
        SCHEDULER,
        SERVER_GROUP,
        WORKER_GROUP,
        AnswerMismatch,
        KeyRange,
        KVMeta,
        KVPairs,
        KVServer,
        KVServerDefaultHandle,
        KVWorker,
        Postoffice,
        SimpleApp,
        SimpleData,
        finalize,
        get_postoffice,
        is_scheduler,
        is_server,
        is_worker,
        my_rank,
        num_servers,
        num_workers,
        register_exit_callback,
        start,
        start_async,
    )

__all__ = [
    "ALL",
    "Adagrad",
    "Adam",
    "Add",
    "Admission",
    "AnswerMismatch",
    "Assign",
    "Balance",
    "Cache",
    "CacheStatistics",
    "Cast",
    "Compressor",
    "Consistency",
    "Constant",
    "Cosine",
    "DenseTable",
    "ElasticServer",
    "ElasticStatistics",
    "EpochChanged",
    "Eviction",
    "Exponential",
    "Ftrl",
    "Initializer",
    "Int8",
    "KVFuture",
    "KVMeta",
    "KVPairs",
    "KVServer",
    "KVServerDefaultHandle",
    "KVWorker",
    "KeyRange",
    "Lag",
    "Momentum",
    "Optimizer",
    "Parameters",
    "Polynomial",
    "Postoffice",
    "RowsLost",
    "SCHEDULER",
    "SERVER_GROUP",
    "Schedule",
    "ServerShare",
    "Sgd",
    "SimpleApp",
    "SimpleData",
    "SparseTable",
    "Ssp",
    "Sync",
    "TableServer",
    "TableShard",
    "TableStatistics",
    "TableWorker",
    "TopK",
    "Uniform",
    "Versioned",
    "WORKER_GROUP",
    "WarmUp",
    "WorkerShare",
    "WorkersBehind",
    "finalize",
    "get_postoffice",
    "is_scheduler",
    "is_server",
    "is_worker",
    "my_rank",
    "num_servers",
    "num_workers",
    "register_exit_callback",
    "start",
    "start_async",
]
_PSLITE = "prpc_engine.kv.pslite"


def __getattr__(name: str) -> Any:
    """A name of ps-lite's."""
    if name in __all__:
        return getattr(importlib.import_module(_PSLITE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
