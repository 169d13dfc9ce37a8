"""Requests of one customer: each has a timestamp, goes to some nodes, and is done when all of them have answered, or one failed.

    state     event                                  next
    open      an answer comes, others are missing    open
    open      the last answer comes                  done: finish(timestamp, answers) runs, then wait() returns
    open      a part fails: lost peer, deadline,     failed: wait() raises that error; answers of others are dropped
              handler raised; or finish() raises

Timestamps are 0, 1, 2, ... for each customer. Every part has a deadline, so every wait ends. What is done is forgotten; errors
are kept for wait(), the last FAILED_MAX of them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.kv.pslite import ids
from prpc_engine.kv.pslite.outbox import Outbox
from prpc_engine.kv.pslite.postoffice import Postoffice
from prpc_engine.kv.pslite.reliable import PATIENCE_GROWTH_MAX, Dice
from shard import VALUE, ClosedError, Future

REQUEST_TIMEOUT_S = 60.0  # of a request that is given none: servers may wait for other workers before they answer
FAILED_MAX = 4096

logger = logging.getLogger("prpc")


class Request(Future):
    """One timestamp. Parts are counted under its customer's lock."""

    timestamp: int = 0
    missing: int = 0
    answers: Any = None  # by part, a list
    finish: Callable[[int, list[Any]], object] | None = None
    nodes: tuple[int, ...] = ()


@dataclass(eq=False)
class Part:
    """What goes to one node."""

    request: Request
    index: int
    node: int
    kind: str
    payload: tuple[Any, ...]
    nbytes: int
    deadline: float
    attempts: int = 0
    sequence: int = 0
    is_taken: bool = False  # out of the outbox: its arrays are the transport's


