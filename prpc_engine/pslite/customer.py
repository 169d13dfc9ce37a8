"""Requests of one customer: each has a timestamp, goes to some nodes, and is done when all of them
have answered, or one failed.

    state  event                                                  next
    open   an answer comes, others are missing                    open
    open   the last answer comes                                  finish(timestamp, answers) runs;
                                                                  done, but with a callback: told
    told   callback(timestamp, answers) has run in an engine      done: wait() returns
           thread
    open   a part fails: lost peer, deadline, handler raised; or  failed: wait() raises that error;
    told   finish() or callback() raises                          answers of others are dropped

Timestamps are 0, 1, 2, ... for each customer. Every part has a deadline, so every wait ends. What
is done is forgotten; errors are kept for wait(), the last FAILED_MAX of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NoReturn

from prpc_engine import errors
from prpc_engine.pslite import ids
from prpc_engine.pslite.batcher import Batcher
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.pslite.reliable import Dice
from prpc_engine.pslite.request import MISSING, NodePart, Timestamp
from shard import VALUE, ClosedError, Future, runtime

# of a request that is given none: servers may wait for other workers before they answer
REQUEST_TIMEOUT_S = 60.0
FAILED_MAX = 4096

logger = logging.getLogger("prpc")
_now = runtime.now


class Customer:
    """A customer sends requests to nodes of the job, and knows which of them are answered.

    Thread-safe. Owned by its application. app_id: of that application, for texts.
    request_timeout_s: the deadline of requests that are given none, in seconds. request() raises
    Backpressure, wait() what a request failed with. States of a request: the table at the file's
    head.
    """

    def __init__(
        self, postoffice: Postoffice, app_id: int, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.app_id = app_id
        self.request_timeout_s = request_timeout_s
        self._postoffice, self._number = postoffice, next(postoffice.customers)
        self._driver = postoffice.driver
        self._reactor = postoffice.driver.reactor
        self._timestamps = itertools.count()
        self.new_timestamp = self._timestamps.__next__  # for one request()
        self._given = 0  # at least so many timestamps have been
        # of what each request lacks, and of failures: any thread asks, answers end them in others
        self._guard = runtime.Lock()
        self._open: dict[int, Timestamp] = {}
        self._failed: dict[int, BaseException] = {}
        self._lanes: dict[int, Batcher] = {}
        settings = postoffice.settings
        self._dice = (
            Dice(settings.drop_percent, settings.drop_seed, 0) if settings.drop_percent else None
        )

    def request(
        self,
        timestamp: int,
        kind: str,
        parts: Sequence[tuple[int, tuple[Any, ...], int]],
        finish: Callable[[int, list[Any]], object] | None,
        priority: int = 0,
        timeout_s: float | None = None,
        stable: bool = False,
        callback: Callable[[int, list[Any]], object] | None = None,
    ) -> int:
        """Send (node, arguments, bytes with the answer) parts; the timestamp. finish(timestamp,
        answers) runs when all have come, in their order, if it is given; then callback(timestamp,
        answers), which is the application's, in an engine thread.

        stable  arrays among the arguments stay as they are until it is done: those that have to
                wait here are not copied
        Raises Backpressure where there is no room for the first part; where there is none for a
        later one, wait() does."""
        count = len(parts)
        answers = [MISSING] * count
        request = self._open[timestamp] = Timestamp(
            *(self._driver, 0, None, None, None, timestamp, count, answers, finish, callback, parts)
        )
        if not count:
            self._complete(request)
        if timeout_s is None:
            timeout_s = self.request_timeout_s
        deadline = _now() + timeout_s
        for index, (node, arguments, nbytes) in enumerate(parts):
            part = NodePart(request, index, kind, arguments, nbytes, timeout_s, deadline)
            try:
                (self._lanes.get(node) or self._lane_to(node)).send(part, priority, stable)
            except errors.Backpressure as error:
                if index == 0:
                    del self._open[timestamp]
                    raise
                self._fail(request, error)
                break
        return timestamp

    def _lane_to(self, node: int) -> Batcher:
        lane = Batcher(node, self._number, self._postoffice, self._dice, self._count, self._fail)
        return self._lanes.setdefault(node, lane)

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Return once that request is done and its callback has run. Again, and from any thread.

        Raises what it failed with (MaybeExecuted, NotSent, RemoteError, DeadlineExceeded, ...),
        DeadlineExceeded after `timeout_s` seconds; None waits for the request's own deadline.
        BadArguments for a timestamp that was not given yet."""
        request = self._open.get(timestamp)
        if request is None:
            is_given = type(timestamp) is int and 0 <= timestamp < self._given
            if self._failed or not is_given:
                self._check_done(timestamp)
            return
        call = request.call
        try:
            if call is not None:
                if (call.finished or self._driver.wait(call, timeout_s)) and call.finished == VALUE:
                    return
                self._hear_all()
            left_s = timeout_s if call is None or call.finished else 0.0
            if (
                request.finished or self._driver.wait(request, left_s)
            ) and request.finished == VALUE:
                return
            request.result(0)  # raises
        except errors.RpcError:
            raise
        except ClosedError:
            self._raise_closed(timestamp)
        except TimeoutError:
            waits = zip(request.parts, request.answers, strict=False)
            silent = [ids.name_of(node) for (node, _, _), answer in waits if answer is MISSING]
            why = (
                f"not answered after {timeout_s} s by: {', '.join(silent)}; wait longer, "
                "or look what they do"
                if silent
                else f"not done after {timeout_s} s: all have answered, and its callback still runs"
            )
            raise errors.DeadlineExceeded(
                f"request {timestamp} of app {self.app_id} is {why}"
            ) from None

    async def wait_async(self, timestamp: int) -> None:
        """wait() for a coroutine, of asyncio or of a handler: until the request's own deadline."""
        request = self._open.get(timestamp)
        if request is None:
            self._check_done(timestamp)
            return
        self._hear_all()
        try:
            await request
        except ClosedError:
            self._raise_closed(timestamp)

    def _check_done(self, timestamp: int) -> None:
        _check_whole(timestamp)
        if self._failed:
            error = self._failed.get(timestamp)
            if error is not None:
                raise error.with_traceback(None)
        if not 0 <= timestamp < self._given and not 0 <= timestamp < self._count_given():
            raise errors.BadArguments(
                f"timestamp {timestamp} was not given by this customer: "
                f"it has given {self._given} so far"
            )

    def _count_given(self) -> int:
        # the count's next number, without taking it
        self._given = int(repr(self._timestamps)[len("count(") : -1])
        return self._given

    def _raise_closed(self, timestamp: int) -> NoReturn:
        raise errors.Closed(
            f"request {timestamp} of app {self.app_id} was under way when this process left the job"
        ) from None

    def is_done(self, timestamp: int) -> bool:
        """Whether wait() would return, or raise, at once. Raises BadArguments for no number."""
        request = self._open.get(timestamp)
        if request is not None:
            call = request.call  # gone as soon as another thread hears of it
            return self._driver.closing or (call is not None and call.done())
        _check_whole(timestamp)
        return timestamp < self._count_given()

    # -- parts -------------------------------------------------------------------------------------

    def _hear_all(self) -> None:
        for lane in list(self._lanes.values()):
            lane.hear_all()

    def _count(self, part: NodePart, answer: Any) -> None:
        request = part.request
        request.answers[part.index] = answer
        if len(request.answers) > 1:
            with self._guard:
                request.missing -= 1
                if request.missing:
                    return
        if not request.finished:
            self._complete(request)

    def _complete(self, request: Timestamp) -> None:
        if request.finish is not None:
            try:
                request.finish(request.timestamp, request.answers)
            except Exception as error:
                self._fail(request, error)
                return
        if request.callback is None:
            self._end(request)
        else:
            answered = Future(self._driver)
            answered.add_done_callback(lambda _: self._call_back(request))
            answered.set_result(None)

    def _call_back(self, request: Timestamp) -> None:
        """In an engine thread."""
        assert request.callback is not None, "it has one"
        if request.finished:
            return  # it has failed meanwhile
        try:
            request.callback(request.timestamp, request.answers)
        except Exception as error:
            self._fail(request, error)
        except BaseException as error:  # who exits or is interrupted there: said in the log
            self._fail(request, error)
            raise
        else:
            self._end(request)

    def _end(self, request: Timestamp) -> None:
        request.answers = request.parts = ()  # the arrays go back to whoever lent them
        self._open.pop(request.timestamp, None)
        request.set_result(None)

    def _fail(self, request: Timestamp, error: BaseException) -> None:
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
            # whoever waits may have it parked
            self._reactor.call_soon(partial(request.set_error, error))


def _check_whole(timestamp: object) -> None:
    if not isinstance(timestamp, Integral):
        raise errors.BadArguments(
            f"timestamp {timestamp!r:.80}: give the number that push(), pull() or another verb "
            "returned"
        )


def _without_frames(error: BaseException) -> BaseException:
    """The error without what its traceback holds: the arrays of the request, for as long as it is
    kept.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
