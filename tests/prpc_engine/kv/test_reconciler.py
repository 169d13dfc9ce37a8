"""One server's reconciler and filler beside a placement that others change, and a master that is
away at the worst moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from prpc_engine.errors import DeadlineExceeded, MaybeExecuted, NotSent, RpcError
from prpc_engine.kv import Constant, ElasticServer, Sgd
from prpc_engine.kv.replication.partition_router import PartitionRouter
from prpc_engine.kv.replication.reconciler import LOOKS_PER_LEASE, Reconciler
from prpc_engine.kv.replication.replica import Moved, Replica
from prpc_engine.kv.replication.replication_log import ReplicationLog
from prpc_engine.kv.replication.state_transfer import OutgoingCopy
from prpc_engine.kv.schema.placement import Placed, Placement, plan
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.server.server import TableShard
from shard import Future, control_loop, run_blocking
from shard.loop.waits import BLOCKING_THREADS_MAX
from tests.prpc_engine.processes import PATIENCE_S, wait_until

ME, OTHER, THIRD = 1, 2, 3
TABLE = SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1)


class Node:
    """A placement node of a master without network. forbid(placement): raised instead of setting
    that one.
    """

    path = "/tables"

    def __init__(self, placement: Placement, alive: list[int]) -> None:
        self.placement, self.version, self.alive = placement, 1, alive
        self.forbid: Callable[[Placement], Exception | None] = lambda _: None
        self.reads = 0
        self._lock = threading.Lock()

    async def read(self) -> tuple[Placement, int]:
        with self._lock:
            self.reads += 1
            return self.placement, self.version

    async def try_change(self, placement: Placement, version: int) -> int | None:
        with self._lock:
            error = self.forbid(placement)
            if error is not None:
                raise error
            if version != self.version:
                return None
            self.placement, self.version = placement, version + 1
            return self.version

    async def servers(self) -> list[int]:
        return self.alive


class Nobody:
    """A client of servers that do not answer."""

    def submit_to(
        self, server_id: int, method: str, /, *args: Any, timeout_s: float = 30.0
    ) -> Future:
        raise DeadlineExceeded(f"server {server_id} does not answer")


def run_now(function: Callable[[Future], object]) -> Future:
    done = Future()
    try:
        function(done)
    except RpcError as error:
        done.set_error(error)
    return done


def ended(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, in the control loop."""
    return control_loop().spawn(coroutine).result(PATIENCE_S)


@contextmanager
def kept(node: Node, make_shard: Callable[[], TableShard] = TableShard) -> Iterator[Reconciler]:
    """A running reconciler of server ME."""
    host = PartitionRouter(make_shard, lambda: reconciler.look())
    reconciler = Reconciler(node, host, Nobody(), run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]
    host.server_id, host.send = ME, lambda *_: Future()
    reconciler.start()
    try:
        yield reconciler
    finally:
        reconciler.stop()
        reconciler.join()


def test_a_master_that_did_not_hear_that_a_partition_is_loaded_is_told_again() -> None:
    node = Node(Placement((Placed(ME, loading=True),)), [ME])
    failures = [DeadlineExceeded("the master is away")]
    node.forbid = lambda placement: (
        failures.pop() if failures and not placement.partitions[0].loading else None
    )
    with kept(node):
        wait_until(
            lambda: not node.placement.partitions[0].loading, "the partition is said to be loaded"
        )
    assert not failures


def test_a_partition_is_said_to_be_loaded_also_when_it_got_an_heir_meanwhile() -> None:
    node = Node(Placement((Placed(ME, loading=True),)), [ME, OTHER])
    loading, go_on = threading.Event(), threading.Event()

    def make_late() -> TableShard:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return TableShard()

    with kept(node, make_late):
        assert loading.wait(PATIENCE_S)
        node.placement, node.version = (
            msgspec.structs.replace(node.placement, draining=(ME,)),
            node.version + 1,
        )
        wait_until(lambda: node.placement.partitions[0].heir == OTHER, "an heir")
        go_on.set()
        wait_until(
            lambda: not node.placement.partitions[0].loading, "the partition is said to be loaded"
        )


