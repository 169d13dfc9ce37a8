"""The life of a link between two tasks of which one comes and goes: its state is where the table
leads.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster.endpoint import Endpoint, node_config, place_from
from prpc_engine.cluster.errors import TaskAbsent
from prpc_engine.cluster.link import Errand, Link
from prpc_engine.cluster.names import device, plan_of
from prpc_engine.errors import Closed
from prpc_engine.rpc import send_queue
from prpc_engine.rpc.send_queue import QUEUES, QueueAction, QueueEvent, QueueState
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.endpoint_map import DataEndpoints
from tests.examples import examples
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.state_walks import WalkedTable

Queues = WalkedTable[QueueState, QueueEvent, QueueAction]


class RealLink(RuleBasedStateMachine):
    """A link of a worker to a ps, over sockets; both in this process. The ps comes and goes."""

    def __init__(self, table: Queues, host: str) -> None:
        super().__init__()
        self.table, self.host, self.asked = table, host, 0
        self.ps: Server | None = None
        self.waiting: list[Errand] = []
        self.is_closed = False

    @initialize()
    def make(self) -> None:
        self.table.taken.clear()
        self.cluster = cluster_at(self.host, ps=1, worker=1)
        spec = ClusterSpec(self.cluster)
        ps, worker = sorted(spec.addresses)
        place = place_from(
            device(worker),
            plan_of(spec, DataEndpoints("exchange", {})),
            spec.addresses[worker],
            None,
            ServerConfig(),
            node_config(ServerConfig(), worker.job, len(spec.addresses)),
        )
        self.endpoint = Endpoint(place, {"who": lambda: "worker"}, lambda peer: None)
        self.endpoint.serve()
        self.link = Link(
            device(ps),
            spec.addresses[ps],
            None,
            self.endpoint.me,
            self.endpoint.control,
            self.endpoint.data,
            PATIENCE_S,
            lambda: None,
        )

    def ask(self, is_patient: bool) -> Errand:
        return self.link.submit("who", "its name", lambda _: (), PATIENCE_S, is_patient)

    def answered(self, errands: list[Errand]) -> None:
        """All of them, and then the link is up."""
        assert [errand.result(PATIENCE_S) for errand in errands] == ["ps"] * len(errands)
        wait_until(lambda: self.link.state is QueueState.UP, "the last one has left")

    @rule(is_patient=st.booleans())
    def request(self, is_patient: bool) -> None:
        self.asked += 1
        errand = self.ask(is_patient)
        if self.is_closed:
            assert isinstance(errand.error(PATIENCE_S), Closed)
            return
        if self.ps is not None:
            self.answered([errand])
        elif is_patient:
            self.waiting.append(errand)
            assert self.link.state is QueueState.CONNECTING
        else:
            assert isinstance(errand.error(PATIENCE_S), TaskAbsent)
            expected = QueueState.CONNECTING if self.waiting else QueueState.DOWN
            assert self.link.state is expected

    @precondition(lambda self: self.ps is None)
    @rule()
    def start_the_ps(self) -> None:
        self.ps = Server(self.cluster, "ps", 0, methods={"who": lambda: "ps"})
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.answered(waiting)

    @precondition(lambda self: self.ps is not None)
    @rule()
    def stop_the_ps(self) -> None:
        assert self.ps is not None
        self.ps.stop()
        self.ps = None
        if not self.is_closed:
            wait_until(lambda: self.link.statistics().state == "down", "the loss of the connection")

    @precondition(lambda self: self.waiting)
    @rule()
    def cancel(self) -> None:
        for errand in self.waiting:
            assert errand.cancel()
        self.waiting.clear()
        wait_until(lambda: self.link.state is QueueState.DOWN, "nobody waits")

    @precondition(lambda self: self.asked > 2)
    @rule()
    def close(self) -> None:
        self.link.close()
        self.is_closed = True
        for errand in self.waiting:
            assert isinstance(errand.error(PATIENCE_S), Closed)
        self.waiting.clear()

    @invariant()
    def its_state_is_the_tables(self) -> None:
        assert self.link.state is self.table.end()
        assert self.link.statistics().waiting == len(self.waiting)

    def teardown(self) -> None:
        self.link.close()
        if self.ps is not None:
            self.ps.stop()
        self.endpoint.close()


@pytest.mark.slow
def test_a_link_between_tasks_goes_by_the_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Queues(QUEUES)
    monkeypatch.setattr(send_queue, "QUEUES", table)
    run_state_machine_as_test(
        lambda: RealLink(table, fresh_host(seed)),
        settings=settings(max_examples=examples(20), stateful_step_count=20),
    )
