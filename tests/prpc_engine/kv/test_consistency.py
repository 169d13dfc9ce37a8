"""Who waits for whom: the clocks, and tables whose callers are made up."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prpc_engine.errors import Backpressure, BadArguments, ConfigError
from prpc_engine.kv import Cast, Consistency, Ssp, Sync, TableServer, TableWorker, WorkersBehind
from prpc_engine.kv.checkpoint.gate import HeldTable, Waiting, release
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.consistency.barrier_scheduler import GRACE_S, WAITING_MAX
from prpc_engine.kv.consistency.consistency import Clocks, from_spec
from prpc_engine.kv.consistency.progress import Lag
from prpc_engine.kv.replication.replica import Replica
from prpc_engine.kv.schema.table_spec import from_dict
from prpc_engine.rpc.deferred import Deferred
from shard import CONTEXT, runtime
from tests.helpers import ManualClock

ONE = np.ones(1, np.float32)
ADD = {"name": "add"}


class FakeWorker:
    """The connection of a worker as a server sees it; its timers run when the test says."""

    def __init__(self, number: int, timeout_ms: int = 1000, process: str = "") -> None:
        self.connection = SimpleNamespace(
            peer_incarnation=number, peer=f"worker {number}", error=None
        )
        self.when_lost: list[Callable[[Any], object]] = []
        self.reactor = self
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.timeout_ms = timeout_ms
        self.process = process

    def request(self, *_: object) -> Deferred:
        answer = Deferred()
        answer.reply({"process": self.process})
        return answer

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Any:
        entry = (delay_s, callback)
        self.timers.append(entry)
        return SimpleNamespace(
            cancel=lambda: self.timers.remove(entry) if entry in self.timers else None
        )

    def is_over(self) -> None:
        for _, callback in self.timers.copy():
            callback()

    def is_lost(self) -> None:
        self.connection.error = OSError("gone")
        for tell in self.when_lost:
            tell(self)

    def is_gone(self) -> None:
        self.is_lost()
        for delay_s, callback in self.timers.copy():
            if delay_s == GRACE_S:
                callback()

    @contextmanager
    def calls(self) -> Iterator[None]:
        CONTEXT.value = (self, self.timeout_ms)
        try:
            yield
        finally:
            CONTEXT.value = None


def dense(
    consistency: Consistency, clock: Callable[[], float] = time.monotonic, **more: Any
) -> Any:
    plain = {
        "table": "w",
        "partition": 0,
        "partitions": 1,
        "optimizer": ADD,
        "initializer": {"name": "constant"},
    }
    return from_dict(
        {
            "name": "dense",
            **plain,
            "shape": [1],
            "begin": 0,
            "end": 1,
            "consistency": consistency,
            **more,
        }
    ).make(clock)


def sparse(consistency: Consistency, **more: Any) -> Any:
    plain = {
        "table": "w",
        "partition": 0,
        "partitions": 1,
        "optimizer": ADD,
        "initializer": {"name": "constant"},
    }
    return from_dict(
        {"name": "sparse", **plain, "dim": 1, "consistency": consistency, **more}
    ).make()


def push(worker: FakeWorker, table: Any, value: float = 1.0) -> Any:
    with worker.calls():
        return table.push(value * ONE)


def pull(worker: FakeWorker, table: Any) -> Any:
    with worker.calls():
        return table.pull()


# Specs


def test_a_consistency_goes_to_a_plain_dict_and_back() -> None:
    for made in (Sync(3), Sync(2, "sum"), Ssp(4, 2)):
        assert from_spec(made.to_spec()) == made
    assert from_spec({"name": "async"}) is None
    assert from_spec(None) is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "bsp"}, "allowed: async, ssp, sync"),
        ({"name": "sync"}, "needs the setting 'workers'"),
        ({"name": "sync", "workers": 0}, "workers is 0"),
        ({"name": "sync", "workers": 2, "reduce": "max"}, "allowed: mean, sum"),
        ({"name": "ssp", "workers": 2, "bound": -1}, "bound is -1"),
        ({"name": "async", "workers": 2}, "no setting 'workers'"),
    ],
)
def test_what_is_not_allowed_is_said(spec: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_spec(spec)


def test_two_workers_must_agree_on_the_consistency_of_a_table() -> None:
    service = LocalService()
    TableServer(service)
    for each in (None, {"name": "async"}):
        TableWorker(service).create_dense("w", (1,), ADD, consistency=each)
    with pytest.raises(ConfigError, match="is there with another spec"):
        TableWorker(service).create_dense("w", (1,), ADD, consistency=Sync(2))


def test_partitions_that_are_copied_or_move_take_no_paced_tables() -> None:
    hosted: Any = SimpleNamespace(is_handing_over=False)
    with pytest.raises(ConfigError, match="for services whose partitions stay where they are"):
        Replica.create_table(hosted, {"table": "w", "consistency": Ssp(2, 1).to_spec()})


# Clocks


def test_nobody_leaves_behind_who_is_awaited() -> None:
    clocks = Clocks(2)
    clocks.enter(1, "one")
    clocks.tick(1)
    assert (clocks.lead(1), clocks.behind()) == (1, "1 of 2 workers that have not pushed yet")
    clocks.enter(2, "two")
    assert (clocks.lead(1), clocks.behind()) == (1, "two")
    clocks.tick(2)
    assert clocks.lead(1) == 0


def test_who_joins_enters_at_the_slowest_clock_and_who_leaves_holds_nobody_up() -> None:
    clocks = Clocks(2)
    for worker, pushes in ((1, 5), (2, 3)):
        clocks.enter(worker, str(worker))
        clocks.tick(worker, pushes)
    clocks.enter(3, "3")
    assert [clocks.lead(worker) for worker in (1, 2, 3)] == [2, 0, 0]
    clocks.leave(2)
    clocks.tick(3)
    assert clocks.lead(1) == 1
    clocks.leave(3)
    assert clocks.lead(1) == 0


def test_after_the_last_one_all_are_awaited_anew_unless_it_comes_back() -> None:
    clocks = Clocks(2)
    for worker in (1, 2):
        clocks.enter(worker, str(worker))
        clocks.tick(worker)
    clocks.leave(1)
    clocks.leave(2)
    clocks.enter(2, "2")
    clocks.tick(2)
    assert clocks.lead(2) == 0  # its connection was lost, not the other one's place taken
    clocks.leave(2)
    clocks.enter(3, "3")
    clocks.tick(3)
    assert clocks.lead(3) == 1
    assert "1 of 2 workers" in clocks.behind()


# sync


@pytest.mark.parametrize(("reduce", "value"), [("mean", 3.0), ("sum", 6.0)])
def test_a_step_is_applied_once_with_the_pushes_of_all(reduce: str, value: float) -> None:
    table, one, two = dense(Sync(2, reduce)), FakeWorker(1), FakeWorker(2)
    first = push(one, table, 2.0)
    assert not first.done()
    assert pull(one, table) == 0
    second = push(two, table, 4.0)
    assert (first.result(), second.result()) == (1, 1)
    assert pull(two, table) == value
    assert table.statistics().pushes == 1
    assert not one.timers
    assert not two.timers


def test_sparse_steps_have_the_keys_of_all_and_answer_each_with_its_own() -> None:
    table, workers = sparse(Sync(3), compression=Cast()), [FakeWorker(i) for i in range(3)]
    keys = [np.array([1, 2]), np.array([2, 3, 2]), np.array([], np.int64)]
    answers = []
    for worker, asked in zip(workers, keys, strict=True):
        with worker.calls():
            answers.append(
                table.push_pull(asked, *Cast().encode(np.full((len(asked), 1), 3, np.float32)))
            )
    assert [answer.result().tolist() for answer in answers] == [[[1], [3]], [[3], [1], [3]], []]


def test_pushes_sent_ahead_belong_to_later_steps() -> None:
    table, one, two = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2)
    ahead = [push(one, table, value) for value in (1, 10, 100)]
    push(two, table, 0)
    assert [answer.done() for answer in ahead] == [True, False, False]
    assert pull(two, table) == 1
    push(two, table, 0)
    assert pull(two, table) == 11


def test_a_push_that_does_not_fit_hurts_nobody_else() -> None:
    table, one, two = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2)
    waiting = push(one, table)
    with two.calls(), pytest.raises(BadArguments, match=r"float32\[2\]"):
        table.push(np.ones(2, np.float32))
    assert not waiting.done()
    push(two, table)
    assert waiting.result() == 1
    assert pull(two, table) == 2


def test_a_wait_ends_before_its_callers_deadline_and_names_who_is_behind() -> None:
    table, one, two = dense(Sync(2)), FakeWorker(1), FakeWorker(2)
    push(one, table)
    push(two, table)
    late = push(one, table)
    assert one.timers[0][0] == pytest.approx(0.9)
    one.is_over()
    with pytest.raises(WorkersBehind, match=r"waited 0\.9 s for worker 2; it has not run"):
        late.result()
    assert not one.timers
    again = push(one, table, 5.0)  # the push that failed is in no step
    push(two, table, 5.0)
    assert again.result() == 2
    assert pull(one, table) == 1 + 5


def test_a_push_that_its_caller_gives_up_is_in_no_step() -> None:
    table, one, two = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2)
    push(one, table).cancel()
    push(two, table, 4.0)
    assert pull(one, table) == 0
    push(one, table, 2.0)
    assert pull(one, table) == 6


def test_a_worker_that_dies_holds_no_step_up_and_what_it_sent_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, one, two, three = dense(Sync(3, "sum")), FakeWorker(1), FakeWorker(2), FakeWorker(3)
    for worker in (one, two, three):
        push(worker, table)
    push(two, table, 10)
    waiting = push(one, table, 100)
    two.is_gone()
    three.is_gone()
    assert waiting.done()
    assert pull(one, table) == 3 + 110
    assert "worker 3 is gone: table 'w' waits for it no longer" in caplog.text
    push(one, table)
    assert pull(one, table) == 114


def test_a_new_connection_of_the_same_worker_takes_its_place_again() -> None:
    table, one, other = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(1)
    push(one, table)
    push(FakeWorker(2), table)
    push(other, table)
    one.is_lost()
    push(FakeWorker(2), table)
    assert pull(other, table) == 4
    other.is_gone()
    push(FakeWorker(2), table)
    assert pull(FakeWorker(2), table) == 5


def test_a_worker_whose_connection_was_cut_is_waited_for_a_little() -> None:
    table, one, two, again = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2), FakeWorker(1)
    push(one, table)
    push(two, table)
    one.is_lost()
    waiting = push(two, table, 10)
    assert not waiting.done()
    with again.calls():
        table.worker_is_here()
    assert not [delay_s for delay_s, _ in one.timers if delay_s == GRACE_S]
    push(again, table, 5)
    assert (waiting.result(), pull(two, table)) == (2, 17)
    again.is_gone()
    assert push(two, table).done()


def test_a_worker_whose_process_is_seen_to_have_ended_is_gone_at_once() -> None:
    with subprocess.Popen(["true"]) as process:
        ended = f"{runtime.this_process().rpartition('/')[0].rpartition('/')[0]}/{process.pid}/1"
    table, one, dead = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2, process=ended)
    push(one, table)
    push(dead, table)
    waiting = push(one, table)
    dead.is_lost()
    assert [delay_s for delay_s, _ in dead.timers] == [0.0]
    dead.is_over()
    assert waiting.done()


def test_who_makes_others_wait_is_known_and_for_how_long(clock: ManualClock) -> None:
    for table in (dense(Sync(2), clock), dense(Ssp(2, 0), clock)):
        one, two = FakeWorker(1), FakeWorker(2)
        push(one, table)
        push(two, table)
        push(one, table)
        clock.advance(3)
        pull(one, table)  # ssp: it waits; sync: its push does
        clock.advance(2)
        is_sync = table.statistics().pushes == 1
        lags = dict(table.lags().values())
        assert lags == {"worker 1": Lag(0, 0, 0), "worker 2": Lag(1, 5, 5 if is_sync else 2)}
        push(two, table)
        clock.advance(7)
        lags = dict(table.lags().values())
        assert lags == {"worker 1": Lag(0, 0, 0), "worker 2": Lag(0, 0, 5 if is_sync else 2)}
        push(one, table)
        two.is_gone()
        assert list(table.lags()) == [1]


def test_verbs_that_wait_are_bounded_in_number() -> None:
    table, one = dense(Sync(2)), FakeWorker(1)
    waiting = [push(one, table) for _ in range(WAITING_MAX)]
    with pytest.raises(
        Backpressure,
        match="64 verbs of this worker wait for 1 of 2 workers that have not pushed yet",
    ):
        push(one, table)
    assert not any(each.done() for each in waiting)


def test_a_process_alone_is_told_that_nobody_else_can_come() -> None:
    alone = dense(Sync(2))
    with pytest.raises(BadArguments, match="there is only this process"):
        alone.push(ONE)
    assert alone.lags() == {0: ("this process", Lag(0, 0, 0))}
    table = dense(Sync(1))
    assert table.push(ONE).done()
    assert table.pull() == 1


# ssp


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_may_be_so_far_ahead_and_no_farther(bound: int) -> None:
    table, one, two = dense(Ssp(2, bound)), FakeWorker(1), FakeWorker(2)
    for done in range(bound + 1):
        assert pull(one, table) == done
        assert push(one, table) == done + 1
    waiting = [pull(one, table), push(one, table), pull(one, table)]
    assert not any(each.done() for each in waiting)
    assert pull(two, table) == bound + 1  # it only reads as yet, and waits for nobody
    assert push(two, table) == bound + 2
    assert [each.done() for each in waiting] == [True, True, False]
    assert waiting[0].result() == bound + 2
    push(two, table)
    assert waiting[2].result() == bound + 4


def test_sparse_verbs_wait_the_same_way_and_a_push_that_fails_is_no_step() -> None:
    table, one, two = sparse(Ssp(2, 0)), FakeWorker(1), FakeWorker(2)
    keys, grads = np.array([7, 8]), np.ones((2, 1), np.float32)
    with two.calls():
        with pytest.raises(BadArguments):
            table.push(keys, grads[:1])
        table.push(keys, grads)
    with two.calls():
        waiting = table.push_pull(keys, grads), table.pull(keys)
    with one.calls():
        assert table.push_pull(keys, grads).tolist() == [[2], [2]]
    assert waiting[0].result().tolist() == [[3], [3]]
    assert not waiting[1].done()


def test_a_worker_that_dies_bounds_nobody() -> None:
    table, one, two = dense(Ssp(2, 0)), FakeWorker(1), FakeWorker(2)
    push(one, table)
    push(two, table)
    push(one, table)
    waiting, sent = pull(one, table), push(one, table, 5)
    two.is_gone()
    assert (waiting.result(), sent.result()) == (3, 4)
    assert pull(one, table) == 8


def test_what_a_dead_worker_had_pushed_is_applied_and_what_it_pulled_dropped() -> None:
    table, one, two = dense(Ssp(2, 0)), FakeWorker(1), FakeWorker(2)
    push(one, table)
    waiting = [pull(one, table), push(one, table)]
    one.is_gone()
    assert all(each.done() for each in waiting)
    assert pull(two, table) == 2


# With a checkpoint's gate before it


def test_held_pushes_reach_their_step_on_behalf_of_who_sent_them() -> None:
    table, one, two = dense(Sync(2, "sum")), FakeWorker(1), FakeWorker(2)
    waiting: Waiting = Waiting()
    held: HeldTable[Any] = HeldTable(table, waiting)
    answers: list[Deferred] = [push(one, held), push(two, held), push(one, held)]
    release(waiting)
    assert [answer.done() for answer in answers] == [True, True, False]
    assert pull(one, table) == 2
    answers[2].cancel()
    push(two, table)
    assert pull(one, table) == 2  # the step still lacks worker 1