class Lane:
    """The way to one node."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a part that fails while it is sent lets the next one go
        self.outbox: Outbox[Part] = Outbox()


class Customer:
    """See the file's head. Thread-safe. `request_timeout_s`: the deadline of requests that are given none, in seconds."""

    def __init__(
        self, postoffice: Postoffice, app_id: int, customer_id: int, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.app_id, self.customer_id = app_id, customer_id
        self.request_timeout_s = request_timeout_s
        self._postoffice = postoffice
        self._node = postoffice.node_of(customer_id)
        self._client = postoffice.client
        self._driver = postoffice.driver
        self._reactor = postoffice.driver.reactor
        self._timestamps = itertools.count()
        self._next = 0
        self._guard = threading.Lock()
        self._open: dict[int, Request] = {}
        self._failed: dict[int, BaseException] = {}
        self._lanes: dict[int, Lane] = {}
        settings = postoffice.settings
        self._resend_s = settings.resend_s
        self._dice = Dice(settings.drop_percent, settings.drop_seed, 0) if settings.drop_percent else None

    def request(
        self,
        kind: str,
        parts: Sequence[tuple[int, tuple[Any, ...], int]],
        finish: Callable[[int, list[Any]], object],
        priority: int = 0,
        timeout_s: float | None = None,
        stable: bool = False,
    ) -> int:
        """Send (node, payload, bytes) parts; the timestamp. finish(timestamp, answers) runs when all have come, in their order.

        stable  arrays in the payload stay as they are until it is done: those that have to wait here are not copied
        Raises Backpressure where there is no room for the first part; where there is none for a later one, wait() does."""
        if timeout_s is None:
            timeout_s = self.request_timeout_s
        nodes = tuple(node for node, _, _ in parts)
        request = Request(self._driver, missing=len(parts), answers=[None] * len(parts), finish=finish, nodes=nodes)
        deadline = time.monotonic() + timeout_s
        with self._guard:
            request.timestamp = timestamp = next(self._timestamps)
            self._next = timestamp + 1
            self._open[timestamp] = request
        if not parts:
            self._complete(request)
        for index, (node, payload, nbytes) in enumerate(parts):
            part = Part(request, index, node, kind, payload, nbytes, deadline)
            lane = self._lanes.get(node) or self._lanes.setdefault(node, Lane())
            with lane.lock:
                try:
                    lane.outbox.put(part, nbytes, priority)
                except errors.Backpressure as error:
                    if index == 0:
                        del self._open[timestamp]
                        raise
                    self._fail(request, error)
                    break
                sent = self._pump(lane)
                if (self._resend_s or not part.is_taken) and not stable:
                    part.payload = tuple(each.copy() if isinstance(each, np.ndarray) else each for each in payload)
            self._listen(lane, sent)
        return timestamp

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Return once that request is done and its callback has run. Again, and from any thread.

        Raises what it failed with (MaybeExecuted, NotSent, RemoteError, DeadlineExceeded, ...), DeadlineExceeded after
        `timeout_s` seconds; None waits for the request's own deadline. BadArguments for a timestamp that was not given yet."""
        request = self._open.get(timestamp)
        if request is None:
            error = self._failed.get(timestamp)
            if error is not None:
                raise error.with_traceback(None)
            if not 0 <= timestamp < self._next:
                raise errors.BadArguments(
                    f"timestamp {timestamp} was not given by this customer: it has given {self._next} so far"
                )
            return
        try:
            request.result(timeout_s)
        except errors.RpcError:
            raise
        except ClosedError:
            raise errors.Closed(
                f"request {timestamp} of app {self.app_id} was under way when this process left the job"
            ) from None
        except TimeoutError:
            silent = [ids.name_of(node) for node, answer in zip(request.nodes, request.answers, strict=True) if answer is None]
            raise errors.DeadlineExceeded(
                f"request {timestamp} of app {self.app_id} is not answered after {timeout_s} s by: {', '.join(silent)}; wait "
                "longer, or look what they do"
            ) from None

    def is_done(self, timestamp: int) -> bool:
        """Whether wait() would return, or raise, at once."""
        return timestamp < self._next and timestamp not in self._open

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _pump(self, lane: Lane) -> list[tuple[Part, Future]]:
        """Send what may leave; who has been called. Under the lane's lock."""
        sent = []
        while (part := lane.outbox.take()) is not None:
            part.is_taken = True
            sent.append((part, self._send(part)))
        return sent

    def _listen(self, lane: Lane, sent: list[tuple[Part, Future]]) -> None:
        """Without the lock: what completes meanwhile runs the user's callback here and now."""
        for part, call in sent:
            if call.finished:  # it failed at once, as the next ones may: one after the other, not one within the other
                self._reactor.call_soon(partial(self._answered, lane, part, call))
            else:
                call.add_done_callback(partial(self._answered, lane, part))

    def _send(self, part: Part) -> Future:
        """Call its node. What is wrong becomes the outcome."""
        left_s = part.deadline - time.monotonic()
        message = part.kind, self.app_id, self._node, self.customer_id, part.request.timestamp
        try:
            if part.request.finished:
                raise errors.Cancelled("another part of the request has failed")
            if left_s <= 0:
                raise errors.DeadlineExceeded(f"{ids.name_of(part.node)} took too long with what was sent before: slow down")
            if not self._resend_s:
                return self._client.submit_to(part.node, "post", *message, *part.payload, timeout_s=left_s)
            if not part.attempts:
                part.sequence = next(self._postoffice.sequences)
            patience_s = self._resend_s * min(PATIENCE_GROWTH_MAX, 2**part.attempts)
            part.attempts += 1
            once = self._postoffice.incarnation, part.sequence
            return self._client.submit_to(
                part.node, "post_once", *once, *message, *part.payload, timeout_s=min(left_s, patience_s)
            )
        except Exception as error:
            failed = Future()
            failed.set_error(error)
            return failed

    def _answered(self, lane: Lane, part: Part, call: Future) -> None:
        is_lost = self._dice is not None and self._dice.drops()
        if (
            self._resend_s
            and (is_lost or isinstance(call._outcome, errors.DeadlineExceeded))
            and part.deadline > time.monotonic()
        ):
            pause_s = self._resend_s if is_lost else 0.0
            self._reactor.call_soon(partial(self._send_again_after, lane, part, pause_s))
            return
        with lane.lock:
            lane.outbox.finished(part.nbytes)
        if is_lost:
            self._fail(part.request, errors.DeadlineExceeded(f"the answer of {ids.name_of(part.node)} was dropped (PS_DROP_MSG)"))
        elif call.finished == VALUE:
            self._count(part, call._outcome)
        else:
            self._fail(part.request, call._outcome)
        with lane.lock:
            sent = self._pump(lane)
        self._listen(lane, sent)

    def _send_again_after(self, lane: Lane, part: Part, pause_s: float) -> None:
        """In the reactor."""
        self._reactor.timers.call_at(self._reactor.clock() + pause_s, lambda: self._listen(lane, [(part, self._send(part))]))

    def _count(self, part: Part, answer: Any) -> None:
        request = part.request
        with self._guard:
            request.answers[part.index] = (answer,)
            request.missing -= 1
            is_last = not request.missing
        if is_last and not request.finished:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        assert request.finish is not None
        try:
            request.finish(request.timestamp, [answer for (answer,) in request.answers])
        except Exception as error:
            self._fail(request, error)
            return
        request.answers = [()] * len(request.nodes)  # the arrays go back to whoever lent them
        self._open.pop(request.timestamp, None)
        request.set_result(None)

    def _fail(self, request: Request, error: BaseException) -> None:
        with self._guard:
            if request.timestamp not in self._open:
                return  # it failed before
            self._failed[request.timestamp] = _without_frames(error)
            if len(self._failed) > FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            del self._open[request.timestamp]
        logger.debug("request %d of app %d failed: %s", request.timestamp, self.app_id, str(error))
        if self._driver.leads_here():
            request.set_error(error)
        else:
            self._reactor.call_soon(partial(request.set_error, error))  # whoever waits may have it parked


def _without_frames(error: BaseException) -> BaseException:
    """The error without what its traceback holds: the arrays of the request, for as long as it is kept."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
