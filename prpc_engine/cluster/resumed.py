"""A receive of tensors some of which came after an earlier receiver's deadline, or may still
(late.py).

it waits for the stragglers that were to bring them      until all have settled, or its deadline
                                                         passes
it takes what is here, and asks the source for the rest  until that is answered; when it fails, what
                                                         it took is kept again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.cluster.late import Late, Straggler
from prpc_engine.cluster.rendezvous import Tensor
from shard import VALUE, Future, Reactor, Waiter, gather, runtime

# source, step, keys, seconds: the future of their tensors
Ask = Callable[[int, int, Sequence[str], float], Future]


class Resumed(Future, kw_only=True):
    """The future of their list. `what` is for texts, `ask` sends a request."""

    late: Late
    source: int
    step: int
    keys: Sequence[str]
    what: str
    ask: Ask
    deadline: float
    rest: Future | None = None  # what was asked of the source

    def cancel(self, error: BaseException | None = None) -> bool:
        """Nobody waits for it any more; what it took is kept."""
        ended = Future.cancel(self, error)
        rest = self.rest
        if rest is not None:
            rest.cancel(error)
        return ended

    def _expire(self) -> None:
        if self.rest is None:  # else that has a deadline of its own
            self.set_error(
                errors.DeadlineExceeded(
                    f"{self.what} has not come whole in time: receive it again with a larger "
                    "timeout_s, or look why it is slow"
                )
            )

    def _go_on(self, _: Future) -> None:
        if self.finished:
            return
        here = self.late.take(self.source, self.step, self.keys)
        missing = [key for key in self.keys if key not in here]
        if not missing:
            self._end(here)
            return
        try:
            rest = self.rest = self.ask(
                self.source, self.step, missing, max(0.0, self.deadline - runtime.monotonic())
            )
        except Exception as error:
            self.late.keep(self.source, self.step, here)
            self.set_error(error)
            return
        rest.when_done(partial(self._rest_ended, here, missing))
        if self.finished:
            rest.cancel()

    def _rest_ended(self, here: dict[str, Tensor], missing: list[str], rest: Future) -> None:
        if rest.finished == VALUE:
            self._end({**here, **dict(zip(missing, rest._outcome, strict=False))})
        else:
            self.late.keep(self.source, self.step, here)
            self.set_error(rest._outcome)

    def _end(self, here: dict[str, Tensor]) -> None:
        if not self.set_result([here.get(key) for key in self.keys]):  # given up meanwhile
            self.late.keep(self.source, self.step, here)


def resume(
    waiter: Waiter,
    reactor: Reactor,
    late: Late,
    stragglers: Sequence[Straggler],
    source: int,
    step: int,
    keys: Sequence[str],
    what: str,
    ask: Ask,
    timeout_s: float,
) -> Future:
    """Receive them within `timeout_s` seconds, once those `stragglers` have settled.
    Never waits.
    """
    fields: dict[str, Any] = {
        "late": late,
        "source": source,
        "step": step,
        "keys": keys,
        "what": what,
        "ask": ask,
    }
    resumed = Resumed(waiter, deadline=runtime.monotonic() + timeout_s, **fields)
    if stragglers:
        timer = reactor.call_later(timeout_s, resumed._expire)
        resumed.when_done(lambda _: reactor.call_soon(timer.cancel))
    gather(stragglers).when_done(resumed._go_on)
    return resumed
