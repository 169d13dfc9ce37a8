"""The two halves of a stream put in order what lanes of a connection mixed up, and end when all is
there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import deque
from functools import partial
from typing import Any

import pytest

from prpc_engine.rpc import flow_control
from prpc_engine.rpc.flow_control import NUMBER_MASK, WINDOW_ITEMS, Inbox, Window
from prpc_engine.rpc.stream import Stream, stream_call
from shard import Future
from tests.held import at
from tests.helpers import ManualWaiter
from tests.preempted import preempted


def taken(inbox: Inbox) -> list[Any]:
    """All that can be had without waiting; "end" or the error when that follows."""
    found: list[Any] = []
    while True:
        try:
            there, item = inbox.take()
        except StopIteration:
            return [*found, "end"]
        except RuntimeError as error:
            return [*found, str(error)]
        if not there:
            return found
        found.append(item)


def new_inbox() -> Inbox:
    return Inbox(None, lambda items: None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_items_come_out_in_the_order_of_their_numbers(order: tuple[int, ...]) -> None:
    inbox = new_inbox()
    for number in order:
        assert inbox.put(number, f"item {number}")
    assert taken(inbox) == ["item 0", "item 1", "item 2", "item 3"]


# END goes over every lane, ahead of the answer: it is there first.
ARRIVALS = [
    order
    for order in itertools.permutations(["end", "answer", 0, 1])
    if order.index("end") < order.index("answer")
]


@pytest.mark.parametrize("order", ARRIVALS)
def test_the_end_comes_after_all_items_whatever_overtook_them(order: tuple[Any, ...]) -> None:
    inbox = new_inbox()
    for what in order:
        if what == "end":
            assert inbox.expect(2)
        elif what == "answer":
            inbox.finish(RuntimeError("broken"))
        else:
            assert inbox.put(what, what)
    assert inbox.finished
    assert taken(inbox) == [0, 1, "broken"]


def test_without_end_what_came_is_all_there_is() -> None:
    inbox = new_inbox()
    inbox.put(0, "a")
    inbox.finish()
    assert taken(inbox) == ["a", "end"]


def test_a_connection_that_is_gone_cuts_what_was_still_to_come() -> None:
    inbox = new_inbox()
    inbox.put(0, "a")
    inbox.put(2, "c")
    inbox.expect(3)
    inbox.finish()
    assert taken(inbox) == ["a"]
    inbox.cut(RuntimeError("gone"))
    assert taken(inbox) == ["gone"]


def test_an_item_may_come_as_another_thread_gives_the_stream_up() -> None:
    class Early(dict[int, Any]):
        """Between the look at an item that came early and its being taken."""

        def __contains__(self, number: object) -> bool:
            found = super().__contains__(number)
            if found:
                inbox.finish(RuntimeError("given up"))
            return found

    inbox = new_inbox()
    assert inbox.put(1, "b")
    inbox._early = Early(inbox._early)
    assert inbox.put(0, "a")
    assert taken(inbox) == ["a", "b", "given up"]


def test_numbers_begin_anew_after_the_largest() -> None:
    inbox = new_inbox()
    inbox._next = NUMBER_MASK
    assert inbox.put(0, "second")
    assert inbox.put(NUMBER_MASK, "first")
    assert inbox.expect(1)
    inbox.finish()
    assert taken(inbox) == ["first", "second", "end"]


@pytest.mark.parametrize("number", [0, 2, WINDOW_ITEMS + 1, NUMBER_MASK])
def test_an_item_twice_or_without_credit_is_refused(number: int) -> None:
    inbox = new_inbox()
    assert inbox.put(0, "a")
    assert inbox.put(2, "c")
    assert not inbox.put(number, "again")
    assert not inbox.expect(WINDOW_ITEMS + 2), "more than could be under way"


def test_a_window_counts_what_was_sent_and_not_what_was_tried() -> None:
    window = Window(None, 1)
    assert window.take() is None
    assert window.take() is None, "sending failed: the credit is still there"
    window.sent += 1
    waiting = window.take()
    assert waiting is not None
    window.grant(1)
    assert waiting.done()
    assert window.take() is None


def test_who_gives_up_waiting_for_credit_again_and_again_leaves_nothing_behind() -> None:
    stream = Stream(stream_call(ManualWaiter()))

    def futures() -> int:
        gc.collect()
        return sum(isinstance(one, Future) for one in gc.get_objects())

    before = futures()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            stream.send("item", timeout_s=0.0)
    assert futures() == before


def test_credit_granted_between_the_look_and_the_wait_is_not_lost() -> None:
    """The sender would wait for a grant that has come already."""
    window = Window(None, credit=0)
    for event in (partial(window.grant, 1), partial(window.close, RuntimeError("gone"))):
        with at("window.waiting", event):
            waits = window.take()
        assert waits is not None
        assert waits.done()
        window.sent += 1


def test_an_item_that_comes_between_the_look_and_the_wait_is_taken() -> None:
    inbox = new_inbox()
    with at("inbox.waiting", lambda: inbox.put(0, "a")):
        assert inbox.take() == (True, "a")


@pytest.mark.parametrize("is_taken_first", [False, True])
def test_who_waits_for_an_item_is_woken_wherever_the_other_thread_stood_still(
    is_taken_first: bool,
) -> None:
    for case in preempted(flow_control.__name__):
        inbox, waits = new_inbox(), list[Future]()

        def take_all(inbox: Inbox = inbox, waits: list[Future] = waits) -> None:
            while not waits:
                is_there, taken = inbox.take()
                if not is_there:
                    waits.append(taken)

        def put(inbox: Inbox = inbox) -> None:
            inbox.put(0, "a")

        case.run(*((take_all, put) if is_taken_first else (put, take_all)))
        inbox.put(1, "b")
        assert waits[0].done(), case.after


@pytest.mark.parametrize("is_taken_first", [False, True])
@pytest.mark.parametrize("what", ["grant", "close"])
def test_who_waits_for_credit_is_woken_wherever_the_other_thread_stood_still(
    what: str, is_taken_first: bool
) -> None:
    for case in preempted(flow_control.__name__):
        window, waits = Window(None, 0), list[Future | None]()

        def take(window: Window = window, waits: list[Future | None] = waits) -> None:
            with contextlib.suppress(RuntimeError):
                waits.append(window.take())

        def wake(window: Window = window) -> None:
            if what == "grant":
                window.grant(1)
            else:
                window.close(RuntimeError("gone"))

        case.run(*((take, wake) if is_taken_first else (wake, take)))
        assert all(future is None or future.done() for future in waits), case.after


def test_a_closed_window_raises_what_closed_it() -> None:
    window = Window(None)
    window.close(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        window.take()
    assert str(window.ended_by) == "gone"


def test_a_stream_ends_once_and_by_what_ended_it_first() -> None:
    inbox = new_inbox()
    inbox.finish(RuntimeError("first"))
    inbox.finish(RuntimeError("second"))
    inbox.cut(RuntimeError("third"))
    assert inbox.put(0, "late"), "given up here, and not known there yet"
    assert taken(inbox) == ["first"]


def test_the_last_item_and_the_end_that_come_while_the_receiver_looks_are_both_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(deque[Any]):
        """Has the last item and the end come right after a look that found nothing."""

        def __bool__(self) -> bool:
            was_there = len(self) > 0
            if not inbox.finished:
                inbox.put(0, "last")
                inbox.finish()
            return was_there

    monkeypatch.setattr(flow_control, "deque", Late)
    inbox = new_inbox()
    assert taken(inbox) == ["last", "end"]
