"""Seconds that are no number are refused by name in the verbs of tables and accumulators, and wait
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.accumulator import AccumulatorClient, AccumulatorServer
from prpc_engine.errors import ConfigError
from prpc_engine.kv import Constant, Sgd, TableServer, TableWorker

KEYS = np.arange(3, dtype=np.int64)
BAD = ["5", True, float("nan"), float("inf"), -1, 10**400, 1j, [1], object()]


@pytest.fixture(scope="module")
def service() -> Iterator[RpcService]:
    with Master() as master, RpcService(master.address) as service:
        yield service


@pytest.fixture(scope="module")
def worker(service: RpcService) -> TableWorker:
    TableServer(service)
    worker = TableWorker(service)
    worker.create_sparse("rows", 2, Sgd(0.1), Constant(0.0))
    worker.create_dense("dense", (2,), Sgd(0.1))
    return worker


VERBS: dict[str, Callable[[TableWorker, Any], object]] = {
    "pull": lambda worker, value: worker.pull("rows", KEYS, timeout_s=value),
    "push": lambda worker, value: worker.push(
        "rows", KEYS, np.ones((3, 2), np.float32), timeout_s=value
    ),
    "assign": lambda worker, value: worker.assign("dense", np.ones(2, np.float32), timeout_s=value),
    "create_sparse": lambda worker, value: worker.create_sparse(
        "rows", 2, Sgd(0.1), Constant(0.0), timeout_s=value
    ),
    "reset": lambda worker, value: worker.reset("rows", timeout_s=value),
    "save": lambda worker, value: worker.save("/nowhere", 1, timeout_s=value),
    "restore": lambda worker, value: worker.restore("/nowhere", timeout_s=value),
    "statistics": lambda worker, value: worker.statistics(timeout_s=value),
    "result": lambda worker, value: worker.submit_pull("rows", KEYS).result(value),
}


@pytest.mark.parametrize("value", BAD, ids=lambda value: f"{value!r:.10}")
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_tables_refuse_them(worker: TableWorker, verb: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s=.*seconds are allowed"):
        VERBS[verb](worker, value)


@pytest.mark.parametrize("value", BAD, ids=lambda value: f"{value!r:.10}")
def test_the_deadline_of_a_worker_is_checked_when_it_is_made(
    service: RpcService, value: Any
) -> None:
    with pytest.raises(ConfigError, match=r"call_timeout_s=.*seconds are allowed"):
        TableWorker(service, call_timeout_s=value)


@pytest.mark.parametrize("value", BAD, ids=lambda value: f"{value!r:.10}")
def test_verbs_of_accumulators_refuse_them(service: RpcService, value: Any) -> None:
    with AccumulatorServer(service), AccumulatorClient(service) as client:
        for verb in (client.wait_empty, client.snapshot, client.erase_all, client.close):
            with pytest.raises(ConfigError, match=r"timeout_s=.*seconds are allowed"):
                verb(timeout_s=value)
        with pytest.raises(ConfigError, match=r"timeout_s=.*seconds are allowed"):
            AccumulatorClient(service, timeout_s=value)
