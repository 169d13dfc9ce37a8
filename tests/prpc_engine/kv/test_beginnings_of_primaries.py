"""With what the primaries of a partition began, and what a worker that has missed some is told."""

from __future__ import annotations

from typing import Any

import numpy as np

from prpc_engine.kv.client.session import Session
from prpc_engine.kv.replication.replica import BEGINNINGS_MAX, Replica
from prpc_engine.kv.schema.placement import Placed
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.initializer import Constant
from prpc_engine.kv.table.optimizer import Sgd
from shard import Future

TABLE = SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1)
PARTITION, SERVER, HEIR, CLIENT = 0, 1, 2, 7


def send(*_: Any) -> Future:
    done = Future()
    done.set_result(None)
    return done


def primary(epoch: int, pushes: int, beginnings: Any = ()) -> Replica:
    """One that begins in that epoch with so many pushes."""
    shard = TableShard()
    shard.create_table(TABLE.to_dict())
    for number in range(1, pushes + 1):
        push(shard, number)
    placed = Placed(SERVER, epoch)
    return Replica(PARTITION, SERVER, placed, shard, pushes, send, lambda: None, beginnings)


def push(shard: TableShard, number: int) -> None:
    shard.apply(CLIENT, number, "push", "t", np.arange(1), np.ones((1, 1), np.float32))


def test_a_loss_is_told_though_versions_grew_and_the_partition_was_handed_over_since() -> None:
    promoted = primary(2, 3)  # the one before had five
    for number in range(4, 7):
        push(promoted.shard, number)
    copy = promoted.begin_copy(HEIR)["beginnings"]
    heir = primary(3, 6, [(epoch, versions) for epoch, versions in copy])
    assert heir.began_since(1) == {"t": 3}
    assert heir.began_since(2) == {"t": 6}
    assert heir.began_since(3) == {"t": 6}
    session = Session("kv")
    floors = session.floors("t")
    assert session.answered("t", floors, {PARTITION: 5}) is None
    told = session.began(PARTITION, heir.began_since(1))
    assert told is not None
    assert (told.partition, told.pushes_lost) == (PARTITION, 2)


def test_a_table_that_a_primary_between_did_not_have_began_with_nothing() -> None:
    heir = primary(3, 6, [(2, {})])
    assert heir.began_since(1) == {"t": 0}


def test_so_many_beginnings_are_kept() -> None:
    many = [(epoch, {"t": epoch}) for epoch in range(1, 3 * BEGINNINGS_MAX)]
    kept = primary(3 * BEGINNINGS_MAX, 1, many).beginnings
    assert [epoch for epoch, _ in kept] == list(
        range(2 * BEGINNINGS_MAX + 1, 3 * BEGINNINGS_MAX + 1)
    )
