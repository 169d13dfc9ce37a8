"""What the demo's server and worker processes do."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prpc_engine.client.client import RpcClient
from prpc_engine.demo.data import Flights, load_flights
from prpc_engine.demo.recovery import PARTITIONS_A_SERVER
from prpc_engine.demo.settings import DENSE_TABLE, DemoSettings
from prpc_engine.demo.training import create_tables, train
from prpc_engine.errors import RpcError
from prpc_engine.kv import ElasticServer, TableServer, TableWorker
from prpc_engine.service.service import RpcService

DIRECTOR = "demo.director"  # the service of the demo's own process, which the workers report to
REPORT_EVERY_S = 0.05
START_TIMEOUT_S = 60.0
LATENCY_PROBES = 5000  # calls, so that there is a p99.9 worth the name


@dataclass(frozen=True)
class DemoJob:
    """What every role must know."""

    master: str
    servers: int  # processes
    shards: int  # of each server; 0: it serves by itself
    workers: int
    polling: bool
    secret: str = field(repr=False)
    settings: DemoSettings
    replicas: int = 0  # copies of the tables; 0: they live and die with their server

    @property
    def partitions(self) -> int:
        """Servers of the key-value service, each shard counted."""
        return self.servers * max(1, self.shards)


def run_server(job: DemoJob, index: int) -> None:
    """Serve tables until SIGTERM."""
    with RpcService(
        job.master, shards=job.shards, polling=job.polling, secret=job.secret
    ) as service:
        # No exception: it could land in a destructor and be lost.
        signal.signal(signal.SIGTERM, lambda signum, frame: service.stop_serving())
        if not job.replicas:
            TableServer(service)
            service.serve_forever()
            return
        partitions = PARTITIONS_A_SERVER * job.servers
        with ElasticServer(
            service, partitions=partitions, replicas=job.replicas, servers=job.servers
        ):
            service.serve_forever()


def connect_tables(service: RpcService, job: DemoJob, timeout_s: float) -> TableWorker:
    """A worker of the job's tables, once its servers are there."""
    if job.replicas:
        return TableWorker(service, elastic=True, ack="replicated", timeout_s=timeout_s)
    return TableWorker(service, expected_servers=job.partitions, timeout_s=timeout_s)


def run_worker(
    job: DemoJob,
    index: int,
    load: Callable[[], Flights] = load_flights,
    connect: Callable[[RpcService, DemoJob, float], TableWorker] = connect_tables,
) -> None:
    """Train this worker's share, and tell the director how it goes."""
    flights = load()
    with RpcService(job.master, polling=job.polling, secret=job.secret) as service:
        director = service.create_client(DIRECTOR, timeout_s=START_TIMEOUT_S)
        try:
            kv = connect(service, job, START_TIMEOUT_S)
            create_tables(kv, job.settings)
            # answered when all workers are
            director.call("ready", index, timeout_s=START_TIMEOUT_S)
            _train(job, index, service, director, kv, flights)
        except RpcError as error:
            with contextlib.suppress(RpcError):  # it may be ending, too
                director.call(
                    "failed", index, f"{type(error).__name__}: {str(error).splitlines()[0]}"
                )
            raise SystemExit(1) from None  # the director says it better than a traceback


def _train(
    job: DemoJob,
    index: int,
    service: RpcService,
    director: RpcClient,
    kv: TableWorker,
    flights: Any,
) -> None:
    spent = {"prepare": 0.0, "pull": 0.0, "compute": 0.0, "push": 0.0}
    examples = batches = 0
    losses = 0.0
    total = 0
    before = _traffic(service)
    started = time.perf_counter()
    reported = started
    for step in train(kv, flights, job.settings, index, job.workers):
        examples += step.examples
        batches += 1
        losses += step.loss
        for name in spent:
            spent[name] += getattr(step, f"{name}_s")
        if time.perf_counter() - reported >= REPORT_EVERY_S:
            director.notify("progress", index, examples, losses / batches)
            total, examples, batches, losses, reported = (
                total + examples,
                0,
                0,
                0.0,
                time.perf_counter(),
            )
    seconds = time.perf_counter() - started
    messages, sent = (now - then for now, then in zip(_traffic(service), before, strict=True))
    summary = {
        "examples": total + examples,
        "seconds": seconds,
        "messages": messages,
        "bytes": sent,
        "spent_s": spent,
        "loss": losses / batches if batches else -1.0,
        "latencies_us": _probe(kv),
    }
    director.call("finished", index, examples, summary)


def _traffic(service: RpcService) -> tuple[int, int]:
    """(messages, bytes) to and from all peers so far; a request and its reply are two messages."""
    peers = service.statistics().peers
    return 2 * sum(peer.requests for peer in peers), sum(
        p.traffic.bytes_sent + p.traffic.bytes_received for p in peers
    )


def _probe(kv: TableWorker) -> list[float]:
    """Microseconds of blocking pulls of the small dense tensor, one after the other."""
    latencies = []
    for _ in range(LATENCY_PROBES):
        started = time.perf_counter_ns()
        kv.pull(DENSE_TABLE)
        latencies.append((time.perf_counter_ns() - started) / 1000)
    return latencies
