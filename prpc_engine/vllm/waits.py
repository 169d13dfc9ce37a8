"""How threads wait at one end of a queue: until what they look at has come about, their time is
over, or the end is closed. What they look at changes in the engine's thread and in others.

    wait(look, ...)    looks, and where there is nothing yet waits for the next change, again and
                       again; every TELL_S it says in the log for what
    with guard:        changes what is looked at
      take_waiting()   and wakes those, once the guard is let go of: wake()
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from prpc_engine import errors
from prpc_engine.vllm.messages import TELL_S
from prpc_engine.vllm.queue_errors import QueueClosed
from shard import ClosedError, Driver, Future, runtime

logger = logging.getLogger("prpc")
Found = TypeVar("Found")


class QueueWaits:
    """Of one end. Thread-safe.

    driver  turns the reactor for who waits
    closed  the error of who waits at an end that is closed
    """

    def __init__(self, driver: Driver, closed: Callable[[], QueueClosed]) -> None:
        # Of all that the end's threads look at, and of who waits: items come in the reactor.
        self.guard = runtime.Lock()
        self._driver, self._closed = driver, closed
        self._waiting: list[Future] = []

    def next_change(self) -> Future:
        """Done with the next take_waiting() and wake(). With the guard held."""
        change = Future(self._driver)
        self._waiting.append(change)
        return change

    def take_waiting(self) -> list[Future]:
        """Those to be woken. With the guard held."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def wait(
        self,
        look: Callable[[], Found | None],
        timeout: float | None,
        text: Callable[[], str],
        late: str,
        told: str,
        tells: bool = True,
    ) -> Found:
        """What look() gives, once that is not None; it is called with the guard held, and may
        raise. timeout: in seconds; None: for ever. text() says what is not there, and is followed
        by `late` in the DeadlineExceeded that this raises, or by `told` in the log, both with the
        time put in; `tells`: whether the log is told.
        """
        deadline = None if timeout is None else runtime.monotonic() + timeout
        tell_at = runtime.monotonic() + TELL_S if tells else None
        while True:
            with self.guard:
                found = look()
                if found is not None:
                    return found
                change = self.next_change()
            limits = [one for one in (deadline, tell_at) if one is not None]
            if self._is_done(change, min(limits, default=None)):
                continue
            now = runtime.monotonic()
            with self.guard:
                said = text()
            if deadline is not None and now >= deadline:
                raise errors.DeadlineExceeded(said + late.format(f"{timeout:.3g} s"))
            if tell_at is not None and now >= tell_at:
                tell_at += TELL_S
                logger.warning("%s", said + told.format(f"{TELL_S:.0f} s"))

    def _is_done(self, change: Future, until: float | None) -> bool:
        try:
            return self._driver.wait_until(change, until)
        except ClosedError as error:
            raise self._closed() from error
        finally:
            if not change.finished:
                with self.guard:  # or those whose time is over pile up
                    if change in self._waiting:
                        self._waiting.remove(change)


def wake(waiting: list[Future]) -> None:
    """Those of take_waiting()."""
    for future in waiting:
        future.set_result(None)
