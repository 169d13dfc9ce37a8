"""Futures of remote calls, with the verbs of torch.futures.Future beside the engine's own.

    torch                      here, the same                   the engine's
    wait()                     the value, or raises             result(timeout_s)
    value()                    of one that is done              result(0)
    done()                                                      done()
    then(f)                    the future of f(this one)        -
    add_done_callback(f)       f(this one), in a thread of the engine
    set_result, set_exception  complete it                      set_result, set_error
    collect_all, wait_all      of a list                        gather

They are no torch.futures.Future: those of C++ know nothing of this engine. `await` works in tasks
and in asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import shard
from prpc_engine.errors import BadArguments


class Future(shard.Future):
    """A result to come. Any thread may complete it, once.

    One that is made by hand, as an asynchronous function returns it, has no driver: a thread that
    waits for it sleeps; others complete it.
    """

    def wait(self) -> Any:
        """The value, once there; raises the error it was completed with."""
        return self.result()

    def value(self) -> Any:
        """The value of a future that is done. Raises its error, RuntimeError where it is not
        done.
        """
        if not self.finished:
            raise RuntimeError("this future is not done: wait() for it")
        return self.result()

    def set_exception(self, error: BaseException) -> bool:
        """As set_error()."""
        return self.set_error(error)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """The future of callback(this one), which is called once this one is done, where done
        callbacks are; its error, of any kind, is that of the new future.
        """
        after = Future(self.waiter)

        def run(done: Future) -> None:
            try:
                value = callback(done)
            except BaseException as error:  # that of a future that was cancelled, too
                after.set_error(error)
                if isinstance(error, KeyboardInterrupt):
                    raise  # Ctrl-C: see shard/loop/callback.py
            else:
                after.set_result(value)

        self.add_done_callback(run)
        return after

    def pass_on(self, outcome: Future) -> None:
        """Complete that one as this one is, which is done."""
        error = self.error()
        if error is not None:
            outcome.set_error(error)
        else:
            outcome.set_result(self.result())

    def _wait(self, timeout_s: float | None) -> bool:
        if self.waiter is not None:
            return self.waiter.wait(self, timeout_s)
        done = shard.runtime.Semaphore(0)
        self.when_done(lambda _: done.release())
        return bool(done.acquire(timeout=timeout_s))


def collect_all(futures: Sequence[Future]) -> Future:
    """The future of the list of them, done when all are: as torch.futures.collect_all(). Raises
    BadArguments for what is no Future.
    """
    futures = list(futures)
    for place, one in enumerate(futures):
        if not isinstance(one, Future):
            raise BadArguments(
                f"futures[{place}]={one!r:.100}: a Future is expected, as rpc_async() returns"
            )
    waiter = next((one.waiter for one in futures if one.waiter is not None), None)
    whole = Future(waiter)
    shard.gather([shard.shield(one) for one in futures], waiter).when_done(
        lambda _: whole.set_result(futures)
    )
    return whole


def wait_all(futures: Sequence[Future]) -> list[Any]:
    """Their values in order; raises the first error: as torch.futures.wait_all(), and
    collect_all()'s.
    """
    return [one.wait() for one in collect_all(futures).wait()]


def followed(value: Any) -> Future | None:
    """A future of ours that is done as `value` is, where that is a future of any library: ours, the
    engine's, concurrent.futures' or torch's. None for any other value.
    """
    if isinstance(value, Future):
        return value
    if isinstance(value, shard.Future):
        ours = Future(value.waiter)
        value.when_done(lambda done: _pass_on(done.result, ours))
        return ours
    module = type(value).__module__
    if module.startswith("concurrent.futures") or module.partition(".")[0] == "torch":
        add = getattr(value, "add_done_callback", None)
        verb = "result" if hasattr(value, "result") else "value"
        if callable(add) and callable(getattr(value, verb, None)):
            ours = Future()
            # The callback must not refer to `value`: the future would refer to itself, and dropping
            # it would be seen by the collector of garbage alone.
            add(lambda done: _pass_on(getattr(done, verb), ours))
            return ours
    return None


def _pass_on(result: Callable[[], Any], future: Future) -> None:
    try:
        value = result()
    except BaseException as error:  # whatever it is, somebody waits for it
        future.set_error(error)
    else:
        future.set_result(value)