def test_looks_go_on_while_every_thread_for_blocking_work_is_busy() -> None:
    """They renew the time that the host may serve for, whatever the application does meanwhile."""
    node, blocked, go_on = (
        Node(Placement((Placed(OTHER),)), [OTHER]),
        list[int](),
        threading.Event(),
    )

    def block() -> None:
        blocked.append(1)
        assert go_on.wait(PATIENCE_S)

    async def keep_busy() -> None:
        await run_blocking(block)

    with kept(node):
        busy = [control_loop().spawn(keep_busy()) for _ in range(BLOCKING_THREADS_MAX)]
        try:
            wait_until(lambda: len(blocked) == BLOCKING_THREADS_MAX, "threads that block")
            before = node.reads
            wait_until(lambda: node.reads > before + LOOKS_PER_LEASE, "more looks")
            assert not any(each.done() for each in busy)
        finally:
            go_on.set()
            for each in busy:
                each.result(PATIENCE_S)


def test_a_reconciler_that_is_stopped_leaves_nothing_in_the_control_loop() -> None:
    """Also where the master never answers."""
    asked, given_up = threading.Event(), threading.Event()
    node = Node(Placement((Placed(ME),)), [ME])

    async def never() -> tuple[Placement, int]:
        asked.set()
        try:
            await Future()
        finally:
            given_up.set()
        raise AssertionError("that future has no result")

    node.read = never  # type: ignore[method-assign]
    with kept(node):
        assert asked.wait(PATIENCE_S)
    assert given_up.wait(PATIENCE_S)


def test_who_waits_for_a_placement_that_does_not_come_waits_no_longer_than_asked() -> None:
    with kept(Node(Placement((Placed(OTHER),)), [OTHER])) as reconciler:
        assert reconciler.wait_until(lambda placement: placement.replicas == 0, PATIENCE_S)
        assert not reconciler.wait_until(lambda placement: False, 0.05)


def test_a_server_that_is_leaving_says_so_again_where_it_seemed_dead_meanwhile() -> None:
    node = Node(Placement((Placed(OTHER),)), [ME, OTHER])
    with kept(node) as reconciler:
        reconciler.drain()
        assert node.placement.draining == (ME,)
        node.placement, node.version = Placement((Placed(OTHER),)), node.version + 1
        wait_until(lambda: node.placement.draining == (ME,), "the word")


def test_a_placement_that_the_filler_has_told_already_is_not_gone_back_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, _ = primary_of(Placed(ME))
    old, new = Placement((Placed(ME),)), Placement((Placed(OTHER, epoch=2),))
    node = Node(old, [ME, OTHER])
    reconciler = Reconciler(node, host, Nobody(), run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]

    async def while_the_filler_goes_on() -> list[int]:
        node.placement, node.version = new, 2
        del node.servers  # type: ignore[attr-defined]
        await reconciler.look_once()
        return [ME, OTHER]

    node.servers = while_the_filler_goes_on  # type: ignore[method-assign]
    ended(reconciler.look_once())
    assert not host.hosted
    assert reconciler.placement is new
    assert "its rows are lost" not in caplog.text


def test_a_partition_whose_checkpoints_cannot_be_read_waits_and_does_not_begin_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("what is no folder now")
    placed = Placed(ME, loading=True)
    node, host = Node(Placement((placed,)), [ME]), PartitionRouter(TableShard, lambda: None)
    reconciler = Reconciler(node, host, Nobody(), run_now, 0.2, lambda _: None, str(folder))  # type: ignore[arg-type]
    host.server_id, host.send = ME, lambda *_: Future()
    reconciler.start()
    try:
        wait_until(lambda: "cannot be read: Not a directory" in caplog.text, "the first try")
        assert not host.hosted
        folder.unlink()
        wait_until(lambda: not node.placement.partitions[0].loading, "the partition")
        assert node.placement.partitions[0].step == -1
        assert list(host.hosted) == [0]
    finally:
        reconciler.stop()
        reconciler.join()


