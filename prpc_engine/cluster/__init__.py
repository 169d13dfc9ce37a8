"""A cluster of tasks that exchange named tensors by step, with the face of tf.train.Server and
without TensorFlow.

    server = prpc_engine.Server({"ps": ["h:2222"], "worker": ["h:2223"]}, "worker", 0)
    server.send("gradient", array, to="/job:ps/task:0", step=7)
    weights = server.recv("weights", source="/job:ps/task:0", step=7)

server  ->  endpoint  ->  relay  ->  cores        link  ->  control        fuse  ->  receipt
                                                  link  ->  patience
rendezvous, names, verbs, config
"""

from __future__ import annotations

from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.errors import (
    Duplicate,
    StepAborted,
    TaskLost,
    TaskRestarted,
    TaskUnreachable,
)
from prpc_engine.cluster.receipt import Receipt
from prpc_engine.cluster.server import Server, ServerDef, ServerStatistics, State

__all__ = [
    "Duplicate",
    "Receipt",
    "Server",
    "ServerConfig",
    "ServerDef",
    "ServerStatistics",
    "State",
    "StepAborted",
    "TaskLost",
    "TaskRestarted",
    "TaskUnreachable",
]
