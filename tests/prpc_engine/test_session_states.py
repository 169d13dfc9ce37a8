"""The life of a session at the master: any events that may come, by the table alone and by a
session whose master comes and goes.
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

from prpc_engine import Master, errors
from prpc_engine.master import session as session_module
from prpc_engine.master.client import MasterClient
from prpc_engine.master.session_states import (
    SESSIONS,
    SessionAction,
    SessionEvent,
    SessionState,
)
from shard import Future, PeerLostError
from tests.examples import examples
from tests.ports import address_of, hold_port
from tests.prpc_engine.inside import session_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.state_walks import WalkedTable

Sessions = WalkedTable[SessionState, SessionEvent, SessionAction]


class AnySession(RuleBasedStateMachine):
    """The table, beside what it is about: verbs, which are numbered as they are asked.

    waiting, under_way, ended  where each of them is
    keeper                     "tries" to open the session, "holds" a connection, or is "gone"
    is_cancelled               as it tried: it may yet see an attempt end
    """

    def __init__(self, table: Sessions) -> None:
        super().__init__()
        self.table, self.state = table, table.initial
        self.asked = 0
        self.waiting: set[int] = set()
        self.under_way: set[int] = set()
        self.ended: set[int] = set()
        self.keeper, self.is_cancelled = "tries", False
        self.told = 0  # how often who waits for the first opening heard of it
        self.was_up = False

    def happens(self, event: SessionEvent) -> tuple[SessionAction, ...]:
        before = self.state
        self.state, actions = self.table.after(before, event)
        for action in actions:
            if action is SessionAction.SEND:
                assert self.keeper == "tries"
                self.keeper = "holds"
                self.told += not self.was_up
                self.was_up = True
                self.under_way |= self.waiting
                self.waiting.clear()
            elif action is SessionAction.CONNECT:
                assert self.keeper == "holds"
                self.keeper = "tries"
                self.waiting |= self.under_way
                self.under_way.clear()
            elif action is SessionAction.TELL:
                self.told += 1
                self.keeper = "gone"
            elif action is SessionAction.LEAVE:
                assert before is SessionState.UP, "there is no connection to tell it over"
            elif action is SessionAction.FAIL:
                self.end(self.waiting)
            elif action is SessionAction.END:
                self.told += not self.told
                self.is_cancelled = self.keeper == "tries"
                self.keeper = "gone"
                self.end(self.waiting | self.under_way)
        return actions

    def end(self, numbers: set[int]) -> None:
        assert not self.ended & numbers, "it ended before"
        self.ended |= numbers
        self.waiting -= numbers
        self.under_way -= numbers

    @rule()
    def ask(self) -> None:
        self.asked += 1
        for action in self.happens(SessionEvent.ASKED):
            if action is SessionAction.REFUSE:
                self.end({self.asked})
            elif action is SessionAction.ENTER:
                is_up = self.state is SessionState.UP
                (self.under_way if is_up else self.waiting).add(self.asked)

    @precondition(lambda self: self.keeper == "tries")
    @rule()
    def open(self) -> None:
        self.happens(SessionEvent.OPENED)

    @precondition(lambda self: self.keeper == "tries")
    @rule(may_come=st.booleans())
    def fail_to_open(self, may_come: bool) -> None:
        event = SessionEvent.FAILED
        if not may_come:
            event = SessionEvent.REFUSED if self.was_up else SessionEvent.GIVEN_UP
        actions = self.happens(event)
        assert (SessionAction.TRY_AGAIN in actions) is (self.keeper == "tries")

    @precondition(lambda self: self.is_cancelled)
    @rule(
        event=st.sampled_from(
            [
                SessionEvent.OPENED,
                SessionEvent.FAILED,
                SessionEvent.REFUSED,
                SessionEvent.GIVEN_UP,
            ]
        )
    )
    def see_an_attempt_end_as_another_thread_closes(self, event: SessionEvent) -> None:
        assert not self.happens(event)

    @precondition(lambda self: self.state is SessionState.UP)
    @rule()
    def lose(self) -> None:
        self.happens(SessionEvent.LOST)

    @precondition(lambda self: self.under_way)
    @rule()
    def answer(self) -> None:
        self.end({min(self.under_way)})

    @precondition(lambda self: self.waiting)
    @rule()
    def pass_a_deadline(self) -> None:
        self.end({min(self.waiting)})

    @precondition(lambda self: self.asked > 3)
    @rule()
    def close(self) -> None:
        is_first = self.state is not SessionState.OVER
        assert (SessionAction.END in self.happens(SessionEvent.CLOSE)) is is_first

    @invariant()
    def each_verb_is_in_one_place(self) -> None:
        assert len(self.waiting) + len(self.under_way) + len(self.ended) == self.asked
        assert self.waiting | self.under_way | self.ended == set(range(1, self.asked + 1))

    @invariant()
    def the_state_says_what_there_is(self) -> None:
        keepers = {
            SessionState.NEW: "tries",
            SessionState.DOWN: "tries",
            SessionState.UP: "holds",
            SessionState.MISSED: "gone",
            SessionState.OVER: "gone",
        }
        assert self.keeper == keepers[self.state]
        assert not self.under_way or self.state is SessionState.UP
        assert not self.waiting or self.state not in (SessionState.UP, SessionState.OVER)
        assert self.told == (self.state is not SessionState.NEW)


@pytest.mark.slow
def test_every_transition_is_taken_and_a_verb_ends_once() -> None:
    table = Sessions(SESSIONS)
    run_state_machine_as_test(
        lambda: AnySession(table),
        settings=settings(
            max_examples=max(150, examples(150)), stateful_step_count=40, derandomize=True
        ),
    )
    assert not table.untaken()


class RealSession(RuleBasedStateMachine):
    """A client's session, over sockets; its master, in this process too, comes and goes, and knows
    nothing of those before it.
    """

    def __init__(self, table: Sessions, address: str) -> None:
        super().__init__()
        self.table, self.address = table, address
        self.waiting: list[Future] = []
        self.asked = 0

    @initialize()
    def make(self) -> None:
        self.table.taken.clear()
        self.master: Master | None = Master(self.address)
        self.client = MasterClient(self.address)
        self.session = session_of(self.client)

    @property
    def is_over(self) -> bool:
        return self.session.state is SessionState.OVER

    @rule()
    def ask(self) -> None:
        self.asked += 1
        if self.is_over:
            with pytest.raises(errors.Closed):
                self.session.submit("ranks")
            return
        asked = self.session.submit("ranks", timeout_s=PATIENCE_S)
        if self.master is None:
            self.waiting.append(asked)
        else:
            assert asked.result(PATIENCE_S) == []

    @precondition(lambda self: self.master is not None and not self.is_over)
    @rule()
    def cut(self) -> None:
        lost = self.session.peer
        assert lost is not None
        lost.reactor.call_soon(lambda: lost.connection.close(PeerLostError("it was cut")))
        wait_until(lambda: self.session.peer not in (lost, None), "another connection")

    @precondition(lambda self: self.master is not None)
    @rule()
    def end_the_master(self) -> None:
        assert self.master is not None
        self.master.close()
        self.master = None
        wait_until(lambda: not self.session.connected, "the loss of the connection")

    @precondition(lambda self: self.master is None)
    @rule()
    def begin_another_master(self) -> None:
        self.master = Master(self.address)
        waiting, self.waiting = self.waiting, []
        if not self.is_over:
            wait_until(lambda: self.session.peer is not None, "the new session")
            for asked in waiting:
                assert asked.result(PATIENCE_S) == []

    @precondition(lambda self: self.asked > 1)
    @rule()
    def close(self) -> None:
        self.client.close()
        assert self.is_over
        for asked in self.waiting:
            assert isinstance(asked.error(PATIENCE_S), errors.Closed)
        self.waiting.clear()

    @invariant()
    def its_state_is_the_tables(self) -> None:
        expected = SessionState.DOWN if self.master is None else SessionState.UP
        assert self.session.state is (SessionState.OVER if self.is_over else expected)
        assert self.session.state is self.table.end()

    def teardown(self) -> None:
        self.client.close()
        if self.master is not None:
            self.master.close()


def test_a_session_whose_master_comes_and_goes_is_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Sessions(SESSIONS)
    monkeypatch.setattr(session_module, "SESSIONS", table)
    with hold_port() as held:
        run_state_machine_as_test(
            lambda: RealSession(table, address_of(held)),
            settings=settings(max_examples=examples(15), stateful_step_count=15),
        )
