"""A channel: items from some threads to others, in order, never more than `capacity` of them
waiting.

    state   event                  next
    open    put                    open; waits while the channel is full
    open    get                    open; waits while the channel is empty
    open    close() of one opener  open; closed when it was the last one
    open    abort()                closed and drained: what waited in it is handed to who aborts
    closed  put, shared_open       Closed
    closed  get                    what is left, then Closed: drained

Who makes it is its first opener; each shared_open() adds one, so that several producers can each
close() their part and the consumers end after the last of them. queue.Queue can be closed from
Python 3.13 on only, and has neither batches nor openers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from prpc_engine.errors import Closed
from prpc_engine.settings.config import check_number, check_wait

CAPACITY_ITEMS = 1024  # where nobody says: enough to hide the pauses of either side
CAPACITY_ITEMS_MAX = 1 << 30

T = TypeVar("T")
D = TypeVar("D")


class Channel(Generic[T]):
    """A channel carries items from some threads to others, in order, and bounds those that wait.

    Thread-safe; a context manager that closes one opening at its end. States: the table at the
    file's head. capacity: how many items may wait. name: for texts.

    `timeout_s` is in seconds; None waits until there is room, or an item, or the channel is closed.
    Raises ConfigError for a capacity that is not possible, and for seconds that are none.
    """

    def __init__(self, capacity: int = CAPACITY_ITEMS, name: str = "channel") -> None:
        self.capacity = check_number("capacity", capacity, 1, CAPACITY_ITEMS_MAX)
        self.name = name
        self._items: deque[T] = deque()
        self._openers = 1
        # of the items: senders and receivers are threads of the application
        lock = threading.Lock()
        self._has_room = threading.Condition(lock)  # senders sleep in it
        self._has_items = threading.Condition(lock)  # receivers sleep in it

    def __len__(self) -> int:
        """How many items wait now."""
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether the last opener has closed it; items may still wait."""
        return not self._openers

    # -- writing -----------------------------------------------------------------------------------

    def put(self, item: T, timeout_s: float | None = None) -> None:
        """Add one item. Raises TimeoutError when the channel stays full, Closed."""
        if timeout_s is not None:
            check_wait(timeout_s)
        with self._has_room:
            self._wait_for_room(timeout_s)
            self._items.append(item)
            self._has_items.notify()

    def try_put(self, item: T) -> bool:
        """Add one item if there is room; False means full. Raises Closed."""
        with self._has_room:
            self._check_open()
            if len(self._items) >= self.capacity:
                return False
            self._items.append(item)
            self._has_items.notify()
            return True

    def put_many(self, items: Sequence[T], timeout_s: float | None = None) -> int:
        """Add the items in order, as room comes: how many went in, from the first on.

        They are fewer than given only when the channel stayed full for `timeout_s` or was closed
        meanwhile; the next call says which. Raises TimeoutError, Closed when not one went in.
        """
        if timeout_s is not None:
            check_wait(timeout_s)
        done = 0
        with self._has_room:
            while done < len(items):
                try:
                    self._wait_for_room(timeout_s)
                except (TimeoutError, Closed):
                    if not done:
                        raise
                    break
                room = self.capacity - len(self._items)
                part = items[done : done + room]
                self._items.extend(part)
                self._has_items.notify(len(part))
                done += len(part)
        return done

    # -- reading -----------------------------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> T:
        """The oldest item. Raises TimeoutError when none comes, Closed when the channel is closed
        and drained.
        """
        if timeout_s is not None:
            check_wait(timeout_s)
        with self._has_items:
            self._wait_for_items(timeout_s)
            item = self._items.popleft()
            self._has_room.notify()
            return item

    def try_get(self, default: D | None = None) -> T | D | None:
        """The oldest item, or `default` when none waits. Raises Closed when the channel is closed
        and drained.
        """
        with self._has_items:
            if not self._items:
                self._check_open()
                return default
            item = self._items.popleft()
            self._has_room.notify()
            return item

    def get_many(self, items_max: int, timeout_s: float | None = None) -> list[T]:
        """As get(), and what else waits, `items_max` in all: never an empty list. Raises
        TimeoutError, Closed, ConfigError.
        """
        check_number("items_max", items_max, 1, CAPACITY_ITEMS_MAX)
        if timeout_s is not None:
            check_wait(timeout_s)
        with self._has_items:
            self._wait_for_items(timeout_s)
            taken = [self._items.popleft() for _ in range(min(items_max, len(self._items)))]
            self._has_room.notify(len(taken))
            return taken

    def __iter__(self) -> Iterator[T]:
        """Item after item, until the channel is closed and drained. Several threads may iterate:
        each item goes to one.
        """
        while True:
            try:
                item = self.get()
            except Closed:
                return
            yield item

    # -- its end -----------------------------------------------------------------------------------

    def shared_open(self) -> Channel[T]:
        """The same channel with one opener more, who has to close() it, too. Raises Closed."""
        with self._has_room:
            self._check_open()
            self._openers += 1
            return self

    def close(self) -> None:
        """One opener is done: once for each. The last one closes the channel; after that it does
        nothing.
        """
        with self._has_room:
            if self._openers:
                self._openers -= 1
                self._wake_all_if_closed()

    def abort(self) -> list[T]:
        """Close for all openers at once, and take out what waits: nobody will."""
        with self._has_room:
            self._openers = 0
            left = list(self._items)
            self._items.clear()
            self._wake_all_if_closed()
            return left

    def __enter__(self) -> Channel[T]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- with the lock held ------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._openers:
            raise Closed(f"{self.name} was closed here")

    def _wake_all_if_closed(self) -> None:
        if not self._openers:
            self._has_room.notify_all()
            self._has_items.notify_all()

    def _wait_for_room(self, timeout_s: float | None) -> None:
        self._wait(
            self._has_room,
            lambda: len(self._items) < self.capacity or not self._openers,
            timeout_s,
            "full",
        )
        self._check_open()

    def _wait_for_items(self, timeout_s: float | None) -> None:
        self._wait(
            self._has_items, lambda: bool(self._items) or not self._openers, timeout_s, "empty"
        )
        if not self._items:
            self._check_open()

    def _wait(
        self,
        condition: threading.Condition,
        over: Callable[[], bool],
        timeout_s: float | None,
        what: str,
    ) -> None:
        if not condition.wait_for(over, timeout_s):
            raise TimeoutError(
                f"{self.name} was {what} for {timeout_s} s: {len(self._items)} of {self.capacity} "
                "items wait in it"
            )
