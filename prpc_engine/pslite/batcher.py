"""The way from one customer to one node: what leaves alone, what leaves with others, and what comes
back for each.

    in one call          is answered by, for each
    one message          its answer, when there is one; or its error
    several small ones,  None, bytes, an array,   as it would be alone
    endpoint.kv_many()   a tuple
                         a list                   its handler raised: the error's name, text and
                                                  traceback
                         an int                   no answer yet: late() of that number is answered
                                                  by it, when there is one (FORGOTTEN, by late():
                                                  that server does not know the number)

A message leaves at once, alone, while few are on their way. Small ones that come then wait for each
other, until there are enough of them, an answer comes, or somebody makes progress, as a thread that
waits does:

    bytes of its arrays, and of its answer's  leave together             why
    up to INLINE_BYTES_MAX, all in the head   up to                      the engine packs them in
                                              INLINE_TOGETHER_BYTES_MAX  one piece
    up to BESIDE_BYTES_MAX, and if it has     up to                      a call costs more than
      arrays beside the head they stay as     BESIDE_TOGETHER_BYTES_MAX  copying them; the other
      they are                                                           side begins before all came
    more                                      never                      both sides should be at
                                                                         work

Of a call that left alone and answers a whole request, with nothing to be done at its end, nobody is
told when it ends: who waits for the request looks at the call, and the lane does once the next one
has left, while the other side works. Being told would take a microsecond of the caller's time
between the answer and wait()'s return.

Once a server has answered late, the next ALONE_AFTER_LATE of them go one by one: asking again would
cost each a call of its own.

Where messages get lost (PS_DROP_MSG) or are sent again (PS_RESEND), each is a call of its own:
reliable.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.pslite import ids
from prpc_engine.pslite.customer_router import KV
from prpc_engine.pslite.outbox import ALONE_MAX, MESSAGES_MAX, Kind, Outbox
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.pslite.reliable import PATIENCE_GROWTH_MAX, Dice
from prpc_engine.pslite.request import NodePart, Timestamp
from prpc_engine.pslite.wire import FORGOTTEN, INLINE_BYTES_MAX
from shard import VALUE, Future, runtime

ALONE_AFTER_LATE = 4096
# of their arrays: with their heads, what the engine still packs in one piece
INLINE_TOGETHER_BYTES_MAX = 14 << 10
BESIDE_BYTES_MAX = 128 << 10  # of one: copying it takes as long as a call
# some 50 us of copying, before the other side has anything to do
BESIDE_TOGETHER_BYTES_MAX = 512 << 10


class Batcher:
    """A batcher sends one customer's messages to one node, alone or several in one call.

    Thread-safe. Owned by its Customer. Each part ends by answered(part, value) or failed(part's
    request, error); send() raises Backpressure. What leaves together: the tables at the file's
    head.

    node    id of the node that they go to
    number  of the customer, among those of this process
    dice    loses answers; None: nothing is lost
    """

    def __init__(
        self,
        node: int,
        number: int,
        postoffice: Postoffice,
        dice: Dice | None,
        answered: Callable[[NodePart, Any], object],
        failed: Callable[[Timestamp, BaseException], object],
    ) -> None:
        self._node, self._number, self._incarnation = node, number, postoffice.incarnation
        self._submit_to = postoffice.client.submit_to
        self._reactor = postoffice.driver.reactor
        self._clock = postoffice.driver.reactor.clock
        self._resend_s, self._dice = postoffice.settings.resend_s, dice
        self._is_plain = not self._resend_s and dice is None  # nothing is lost, nothing sent again
        self._succeed, self._fail = answered, failed
        self._no_arrays = ((node, (), 0),)
        self._lock = runtime.RLock()  # a part that fails while it is sent lets the next one go
        self._outbox: Outbox[NodePart] = Outbox()
        self._unheard: deque[tuple[NodePart, Future]] = (
            deque()
        )  # calls whose end nobody is told of, in the order in which they left
        self._alone = 0  # so many of the next messages wait for no others
        self._is_flush_due = False
        self._sequence = 0  # of the next part that leaves for the first time
        self._unanswered: dict[int, NodePart] = {}  # by sequence, ascending

    def send(self, part: NodePart, priority: int, stable: bool) -> None:
        """Now, or when its turn comes; `stable` as in Customer.request(). Raises Backpressure."""
        with self._lock:
            is_admitted, kind = self._is_plain and self._outbox.admit(part.nbytes, ALONE_MAX), None
            if self._is_plain and not is_admitted:
                is_admitted, kind = self._admit_among_others(part, stable)
            if is_admitted:  # the usual way
                sent = None
                try:
                    call: Future = self._submit_to(
                        self._node, part.kind, *part.arguments, timeout_s=part.timeout_s
                    )
                except Exception as error:
                    call = _failed(error)
                request = part.request
                if (
                    request.finish is None
                    and request.callback is None
                    and len(request.answers) == 1
                    and not call.finished
                ):
                    request.call = call
                    part.arguments, request.parts = (), self._no_arrays  # the engine has them
                    self._settle()  # now that the other side is at work
                    self._unheard.append((part, call))
                    return
            else:
                if not self._outbox.put(part, part.nbytes, priority, kind):
                    if not self._is_flush_due:
                        self._is_flush_due = True
                        self._reactor.call_soon(self._flush)
                    return
                sent = self._pump()
                if not stable and (self._resend_s or not part.is_taken):
                    part.arguments = tuple(
                        [
                            each.copy() if isinstance(each, np.ndarray) else each
                            for each in part.arguments
                        ]
                    )
        if sent is None:
            self._hear(partial(self._answered, part), call)
        else:
            self._listen(sent)

    def _settle(self) -> None:
        """What is known of those that nobody heard of. Under the lock."""
        unheard = self._unheard
        while unheard and unheard[0][1].finished:
            self._answered(*unheard.popleft())

    def hear_all(self) -> None:
        """From now on their requests end when those calls do."""
        with self._lock:
            self._settle()
            unheard = self._unheard.copy()
            self._unheard.clear()
        for part, call in unheard:
            part.request.call = None
            call.when_done(partial(self._answered, part))

    def _admit_among_others(self, part: NodePart, stable: bool) -> tuple[bool, Kind | None]:
        """Whether it may leave at once all the same, and else what it may leave together with.
        Under the lock.
        """
        if self._unheard:
            self.hear_all()  # some may have ended, and at the end of the others what waits leaves
            if self._outbox.admit(part.nbytes, ALONE_MAX):
                return True, None
        count = len(part.arguments)
        if (
            part.kind is not KV
            or part.nbytes > BESIDE_BYTES_MAX
            or count > 2
            or (count == 2 and not stable)
        ):
            return self._outbox.admit(part.nbytes, MESSAGES_MAX), None
        if self._alone:
            self._alone -= 1
            return self._outbox.admit(part.nbytes, MESSAGES_MAX), None
        if count == 1 and part.nbytes <= INLINE_BYTES_MAX:
            return False, (part.timeout_s, INLINE_TOGETHER_BYTES_MAX)
        return False, (part.timeout_s, BESIDE_TOGETHER_BYTES_MAX)

    def _flush(self) -> None:
        """In the reactor: somebody makes progress."""
        with self._lock:
            self._is_flush_due = False
            sent = self._pump()
        self._listen(sent)

    def _pump(self) -> list[tuple[list[NodePart], Future]]:
        """Send what may leave; who has been called. Under the lock."""
        sent = []
        while parts := self._outbox.take():
            for part in parts:
                part.is_taken = True
            sent.append(
                (parts, self._send(parts[0]) if len(parts) == 1 else self._send_together(parts))
            )
        return sent

    def _listen(self, sent: list[tuple[list[NodePart], Future]]) -> None:
        """Without the lock, which is not for what follows a request's end."""
        for parts, call in sent:
            self._hear(
                partial(self._answered, parts[0])
                if len(parts) == 1
                else partial(self._answered_together, parts),
                call,
            )

    def _hear(self, hear: Callable[[Future], object], call: Future) -> None:
        # it failed at once, as the next ones may: one after the other, not one within the other
        if call.finished:
            self._reactor.call_soon(partial(hear, call))
        else:
            call.when_done(hear)

    # -- alone -------------------------------------------------------------------------------------

    def _send(self, part: NodePart) -> Future:
        """Call the node. What is wrong becomes the outcome. Under the lock."""
        try:
            if part.request.finished:
                raise errors.Cancelled("another part of the request has failed")
            left_s = self._left_s(part)
            if not self._resend_s:
                return self._submit_to(self._node, part.kind, *part.arguments, timeout_s=left_s)
            if part.sequence < 0:
                part.sequence = self._sequence
                self._sequence += 1
                self._unanswered[part.sequence] = part
            left_s = min(left_s, self._resend_s * min(PATIENCE_GROWTH_MAX, 2**part.attempts))
            part.attempts += 1
            number = self._incarnation, self._number, part.sequence, next(iter(self._unanswered))
            return self._submit_to(
                self._node, "once", *number, part.kind, *part.arguments, timeout_s=left_s
            )
        except Exception as error:
            return _failed(error)

    def _left_s(self, part: NodePart) -> float:
        left_s = part.deadline - self._clock()
        if left_s <= 0:
            raise errors.DeadlineExceeded(
                f"{ids.name_of(self._node)} took too long with earlier requests: send more slowly"
            )
        return left_s

    def _answered(self, part: NodePart, call: Future) -> None:
        error = call._outcome if call.finished != VALUE else None
        if not self._is_plain:
            if self._dice is not None and self._dice.drops():
                error = errors.DeadlineExceeded(
                    f"the answer of {ids.name_of(self._node)} was dropped (PS_DROP_MSG)"
                )
            if (
                self._resend_s
                and isinstance(error, errors.DeadlineExceeded)
                and part.deadline > self._clock()
            ):
                pause_s = 0.0 if error is call._outcome else self._resend_s
                self._reactor.call_soon(partial(self._send_again_after, part, pause_s))
                return
            with self._lock:
                self._unanswered.pop(part.sequence, None)
        with self._lock:
            sent = self._pump() if self._outbox.finished(part.nbytes) else None
        if error is None:
            self._succeed(part, call._outcome)
        else:
            self._fail(part.request, error)
        if sent is not None:
            self._listen(sent)

    def _send_again_after(self, part: NodePart, pause_s: float) -> None:
        """In the reactor."""

        def send() -> None:
            with self._lock:
                call = self._send(part)
            self._hear(partial(self._answered, part), call)

        self._reactor.call_later(pause_s, send)

    # -- together ----------------------------------------------------------------------------------

    def _send_together(self, parts: list[NodePart]) -> Future:
        """As _send(), of parts of equal timeouts. The last one's deadline is that of all: they came
        within a moment.
        """
        try:
            left_s = self._left_s(parts[-1])
            messages = itertools.chain.from_iterable([part.arguments for part in parts])
            return self._submit_to(self._node, "kv_many", left_s, *messages, timeout_s=left_s)
        except Exception as error:
            return _failed(error)

    def _answered_together(self, parts: list[NodePart], call: Future) -> None:
        if call.finished != VALUE:
            self._finished(parts)
            for part in parts:
                self._fail(part.request, call._outcome)
            return
        answers = call._outcome
        if answers is None:
            self._finished(parts)
            for part in parts:
                self._succeed(part, None)
            return
        late = [
            (part, answer)
            for part, answer in zip(parts, answers, strict=True)
            if type(answer) is int
        ]
        with self._lock:
            self._alone = ALONE_AFTER_LATE if late else 0
        self._finished(
            [part for part, answer in zip(parts, answers, strict=True) if type(answer) is not int]
        )
        for part, answer in zip(parts, answers, strict=True):
            if type(answer) is list:
                self._fail(part.request, self._error_of(*answer))
            elif type(answer) is not int:
                self._succeed(part, answer)
        for part, number in late:
            left_s = max(0.0, part.deadline - self._clock())
            try:
                later: Future = self._submit_to(self._node, "late", number, timeout_s=left_s)
            except Exception as error:
                later = _failed(error)
            self._hear(partial(self._answered_late, part), later)

    def _finished(self, parts: list[NodePart]) -> None:
        """They are answered, or lost: what waits may leave."""
        with self._lock:
            waits = self._outbox.finished(sum([part.nbytes for part in parts]), len(parts))
            sent = self._pump() if waits else []
        self._listen(sent)

    def _answered_late(self, part: NodePart, call: Future) -> None:
        self._finished([part])
        error = call._outcome if call.finished != VALUE else None
        if isinstance(error, errors.NotSent) or (
            error is None and type(call._outcome) is int and call._outcome == FORGOTTEN
        ):
            error = errors.MaybeExecuted(
                f"{ids.name_of(self._node)} was lost, or replaced, after it had taken the request"
            )
        if error is None:
            self._succeed(part, call._outcome)
        else:
            self._fail(part.request, error)

    def _error_of(self, name: str, text: str, more: str) -> errors.RemoteError:
        return errors.RemoteError(
            f"'kv' of {ids.name_of(self._node)} raised {name}: {text}\n\n{more}",
            type_name=name,
            remote_message=text,
            remote_traceback=more,
        )


def _failed(error: BaseException) -> Future:
    future = Future()
    future.set_error(error)
    return future
