"""When create_table is answered: whoever may be promoted has the table by then. (A server that was
copied, and that the master was about to hear of as a replica, lacked it: seed 4000030 of the
elastic scenarios.)
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from prpc_engine.kv.replication.replica import Moved, Replica
from prpc_engine.kv.schema.placement import Placed
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.initializer import Constant
from prpc_engine.kv.table.optimizer import Sgd
from shard import Future

PARTITION, PRIMARY, COPY = 0, 1, 2
ALONE = Placed(PRIMARY)
JOINING = replace(ALONE, joining=(COPY,))


class Creating:
    """A primary, and one server that copies it."""

    def __init__(self) -> None:
        self.forwards: list[Future] = []
        self.hosted = Replica(PARTITION, PRIMARY, ALONE, TableShard(), 0, self.send, lambda: None)

    def send(self, *_: Any) -> Future:
        self.forwards.append(Future())
        return self.forwards[-1]

    def copied(self) -> None:
        self.hosted.learn(JOINING)
        copy = self.hosted.begin_copy(COPY)["copy"]
        assert self.hosted.read_copy(COPY, copy) is None  # no tables
        self.hosted.end_copy(COPY, copy)

    def create(self, table: str = "t") -> Any:
        spec = SparseSpec(table, 0, 1, Sgd(1.0), Constant(), 1)
        return self.hosted.create_table(spec.to_dict())


def test_a_table_waits_for_a_server_that_was_copied_and_is_no_replica_yet() -> None:
    partition = Creating()
    partition.copied()
    created = partition.create()
    assert not created.done()
    partition.forwards[0].set_result(None)
    assert created.result(0) is True


def test_the_second_who_creates_it_waits_as_the_first() -> None:
    partition = Creating()
    partition.copied()
    both = [partition.create(), partition.create()]
    assert not any(each.done() for each in both)
    partition.forwards[0].set_result(None)
    assert [each.result(0) for each in both] == [True, False]


def test_without_copies_it_waits_for_nobody() -> None:
    assert Creating().create().result(0) is True


def test_it_waits_no_longer_for_a_copy_that_cannot_follow() -> None:
    partition = Creating()
    partition.copied()
    created = partition.create()
    partition.hosted.streams[COPY].fail("it is too late")
    assert created.result(0) is True


def test_it_waits_for_one_that_the_master_may_know_as_a_replica_until_it_is_known() -> None:
    partition = Creating()
    partition.copied()
    partition.hosted.promise(COPY)
    partition.hosted.streams[COPY].fail("it is too late")
    created = partition.create()
    assert not created.done()  # the master may promote it
    partition.hosted.take_back_promise(COPY)
    assert created.result(0) is True


def test_a_replica_that_is_copied_anew_is_waited_for() -> None:
    partition = Creating()
    partition.copied()
    partition.hosted.learn(replace(ALONE, replicas=(COPY,)))
    partition.hosted.streams[COPY].fail("it is too late")
    created = partition.create()
    assert not created.done()  # the placement names it
    partition.hosted.learn(ALONE)
    assert created.result(0) is True


def test_who_creates_is_sent_elsewhere_when_the_partition_is() -> None:
    partition = Creating()
    partition.copied()
    created = partition.create()
    partition.hosted.learn(Placed(COPY, epoch=2))
    assert isinstance(created.error(0), Moved)
