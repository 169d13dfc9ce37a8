"""The three tables that nobody asks while the engine runs, asked beside their owners: what happens
to calls, to calls marked once and to numbers of senders is seen where it happens, and the state
before it is derived from what is stored, as the tests of these tables do.

    table                                 seen at
    A call at its caller                  entries of a connection's table of calls, and who takes
                                          them out; Call.cancel, end, set_error, set_result, outlive
    A call marked once, at its server     methods of OnceWindow and Repeats
    A number of a sender                  methods of IdempotencyWindow and SeenNumbers

In a simulation one thread runs at a time, and changes only where it waits or looks at the clock: so
a state and the event that follows it are seen together. Nothing here keeps a call alive beyond its
own end, as its blocks may be leases of shared memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from prpc_engine.idempotency_window import (
    FORGOTTEN,
    NEW,
    NUMBERS,
    IdempotencyWindow,
    NumberEvent,
    SeenNumbers,
)
from prpc_engine.rpc.call import Call, CallTable
from prpc_engine.rpc.call_state import CALL_STATES, CallEvent, CallState
from prpc_engine.rpc.once import ONCE_CALLS, Identity, OnceEvent, OnceState, OnceWindow
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.repeats import Repeats
from shard import VALUE, StateTable
from shard.state_table import word

Note = Callable[[str, str, str], object]  # of what no table has: title, state, event
SAMPLE = 64  # numbers of one sender that are looked at when its floor rises


@contextlib.contextmanager
def asked_beside(unknown: Note) -> Iterator[None]:
    """Meanwhile these tables are asked what follows; `unknown` is told of what they lack."""

    def ask(table: StateTable[Any, Any, Any], state: Any, event: Any) -> Any:
        if (state, event) not in table.transitions:
            unknown(table.title, word(state), word(event))
            return state
        return table.after(state, event)[0]

    with pytest.MonkeyPatch.context() as patch:
        replaced = [
            *_calls(lambda state, event: ask(CALL_STATES, state, event)),
            *_once(lambda state, event: ask(ONCE_CALLS, state, event)),
            *_numbers(lambda state, event: ask(NUMBERS, state, event)),
        ]
        for owner, name, function in replaced:
            patch.setattr(owner, name, function, raising=False)
        yield


Ask = Callable[[Any, Any], Any]
Replaced = tuple[type[Any], str, Any]


# -- a call at its caller --------------------------------------------------------------------------


class _Entered(dict[int, Call]):
    """Calls of a CallTable. Who takes one out says by its name what has happened. ended: numbers of
    those that have, with how; kept: calls that go on, by the numbers of attempts that are over.
    """

    def __init__(self, steps: _CallSteps) -> None:
        super().__init__()
        self.steps = steps
        self.ended: dict[int, CallState] = {}
        self.kept: dict[int, Call] = {}

    def state_of(self, number: int) -> CallState | None:
        """Of the call that had that number, and is not here; None: unknown, or another attempt of
        it is under way.
        """
        call = self.kept.get(number)
        if call is not None:
            state = self.steps.state(call)
            return None if state in (CallState.SENDING, CallState.IN_FLIGHT) else state
        return self.ended.get(number)

    def __setitem__(self, number: int, call: Call) -> None:
        if sys._getframe(1).f_code.co_name != "outlive":
            self.steps.note(call, CallEvent.ENTERED)
        super().__setitem__(number, call)

    def pop(self, number: int, default: Any = None) -> Any:
        self.steps.taken_out(self, number, sys._getframe(1))
        return super().pop(number, default)


class _CallSteps:
    """What is known between two steps. failing: attempts that have failed, whose owners have not
    decided; replied: calls whose answer was taken out, and is not read yet; earlier: numbers of
    attempts that are over, of calls that are not. By id(): each is held meanwhile.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.failing: dict[int, Call] = {}
        self.replied: dict[int, tuple[CallState, CallEvent]] = {}
        self.refused: set[int] = set()  # of those that are being sent
        self.earlier: dict[int, list[tuple[_Entered, int]]] = {}  # attempts of calls that go on

    def state(self, call: Call) -> CallState:
        if call.finished:
            return CallState.ANSWERED if call.finished == VALUE else CallState.FAILED
        if call.table is None or call.table.in_flight.get(call.call_id) is not call:
            return CallState.WAITING
        return CallState.IN_FLIGHT if call.sent else CallState.SENDING

    def note(self, call: Call, event: CallEvent) -> None:
        self.ask(self.state(call), event)

    def fail(self, call: Call, event: CallEvent) -> None:
        """An attempt ends by that event."""
        self.note(call, event)
        self.failing[id(call)] = call

    def taken_out(self, table: _Entered, number: int, frame: FrameType) -> None:
        """By the function of that frame."""
        call, by = table.get(number), frame.f_code.co_name
        if by in ("request", "resend", "_open"):
            self.note(frame.f_locals["call"], CallEvent.NOT_SENT)
            self.refused.add(id(frame.f_locals["call"]))
        elif by in ("_on_message", "_on_failure", "reply"):
            failure = by == "_on_failure"
            if call is None:
                state = table.state_of(number)
                if state is not None:
                    self.ask(state, CallEvent.FAILURE if failure else CallEvent.REPLY)
            elif failure:
                self.fail(call, CallEvent.FAILURE)
            else:  # it may be late, or not be read
                late = by == "reply"
                event = CallEvent.LATE if late else CallEvent.FAILURE
                self.replied[id(call)] = self.state(call), event
        elif call is None:
            pass
        elif by == "withdraw":
            above = frame.f_back.f_code.co_name if frame.f_back else ""
            self.fail(call, CallEvent.OVERDUE if above == "_overdue" else CallEvent.CANCELLED)
        elif by == "end_late":
            self.fail(call, CallEvent.LATE)
        elif by == "fail_all":
            is_waited_for = frame.f_locals["later"] is not None and frame.f_locals["looks"] >= 1
            self.fail(call, CallEvent.LOST if is_waited_for else CallEvent.ENDED_WITH_IT)
        elif by != "request_at_once":  # a handler's own error
            raise AssertionError(f"{by}() takes calls out: what event of CALL_STATES is that?")

    def completed(self, call: Call, state: CallState) -> None:
        """For what comes after its end."""
        self.failing.pop(id(call), None)
        for entered, number in self.earlier.pop(id(call), []):
            del entered.kept[number]
            entered.ended[number] = state
        in_flight = call.table.in_flight if call.table is not None else None
        if isinstance(in_flight, _Entered):
            in_flight.ended[call.call_id] = state

    def goes_on(self, call: Call) -> None:
        """Its attempt is over, and it is not."""
        self.ask(CallState.FAILING, CallEvent.KEPT)
        in_flight = call.table.in_flight if call.table is not None else None
        if isinstance(in_flight, _Entered) and call.call_id not in in_flight.kept:
            in_flight.kept[call.call_id] = call
            self.earlier.setdefault(id(call), []).append((in_flight, call.call_id))


