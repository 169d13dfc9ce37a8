"""One process of a job, beside others that stand still, fail, or start customers at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prpc_engine import RpcClient
from prpc_engine.errors import DeadlineExceeded
from prpc_engine.kv.pslite import ids
from prpc_engine.kv.pslite.environment import Settings
from prpc_engine.kv.pslite.postoffice import Postoffice
from prpc_engine.local_job import reserved_ports
from prpc_engine.master.client import MasterClient
from tests.prpc_engine.processes import PATIENCE_S


@pytest.fixture
def scheduler() -> Iterator[Postoffice]:
    job = {"DMLC_ROLE": "scheduler", "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1"}
    with reserved_ports(1) as (port,):
        postoffice = Postoffice(Settings.from_environment({**job, "DMLC_PS_ROOT_PORT": str(port)}))
        try:
            yield postoffice
        finally:
            postoffice.close()


@pytest.mark.parametrize("asked", ["call_to", "refresh"])  # the node itself; the scheduler, where it is
def test_who_stands_still_for_longer_than_one_attempt_is_asked_again(
    scheduler: Postoffice, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    scheduler.add_customer(0)
    ask = getattr(RpcClient, asked)

    def time_out_once(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(RpcClient, asked, ask)
        raise DeadlineExceeded("it stands still")

    monkeypatch.setattr(RpcClient, asked, time_out_once)
    scheduler.connect((ids.SCHEDULER,), PATIENCE_S)
    assert getattr(RpcClient, asked) is ask


def test_a_customer_that_could_not_start_keeps_no_place(scheduler: Postoffice, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_away(*_: Any) -> int:
        raise DeadlineExceeded("the master is away")

    monkeypatch.setattr(MasterClient, "generate_id", be_away)
    with pytest.raises(DeadlineExceeded, match="the master is away"):
        scheduler.add_customer(0)
    monkeypatch.undo()
    assert scheduler.add_customer(0, timeout_s=PATIENCE_S) == ids.SCHEDULER


def test_customers_may_start_while_others_come_to_a_barrier(scheduler: Postoffice, monkeypatch: pytest.MonkeyPatch) -> None:
    class Members(tuple[int, ...]):
        """Another customer begins to start while somebody looks who belongs to a group."""

        def __contains__(self, node: object) -> bool:
            starting = threading.Thread(target=scheduler._places.setdefault, args=(("scheduler", 1, 0), 0))
            starting.start()
            starting.join(PATIENCE_S)
            return super().__contains__(node)

    scheduler.add_customer(0)
    monkeypatch.setattr(scheduler, "members", lambda group: Members((ids.SCHEDULER,)))
    scheduler.barrier(0, ids.SCHEDULER)
