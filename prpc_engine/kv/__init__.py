"""Key-value tables over the engine: pull rows, push gradients, and the optimizer runs where the rows live.

    server:  KVServer(service)
    worker:  kv = KVWorker(service, expected_servers=2)
             kv.create_sparse("clicks", dim=9, optimizer={"name": "adagrad", "learning_rate": 0.05})
             rows = kv.pull("clicks", keys)
             kv.push("clicks", keys, grads)

The walk of a verb: worker -> partition -> (client, server) -> table -> index, optimizer.
"""

from prpc_engine.kv.future import KVFuture
from prpc_engine.kv.initializer import Constant, Initializer, Uniform
from prpc_engine.kv.optimizer import Adagrad, Optimizer, Sgd
from prpc_engine.kv.server import KVServer, KVShard
from prpc_engine.kv.table import DenseTable, SparseTable, TableStatistics
from prpc_engine.kv.worker import KVWorker

__all__ = [
    "Adagrad",
    "Constant",
    "DenseTable",
    "Initializer",
    "KVFuture",
    "KVServer",
    "KVShard",
    "KVWorker",
    "Optimizer",
    "Sgd",
    "SparseTable",
    "TableStatistics",
    "Uniform",
]
