"""A tensor whose receiver's deadline passes in the middle of its transfer is received by whoever
asks for it next.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster import Duplicate, StepAborted, TaskLost
from prpc_engine.cluster.late import Late
from prpc_engine.cluster.link import Errand
from prpc_engine.errors import Cancelled, DeadlineExceeded
from prpc_engine.rpc.call import Call, CallTable
from shard import PeerLostError
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.processes import PATIENCE_S, wait_until

PS0, WORKER0 = "/job:ps/task:0", "/job:worker/task:0"
ONE, TWO = np.array(1), np.array(2)


@pytest.fixture(params=["alone", "shards"])
def tasks(
    request: pytest.FixtureRequest, seed: int, forked_shards: None
) -> Iterator[tuple[Server, Server]]:
    """A ps, by itself or with a communication shard, and a worker that reaches it over tcp."""
    cluster, config = cluster_at(fresh_host(seed), ps=1, worker=1), ServerConfig(transports=["tcp"])
    of_ps = config if request.param == "alone" else ServerConfig(shards=1)
    with (
        Server(cluster, "ps", 0, config=of_ps) as ps,
        Server(cluster, "worker", 0, config=config) as worker,
    ):
        # connected
        worker.ask(PS0, "abort", "a word", lambda _: (1 << 40, "over"), PATIENCE_S).result()
        yield ps, worker


class Transfer:
    """Answers with tensors stay on their way to the worker until they are let in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Server) -> None:
        self.held: list[Callable[[], object]] = []
        self._peer = worker._link(worker._names.number(PS0)).peer
        assert self._peer is not None
        self._reactor = worker._at.driver.reactor
        on_message = self._peer._on_message
        self.is_open = False

        def hold(body: Any, blocks: Any = ()) -> None:
            if sum(block.nbytes for block in blocks) >= VALUE.nbytes and not self.is_open:
                kept = bytes(body), list(blocks)
                self.held.append(lambda: on_message(memoryview(kept[0]), kept[1]))
            else:
                on_message(body, blocks)

        monkeypatch.setattr(self._peer.connection, "on_message", hold)

    def wait(self) -> None:
        wait_until(lambda: self.held, "a tensor on its way")

    def let_in(self) -> None:
        self.is_open = True
        for each in self.held:
            self._reactor.call_soon(each)


@pytest.fixture
def transfer(tasks: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> Transfer:
    return Transfer(monkeypatch, tasks[1])


VALUE = np.arange(1000, dtype=np.float64)  # travels within its message


def test_a_tensor_on_its_way_at_the_deadline_is_received_by_the_next(
    tasks: tuple[Server, Server], transfer: Transfer
) -> None:
    ps, worker = tasks
    ps.send("large", VALUE, to=WORKER0, step=0)
    with pytest.raises(DeadlineExceeded, match="allow a larger timeout_s"):
        worker.recv("large", source=PS0, step=0, timeout_s=0.5)
    transfer.wait()
    with pytest.raises(
        DeadlineExceeded,
        match=r"'large' of step 0, which was on its way from .*, has not come whole in time",
    ):
        worker.recv("large", source=PS0, step=0, timeout_s=0.05)
    again = worker.submit_recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)
    transfer.let_in()
    np.testing.assert_array_equal(again.result(PATIENCE_S), VALUE)
    assert worker.statistics().late_bytes == 0
    with pytest.raises(Duplicate, match="was sent to its receiver before"):
        worker.recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)


def test_a_tensor_that_came_too_late_is_kept_and_received_with_others(
    tasks: tuple[Server, Server], transfer: Transfer
) -> None:
    ps, worker = tasks
    ps.send("large", VALUE, to=WORKER0, step=0)
    given_up = worker.submit_recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)
    transfer.wait()
    assert given_up.cancel()
    with pytest.raises(Cancelled):
        given_up.result()
    transfer.let_in()
    wait_until(lambda: worker.statistics().late_bytes == VALUE.nbytes, "the tensor")
    with pytest.raises(DeadlineExceeded):
        worker.recv_many(["other", "large"], source=PS0, step=0, timeout_s=0.1)
    wait_until(lambda: worker.statistics().late_bytes == VALUE.nbytes, "its being kept again")
    ps.send("other", np.array(7), to=WORKER0, step=0)
    other, large = worker.recv_many(["other", "large"], source=PS0, step=0, timeout_s=PATIENCE_S)
    assert other == 7
    np.testing.assert_array_equal(large, VALUE)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["cleanup", "abort"])
