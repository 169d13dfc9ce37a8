"""Key-value tables over the engine: pull rows, push gradients, and the optimizer runs where the rows live.

    server:  KVServer(service)
    worker:  kv = KVWorker(service, expected_servers=2)
             kv.create_sparse("clicks", dim=9, optimizer={"name": "adagrad", "learning_rate": 0.05})
             rows = kv.pull("clicks", keys)
             kv.push("clicks", keys, grads)
             kv.save("/checkpoints/job", step=1000, keep=3)      # and kv.restore("/checkpoints/job") -> 1000

The walk of a verb: worker -> partition -> (client, server) -> table -> index, optimizer.
"""

from prpc_engine.kv.admission import Admission
from prpc_engine.kv.compression import Cast, Compressor, Int8, TopK
from prpc_engine.kv.eviction import Eviction
from prpc_engine.kv.future import KVFuture
from prpc_engine.kv.initializer import Constant, Initializer, Uniform
from prpc_engine.kv.optimizer import Adagrad, Adam, Add, Assign, Ftrl, Momentum, Optimizer, Sgd
from prpc_engine.kv.schedule import Cosine, Exponential, Polynomial, Schedule, WarmUp
from prpc_engine.kv.server import KVServer, KVShard
from prpc_engine.kv.table import DenseTable, SparseTable, TableStatistics
from prpc_engine.kv.worker import KVWorker

__all__ = [
    "Adagrad",
    "Adam",
    "Add",
    "Admission",
    "Assign",
    "Cast",
    "Compressor",
    "Constant",
    "Cosine",
    "DenseTable",
    "Eviction",
    "Exponential",
    "Ftrl",
    "Initializer",
    "Int8",
    "KVFuture",
    "KVServer",
    "KVShard",
    "KVWorker",
    "Momentum",
    "Optimizer",
    "Polynomial",
    "Schedule",
    "Sgd",
    "SparseTable",
    "TableStatistics",
    "TopK",
    "Uniform",
    "WarmUp",
]
