"""What became of many calls: how many ended how, how long they took, and who hung."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prpc_engine import errors


class Tally:
    """Counts of one thread, or of several put together by merge(). Times are in seconds."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()  # "right", or the name of an error
        # answers that are not what the call should give, and errors that have no name of ours
        self.wrong: list[str] = []
        self.times_s: list[float] = []

    def count(
        self, expected: object, call: Callable[..., object], *args: Any, **settings: Any
    ) -> bool:
        """Make call(*args, **settings): whether it ended right.

        Errors of prpc_engine.errors are outcomes, but for RemoteError: no handler here raises.
        Others go through."""
        started = time.perf_counter()
        try:
            got = call(*args, **settings)
        except errors.RpcError as error:
            name = type(error).__name__
            self.outcomes[name] += 1
            if isinstance(error, errors.RemoteError):
                self.wrong.append(str(error))
            return False
        finally:
            self.times_s.append(time.perf_counter() - started)
        if got != expected:
            self.wrong.append(f"{got!r} instead of {expected!r}")
            return False
        self.outcomes["right"] += 1
        return True

    @property
    def ended(self) -> int:
        """Calls that ended in one way or the other."""
        return sum(self.outcomes.values()) + len(self.wrong)

    def merge(self, *others: Tally) -> Tally:
        """Take in what others counted."""
        for other in others:
            self.outcomes += other.outcomes
            self.wrong += other.wrong
            self.times_s += other.times_s
        return self

    def text(self, elapsed_s: float) -> str:
        """One line for people."""
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return (
            f"{counts}, {len(self.wrong)} wrong; {self.ended / elapsed_s:,.0f} calls/s; "
            f"{quantiles_text(self.times_s)}"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def quantiles_text(values_s: Sequence[float]) -> str:
    """p50, p99, p99.9 and the largest, in milliseconds."""
    if not values_s:
        return "nothing measured"
    named = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return ", ".join(
        f"{name} {quantile(values_s, share) * 1e3:.3f} ms" for name, share in named.items()
    )


def run_threads(works: Sequence[Callable[[], None]], bound_s: float) -> float:
    """Run each in a thread of its own; how long all took, in seconds. Fails when one raises, or is
    not done after `bound_s`.
    """
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + bound_s - time.monotonic()))
    hung = sum(thread.is_alive() for thread in threads)
    assert not hung, f"{hung} of {len(threads)} threads hang after {bound_s} s"
    if failures:
        raise failures[0]
    return time.monotonic() - started