def test_a_tensor_that_comes_after_the_end_of_its_step_is_dropped(
    tasks: tuple[Server, Server], transfer: Transfer, end: str
) -> None:
    ps, worker = tasks
    for step in (0, 1):
        ps.send("large", VALUE, to=WORKER0, step=step)
        with pytest.raises(DeadlineExceeded):
            worker.recv("large", source=PS0, step=step, timeout_s=0.5)
    wait_until(lambda: len(transfer.held) == 2, "both on their way")
    waiting = worker.submit_recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)
    if end == "cleanup":
        worker.cleanup(0)
    else:
        worker.abort(0, "over")
    with pytest.raises(StepAborted):
        waiting.result(PATIENCE_S)
    transfer.let_in()
    wait_until(
        lambda: worker.statistics().late_bytes == VALUE.nbytes, "the tensor of the other step"
    )
    worker.cleanup(1)
    assert worker.statistics().late_bytes == 0


def test_a_deadline_before_the_tensor_is_sent_leaves_it_at_its_source(
    tasks: tuple[Server, Server],
) -> None:
    ps, worker = tasks
    for number in range(20):
        with pytest.raises(DeadlineExceeded):
            worker.recv(f"key {number}", source=PS0, step=0, timeout_s=0.005)
        ps.send(f"key {number}", np.full(3, number), to=WORKER0, step=0)
        received = worker.recv(f"key {number}", source=PS0, step=0, timeout_s=PATIENCE_S)
        assert received is not None
        assert received.tolist() == [number] * 3
    wait_until(lambda: not worker._late.steps, "the answers to those that were given up")


def test_deadlines_at_any_moment_of_large_transfers_lose_nothing(
    tasks: tuple[Server, Server],
) -> None:
    ps, worker = tasks
    large = np.arange(4 << 20, dtype=np.float64)  # 32 MiB: some 10 ms on the way
    for step in range(12):
        sender = threading.Thread(
            target=lambda step=step: ps.send("large", large, to=WORKER0, step=step)
        )
        sender.start()
        received = None
        for tenths in range(1000):
            with contextlib.suppress(DeadlineExceeded):
                received = worker.recv(
                    "large", source=PS0, step=step, timeout_s=0.001 * (tenths % 10 + 1)
                )
                break
        sender.join()
        np.testing.assert_array_equal(received, large)  # type: ignore[arg-type]
        for task in tasks:
            task.cleanup(step)


def test_both_errors_say_that_a_tensor_was_lost_with_its_connection(
    tasks: tuple[Server, Server], transfer: Transfer
) -> None:
    ps, worker = tasks
    ps.send("large", VALUE, to=WORKER0, step=0)
    waiting = worker.submit_recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)
    transfer.wait()
    peer = worker._link(worker._names.number(PS0)).peer
    assert peer is not None
    worker._at.driver.reactor.call_soon(
        lambda: peer.connection.close(PeerLostError("cut by a test"))
    )
    with pytest.raises(
        TaskLost,
        match="a tensor that was on its way is lost with the connection: begin another step",
    ):
        waiting.result(PATIENCE_S)
    with pytest.raises(
        Duplicate,
        match="if it did not come there, as its connection was lost on the way, it is lost",
    ):
        worker.recv("large", source=PS0, step=0, timeout_s=PATIENCE_S)


# -- what keeps them -------------------------------------------------------------------------------


def keeper(bytes_max: int = 1000, **more: int) -> Late:
    return Late(contextlib.nullcontext(), bytes_max, **more)


