"""The two halves of one direction of a stream: items go no faster than the other side takes them.
No I/O here.

    half    who has it    state
    Window  who sends     credit: items it may still send; 0: wait
    Inbox   who receives  items that arrived and were not taken; grants credit as they are taken

A side starts with WINDOW_ITEMS of credit, so at most that many items of a stream wait anywhere.

Items are numbered, from 0 on and modulo 2**32, because large and small ones may overtake each other
on the way (shard/transport): the inbox puts them in order, and knows from END how many there are,
which may come before the last of them.

    inbox   event                                       next
    open    finish(), and all that END counts are here  finished, after the items that came
    open    finish(), some that END counts are missing  ending
    ending  the last missing item                       finished
    any     cut(): the connection is gone               finished
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from shard import Future, Waiter

# Enough to hide the way there and back behind the work on eight items; few enough that a slow
# reader costs eight items of memory.
WINDOW_ITEMS = 8
NUMBER_MASK = 0xFFFF_FFFF  # of an item on the wire
# taken items are granted anew so many at a time: a note for every fourth
GRANT_ITEMS = WINDOW_ITEMS // 2


class Window:
    """The sending half. grant() and close() in the reactor's thread, or where the stream is opened;
    the rest in the sender's, who counts items in `sent`."""

    def __init__(self, waiter: Waiter | None, credit: int = WINDOW_ITEMS) -> None:
        self._waiter = waiter
        # since the beginning; only grant() writes it, as only the sender writes `sent`
        self._allowed = credit
        self.sent = 0  # items, and the number of the next one
        self._waiting: deque[Future] = deque()
        self._error: BaseException | None = None

    def take(self) -> Future | None:
        """None when one more item may be sent; or a future to wait for before asking again. Raises
        what closed the stream.
        """
        if self._error is not None:
            raise self._error
        if self._allowed > self.sent:
            return None
        # failpoint: window.waiting
        future = Future(self._waiter)
        self._waiting.append(future)
        # granted, or closed, after our look
        if self._allowed > self.sent or self._error is not None:
            future.set_result(None)
        return future

    @property
    def ended_by(self) -> BaseException | None:
        """What closed the stream; None: nothing has."""
        return self._error

    def give_up(self, credit: Future) -> None:
        """Who got that of take() waits for it no longer."""
        with contextlib.suppress(ValueError):  # it was granted at the last moment
            self._waiting.remove(credit)

    def grant(self, items: int) -> None:
        """The other side took so many."""
        self._allowed += items
        self._wake()

    def close(self, error: BaseException) -> None:
        """Nothing more may be sent."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        # IndexError: emptied by this thread, or another one that does the same
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().set_result(None)


class Inbox:
    """The receiving half. take() in the receiver's thread or task, of which there is one, the rest
    in the reactor's; finish() in any."""

    def __init__(self, waiter: Waiter | None, grant: Callable[[int], None]) -> None:
        """`grant(n)` tells the sender that n more items may come."""
        self._waiter = waiter
        self._grant = grant
        self._items: deque[Any] = deque()
        self._early: dict[int, Any] = {}  # by number: those that overtook others
        self._next = 0  # number of the next item in order
        self._count: int | None = None  # how many there will have been: END said so
        self._taken = 0
        self._ending = False
        self.finished = False
        self._error: BaseException | None = None
        # Only take() writes it: who wakes the receiver could undo the next one.
        self._arrived: Future | None = None

    def put(self, number: int, item: Any) -> bool:
        """An item came; False for one that there was no credit for, or that was here before."""
        if self.finished:
            return True  # given up here, and not known there yet
        ahead = (number - self._next) & NUMBER_MASK
        if len(self._items) + ahead >= WINDOW_ITEMS or number in self._early:
            return False
        if ahead:
            self._early[number] = item
            return True
        self._items.append(item)
        self._next = (number + 1) & NUMBER_MASK
        early = self._early  # finish() in another thread lets go of it
        while self._next in early:
            self._items.append(early.pop(self._next))
            self._next = (self._next + 1) & NUMBER_MASK
        self._finish_if_all_are_here()
        self._wake()
        return True

    def expect(self, count: int) -> bool:
        """END came: there are so many items in all, modulo 2**32. False when they cannot be so
        many.
        """
        if (count - self._next) & NUMBER_MASK > WINDOW_ITEMS or self._count not in (None, count):
            return self.finished
        self._count = count
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """No item will be sent any more; `error` is raised after those that were."""
        if not self._ending:
            self._error = error
            self._ending = True
            self._finish_if_all_are_here()

    def cut(self, error: BaseException) -> None:
        """Nothing more will come; `error` is raised after the items that came."""
        if not self.finished:
            self._error = error
            self._ending, self._count = True, None
            self._finish_if_all_are_here()

    def _finish_if_all_are_here(self) -> None:
        if self._ending and self._count in (None, self._next):
            self.finished = True
            self._early = {}
            self._wake()

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set_result(None)

    def take(self) -> tuple[bool, Any]:
        """(True, the next item); (False, a future to wait for before asking again). Raises
        StopIteration at the end, or the error that ended it."""
        while True:
            finished = self.finished  # first: the last item comes before it is set
            if self._items:
                item = self._items.popleft()
                self._taken += 1
                if self._taken >= GRANT_ITEMS and not self._ending:
                    granted, self._taken = self._taken, 0
                    self._grant(granted)
                return True, item
            if finished:
                if self._error is not None:
                    try:
                        raise self._error
                    finally:
                        # else error, traceback, this frame and the inbox hold each other until a
                        # collection of garbage
                        del self
                raise StopIteration
            # failpoint: inbox.waiting
            future = self._arrived = Future(self._waiter)
            if not self._items and not self.finished:  # nothing came after our look
                return False, future
