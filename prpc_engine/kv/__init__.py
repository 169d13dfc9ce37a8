"""Key-value tables over the engine: pull rows, push gradients, and the optimizer runs where the
rows live.

    server:  TableServer(service)
    worker:  kv = TableWorker(service, expected_servers=2)
             kv.create_sparse("clicks", dim=9, optimizer={"name": "adagrad", "learning_rate": 0.05})
             rows = kv.pull("clicks", keys)
             kv.push("clicks", keys, grads)
             kv.save("/checkpoints/job", step=1000, keep=3)
             kv.restore("/checkpoints/job")  # answers 1000

Where servers come and go, ElasticServer takes the place of TableServer, and TableWorker(service,
elastic=True) finds them: elastic.py.

The walk of a verb: worker -> partition -> lane -> (client, server) -> table -> index, optimizer.

Beside them stand ps-lite's names (KVWorker, KVServer, start, finalize, ...), which
prpc_engine.pslite holds: that package is imported when the first of them is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from prpc_engine.kv.checkpoint.manifest import CheckpointError, TooLate
from prpc_engine.kv.client.future import KVFuture
from prpc_engine.kv.client.parameters import Parameters
from prpc_engine.kv.client.partition_client import RequestStatistics
from prpc_engine.kv.client.session import EpochChanged, Versioned
from prpc_engine.kv.client.worker import TableWorker
from prpc_engine.kv.consistency.cache import Cache, CacheStatistics
from prpc_engine.kv.consistency.consistency import Consistency, Ssp, Sync, WorkersBehind
from prpc_engine.kv.consistency.epochs import RowsLost
from prpc_engine.kv.consistency.progress import Lag
from prpc_engine.kv.consistency.skew import Balance, ServerShare, WorkerShare
from prpc_engine.kv.replication.elastic import ElasticServer, ElasticStatistics
from prpc_engine.kv.server.server import TableServer, TableShard
from prpc_engine.kv.table.admission import Admission
from prpc_engine.kv.table.compression import Cast, Compressor, Int8, TopK
from prpc_engine.kv.table.eviction import Eviction
from prpc_engine.kv.table.initializer import Constant, Initializer, Uniform
from prpc_engine.kv.table.optimizer import (
    Adagrad,
    Adam,
    Add,
    Assign,
    Ftrl,
    Momentum,
    Optimizer,
    Sgd,
)
from prpc_engine.kv.table.schedule import Cosine, Exponential, Polynomial, Schedule, WarmUp
from prpc_engine.kv.table.table import DenseTable, SparseTable, TableStatistics

if TYPE_CHECKING:
    from prpc_engine.pslite import (
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
    "SCHEDULER",
    "SERVER_GROUP",
    "WORKER_GROUP",
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
    "CheckpointError",
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
    "RequestStatistics",
    "RowsLost",
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
    "TooLate",
    "TopK",
    "Uniform",
    "Versioned",
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
_PSLITE = "prpc_engine.pslite"


def __getattr__(name: str) -> Any:
    """A name of ps-lite's."""
    if name in __all__:
        return getattr(importlib.import_module(_PSLITE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