def _calls(ask: Ask) -> Iterator[Replaced]:
    steps = _CallSteps(ask)
    init, fail_all = CallTable.__init__, CallTable.fail_all
    set_result, set_error = Call.set_result, Call.set_error
    end, cancel, outlive = Call.end, Call.cancel, Call.outlive

    def new_init(self: CallTable, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.in_flight = _Entered(steps)

    def new_fail_all(self: CallTable, error_for: Any, later: Any = None, *looks: int) -> int:
        if isinstance(self.in_flight, _Entered):
            event = CallEvent.ENDED_WITH_IT if later is None else CallEvent.LOST
            for state in set(self.in_flight.ended.values()):
                ask(state, event)
            if later is not None and looks != (0,):
                for call in list(self.in_flight.values()):
                    if not call.sent:
                        ask(CallState.SENDING, CallEvent.LOST)
        return fail_all(self, error_for, later, *looks)

    def new_set_result(self: Call, value: Any) -> bool:
        before = steps.replied.pop(id(self), None)
        if before is not None:
            ask(before[0], CallEvent.REPLY)
        done = set_result(self, value)
        if done:
            steps.completed(self, CallState.ANSWERED)
        return done

    def new_set_error(self: Call, error: BaseException) -> bool:
        before = steps.replied.pop(id(self), None)
        if before is not None:
            ask(*before)
            steps.failing[id(self)] = self
        done = set_error(self, error)
        if steps.failing.pop(id(self), None) is not None and not self.finished:
            steps.goes_on(self)
        return done

    def new_end(self: Call, error: BaseException) -> bool:
        if not self.finished:
            is_overdue = sys._getframe(1).f_code.co_name == "_overdue"
            was_failing = steps.failing.pop(id(self), None) is not None
            if was_failing and not is_overdue:
                ask(CallState.FAILING, CallEvent.GIVEN_UP)
            elif not was_failing:
                event = CallEvent.OVERDUE if is_overdue else CallEvent.GIVEN_UP
                steps.note(self, event)
        done = end(self, error)
        if done:
            steps.completed(self, CallState.FAILED)
        return done

    def new_cancel(self: Call, error: BaseException | None = None) -> bool:
        state = steps.state(self)
        if state is CallState.WAITING:
            steps.fail(self, CallEvent.CANCELLED)
        elif self.finished:
            ask(state, CallEvent.CANCELLED)
        return cancel(self, error)

    def new_outlive(self: Call) -> None:
        if steps.failing.pop(id(self), None) is not None:
            ask(CallState.FAILING, CallEvent.OUTLIVED)
        outlive(self)

    def says_sent(send: Callable[..., Any], is_stream: bool = False) -> Callable[..., Any]:
        """SENT, once it comes back, unless the connection refused it."""

        def sending(self: Peer, *arguments: Any, **named: Any) -> Any:
            answer = send(self, *arguments, **named)
            call = answer if isinstance(answer, Call) else arguments[0] if arguments else None
            if isinstance(call, Call):
                if id(call) in steps.refused:
                    steps.refused.discard(id(call))
                else:
                    before = steps.state(call)
                    in_flight = before is CallState.IN_FLIGHT
                    ask(CallState.SENDING if in_flight else before, CallEvent.SENT)
            return answer

        return sending

    yield from (
        (CallTable, "__init__", new_init),
        (CallTable, "fail_all", new_fail_all),
        (Call, "set_result", new_set_result),
        (Call, "set_error", new_set_error),
        (Call, "end", new_end),
        (Call, "cancel", new_cancel),
        (Call, "outlive", new_outlive),
        (Peer, "request", says_sent(Peer.request)),
        (Peer, "request_at_once", says_sent(Peer.request_at_once)),
        (Peer, "resend", says_sent(Peer.resend)),
        (Peer, "open_encoded", says_sent(Peer.open_encoded)),
    )


# -- a call marked once, at its server -------------------------------------------------------------


def _once(ask: Ask) -> Iterator[Replaced]:
    known: WeakKeyDictionary[OnceWindow[Any, Any], dict[Identity, OnceState]] = WeakKeyDictionary()
    begin, drop, answered = OnceWindow.begin, OnceWindow.drop, OnceWindow.answered
    answer, refusal = Repeats.answer, Repeats.refusal

    def move(window: OnceWindow[Any, Any], call: Identity, event: OnceEvent) -> None:
        states = known.setdefault(window, {})
        states[call] = ask(states.get(call, OnceState.UNKNOWN), event)

    def new_begin(self: OnceWindow[Any, Any], call: Identity, *more: Any) -> None:
        move(self, call, OnceEvent.ASKED)
        begin(self, call, *more)

    def new_drop(self: OnceWindow[Any, Any], call: Identity) -> None:
        move(self, call, OnceEvent.DROPPED)
        drop(self, call)

    def new_answered(
        self: OnceWindow[Any, Any], call: Identity, kept: Any, nbytes: int, now: float
    ) -> None:
        move(self, call, OnceEvent.REPLIED_UNKEPT if kept is None else OnceEvent.REPLIED)
        before = self.forgotten
        answered(self, call, kept, nbytes, now)
        if self.forgotten == before:
            return
        states = known[self]
        gone = [
            each
            for each, state in states.items()
            if state in (OnceState.ANSWERED, OnceState.UNKEPT) and self.find(each) is None
        ]
        for each in gone:
            move(self, each, OnceEvent.OVER_A_BOUND)
            for other in list(states):
                if other[0] == each[0] and other[1] < each[1] and other not in gone:
                    move(self, other, OnceEvent.PASSED)
            never = (each[0], each[1] - 1)
            if never not in states and self.refusal(never, False) is not None:
                ask(OnceState.UNKNOWN, OnceEvent.PASSED)

    def new_answer(self: Repeats, peer: Any, call_id: int) -> bool:
        call = (peer.connection.peer_name, call_id)
        done = answer(self, peer, call_id)
        if done:
            move(self.window, call, OnceEvent.ASKED)
        return done

    def new_refusal(
        self: Repeats, peer: Any, call_id: int, key: int, is_repeat: bool
    ) -> str | None:
        why = refusal(self, peer, call_id, key, is_repeat)
        call = (peer.connection.peer_name, call_id)
        entry = self.window.find(call)
        if why is not None and (entry is None or (entry.running is None and entry.answer is None)):
            states = known.setdefault(self.window, {})
            if entry is None and call not in states:  # a later one of its caller was forgotten
                states[call] = OnceState.FORGOTTEN
            move(self.window, call, OnceEvent.ASKED)
        return why

    yield from (
        (OnceWindow, "begin", new_begin),
        (OnceWindow, "drop", new_drop),
        (OnceWindow, "answered", new_answered),
        (Repeats, "answer", new_answer),
        (Repeats, "refusal", new_refusal),
    )


# -- a number of a sender --------------------------------------------------------------------------


def _numbers(ask: Ask) -> Iterator[Replaced]:
    def passed(
        numbers: SeenNumbers[Any], change: Callable[[], object], noted: int | None, window: int
    ) -> None:
        """Of numbers that the floor rises over in that change."""
        floor, highest = numbers.floor, numbers.highest
        near = {*range(floor - 1, floor + SAMPLE), highest - window, highest - window + 1}
        sample = sorted(each for each in {*near, *list(numbers.kept)[:SAMPLE]} if each > 0)
        before = {each: numbers.find(each, window) for each in sample if each != noted}
        change()
        if numbers.floor > floor:
            for number, state in before.items():
                if number <= numbers.floor and numbers.find(number, window) is FORGOTTEN:
                    ask(state, NumberEvent.PASSED)

    seen_find, note, keep = SeenNumbers.find, SeenNumbers.note, SeenNumbers.keep
    forget, settle = SeenNumbers.forget, SeenNumbers.settle
    window_find, window_note = IdempotencyWindow.find, IdempotencyWindow.note
    heard, merge = IdempotencyWindow.heard, IdempotencyWindow.merge
    quiet: list[bool] = []  # while this looks itself

    def new_find(self: SeenNumbers[Any], number: int, window: int = 0) -> Any:
        state = seen_find(self, number, window)
        if not quiet:
            ask(state, NumberEvent.ARRIVES)
        return state

    def new_window_find(self: IdempotencyWindow[Any, Any], sender: Any, number: int) -> Any:
        quiet.append(True)
        try:
            state = window_find(self, sender, number)
        finally:
            quiet.pop()
        ask(state, NumberEvent.ARRIVES)
        return state

    def looked(
        numbers: SeenNumbers[Any], change: Callable[[], object], noted: int | None, window: int
    ) -> None:
        if noted is not None and not quiet:
            ask(seen_find(numbers, noted, window), NumberEvent.NOTED)
        quiet.append(True)
        try:
            passed(numbers, change, noted, window)
        finally:
            quiet.pop()

    def new_note(self: SeenNumbers[Any], number: int, window: int) -> None:
        looked(self, lambda: note(self, number, window), number, window)

    def new_keep(self: SeenNumbers[Any], number: int, outcome: Any) -> None:
        looked(self, lambda: keep(self, number, outcome), number, 0)

    def new_forget(self: SeenNumbers[Any], number: int) -> None:
        looked(self, lambda: forget(self, number), None, 0)

    def new_settle(self: SeenNumbers[Any], number: int) -> None:
        looked(self, lambda: settle(self, number), None, 0)

    def senders_go(window: IdempotencyWindow[Any, Any], change: Callable[[], Any]) -> Any:
        """Of a sender that is forgotten in that change."""
        before = window.senders_forgotten
        oldest = next(iter(window.senders()), None)
        answer = change()
        if window.senders_forgotten > before and oldest is not None:
            for number in range(1, oldest[1].highest + 2):
                ask(seen_find(oldest[1], number, 0), NumberEvent.SENDER_GONE)
        return answer

    def new_window_note(self: IdempotencyWindow[Any, Any], sender: Any, number: int) -> None:
        ask(
            NEW if self.of(sender) is None else window_find(self, sender, number), NumberEvent.NOTED
        )
        quiet.append(True)
        try:
            senders_go(self, lambda: window_note(self, sender, number))
        finally:
            quiet.pop()

    def new_heard(self: IdempotencyWindow[Any, Any], sender: Any) -> Any:
        return senders_go(self, lambda: heard(self, sender))

    def new_merge(self: IdempotencyWindow[Any, Any], sender: Any, numbers: Any) -> None:
        quiet.append(True)
        try:
            senders_go(self, lambda: merge(self, sender, numbers))
        finally:
            quiet.pop()

    yield from (
        (SeenNumbers, "find", new_find),
        (SeenNumbers, "note", new_note),
        (SeenNumbers, "keep", new_keep),
        (SeenNumbers, "forget", new_forget),
        (SeenNumbers, "settle", new_settle),
        (IdempotencyWindow, "find", new_window_find),
        (IdempotencyWindow, "note", new_window_note),
        (IdempotencyWindow, "heard", new_heard),
        (IdempotencyWindow, "merge", new_merge),
    )
