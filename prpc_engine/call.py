"""Calls in flight: who waits for which reply, and until when. No I/O and no clock here: `now` is handed in.

    state      event                      next
    in flight  reply or failure arrives   done      (the value, or the error it names)
    in flight  deadline passes            done      (DeadlineExceeded); a late reply is counted and dropped
    in flight  the connection ends        done      (MaybeExecuted)
    in flight  cancel                     done      (Cancelled); a late reply is counted and dropped

Deadlines are kept without an ordered structure: `soonest` is a lower bound of all of them. It falls when an earlier one
comes in and is made exact when it passes, so a steady stream of calls with equal timeouts costs one look at the table
per timeout, and nothing per call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from prpc_engine.errors import Cancelled, RpcError
from shard import Future

NEVER = float("inf")


class Call(Future):
    """One request that waits for its reply. result(timeout_s), done(), await; cancel() gives it up."""

    table: CallTable | None = None
    call_id: int = 0
    asked: tuple[str, object] = ("", None)  # method and route: for the texts of errors
    sent: float = 0.0  # when; like the deadline, set once the request is on its way
    deadline: float = NEVER

    def cancel(self) -> bool:
        """Wait no longer; False when it was done before. The handler is not stopped."""
        if self.table is not None:
            self.table.in_flight.pop(self.call_id, None)
        return self.set_error(Cancelled(f"{self.asked[0]!r} was cancelled by its caller"))


class CallTable:
    """All calls in flight on one connection. Entries are made from any thread, all else happens in the reactor's.

    A call is entered under next_id(), with `soonest` lowered to its deadline when that is earlier; its reply takes it out by
    in_flight.pop(). A reply that finds none is counted in dropped_replies."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Call] = {}
        self.soonest = NEVER
        self.dropped_replies = 0  # came after their call was done
        self._ids = itertools.count(1)
        self.next_id = self._ids.__next__

    @property
    def started(self) -> int:
        """How many calls there have been."""
        return int(repr(self._ids)[len("count(") : -1]) - 1  # the count's next number, without taking it

    def expire(self, now: float, error_for: Callable[[Call], RpcError]) -> int:
        """End all whose deadline has passed; how many. `soonest` is exact after it, but for calls made meanwhile: those arm
        a look of their own."""
        late = []
        soonest = self.soonest = NEVER  # before the look: a deadline set after it is compared with this, one set before is seen
        for call in list(self.in_flight.values()):
            if call.deadline <= now:
                late.append(call)
            elif call.deadline < soonest:
                soonest = call.deadline
        self.soonest = min(soonest, self.soonest)
        for call in late:
            self.in_flight.pop(call.call_id, None)
            call.set_error(error_for(call))
        return len(late)

    def fail_all(self, error_for: Callable[[Call], RpcError]) -> int:
        """End all: the connection is gone; how many."""
        calls = list(self.in_flight.values())
        self.in_flight.clear()
        for call in calls:
            call.set_error(error_for(call))
        return len(calls)
