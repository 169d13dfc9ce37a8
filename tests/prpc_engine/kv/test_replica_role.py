"""The role of a replica: the table by itself, and a Replica that is driven along it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prpc_engine.kv.replication.replica import Moved, Replica
from prpc_engine.kv.replication.replica_role import (
    HOLDS_PUSHES,
    PRIMARIES,
    REPLICA_ROLES,
    ReplicaRole,
    RoleAction,
    RoleEvent,
)
from prpc_engine.kv.schema.placement import Placed
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.initializer import Constant
from prpc_engine.kv.table.optimizer import Sgd
from prpc_engine.rpc.deferred import Deferred
from shard import Future
from tests.examples import examples
from tests.state_walks import Walk, walks

ME, HEIR = 1, 2
CLIENT = 7
TABLE = SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1)
PLACED = (RoleEvent.NAMED_REPLICA, RoleEvent.NAMED_PRIMARY)


class RoleTable(RuleBasedStateMachine):
    """Any sequence of events, and what the actions come to."""

    def __init__(self) -> None:
        super().__init__()
        self.state = REPLICA_ROLES.initial
        self.serves = self.follows = False
        self.pushes_wait = False
        self.asked = 0  # hand_over()s without an answer

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(REPLICA_ROLES.events(self.state)))
        if event is RoleEvent.HAND_OVER_ASKED:
            self.asked = 1  # who asked before has its answer then: Replica.hand_over()
        before, was_asked = self.state, self.asked
        self.state, actions = REPLICA_ROLES.after(before, event)
        for action in actions:
            if action is RoleAction.REFUSE_WAITING:
                self.serves = self.follows = self.pushes_wait = False
            elif action is RoleAction.SERVE:
                assert event is RoleEvent.NAMED_PRIMARY and not (self.serves or self.follows)
                self.serves = True
            elif action is RoleAction.FOLLOW:
                assert event is RoleEvent.NAMED_REPLICA and not (self.serves or self.follows)
                self.follows = True
            elif action in (RoleAction.ANSWER_YES, RoleAction.ANSWER_NO):
                assert was_asked, "an answer to nobody"
                self.asked = 0
            elif action is RoleAction.SEND_BACK:
                self.pushes_wait = False
            elif action is RoleAction.TELL_NEWS:
                assert before is ReplicaRole.PRIMARY, "the heir may have taken over"
        if RoleAction.ANSWER_YES in actions:
            assert event is RoleEvent.REPLICAS_HAVE_ALL

    @precondition(lambda self: self.state in HOLDS_PUSHES)
    @rule()
    def a_push_comes(self) -> None:
        self.pushes_wait = True

    @invariant()
    def it_has_one_role(self) -> None:
        assert self.serves == (self.state in PRIMARIES)
        assert self.follows == (self.state is ReplicaRole.REPLICA)

    @invariant()
    def nothing_waits_but_for_a_hand_over(self) -> None:
        assert not self.pushes_wait or self.state in HOLDS_PUSHES
        assert bool(self.asked) == (self.state is ReplicaRole.HANDING_OVER)


TestRoleTable = RoleTable.TestCase
TestRoleTable.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)


class World:
    """A Replica at the server ME, told and answered by the test, and what the table says of it."""

    def __init__(self) -> None:
        self.expected = REPLICA_ROLES.initial
        self.epoch = 0
        self.sequence = 0
        self.forwards: list[Future] = []  # to the heir, without an answer
        self.askers: list[Future] = []
        self.held: list[Deferred] = []  # pushes that wait
        self.replica: Replica | None = None

    @property
    def hosted(self) -> Replica:
        assert self.replica is not None, "it is placed first"
        return self.replica

    def send(self, *_: Any) -> Future:
        self.forwards.append(forward := Future())
        return forward

    def do(self, event: RoleEvent) -> None:
        """Let it happen to both."""
        self.expected, _ = REPLICA_ROLES.after(self.expected, event)
        if event in PLACED:
            self.place(event)
        elif event is RoleEvent.HAND_OVER_ASKED:
            self.askers.append(Future())
            self.hosted.hand_over(self.askers[-1])
        elif event is RoleEvent.REPLICAS_HAVE_ALL:
            self.answer_all()
        elif event is RoleEvent.KEPT:
            self.hosted.keep()
        else:
            self.hosted.leave()
        if self.expected is ReplicaRole.HANDING_OVER and not self.forwards:
            self.expected, _ = REPLICA_ROLES.after(self.expected, RoleEvent.REPLICAS_HAVE_ALL)
        if self.expected not in PRIMARIES:
            self.forwards.clear()

    def place(self, event: RoleEvent) -> None:
        self.epoch += 1
        self.forwards.clear()  # of the epoch before
        if event is RoleEvent.NAMED_PRIMARY:
            placed = Placed(ME, self.epoch, replicas=(HEIR,), heir=HEIR)
        else:
            placed = Placed(HEIR, self.epoch, replicas=(ME,))
        if self.replica is None:
            shard = TableShard()
            shard.create_table(TABLE.to_dict())
            self.replica = Replica(0, ME, placed, shard, 0, self.send, lambda: None)
        else:
            self.replica.learn(placed)
        if event is RoleEvent.NAMED_PRIMARY:
            self.push()  # which the heir has not answered

    def answer_all(self) -> None:
        while self.forwards:
            self.forwards.pop(0).set_result(None)

    def push(self) -> None:
        self.sequence += 1
        change = "push", "t", np.arange(1), np.ones((1, 1), np.float32)
        answer = self.hosted.apply(CLIENT, self.sequence, *change)
        if type(answer) is Deferred:
            self.held.append(answer)

    def check(self) -> None:
        """What holds in each state."""
        if self.replica is None:
            return
        role = self.replica.role
        assert role is self.expected
        assert self.replica.is_primary == (role in PRIMARIES) == bool(self.replica.streams)
        assert (self.replica.shard.on_applied is not None) == (role in PRIMARIES)
        assert self.replica.is_handing_over == (role in HOLDS_PUSHES)
        if role not in HOLDS_PUSHES:
            assert all(isinstance(push.error(0), Moved) for push in self.held)
            self.held.clear()
        assert not any(push.done() for push in self.held)
        # who asked is answered, and with yes only by who may
        assert [asker.done() for asker in self.askers[:-1]] == [True] * len(self.askers[:-1])
        if self.askers:
            assert self.askers[-1].done() == (role is not ReplicaRole.HANDING_OVER)
        if role is ReplicaRole.HANDED:
            assert self.askers[-1].result() is True and not self.forwards

    def close(self) -> None:
        """Nothing waits after it."""
        if self.replica is not None and self.replica.role is not ReplicaRole.GONE:
            self.do(RoleEvent.LEFT)
            self.check()


@pytest.mark.parametrize("walk", walks(REPLICA_ROLES))
def test_a_replica_takes_each_transition_of_its_table(walk: Walk) -> None:
    world = World()
    for event in walk.way:
        assert isinstance(event, RoleEvent)
        world.do(event)
        world.check()
    assert world.expected is walk.state
    if world.replica is not None and world.replica.is_handing_over:
        world.push()
        assert world.held
    assert isinstance(walk.event, RoleEvent)
    world.do(walk.event)
    world.check()
    world.close()


class DrivenReplica(RuleBasedStateMachine):
    """Any sequence of events, pushes and answers, at a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        self.world.do(data.draw(st.sampled_from(REPLICA_ROLES.events(self.world.expected))))

    @precondition(lambda self: self.world.expected in PRIMARIES)
    @rule()
    def a_push_comes(self) -> None:
        self.world.push()

    @precondition(lambda self: len(self.world.forwards) > 1)
    @rule()
    def the_heir_answers_one(self) -> None:
        self.world.forwards.pop(0).set_result(None)

    @precondition(lambda self: self.world.expected is ReplicaRole.PRIMARY)
    @rule()
    def the_heir_answers_all(self) -> None:
        self.world.answer_all()

    @precondition(lambda self: self.world.expected in HOLDS_PUSHES)
    @rule()
    def the_heir_is_another_and_the_replicas_have_all(self) -> None:
        hosted, expected = self.world.hosted, self.world.expected
        placed = hosted.placed
        hosted.learn(Placed(ME, placed.epoch, replicas=(HEIR,)))
        self.world.answer_all()
        assert hosted.role is expected, "nobody may take over"
        self.world.do(RoleEvent.KEPT)
        hosted.learn(placed)

    @invariant()
    def the_replica_is_as_its_table_says(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()


TestDrivenReplica = DrivenReplica.TestCase
TestDrivenReplica.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None
)


@pytest.mark.parametrize("last", [RoleEvent.NAMED_REPLICA, RoleEvent.LEFT])
def test_who_asks_to_hand_over_what_is_held_no_longer_is_answered_at_once(last: RoleEvent) -> None:
    world = World()
    world.do(RoleEvent.NAMED_PRIMARY)
    world.do(last)
    world.hosted.hand_over(handed := Future())
    assert handed.result(0) is False
    assert not world.hosted.is_handing_over


def test_an_event_that_cannot_come_is_refused() -> None:
    world = World()
    world.do(RoleEvent.NAMED_PRIMARY)
    world.close()
    with pytest.raises(LookupError, match="'left' cannot come in the state 'gone'"):
        world.hosted.leave()
