"""One process of each role, for tests of what the variables make of it.

    python -m tests.prpc_engine.roles CORES ROLE [ARGUMENT]

uses that many of the cores it may, makes what ROLE names, tells in a JSON line what came of it, and
ends with its standard input.

    service, tables, elastic  an RpcService at the master ARGUMENT, alone or with that server on it
    ps, worker                a Server in a cluster of both; ARGUMENT is its host
    pslite                    a node of ps-lite, as DMLC_* say
    tensorflow                a TaskServer of a cluster of two of a job; ARGUMENTS are its host, and
                              the job, where that is not ps

    shards     how many processes            kept      cores of each; without shards, of the thread
    polling    of the application            spinning  of the shards           that serves
    lines      of the log                    error     why there is nothing
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the engine looks which cores there are
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    if "shard" in sys.modules:  # of the Python that this one was forked from: it has looked
        from shard.group import cpu

        cpu._AT_START = sorted(os.sched_getaffinity(0))

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

from prpc_engine import RpcService, Server
from prpc_engine.errors import ConfigError
from shard import Driver, ShardGroup
from tests.forked import IMPORTS
from tests.program import UNTIL_S, Program


class RoleProcess(Program):
    """Such a process, and what it told."""

    patience_s = UNTIL_S  # it may import TensorFlow

    def __init__(self, role: str, *arguments: str, cores: int = 2, env: dict[str, str]) -> None:
        # TensorFlow is in no Python that has imported what most programs need
        self.is_forked = role != "tensorflow" or self.imports != IMPORTS
        super().__init__("tests.prpc_engine.roles", str(cores), role, *arguments, env=env)
        self.told: dict[str, Any] = json.loads(self.read_line())


def of(group: ShardGroup | None, driver: Driver, shards: int) -> dict[str, Any]:
    """What became of the variables, at one server."""
    pids = [one.pid for one in group.statistics().shards] if group is not None else []
    threads = pids or [driver._thread.native_id]
    return {
        "shards": shards,
        "processes": len(pids),
        "kept": [sorted(os.sched_getaffinity(one or 0)) for one in threads],
        "polling": driver.polling,
        "spinning": group is not None and group._idle == "spin",
    }


def of_service(service: RpcService) -> dict[str, Any]:
    """The same, of a service."""
    return of(service._group, service.driver, service.shards)


@contextlib.contextmanager
def service_of(role: str, master: str) -> Iterator[dict[str, Any]]:
    """With what ROLE puts on it."""
    from prpc_engine.kv import ElasticServer, TableServer

    with RpcService(master, lease_s=30.0) as service:
        if role == "tables":
            TableServer(service)
        elastic = ElasticServer(service, partitions=1) if role == "elastic" else None
        yield of_service(service)
        if elastic is not None:
            elastic.close()


@contextlib.contextmanager
def task_of(job: str, host: str) -> Iterator[dict[str, Any]]:
    """Of a cluster whose other tasks need not be there."""
    cluster = {"ps": [f"{host}:7001", f"{host}:7002"], "worker": [f"{host}:7003"]}
    with Server(cluster, job, 0) as server:
        relays = server._at._relays
        group = relays._group if relays is not None else None
        yield of(group, server._at.driver, server.statistics().shards)


@contextlib.contextmanager
def node_of_pslite() -> Iterator[dict[str, Any]]:
    """In a job whose scheduler is there, or which it is."""
    from prpc_engine.pslite import lifecycle

    lifecycle.start_async(0)
    yield of_service(lifecycle.get_postoffice()._service)
    lifecycle.finalize(0, False)


def _kept(pid: int) -> list[int]:
    """The cores of the thread of that process which serves: it has one to itself, where any has."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return min((sorted(os.sched_getaffinity(one)) for one in threads), key=len)


@contextlib.contextmanager
def task_of_tensorflow(host: str, job: str = "ps") -> Iterator[dict[str, Any]]:
    """One of two; the other one is not there."""
    import tensorflow as tf

    from prpc_engine.tensorflow.server import TaskServer

    cluster = tf.train.ClusterSpec({job: [f"{host}:7001", f"{host}:7002"]})
    task = TaskServer(
        tf.train.ServerDef(cluster=cluster.as_cluster_def(), job_name=job, protocol="prpc")
    )
    task.start()
    told = of(None, task.engine._at.driver, task.engine.statistics().shards)
    pids = task.pids_of_shards
    yield told | {
        "processes": len(pids),
        "kept": [*told["kept"], *(_kept(pid) for pid in pids)],
    }
    task.close()


def main(role: str, *arguments: str) -> None:
    """What the process runs."""
    lines: list[str] = []
    logger = logging.getLogger("prpc")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    making = (
        node_of_pslite()
        if role == "pslite"
        else task_of_tensorflow(*arguments)
        if role == "tensorflow"
        else (task_of if role in ("ps", "worker") else service_of)(role, *arguments)
    )
    with contextlib.ExitStack() as exits:
        try:
            told = exits.enter_context(making)
        except ConfigError as error:
            told = {"error": str(error)}
        print(json.dumps({**told, "lines": lines}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[2:])