def test_what_there_is_no_room_for_is_lost_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    there = keeper(bytes_max=2 * ONE.nbytes)
    for key in "abc":
        there.settle(there.expect(1, 0, [key]), [ONE])
    assert (
        "1 tensors of step 0 came after their deadline and are lost: "
        "16 bytes of such tensors wait, 16 may" in caplog.text
    )
    assert list(there.take(1, 0, ["a", "b", "c"])) == ["a", "b"]
    there = keeper(tensors_max=1)
    there.keep(1, 0, {"dead": None})
    there.keep(1, 0, {"dead too": None})
    assert there.take(1, 0, ["dead", "dead too"]) == {"dead": None}
    assert there.nbytes == 0


def test_a_tensor_is_kept_for_its_source_step_and_key() -> None:
    there = keeper()
    assert there.waits_for(1, 0, ["a"]) is None
    straggler = there.expect(1, 0, ["a", "b"])
    for source, step, keys in ((2, 0, ["a"]), (1, 1, ["a"]), (1, 0, ["c"])):
        assert there.waits_for(source, step, keys) is None
    assert there.waits_for(1, 0, ["c", "b"]) == [straggler]
    there.settle(straggler, [ONE, TWO])
    assert straggler.done()
    assert there.waits_for(1, 0, ["c", "b"]) == []
    assert there.take(1, 0, ["b", "c"]) == {"b": TWO}
    assert there.take(1, 0, ["a", "b"]) == {"a": ONE}
    there.settle(straggler, [ONE, TWO])  # again: nobody expects it
    assert there.waits_for(1, 0, ["a"]) is None


def test_what_settles_without_tensors_leaves_nothing() -> None:
    there = keeper()
    straggler = there.expect(1, 0, ["a"])
    there.settle(straggler, None)
    assert straggler.done()
    assert there.waits_for(1, 0, ["a"]) is None
    assert there.steps == 0


def test_the_end_of_a_step_settles_what_is_waited_for_and_drops_what_is_kept() -> None:
    there = keeper()
    straggler, other = there.expect(1, 0, ["a", "b"]), there.expect(1, 1, ["a"])
    there.keep(2, 0, {"c": ONE})
    there.forget(0)
    assert straggler.done() and not other.done()
    assert (there.nbytes, there.steps) == (0, 1)
    there.settle(straggler, [ONE, TWO])
    assert there.take(1, 0, ["a", "b"]) == {}
    there.settle(other, [ONE])
    assert there.take(1, 1, ["a"]) == {"a": ONE}
    assert there.steps == 0


# -- who leaves a request behind -------------------------------------------------------------------


class Ends:
    """An errand on its way, and what ends it."""

    def __init__(self) -> None:
        self.settled: list[object] = []
        self.table = CallTable()
        self.told: list[int] = []
        self.table.send_cancel = self.told.append
        self.errand = Errand(
            straggle=lambda: self.settled.append,
            claims=[True],
            late=lambda one, error: one.set_error(error),
        )
        self.call = Call(table=self.table, call_id=1, client=self.errand)
        self.table.in_flight[1] = self.call

    def cancel(self) -> None:
        self.errand.cancel()

    def expire(self) -> None:
        self.call.deadline = 1.0
        self.table.find_late(1.0)
        self.table.end_late(lambda call: DeadlineExceeded("late"))

    def send(self) -> None:
        self.errand.sent(
            self.call,
            lambda done: self.errand.set_result(done._outcome) if done.finished == 1 else None,
        )


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["cancel", "expire", "send"])), ids="-".join
)
def test_a_request_is_left_behind_once_in_whichever_order_its_end_and_its_sending_come(
    order: tuple[str, ...],
) -> None:
    ends = Ends()
    for what in order:
        getattr(ends, what)()
    assert ends.errand.done()
    assert not ends.call.done()
    assert 1 in ends.told
    del ends.table.in_flight[1]
    ends.call.set_result(["a tensor"])
    assert [one for one in ends.settled if one is not None] == [["a tensor"]]


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_request_that_was_answered_in_time_leaves_nothing_behind(end: str) -> None:
    ends = Ends()
    ends.send()
    del ends.table.in_flight[1]
    ends.call.set_result(["a tensor"])
    getattr(ends, end)()
    assert ends.errand.result() == ["a tensor"]
    assert [one for one in ends.settled if one is not None] == []
