"""Calls in flight: who waits for which reply, and until when. No I/O and no clock here: `now` is
handed in. What follows what is a table: call_state.py.

Deadlines are kept without an ordered structure: `soonest` is a lower bound of all of them. It falls
when an earlier one comes in and is made exact when it passes, so a steady stream of calls with
equal timeouts costs one look at the table per timeout, and nothing per call. Those that a look
finds are ended some at a time: many may have one deadline.

Entered, a call is being sent until its `sent` says when it was: its thread may stand still in
between for as long as the system likes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from prpc_engine.errors import Cancelled, Closed, DeadlineExceeded, RpcError
from shard import ClosedError, Future

NEVER, PASSED = float("inf"), float("-inf")
Later = Callable[[float, Callable[[], object]], object]
# A call without a timeout of its own gives up after this long: long for a call, short for a person.
TIMEOUT_S = 30.0
# Call ids of one connection of a node, which never come again on another one of it: so many calls
# take four months at 100 000 a second, and the 24 bits above hold a new connection every second for
# half a year.
CALL_ID_BITS = 40
# Between looks at the calls that were being sent when their connection ended, and how many: a
# second or so in all, for a thread that does not come to run.
SENDING_S, SENDING_LOOKS_MAX = 0.001, 1000
# After a call's deadline, for the reactor to end it: then the thread that waits does so itself.
LATE_S = 0.05


class CallOwner(Protocol):
    """What is told of a call's failure before its future is, and may send it again: an RpcClient,
    or Named.
    """

    def failed(self, call: Call, error: BaseException) -> bool:
        """An attempt failed; True: the call stays pending, and will be ended by the client."""


class Call(Future):
    """One request that waits for its reply. result(timeout_s), done(), await;
    cancel() gives it up.
    """

    table: CallTable | None = None
    call_id: int = 0
    asked: tuple[str, Any] = ("", None)  # method and route
    # hears of a failure first, and may try again; None: the failure is the end
    client: CallOwner | None = None
    body: bytes = b""  # of the request, for trying again
    blocks: Sequence[NDArray[Any]] = ()
    sent: float = 0.0  # when; like the deadline, set once the request is on its way; 0.0: it is not
    # of this attempt; PASSED once it has been found so here, which its server may not know
    deadline: float = NEVER
    overall: float = NEVER  # of all attempts together
    state: Any = None  # of trying again: the client's
    # whether another call stands for it: then its failure is none of the client's
    is_attempt: ClassVar[bool] = False

    def _wait(self, timeout_s: float | None) -> bool:
        try:
            if timeout_s is not None or self.waiter is None:
                return Future._wait(self, timeout_s)
            return self.wait()
        except ClosedError as error:
            raise Closed(f"{self.asked[0]!r}: this side was closed meanwhile") from error

    def wait(self) -> bool:
        """Wait until it is done, at its deadline at the latest; False in a shard, where tasks await
        and no thread may block.
        """
        if self.waiter is None:
            return False
        while True:
            until = self.overall + LATE_S
            if self.waiter.wait_until(self, until):
                return True
            if self.overall + LATE_S <= until:  # else it was given another deadline meanwhile
                self._overdue()

    def _overdue(self) -> None:
        """Its deadline has passed, and the reactor has not seen to it: a handler keeps it. In the
        thread that waits.
        """
        if self.table is not None:
            self.table.own_outbox()  # the caller may change its arrays from now on
        self.withdraw()
        self.end(
            DeadlineExceeded(
                f"no answer to {self.asked[0]!r} from {self.asked[1]} in time, and none could be "
                "taken: a handler of this process, or a callback of a future, keeps its reactor; "
                "the log of stalls names it"
            )
        )

    def set_error(self, error: BaseException) -> bool:
        """Complete with an error, unless the client goes on with the call; False when it was
        complete before.
        """
        if self.client is not None and not self.finished and self.client.failed(self, error):
            return True
        return self.end(error)

    def end(self, error: BaseException) -> bool:
        """Complete with an error, whatever could still be tried."""
        if not Future.set_error(self, error):
            return False
        figures = getattr(self.asked[1], "figures", None)  # of a client's route
        if figures is not None and not self.is_attempt:
            figures.failed(error)
        return True

    def withdraw(self) -> None:
        """Tell the server that nobody waits: what is queued there is dropped, a task ended, a plain
        function runs to its end.
        """
        if self.table is not None and self.table.in_flight.pop(self.call_id, None) is not None:
            self.table.send_cancel(self.call_id)

    def outlive(self) -> None:
        """After its deadline has PASSED, in the reactor: stay in flight for what its answer brings.
        The server is told that the call is cancelled, and answers with an error, if it has not
        answered before."""
        assert self.table is not None, "it was in one when its deadline passed"
        self.deadline = NEVER
        self.table.in_flight[self.call_id] = self
        self.table.send_cancel(self.call_id)

    def cancel(self, error: BaseException | None = None) -> bool:
        """Wait no longer, and withdraw() it. Completes with `error`, Cancelled by default. False
        when it was done before.
        """
        self.withdraw()
        return self.set_error(error or Cancelled(f"{self.asked[0]!r} was cancelled by its caller"))


class CallTable:
    """All calls in flight on one connection. Entries are made from any thread, all else happens in
    the reactor's.

    A call is entered under next_id(), with `soonest` lowered to its deadline when that is earlier;
    its reply takes it out by in_flight.pop(). A reply that finds none is counted in
    dropped_replies.

    Numbers begin after `base`; `life` is equal for connections over which the node at the other end
    is the same, and knows this one as the same."""

    def __init__(self, base: int = 0, life: object = None) -> None:
        self.in_flight: dict[int, Call] = {}
        self.soonest = NEVER
        self.dropped_replies = 0  # came after their call was done
        self.send_cancel: Callable[[int], None] = _tell_nobody
        self.own_outbox: Callable[[], None] = _nothing
        self.life = life
        self._base = base
        self._late: deque[Call] = deque()  # found, and not ended yet
        self._ids = itertools.count(base + 1)
        self.next_id = self._ids.__next__

    @property
    def started(self) -> int:
        """How many calls there have been."""
        # the count's next number, without taking it
        return int(repr(self._ids)[len("count(") : -1]) - 1 - self._base

    def find_late(self, now: float) -> bool:
        """Find all whose deadline has passed, for end_late(); whether there are any. `soonest` is
        exact after it, but for calls made meanwhile: those arm a look of their own."""
        # before the look: a deadline set after it is compared with this, one set before is seen
        soonest = self.soonest = NEVER
        for call in list(self.in_flight.values()):
            if call.deadline <= now:
                self._late.append(call)
            elif call.deadline < soonest:
                soonest = call.deadline
        self.soonest = min(soonest, self.soonest)
        return bool(self._late)

    def end_late(self, error_for: Callable[[Call], RpcError], most: int | None = None) -> int:
        """End those that were found, `most` of them at a time; how many. `has_late` says whether
        there are more.
        """
        count = 0
        while self._late and count != most:
            call = self._late.popleft()
            # else it was answered, or given up, meanwhile
            if self.in_flight.pop(call.call_id, None) is not None:
                count += 1
                call.deadline = PASSED
                call.set_error(error_for(call))
        return count

    @property
    def has_late(self) -> bool:
        """Whether some that find_late() found are to be ended still."""
        return bool(self._late)

    def fail_all(
        self,
        error_for: Callable[[Call], RpcError],
        later: Later | None = None,
        looks: int = SENDING_LOOKS_MAX,
    ) -> int:
        """End all: the connection is gone; how many. later(seconds, callback) is for those that are
        being sent now: if they were sent, they end then. Without it they end now, too."""
        calls = [
            call
            for call in list(self.in_flight.values())
            if call.sent or later is None or looks < 1
        ]
        for call in calls:
            self.in_flight.pop(call.call_id, None)
        for call in calls:
            call.set_error(error_for(call))
        if self.in_flight and later is not None:
            later(SENDING_S, partial(self.fail_all, error_for, later, looks - 1))
        return len(calls)


def _nothing() -> None:
    """Before a peer has taken the table."""


def _tell_nobody(call_id: int) -> None:
    """Before a peer has taken the table."""
