"""What users do wrong with a server of TensorFlow's, one function each: the class and text of the
error that they read.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.tensorflow.scenarios import Task, task_server
from tests.tensorflow.tasks import clusters

v1 = tf.compat.v1


def _told(act: Callable[[], Any]) -> list[str]:
    try:
        act()
    except Exception as error:
        # TensorFlow's head for any step
        return [type(error).__name__, str(error).removeprefix("Graph execution error:\n\n")]
    return ["none", ""]


def _server(cluster: Any, job: str, index: int, **keywords: Any) -> Any:
    return v1.train.Server(
        cluster, job_name=job, task_index=index, **{"protocol": "prpc", **keywords}
    )


def typo(task: Task) -> Any:
    """No protocol has that name; ours are told with it."""
    return _told(lambda: _server(task.cluster, "worker", 0, protocol="prcp"))


def unknown_job(task: Task) -> Any:
    """The cluster has none of that name."""
    return _told(lambda: _server(task.cluster, "chief", 0))


def unknown_task(task: Task) -> Any:
    """The job has none of that number."""
    return _told(lambda: _server(task.cluster, "worker", 7))


def port_taken(task: Task) -> Any:
    """By another process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return _told(
            lambda: _server({"worker": [f"127.0.0.1:{taken.getsockname()[1]}"]}, "worker", 0)
        )


def no_endpoint(task: Task) -> Any:
    """.endpoint_map has no line for the own task."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, ".endpoint_map"), "w") as file:
            file.write("127.0.0.1:1=127.0.0.1:2\n")
        os.environ["PRPC_ENDPOINT_MAP"] = folder
        try:
            return _told(
                lambda: _server({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:3"]}, "worker", 0)
            )
        finally:
            del os.environ["PRPC_ENDPOINT_MAP"]


def no_such_place(task: Task) -> Any:
    """An op at a ps that the cluster does not have."""
    with task.graph(), v1.device("/job:ps/task:9"):
        v = v1.get_variable("v", [], initializer=v1.ones_initializer())
        with task.session() as session:
            return _told(lambda: session.run(v.initializer))


def _one_step(ps: str = "", **config: Any) -> Any:
    """Of a new worker with that ps, or one that is not there; the error, and what the log says."""
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    if ps:
        cluster["ps"] = [ps]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("prpc").addHandler(handler)
    server = _server(cluster, "worker", 0)
    try:
        with tf.Graph().as_default(), v1.device("/job:ps/task:0"):
            two = tf.identity(tf.constant(2.0), name="two")
            with v1.Session(server.target, config=v1.ConfigProto(**config)) as session:
                return [*_told(lambda: session.run(two)), told]
    finally:
        task_server(server).close()
        logging.getLogger("prpc").removeHandler(handler)


def other_cluster(task: Task) -> Any:
    """The ps is of a cluster with more tasks."""
    return _one_step(task.cluster.job_tasks("ps")[0])


def not_up(task: Task) -> Any:
    """Nobody is there; the session allows each call as long as a first attempt takes on a busy
    machine.
    """
    return _one_step(operation_timeout_in_ms=3000)


def _monitored(ps: str) -> Any:
    """A monitored session of a new worker, with a variable at that ps: what its construction
    raises.
    """
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    if ps:
        cluster["ps"] = [ps]
    server = _server(cluster, "worker", 0)
    try:
        with tf.Graph().as_default(), v1.device("/job:ps/task:0"):
            v1.get_variable("v", [], initializer=v1.ones_initializer())
            return _told(lambda: v1.train.MonitoredTrainingSession(server.target).close())
    finally:
        task_server(server).close()


def grpc_ps(task: Task) -> Any:
    """A stock server is where the ps should be. (For the task of the stock protocol.)"""
    return _monitored(task.cluster.job_tasks("ps")[0])


def never_up(task: Task) -> Any:
    """Nobody comes up at the ps's address within the connection timeout."""
    os.environ["NETWORK_MAX_CONNECTION_TIMEOUT"] = "1500"
    try:
        return _monitored("")
    finally:
        del os.environ["NETWORK_MAX_CONNECTION_TIMEOUT"]
