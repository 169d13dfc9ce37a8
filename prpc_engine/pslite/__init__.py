"""ps-lite's names over this engine: the same roles, node ids, groups, key ranges, verbs and DMLC_*
variables.

    start()                                          every process: scheduler, servers, workers
    if is_server():
        KVServer(0).set_request_handle(KVServerDefaultHandle())
    if is_worker():
        kv = KVWorker(0, 0)
        kv.wait(kv.push(keys, vals))                 keys uint64[n], sorted; vals float32[n * k]
        kv.wait(kv.pull(keys, vals))
    finalize()

    prpc launch -s 2 -w 4 -- python train.py

The walk of a verb: kv_worker -> slicer -> wire -> customer (timestamps) -> batcher, outbox
(priority; alone or with others) -> the engine -> endpoint -> customer_router -> kv_server -> its
handle. Node ids and groups are in ids.py, variables in environment.py. The same names are in
prpc_engine.kv and prpc_engine.kv.pslite.
"""

from prpc_engine.pslite.default_handle import KVServerDefaultHandle
from prpc_engine.pslite.ids import ALL, SCHEDULER, SERVER_GROUP, WORKER_GROUP, KeyRange
from prpc_engine.pslite.kv_server import KVMeta, KVServer
from prpc_engine.pslite.kv_worker import AnswerMismatch, KVWorker
from prpc_engine.pslite.lifecycle import (
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
from prpc_engine.pslite.pairs import KVPairs
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.pslite.simple_app import SimpleApp, SimpleData

__all__ = [
    "ALL",
    "SCHEDULER",
    "SERVER_GROUP",
    "WORKER_GROUP",
    "AnswerMismatch",
    "KVMeta",
    "KVPairs",
    "KVServer",
    "KVServerDefaultHandle",
    "KVWorker",
    "KeyRange",
    "Postoffice",
    "SimpleApp",
    "SimpleData",
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
