"""A primary and its replicas hold the same, state by state, whatever is pushed, pulled, copied,
handed over, or dies.

Several servers' Hosted side by side, without network and without clocks: what one sends another
waits in a queue, in order for each receiver, and arrives as it does over a wire. After each change
that a primary forwards the table's state is noted under the change's number; a replica that has
applied so many changes must have that state. Once everything has arrived it must have the state of
now.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prpc_engine.kv.replication.replica import Replica
from prpc_engine.kv.replication.state_transfer import IncomingCopy
from prpc_engine.kv.schema.placement import NOBODY, Placed, demoted, handed_over, joined
from prpc_engine.kv.schema.table_spec import from_dict
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table import decisions
from prpc_engine.kv.table.table import SparseTable
from shard import Future
from tests.examples import examples
from tests.prpc_engine.table_states import state_of, states_of

SERVERS = (1, 2, 3)
CLIENT = 7
DIM = 2
PLAIN: dict[str, Any] = {
    "name": "sparse",
    "partition": 0,
    "partitions": 1,
    "dim": DIM,
    "optimizer": {"name": "adam", "learning_rate": 0.1},
    "initializer": {"name": "uniform", "scale": 0.1},
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "rows_max": PLAIN | {"eviction": {"rows_max": 6}},
    "ttl_steps": PLAIN | {"eviction": {"ttl_steps": 4}},
    "ttl_s": PLAIN | {"eviction": {"ttl_s": 4.0, "rows_max": 8}},
    "min_count": PLAIN | {"admission": {"min_count": 2, "width_bits": 3}},
    "both": PLAIN | {"admission": {"min_count": 2, "width_bits": 3}, "eviction": {"rows_max": 5}},
}
DENSE = {key: value for key, value in PLAIN.items() if key != "dim"} | {
    "name": "dense",
    "shape": [4],
    "begin": 0,
    "end": 4,
}
keys_given = st.lists(st.integers(0, 14), min_size=1, max_size=6)
sparse_names = st.sampled_from(sorted(SPECS))
verb_names = st.sampled_from(
    ["push", "pull", "push_pull", "push_dense", "push_pull_dense", "pull_dense"]
)
verbs_given = st.lists(
    st.tuples(verb_names, sparse_names, keys_given, st.integers(-3, 3)), max_size=12
)
PIECES_MAX = 30


def without(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


class Noted(NamedTuple):
    """A table as its primary had it with the change of that number, which was about it."""

    number: int
    state: dict[str, Any]


class Replication(RuleBasedStateMachine):
    @initialize(verbs=verbs_given, copies=st.integers(0, 2))
    def begin(self, verbs: list[tuple[str, str, list[int], int]], copies: int) -> None:
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(decisions, "USES_MAX", 5)
        self.now = 1000.0
        self.queues: dict[int, deque[tuple[int, int, tuple[Any, ...], Future]]] = {
            server: deque() for server in SERVERS
        }
        self.copies: dict[int, tuple[IncomingCopy, dict[str, Any]]] = {}
        self.noted: dict[int, dict[str, Noted]] = {}
        self.copied_at: dict[int, int] = {}
        self.sequence = 0
        self.hosted: dict[int, Replica] = {}
        self.placed = Placed(SERVERS[0])
        self.noted[0] = {}
        self.host(SERVERS[0], self.shard(), 0)
        for name, spec in sorted(SPECS.items()):
            self.primary.create_table(self.spec(name, spec))
        self.primary.create_table(self.spec("dense", DENSE))
        self.verbs(verbs)
        for server in SERVERS[1 : 1 + copies]:
            self.a_copy_begins(server)
            self.the_copy_goes_on(server, PIECES_MAX)

    # -- the world ---------------------------------------------------------------------------------

    @staticmethod
    def spec(name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return from_dict(spec | {"table": name}).to_dict()

    def shard(self) -> TableShard:
        """With a clock of the test's: each server's shows another time."""
        skew_s = 5000.0 * len(self.hosted)
        return TableShard(clock=lambda: self.now + skew_s)

    def host(self, server: int, shard: TableShard, applied: int) -> None:
        def send(
            to: int, method: str, index: int, epoch: int, number: int, *message: Any
        ) -> Future:
            assert method == "follow"
            answer = Future()
            self.queues[to].append((epoch, number, copy.deepcopy(message), answer))
            return answer

        hosted = self.hosted[server] = Replica(
            0, server, self.placed, shard, applied, send, lambda: None
        )
        forward = hosted._forward

        def noting(method: str, *message: Any) -> None:
            before = self.noted[hosted.applied]
            forward(method, *message)
            table = {
                "replay": lambda: message[2],
                "catch_up": lambda: message[0],
                "create_table": lambda: message[0]["table"],
            }
            self.noted[hosted.applied] = before | self.note(hosted, table[method]())

        hosted._forward = noting  # type: ignore[method-assign]

    @staticmethod
    def note(hosted: Replica, *tables: str) -> dict[str, Noted]:
        return {
            table: Noted(hosted.applied, state_of(hosted.shard.tables[table][1]))
            for table in tables
        }

    @property
    def primary(self) -> Replica:
        return self.hosted[self.placed.primary]

    def learn(self, placed: Placed) -> None:
        self.placed = placed
        for server, hosted in list(self.hosted.items()):
            if server in placed.holders and not (
                server in placed.joining and server not in self.copies
            ):
                hosted.learn(placed)
            else:
                hosted.leave()
                del self.hosted[server]
        for server in [each for each in self.copies if each not in placed.joining]:
            del self.copies[server]

    def deliver(self, server: int) -> None:
        epoch, number, message, answer = self.queues[server].popleft()
        hosted = self.hosted.get(server)
        if hosted is not None and hosted.placed.epoch == epoch and not hosted.is_primary:
            assert hosted.follow(number, *message) is None
            answer.set_result(None)

    def deliver_all(self) -> None:
        while any(self.queues.values()):
            for server, queue in self.queues.items():
                if queue:
                    self.deliver(server)

    # -- verbs -------------------------------------------------------------------------------------

    @rule(verbs=verbs_given)
    def verbs(self, verbs: list[tuple[str, str, list[int], int]]) -> None:
        for verb, table, keys, grad in verbs:
            if verb == "pull":
                self.pull(table, keys)
            elif verb == "pull_dense":
                self.primary.shard.pull_dense("dense")
            elif verb.endswith("_dense"):
                self.sequence += 1
                self.primary.apply(CLIENT, self.sequence, verb, "dense", np.ones(4, np.float32))
            else:
                self.push(table, keys, verb, grad)

    def push(self, table: str, keys: list[int], verb: str, grad: int) -> None:
        self.sequence += 1
        grads = np.full((len(keys), DIM), grad, np.float32)
        self.primary.apply(CLIENT, self.sequence, verb, table, np.array(keys, np.int64), grads)

    def pull(self, table: str, keys: list[int]) -> None:
        self.primary.shard.pull(table, np.array(keys, np.int64))

    @rule(table=sparse_names, keys=keys_given)
    def a_push_finds_no_memory(self, table: str, keys: list[int]) -> None:
        found = self.primary.shard.tables[table][1]
        assert isinstance(found, SparseTable)

        def add(*_: Any) -> Any:
            raise MemoryError

        found._store.add = add  # type: ignore[method-assign]
        try:
            self.push(table, keys, "push", 1)
        except MemoryError:
            pass
        finally:
            del found._store.add

    @rule(seconds=st.integers(1, 3))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds

    # -- servers -----------------------------------------------------------------------------------

    @rule(server=st.sampled_from(SERVERS))
    def a_copy_begins(self, server: int) -> None:
        is_cut = any(
            table.before_change is not None for _, table in self.primary.shard.tables.values()
        )
        if (
            is_cut
            or server in (self.placed.primary, *self.placed.replicas)
            or server in self.copies
        ):
            return
        self.learn(msgspec.structs.replace(self.placed, joining=(*{*self.placed.joining, server},)))
        if not self.primary.streams:
            self.noted[self.primary.applied] = self.note(self.primary, *self.primary.shard.tables)
        description = copy.deepcopy(self.primary.begin_copy(server))
        self.copies[server] = IncomingCopy(self.shard(), description), description

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), pieces=st.integers(1, PIECES_MAX))
    def a_copy_goes_on(self, data: st.DataObject, pieces: int) -> None:
        self.the_copy_goes_on(data.draw(st.sampled_from(sorted(self.copies))), pieces)

    def the_copy_goes_on(self, server: int, pieces: int) -> None:
        incoming, description = self.copies[server]
        for _ in range(pieces):
            piece = self.primary.read_copy(server, description["copy"])
            if piece is None:
                self.placed_copy(server, incoming, description)
                return
            incoming.put(*copy.deepcopy(piece))

    def placed_copy(self, server: int, incoming: IncomingCopy, description: dict[str, Any]) -> None:
        self.host(server, incoming.finish(), description["applied"])
        self.copied_at[server] = self.primary.applied
        self.primary.end_copy(server, description["copy"])
        self.deliver_all()
        self.learn(joined(self.placed, server))

    @rule(server=st.sampled_from(SERVERS), count=st.integers(1, 5))
    def changes_arrive(self, server: int, count: int) -> None:
        for _ in range(min(count, len(self.queues[server]))):
            self.deliver(server)

    @rule()
    def the_keeper_looks(self) -> None:
        self.primary.look_at_streams(self.now)

    @precondition(lambda self: self.placed.replicas)
    @rule(data=st.data(), keys=keys_given, table=sparse_names, is_kept=st.booleans())
    def it_is_handed_over(
        self, data: st.DataObject, keys: list[int], table: str, is_kept: bool
    ) -> None:
        heir = data.draw(st.sampled_from(self.placed.replicas))
        self.copies.clear()
        self.learn(msgspec.structs.replace(self.placed, heir=heir, joining=()))
        handed = Future()
        self.primary.hand_over(handed)
        self.pull(table, keys)
        self.deliver_all()
        for name in SPECS:
            self.pull(name, list(range(15)))
        assert handed.result() is True
        if is_kept:
            self.primary.keep()
            self.learn(msgspec.structs.replace(self.placed, heir=NOBODY))
        else:
            self.learn(handed_over(self.placed))

    @precondition(lambda self: self.placed.replicas)
    @rule(data=st.data(), count=st.integers(0, 9))
    def the_primary_dies(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.sampled_from(self.placed.replicas))
        for _ in range(min(count, len(self.queues[chosen]))):
            self.deliver(chosen)
        for queue in self.queues.values():
            queue.clear()
        self.copies.clear()
        self.hosted.pop(self.placed.primary)
        self.learn(Placed(chosen, self.placed.epoch + 1))
        self.noted = {self.primary.applied: self.note(self.primary, *self.primary.shard.tables)}

    @precondition(lambda self: self.placed.replicas)
    @rule(data=st.data())
    def a_replica_cannot_be_reached(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.placed.replicas))
        self.queues[gone].clear()
        self.learn(
            msgspec.structs.replace(
                demoted(self.placed, gone), joining=self.placed.joining, spares=()
            )
        )

    # -- what holds --------------------------------------------------------------------------------

    @invariant()
    def a_replica_has_the_state_of_its_last_change(self) -> None:
        for server in self.placed.replicas:
            replica = self.hosted[server]
            for name, noted in self.noted[replica.applied].items():
                # Pulls are told later, of a table that decides nothing; and a copy may have stamps
                # of after its cut until then.
                is_told = noted.number > self.copied_at.get(server, -1)
                but = {"pulls", "keys_pulled"} | (set() if is_told else {"stamps"})
                now = state_of(replica.shard.tables[name][1])
                assert without(now, but) == without(noted.state, but), (
                    f"{name} at server {server}, change {noted.number}"
                )

    def teardown(self) -> None:
        if not hasattr(self, "placed"):
            return
        self.patched.undo()
        self.the_keeper_looks()
        self.deliver_all()
        now = states_of(self.primary.shard)
        for server in self.placed.replicas:
            assert states_of(self.hosted[server].shard) == now
        for hosted in self.hosted.values():
            hosted.leave()


TestReplicasAreEqual = Replication.TestCase
TestReplicasAreEqual.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


def test_a_decision_is_what_it_was_encoded_from() -> None:
    keys = np.arange(3)
    for pushed in (0, 1, 63, 64, 65):
        has_row = np.arange(pushed) % 3 == 0
        decided = decisions.Decision(5, 6, 7, keys, keys[:1], keys[1:], keys[:2], has_row)
        again = decisions.decode(decided.encode())
        for one, other in zip(decided, again, strict=True):
            np.testing.assert_array_equal(one, other)
