"""The life of a connection: the table by itself, the base class driven along it, and connections of
each transport.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from numpy.typing import NDArray

from shard import (
    DEFAULT_LIMITS,
    BackpressureError,
    ClosedError,
    Connection,
    ForkedError,
    MemoryTransport,
    PeerLostError,
    Reactor,
    RemoteProtocolError,
    ShardError,
    ShmTransport,
    TcpTransport,
    Traffic,
    UnixTransport,
)
from shard.transport.life import (
    CONNECTION_LIFE,
    ConnectionAction,
    ConnectionEvent,
    ConnectionLife,
    event_of,
)
from tests.examples import examples
from tests.state_walks import Walk, walks
from tests.transport_contract import Side, World

TOLD = (ConnectionLife.CLOSED, ConnectionLife.LOST)
ENDED = (*TOLD, ConnectionLife.IN_FORK)
# what in the base class does them; the two others it does itself
HOOKS = set(ConnectionAction) - {ConnectionAction.REFUSE_SENDS, ConnectionAction.NAME_UNSENT}


class LifeTable(RuleBasedStateMachine):
    """Any sequence of events, and what the actions come to."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CONNECTION_LIFE.initial
        self.done: list[ConnectionAction] = []
        self.ended_by: ConnectionEvent | None = None

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(CONNECTION_LIFE.events(self.state)))
        before = self.state
        self.state, actions = CONNECTION_LIFE.after(before, event)
        if self.ended_by is not None:
            assert self.state is before, "the first end is the end"
            assert set(actions) <= {ConnectionAction.LEAVE_TO_PARENT}
        elif self.state in ENDED:
            self.ended_by = event
        self.done += actions

    @invariant()
    def its_owner_and_the_peer_are_told_once_and_in_order(self) -> None:
        count = self.done.count
        assert count(ConnectionAction.TELL_OWNER) == (self.state in TOLD)
        assert count(ConnectionAction.REFUSE_SENDS) == (self.state in ENDED)
        assert (
            count(ConnectionAction.LET_GO)
            == count(ConnectionAction.NAME_UNSENT)
            == (self.state in TOLD)
        ), "nothing of the parent's is touched in a fork"
        assert count(ConnectionAction.DRIVE) <= 1 and count(ConnectionAction.HANG_UP) <= 1
        assert count(ConnectionAction.SAY_GOODBYE) == (self.state in TOLD)
        if self.state in TOLD:
            order = [self.done.index(each) for each in (
                ConnectionAction.REFUSE_SENDS, ConnectionAction.LET_GO,
                ConnectionAction.NAME_UNSENT, ConnectionAction.TELL_OWNER,
            )]  # fmt: skip
            assert order == sorted(order)

    @invariant()
    def what_comes_in_is_delivered_only_while_a_reactor_drives_it(self) -> None:
        if ConnectionAction.READ_THE_REST in self.done:
            assert ConnectionAction.DRIVE in self.done


TestLifeTable = LifeTable.TestCase
TestLifeTable.settings = settings(max_examples=examples(200), stateful_step_count=20, deadline=None)


