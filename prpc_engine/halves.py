"""The two halves of one direction of a stream: items go no faster than the other side takes them. No I/O here.

    half      who has it                 state
    Window    who sends                  credit: items it may still send; 0: wait
    Inbox     who receives               items that arrived and were not taken; grants credit as they are taken

A side starts with WINDOW_ITEMS of credit, so at most that many items of a stream wait anywhere. Items keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from shard import Future

if TYPE_CHECKING:
    import asyncio

# Enough to hide the way there and back behind the work on eight items; few enough that a slow reader costs eight items of memory.
WINDOW_ITEMS = 8
GRANT_ITEMS = WINDOW_ITEMS // 2  # taken items are granted anew so many at a time: a note for every fourth


class Waits(Protocol):
    """Whose thread waits for a future (shard.Driver); None in a shard, where tasks await."""

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        """See shard.future.Waiter."""

    def await_in(self, future: Future, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
        """See shard.future.Waiter."""


class Window:
    """The sending half. grant() and close() in the reactor's thread, the rest in the sender's."""

    def __init__(self, waiter: Waits | None) -> None:
        self._waiter = waiter
        self._credit = WINDOW_ITEMS
        self._waiting: deque[Future] = deque()
        self._error: BaseException | None = None

    def take(self) -> Future | None:
        """Use one item's credit; or a future to wait for before asking again. Raises what closed the stream."""
        if self._error is not None:
            raise self._error
        if self._credit > 0:
            self._credit -= 1
            return None
        future = Future(self._waiter)
        self._waiting.append(future)
        if self._credit > 0 or self._error is not None:  # granted, or closed, after our look
            future.set_result(None)
        return future

    def grant(self, items: int) -> None:
        """The other side took so many."""
        self._credit += items
        self._wake()

    def close(self, error: BaseException) -> None:
        """Nothing more may be sent."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            self._waiting.popleft().set_result(None)


class Inbox:
    """The receiving half. put() and finish() in the reactor's thread, the rest in the receiver's: one thread or task."""

    def __init__(self, waiter: Waits | None, grant: Callable[[int], None]) -> None:
        """`grant(n)` tells the sender that n more items may come."""
        self._waiter = waiter
        self._grant = grant
        self._items: deque[Any] = deque()
        self._taken = 0
        self._finished = False
        self._error: BaseException | None = None
        self._arrived: Future | None = None

    def put(self, item: Any) -> bool:
        """An item came; False when it is one more than there was credit for."""
        if self._finished:
            return True  # given up here, and not known there yet
        if len(self._items) >= WINDOW_ITEMS:
            return False
        self._items.append(item)
        self._wake()
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more will come; `error` is raised after the items that came before."""
        if not self._finished:
            self._finished, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            arrived.set_result(None)

    def take(self) -> tuple[bool, Any]:
        """(True, the next item); (False, a future to wait for before asking again). Raises StopIteration at the end, or the error
        that ended it."""
        while True:
            if self._items:
                item = self._items.popleft()
                self._taken += 1
                if self._taken >= GRANT_ITEMS and not self._finished:
                    granted, self._taken = self._taken, 0
                    self._grant(granted)
                return True, item
            if self._finished:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            future = self._arrived = Future(self._waiter)
            if not self._items and not self._finished:  # nothing came after our look
                return False, future
