"""One server's keeper and filler beside a placement that others change, and a master that is away at the worst moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from prpc_engine.errors import DeadlineExceeded, MaybeExecuted, RpcError
from prpc_engine.kv import Constant, Sgd
from prpc_engine.kv.host import TableHost
from prpc_engine.kv.hosted import Hosted, Moved
from prpc_engine.kv.keeper import Keeper
from prpc_engine.kv.placement import Placed, Placement
from prpc_engine.kv.server import TableShard
from prpc_engine.kv.stream import Stream
from prpc_engine.kv.table_spec import SparseSpec
from shard import Future
from tests.prpc_engine.processes import PATIENCE_S, wait_until

ME, OTHER = 1, 2


class Node:
    """A placement node of a master without network. forbid(placement): raised instead of setting that one."""

    path = "/tables"

    def __init__(self, placement: Placement, alive: list[int]) -> None:
        self.placement, self.version, self.alive = placement, 1, alive
        self.forbid: Callable[[Placement], Exception | None] = lambda _: None
        self._lock = threading.Lock()

    def read(self) -> tuple[Placement, int]:
        with self._lock:
            return self.placement, self.version

    def try_change(self, placement: Placement, version: int) -> int | None:
        with self._lock:
            error = self.forbid(placement)
            if error is not None:
                raise error
            if version != self.version:
                return None
            self.placement, self.version = placement, version + 1
            return self.version

    def servers(self) -> list[int]:
        return self.alive


class Nobody:
    """A client of servers that do not answer."""

    def call_to(self, server_id: int, method: str, /, *args: Any, timeout_s: float = 30.0) -> Any:
        raise DeadlineExceeded(f"server {server_id} does not answer")


def run_now(function: Callable[[Future], object]) -> Future:
    done = Future()
    try:
        function(done)
    except RpcError as error:
        done.set_error(error)
    return done


@contextmanager
def kept(node: Node, make_shard: Callable[[], TableShard] = TableShard) -> Iterator[TableHost]:
    """What a running keeper keeps, of server ME."""
    host = TableHost(make_shard, lambda: keeper.look())
    keeper = Keeper(node, host, Nobody(), run_now, 0.2, lambda _: None, None)  # type: ignore[arg-type]
    host.server_id, host.send = ME, lambda *_: Future()
    keeper.start()
    try:
        yield host
    finally:
        keeper.stop()
        keeper.join()


def test_a_master_that_did_not_hear_that_a_partition_is_loaded_is_told_again() -> None:
    node = Node(Placement((Placed(ME, loading=True),)), [ME])
    failures = [DeadlineExceeded("the master is away")]
    node.forbid = lambda placement: failures.pop() if failures and not placement.partitions[0].loading else None
    with kept(node):
        wait_until(lambda: not node.placement.partitions[0].loading, "the partition is said to be loaded")
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
        node.placement, node.version = msgspec.structs.replace(node.placement, draining=(ME,)), node.version + 1
        wait_until(lambda: node.placement.partitions[0].heir == OTHER, "an heir")
        go_on.set()
        wait_until(lambda: not node.placement.partitions[0].loading, "the partition is said to be loaded")


def push(host: TableHost, number: int, method: str = "apply") -> Future:
    answer = getattr(host, method)(0, 1, 7, number, "push", "t", np.arange(2), np.ones((2, 1), np.float32))
    assert isinstance(answer, Future)
    return answer


def primary_of(placed: Placed) -> tuple[TableHost, Hosted]:
    host = TableHost(TableShard, lambda: None, clock=lambda: 0.0)
    host.server_id, host.send = ME, lambda *_: Future()
    host.learn(Placement((placed,)), 1, 1.0)
    host.put(0, placed.epoch, TableShard(), 0, -1)
    host.hosted[0].shard.create_table(SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1).to_dict())
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


def test_tables_are_not_replaced_in_a_partition_whose_heir_is_about_to_have_it() -> None:
    host, hosted = primary_of(Placed(ME, replicas=(OTHER,), heir=OTHER))
    handed = Future()
    hosted.hand_over(handed)
    assert handed.result()
    with pytest.raises(Moved, match="being handed over"):
        host.methods()["checkpoint_swap"](0, 1, "0" * 16)


def test_a_stream_that_was_interrupted_with_nothing_to_send_is_as_good_as_new() -> None:
    calls: dict[int, Future] = {}
    stream = Stream(0, lambda number, _: calls.setdefault(number, Future()), lambda _: None, None)
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