class Copied:
    """A primary from which ME is filled.
    The reconciler is told to stop as the first piece is read.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        shard = TableShard()
        shard.create_table(TABLE.to_dict())
        shard.push("t", np.arange(2), np.ones((2, 1), np.float32))
        self.outgoing = OutgoingCopy(shard)
        self.stop: Callable[[], None]

    def submit_to(self, server_id: int, method: str, /, *_: Any, timeout_s: float = 30.0) -> Future:
        self.asked.append(method)
        if method == "copy_begin":
            return run_now(
                lambda answer: answer.set_result(self.outgoing.description | {"applied": 1})
            )
        self.stop()
        return run_now(lambda answer: answer.set_result(self.outgoing.read()))


def test_a_server_that_is_closed_as_it_is_filled_does_not_say_that_it_has_everything() -> None:
    copied = Copied()
    host = PartitionRouter(TableShard, lambda: None)
    node = Node(Placement((Placed(OTHER, joining=(ME,)),), 1), [ME, OTHER])
    reconciler = Reconciler(node, host, copied, run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]
    host.server_id, host.send, copied.stop = ME, lambda *_: Future(), reconciler.stop
    reconciler.start()
    wait_until(lambda: "copy_read" in copied.asked, "the first piece")
    reconciler.join()
    assert copied.asked == ["copy_begin", "copy_read"]
    assert not host.hosted


class Late:
    """The way to a primary's host: what was asked first of a copy comes there when the next one has
    begun, as of a connection that was lost meanwhile."""

    def __init__(self, host: PartitionRouter, method: str, meanwhile: Callable[[], object]) -> None:
        self.host, self.method, self.meanwhile = host, method, meanwhile
        self.asked: tuple[Any, ...] | None = None

    def submit_to(
        self, server_id: int, method: str, /, *args: Any, timeout_s: float = 30.0
    ) -> Future:
        def call(answer: Future) -> None:
            if method == self.method and self.asked is None:
                self.asked = args
                self.meanwhile()
                raise MaybeExecuted("the connection was lost")
            answer.set_result(getattr(self.host, method)(*args))
            if method == "copy_begin" and self.asked:
                with suppress(Moved):
                    getattr(self.host, self.method)(*self.asked)

        return run_now(call)


@pytest.mark.parametrize("method", ["copy_read", "copy_end"])
def test_what_was_asked_of_a_copy_that_was_begun_anew_takes_nothing_from_that_one(
    method: str,
) -> None:
    placed = Placed(ME, joining=(OTHER,))
    host, hosted = primary_of(placed)
    push(host, 1, "apply_replicated")
    filled = PartitionRouter(TableShard, lambda: None)
    filled.server_id, filled.send = OTHER, lambda *_: Future()
    filled.learn(Placement((placed,)), 1, 1.0)
    node = Node(Placement((placed,), 1), [ME, OTHER])
    late = Late(host, method, lambda: push(host, 2, "apply_replicated"))
    reconciler = Reconciler(node, filled, late, run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]
    reconciler.start()
    try:
        wait_until(lambda: hosted.streams and hosted.streams[OTHER].has_caught_up, "the copy")
        assert late.asked is not None
        assert filled.hosted[0].shard.pull("t", np.arange(2)).tolist() == [[-2], [-2]]
        assert hosted.streams[OTHER].has_caught_up
    finally:
        reconciler.stop()
        reconciler.join()


def test_a_copy_is_there_until_another_has_taken_its_place() -> None:
    host, hosted = primary_of(Placed(ME))
    there: list[Replica | None] = []
    hosted.leave = lambda: there.append(host.hosted.get(0))  # type: ignore[method-assign]
    host.put(0, 1, TableShard(), 0, -1)
    assert there == [hosted]


def push(host: PartitionRouter, number: int, method: str = "apply") -> Future:
    answer = getattr(host, method)(
        0, 1, 7, number, "push", "t", np.arange(2), np.ones((2, 1), np.float32)
    )
    assert isinstance(answer, Future)
    return answer


def primary_of(
    placed: Placed, calls: dict[int, Future] | None = None
) -> tuple[PartitionRouter, Replica]:
    """calls: gets what each other server is asked first."""
    host = PartitionRouter(TableShard, lambda: None, clock=lambda: 0.0)
    asked = {} if calls is None else calls
    host.server_id, host.send = ME, lambda server, *_: asked.setdefault(server, Future())
    host.learn(Placement((placed,)), 1, 1.0)
    host.put(0, placed.epoch, TableShard(), 0, -1)
    host.hosted[0].shard.create_table(TABLE.to_dict())
    return host, host.hosted[0]


@pytest.mark.parametrize("method", ["apply", "apply_replicated"])
def test_a_push_that_a_save_holds_goes_elsewhere_when_its_partition_does(method: str) -> None:
    host, hosted = primary_of(Placed(ME))
    hosted.shard.checkpoint_enter("0" * 16, "/nowhere")
    held = push(host, 1, method)
    host.learn(Placement((Placed(OTHER, epoch=2),)), 2, 1.0)
    assert isinstance(held.error(), Moved)
    hosted.shard.checkpoint_release("0" * 16)
    assert hosted.shard.statistics()["t"]["pushes"] == 0


def test_what_a_save_held_is_released_once_the_partition_was_handed_over() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,)))
    hosted.shard.checkpoint_enter("0" * 16, "/nowhere")
    host.learn(Placement((Placed(OTHER, epoch=2, replicas=(ME,)),)), 2, 1.0)
    change = 7, 1, "t", None, np.arange(2), np.ones((2, 1), np.float32)
    # so the push is acknowledged as replicated
    assert host.follow(0, 2, 1, "replay", *change) is None
    host.learn(Placement((Placed(ME, epoch=3),)), 3, 1.0)  # and the other one dies
    assert host.pull(0, 3, "t", np.arange(2)).tolist() == [[-1], [-1]]


def test_tables_are_not_replaced_in_a_partition_whose_heir_is_about_to_have_it() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,), heir=OTHER))
    handed = Future()
    hosted.hand_over(handed)
    assert handed.result()
    with pytest.raises(Moved, match="being handed over"):
        host.methods()["checkpoint_swap"](0, 1, "0" * 16)


def test_a_replica_that_is_being_copied_anew_has_not_what_it_is_yet_to_read() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,)))
    hosted.streams[OTHER].fail("it has forgotten all")
    answer = push(host, 1, "apply_replicated")
    # it has not heard that it is a replica, and the master not that it cannot be one
    begun = host.copy_begin(0, 1, OTHER)
    assert host.copy_read(0, 1, OTHER, begun["copy"]) is not None
    assert not push(host, 2, "apply_replicated").done()
    assert not answer.done()
    assert hosted.look_at_streams(0.0) == ([], [OTHER], False)  # the master is told


def test_a_replica_that_was_demoted_drops_what_it_has_and_is_copied_from_the_beginning() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,)))
    hosted.streams[OTHER].fail("it has forgotten all")
    copy = host.copy_begin(0, 1, OTHER)["copy"]
    host.learn(Placement((Placed(ME, joining=(OTHER,)),)), 2, 1.0)
    with pytest.raises(Moved, match="begin again"):
        host.copy_end(0, 1, OTHER, copy)


def test_a_replica_that_the_master_is_told_of_counts_whatever_is_heard_meanwhile() -> None:
    calls: dict[int, Future] = {}
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,), joining=(THIRD,)), calls)
    hosted.end_copy(THIRD, hosted.begin_copy(THIRD)["copy"])
    hosted.promised.add(THIRD)
    host.learn(Placement((Placed(ME, replicas=(OTHER,), joining=(THIRD, 4)),)), 2, 1.0)
    hosted.streams[THIRD].fail("it was stopped")
    answer = push(host, 1, "apply_replicated")
    calls[OTHER].set_result(None)
    assert not answer.done()


def test_a_copy_that_the_master_does_not_know_of_acknowledges_no_push() -> None:
    calls: dict[int, Future] = {}
    host, hosted = primary_of(Placed(ME, joining=(OTHER,)), calls)
    hosted.end_copy(OTHER, hosted.begin_copy(OTHER)["copy"])
    answer = push(host, 1, "apply_replicated")
    calls[OTHER].set_result(None)
    assert not answer.done()
    host.learn(Placement((Placed(ME, replicas=(OTHER,)),)), 2, 1.0)
    assert answer.done()


@pytest.mark.parametrize(
    "placed", [Placed(ME, replicas=(OTHER,)), Placed(ME, joining=(OTHER,), spares=(OTHER,))]
)
def test_after_a_restore_nobody_is_promoted_who_has_what_there_was_before(placed: Placed) -> None:
    host, hosted = primary_of(placed)
    node = Node(Placement((placed,), replicas=1), [ME, OTHER])
    reconciler = Reconciler(node, host, Nobody(), run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]
    hosted.replace_all("load", 7)
    assert hosted.is_settled("load") is False
    ended(reconciler.look_once())
    assert node.placement.partitions[0] == Placed(
        ME, epoch=2, joining=(OTHER,), restored="load", step=7
    )
    hosted.end_copy(OTHER, hosted.begin_copy(OTHER)["copy"])
    for _ in range(2):  # what is copied after that counts
        ended(reconciler.look_once())
    assert node.placement.partitions[0] == Placed(
        ME, epoch=2, replicas=(OTHER,), restored="load", step=7
    )
    assert hosted.is_settled("load") is True
    assert hosted.is_settled("another") is None


def test_a_restore_that_comes_while_the_master_is_told_of_the_one_before_is_told_as_well() -> None:
    host, hosted = primary_of(Placed(ME))
    hosted.replace_all("first", 1)
    hosted.replace_all("second", 2)
    host.learn(Placement((Placed(ME, epoch=2, restored="first", step=1),)), 2, 1.0)
    assert hosted.restored == ("second", 2)
    host.learn(Placement((Placed(ME, epoch=3, restored="second", step=2),)), 3, 1.0)
    assert hosted.restored == ("", -1)


def test_a_restore_that_was_lost_with_its_server_is_not_taken_for_done() -> None:
    lost = plan(Placement((Placed(OTHER, restored="load", step=7),)), [ME]).partitions[0]
    assert (lost.restored, lost.history) == ("", 1)


def test_a_partition_whose_heir_was_taken_back_at_the_last_moment_was_not_handed_over() -> None:
    placed = Placed(ME, replicas=(OTHER,), heir=OTHER)
    host, hosted = primary_of(placed)
    node = Node(Placement((placed,), replicas=1, draining=(ME,)), [ME, OTHER])

    def take_back_at_the_last_moment(function: Callable[[Future], object]) -> Future:
        done = run_now(function)
        if function == hosted.hand_over:
            assert done.result()
            node.placement, node.version = Placement((Placed(ME, replicas=(OTHER,)),), 1), 7
        return done

    reconciler = Reconciler(
        node,  # type: ignore[arg-type]
        host,
        Nobody(),
        take_back_at_the_last_moment,
        0.2,
        lambda _: None,
        None,
    )
    ended(reconciler.look_once())
    assert node.version == 7
    assert reconciler.hand_overs == 0
    assert not hosted.is_handing_over


def test_a_stream_that_was_interrupted_with_nothing_to_send_is_as_good_as_new() -> None:
    calls: dict[int, Future] = {}
    stream = ReplicationLog(
        0, lambda number, _: calls.setdefault(number, Future()), lambda _: None, None
    )
    for number in (1, 2):
        stream.forward(number, ("apply",))
    calls[2].set_result(None)
    calls.pop(1).set_error(MaybeExecuted("its lane was cut"))
    stream.resume(0.0)
    stream.forward(3, ("apply",))
    calls.pop(3).set_error(MaybeExecuted("much later"))
    stream.resume(100.0)
    assert not stream.failure
    calls[3].set_result(None)
    assert stream.acked == 3


def test_a_replica_that_cannot_be_reached_is_tried_now_and_then_and_not_at_once_again() -> None:
    calls: list[Future] = []
    looks: list[bool] = []

    def send(number: int, message: object) -> Future:
        calls.append(Future())
        return calls[-1]

    stream = ReplicationLog(0, send, looks.append, None)
    stream.forward(1, ("apply",))
    calls.pop().set_error(NotSent("nobody listens there"))
    assert looks == [True]  # of a connection that was lost: it may be back by now
    assert not stream.is_in_doubt
    for tries in range(3):
        stream.resume(tries * 0.05)
        calls.pop().set_error(NotSent("nobody listens there"))
        assert looks == [True, *[False] * (tries + 1)]
        assert stream.is_in_doubt
    stream.resume(0.2)
    calls.pop().set_result(None)
    assert not stream.is_in_doubt
    assert stream.acked == 1


class Raced(Replica):
    """While somebody looks at it, it applies a push that its replica answers, and another server is
    made its primary.
    """

    streams: Any
    is_raced = False

    def __getattribute__(self, name: str) -> Any:
        seen = super().__getattribute__(name)
        if name == "applied" and self.is_raced:
            self.applied = seen + 1
            self.streams[OTHER].acked = seen + 1
        if name == "placed" and self.is_raced:
            self.placed = msgspec.structs.replace(seen, primary=OTHER)
        return seen


def test_statistics_of_a_partition_that_goes_on_meanwhile_are_those_of_one_moment_each() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,)))
    hosted.__class__ = Raced
    hosted.is_raced = True  # type: ignore[attr-defined]
    server: Any = SimpleNamespace(_host=host, _reconciler=SimpleNamespace(hand_overs=0))
    found = ElasticServer.statistics(server)
    assert (found.primaries, found.copies, found.lag) == ((0,), (), 0)


def test_a_server_closes_though_its_reactor_is_too_busy_to_let_go_of_what_it_has() -> None:
    host, _ = primary_of(Placed(ME))
    later: list[Callable[[Future], object]] = []

    def be_busy(function: Callable[[Future], object]) -> Future:
        later.append(function)
        answer = Future()
        answer.set_error(TimeoutError("it has something else to do"))
        return answer

    node = Node(Placement((Placed(ME),)), [ME])
    Reconciler(node, host, Nobody(), be_busy, 0.2, lambda _: None, None).stop()  # type: ignore[arg-type]
    assert host.hosted
    later[0](Future())
    assert not host.hosted
