"""How long handlers take, by method, where RpcService(timing=True) asks for it.

    handler               what is timed
    plain function        from its call to its return; a Future or Deferred that it returns is
                          answered later, and not waited for
    async def             from its first step to its end, with its waits
    generator (a stream)  nothing: its time is that of its reader

A handler is wrapped once, when its server is made. Without timing there is no wrapper, and nothing
to pay.

Bucket i of a method counts durations of 2^(i-1) <= ns < 2^i: any two that differ by a factor of two
are told apart, and which bucket it is costs one int.bit_length().
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.rpc.context import who_asked
from prpc_engine.settings.sections import NodeSection
from shard import is_finite

BUCKETS = 64  # 2^63 ns are 292 years
NEVER_NS = 1 << BUCKETS
# one line a second for each method at most: what is slow is often so for everybody at once
TELL_NS = 1_000_000_000

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class Timing:
    """How handlers are timed, for RpcService(timing=). Raises ConfigError unless slow_call_s is
    above 0 or None.
    """

    slow_call_s: float | None = None  # a handler that takes so long is logged; None: none is

    @classmethod
    def of(cls, node: NodeSection) -> Timing | None:
        """What a node's settings ask for; None: handlers are not timed."""
        wanted = node.timing or node.slow_call_s is not None
        return cls(node.slow_call_s) if wanted else None

    def __post_init__(self) -> None:
        if self.slow_call_s is not None and not (
            is_finite(self.slow_call_s, 0.0) and self.slow_call_s
        ):
            raise ConfigError(
                f"slow_call_s={self.slow_call_s!r}: more than 0 seconds are allowed, or None"
            )


@dataclass(frozen=True)
class MethodTiming:
    """How long one method's handler took, so far; total_s may be one call ahead of buckets, or
    behind.
    """

    total_s: float
    slow: int  # calls of slow_call_s or more
    buckets: tuple[int, ...]  # how many calls, by duration: see the file's head

    @property
    def calls(self) -> int:
        """That have ended, whether they returned or raised."""
        return sum(self.buckets)

    def __add__(self, other: MethodTiming) -> MethodTiming:
        """Both together."""
        buckets = tuple(map(int.__add__, self.buckets, other.buckets))
        return MethodTiming(self.total_s + other.total_s, self.slow + other.slow, buckets)


class MethodTimer:
    """Of one method of one server, by a clock of nanoseconds. Counts in the reactor's thread;
    statistics() from any.
    """

    def __init__(
        self, name: str, timing: Timing, clock_ns: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._name, self._clock_ns = name, clock_ns
        self._slow_ns = NEVER_NS if timing.slow_call_s is None else int(timing.slow_call_s * 1e9)
        self._buckets = [0] * BUCKETS
        self._total_ns = self._slow = self._untold = self._quiet_until_ns = 0

    def statistics(self) -> MethodTiming:
        """A snapshot."""
        return MethodTiming(self._total_ns / 1e9, self._slow, tuple(self._buckets))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The handler, timed; marks on it (prpc_idempotent, its class of tasks) stay."""
        count, clock_ns = self._count, self._clock_ns
        if inspect.iscoroutinefunction(function):

            async def run(arguments: tuple[Any, ...]) -> Any:
                start_ns = clock_ns()
                try:
                    return await function(*arguments)
                finally:
                    count(start_ns)

            @functools.wraps(function)
            def timed(*arguments: Any) -> Any:
                # plain: method.as_task() refuses arguments that do not fit before it calls this
                return run(arguments)

        else:

            @functools.wraps(function)
            def timed(*arguments: Any) -> Any:
                start_ns = clock_ns()
                try:
                    return function(*arguments)
                finally:
                    count(start_ns)

        return timed

    def _count(self, start_ns: int) -> None:
        now_ns = self._clock_ns()
        taken_ns = now_ns - start_ns
        self._buckets[taken_ns.bit_length()] += 1
        self._total_ns += taken_ns
        if taken_ns >= self._slow_ns:
            self._slow += 1
            self._untold += 1
            if now_ns >= self._quiet_until_ns:
                self._quiet_until_ns = now_ns + TELL_NS
                self._tell(taken_ns)

    def _tell(self, taken_ns: int) -> None:
        asker = who_asked()
        caller = "nobody" if asker is None else asker.connection.peer
        more = f"; {self._untold - 1} more since the last such line" if self._untold > 1 else ""
        self._untold = 0
        logger.warning(
            "slow call: %s took %.6f s for %s, slow_call_s=%g%s",
            self._name,
            taken_ns / 1e9,
            caller,
            self._slow_ns / 1e9,
            more,
        )