class Noted(Connection[bytes]):
    """A connection without a wire, whose peer takes nothing: it notes what its base class does."""

    def __init__(self) -> None:
        super().__init__("nobody", DEFAULT_LIMITS)
        self.done: list[ConnectionAction] = []
        self.on_close = lambda *_: self.done.append(ConnectionAction.TELL_OWNER)

    def follow(self, event: ConnectionEvent) -> None:
        """Have that happen."""
        if event is ConnectionEvent.ATTACHED:
            self.attach(Reactor(time.monotonic))
        elif event is ConnectionEvent.PEER_HUNG_UP:
            self._peer_hung_up(PeerLostError("it hung up"))
        elif event is ConnectionEvent.CLOSED_HERE:
            self.close()
        elif event is ConnectionEvent.PEER_LOST:
            self.close(PeerLostError("it is gone"))
        elif event is ConnectionEvent.BROKEN:
            self.close(RemoteProtocolError("it said something else"))
        else:
            self._forked(ForkedError("it is the parent's"))

    def traffic(self) -> Traffic:
        return Traffic()

    def _prepare(
        self, body: Any, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[bytes, int]:
        return bytes(body), len(body)

    def _write(self, item: bytes) -> bool:
        return self.error is not None

    def _beginning(self, item: bytes) -> bytes:
        return item

    def _drive(self, reactor: Reactor) -> None:
        self.done.append(ConnectionAction.DRIVE)
        reactor.close()

    def _hang_up(self) -> None:
        self.done.append(ConnectionAction.HANG_UP)

    def _read_the_rest(self, why: ShardError) -> None:
        self.done.append(ConnectionAction.READ_THE_REST)

    def _say_goodbye(self) -> None:
        self.done.append(ConnectionAction.SAY_GOODBYE)

    def _end(self) -> None:
        assert self.error is not None
        self.done.append(ConnectionAction.LET_GO)

    def _let_go_in_fork(self) -> None:
        self.done.append(ConnectionAction.LEAVE_TO_PARENT)


@pytest.mark.parametrize("walk", walks(CONNECTION_LIFE))
def test_a_connection_takes_each_transition_of_its_table(walk: Walk) -> None:
    connection = Noted()
    for event in walk.way:
        assert isinstance(event, ConnectionEvent)
        connection.follow(event)
    assert connection.life is walk.state
    assert isinstance(walk.state, ConnectionLife) and isinstance(walk.event, ConnectionEvent)
    if walk.state not in ENDED:
        connection.send(b"waits")
    was_told, why = walk.state in TOLD, connection.error
    connection.done.clear()
    connection.follow(walk.event)
    expected, actions = CONNECTION_LIFE.after(walk.state, walk.event)
    assert connection.life is expected
    assert connection.done == [action for action in actions if action in HOOKS]
    assert (connection.error is not None) == (expected in ENDED)
    if why is not None:
        assert connection.error is why
    elif connection.error is not None and expected in TOLD:
        assert event_of(connection.error) is walk.event
    assert connection.unsent == ([b"waits"] if expected in TOLD and not was_told else [])
    assert connection.outbox_messages == (expected not in ENDED)
    if expected in ENDED:
        with pytest.raises(type(connection.error)):  # type: ignore[arg-type]
            connection.send(b"too late")


class Conversation(RuleBasedStateMachine):
    """Two ends of a connection: what is sent, read and ended, and by whom, in any order."""

    make: Any
    address: str

    @initialize(is_attached=st.booleans())
    def begin(self, is_attached: bool) -> None:
        self.world = World(self.make, self.address, patience_s=10.0)
        caller = Side(self.world.call(self.world.connecting_transport()))
        self.world.turn_until(lambda: self.world.accepted)
        self.sides = (caller, self.world.accepted[-1])
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.at_end: dict[Side, int] = {}  # how many messages it had
        self.seen = [side.connection.life for side in self.sides]
        if is_attached:
            self.attach()

    def attach(self) -> None:
        """The caller's end; that of who was called was attached as it was accepted."""
        self.sides[0].connection.attach(self.world.reactor)

    @rule()
    def it_is_attached(self) -> None:
        connection = self.sides[0].connection
        before = connection.life
        if (
            before is ConnectionLife.MADE or before in TOLD
        ):  # no precondition: when it ends is chance
            self.attach()
            assert connection.life is CONNECTION_LIFE.after(before, ConnectionEvent.ATTACHED)[0]

    @rule(end=st.sampled_from([0, 1]), size=st.sampled_from([10, 1000, 70_000, 300_000]))
    def send(self, end: int, size: int) -> None:
        side = self.sides[end]
        number = len(self.sent[end])
        body = number.to_bytes(8, "little")
        blocks = [np.full(size, number % 251, np.uint8)] if size > 1000 else []
        raised: ShardError | None = None
        try:
            side.connection.send(body + bytes(0 if blocks else size), blocks)
        except ShardError as error:
            raised = error
        if side.connection.error is not None:
            assert type(raised) is type(side.connection.error), "it sends nothing any more"
        elif raised is None:
            self.sent[end].append(body)
        else:  # a socket may tell a send of the end before its reader has
            assert isinstance(raised, BackpressureError | PeerLostError)

    @rule()
    def turn(self) -> None:
        self.world.reactor.poll(time.monotonic())

    @rule(
        end=st.sampled_from([0, 1]),
        why=st.sampled_from([None, PeerLostError, RemoteProtocolError, ShardError]),
    )
    def an_end_is_closed(self, end: int, why: type[ShardError] | None) -> None:
        connection = self.sides[end].connection
        before, error = connection.life, why("said by the test") if why is not None else None
        connection.close(error)
        event = ConnectionEvent.CLOSED_HERE if error is None else event_of(error)
        assert connection.life is CONNECTION_LIFE.after(before, event)[0]

    def may_follow(self, before: ConnectionLife) -> set[ConnectionLife]:
        """Whatever events come in one turn."""
        found, left = {before}, deque([before])
        while left:
            state = left.popleft()
            for event in CONNECTION_LIFE.events(state):
                following, _ = CONNECTION_LIFE.after(state, event)
                if following not in found:
                    found.add(following)
                    left.append(following)
        return found - {ConnectionLife.IN_FORK}

    @invariant()
    def each_end_is_as_its_table_says(self) -> None:
        if not hasattr(self, "sides"):
            return
        for number, side in enumerate(self.sides):
            life = side.connection.life
            assert life in self.may_follow(self.seen[number])
            self.seen[number] = life
            assert len(side.ends) == (life in TOLD), "its owner is told once"
            assert (side.connection.error is not None) == (life in TOLD)
            if life in TOLD:
                assert side.ends == [side.connection.error]
                assert isinstance(side.ends[0], ClosedError) == (life is ConnectionLife.CLOSED)
                count = self.at_end.setdefault(side, len(side.messages))
                assert len(side.messages) == count, "nothing comes after the end"
                assert side.connection.outbox_messages == 0
            if life is ConnectionLife.MADE:
                assert not side.messages

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        one, two = self.sides
        if one.connection.life is ConnectionLife.MADE:
            self.attach()
        if one.connection.life not in TOLD and two.connection.life not in TOLD:
            one.connection.close()
        # whichever end began, the other hears of it
        self.world.turn_until(lambda: one.ends and two.ends)
        self.each_end_is_as_its_table_says()
        for sender, receiver, sent in ((one, two, self.sent[0]), (two, one, self.sent[1])):
            unsent = [bytes(each[:8]) for each in sender.connection.unsent]
            arrived = [body[:8] for body in receiver.bodies]
            assert not set(unsent) & set(arrived), "what is said to be unsent never arrives"
            assert set(unsent) | set(arrived) <= set(sent)
            assert len(arrived) == len(set(arrived))
        one.messages.clear()
        two.messages.clear()
        # Of what one end lent, it hears that the other has let go over a socket that outlives both.
        slabs = self.world.slabs
        self.world.turn_until(lambda: not any(each.statistics().blocks_used for each in slabs))
        self.world.close()


def conversation(transport: Any, at: str) -> Any:
    """The machine for one transport."""

    class Spoken(Conversation):
        make = staticmethod(transport)
        address = at

    case = Spoken.TestCase
    # What fails waits: to shrink it would take longer than a test may.
    case.settings = settings(
        max_examples=examples(30),
        stateful_step_count=25,
        deadline=None,
        phases=set(Phase) - {Phase.shrink},
    )
    return case


TestOverMemory = conversation(MemoryTransport, "memory://here")
TestOverShm = conversation(ShmTransport, "shm://")
TestOverUnix = conversation(UnixTransport, "unix://")
TestOverTcp = conversation(TcpTransport, "tcp://127.0.0.1:0")
