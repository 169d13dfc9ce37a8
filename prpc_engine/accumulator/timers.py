"""Auto timers: how long a piece of code takes, counted over all processes, off until
enable_timers().

    with timer("reader", "parse"):
        ...

    @timer("reader", "parse", unit="us")
    def parse(line): ...

Each is a Timer counter called timer::<component>::<name>(<unit>). The start belongs to the frame
that runs the `with` statement (of a decorated function, to the one call), so threads, recursion and
coroutines that interleave never see each other's, although they share one timer; the end is one
append to the counter's list. While timers are off, a `with` costs an object and two looks, a
decorated call just one.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

from prpc_engine.accumulator.counter import FLUSH_COUNT, FLUSH_S, CounterSet, default_counters
from prpc_engine.accumulator.moments import Timer
from prpc_engine.errors import BadArguments, ConfigError

logger = logging.getLogger("prpc")

UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0, "m": 1 / 60, "h": 1 / 3600}  # how many make a second

Function = TypeVar("Function", bound=Callable[..., Any])
Key = tuple[str, str, str]  # component, name, unit
_Start = tuple[int, Callable[[float], None], float]  # thread, where the duration goes, seconds


class _Switch:
    """Whether timers run, and where their values go."""

    on = False
    counters = default_counters
    writes: dict[Key, Callable[[float], None]] = {}  # noqa: RUF012 - there is one switch, and no instance of it


def enable_timers(counters: CounterSet = default_counters) -> None:
    """Let timers that start from now on count, in the counters of the process unless others are
    given.
    """
    if counters is not _Switch.counters:
        _Switch.counters, _Switch.writes = counters, {}
    _Switch.on = True


def disable_timers() -> None:
    """Let timers that start from now on do nothing. Those that run are counted."""
    _Switch.on = False


class AutoTimer:
    """What timer() makes: for any number of `with` statements, nested or in several threads too,
    and of decorated functions.
    """

    __slots__ = ("_component", "_name", "_started", "_unit")

    def __init__(self, component: str, name: str, unit: str = "ms") -> None:
        self._component = component
        self._name = name
        self._unit = unit
        # by the frame that entered; innermost last
        self._started: dict[int, list[_Start]] | None = None

    def __enter__(self) -> None:
        if _Switch.on:
            write = _write_of(self._component, self._name, self._unit)
            if self._started is None:
                self._started = {}
            # Its own frame alone has a list here, and the blocks of one frame end in the reverse
            # order of their beginnings.
            starts = self._started.setdefault(id(sys._getframe(1)), [])
            starts.append((get_ident(), write, perf_counter()))

    def __exit__(self, *exception: object) -> None:
        if self._started:
            end_s = perf_counter()
            start = self._take_start(id(sys._getframe(1)))
            if start is not None:
                _, write, start_s = start
                write((end_s - start_s) * UNITS[self._unit])

    def _take_start(self, frame: int) -> _Start | None:
        """That of the frame; for one who entered in another frame than it leaves in (an ExitStack),
        the latest of its thread.
        """
        assert self._started is not None
        starts = self._started.get(frame)
        if starts is None:
            thread = get_ident()
            own = [
                (one[-1][2], at)
                for at, one in list(self._started.items())
                if one and one[-1][0] == thread
            ]
            if not own:
                return None  # timers were off when it began
            frame = max(own)[1]
            starts = self._started[frame]
        start = starts.pop()
        if not starts:
            del self._started[frame]
        return start

    def __call__(self, function: Function) -> Function:
        """The function, timed. Of an `async def` the time until it returns its coroutine is meant:
        time inside it instead.
        """
        component, name, unit = self._component, self._name, self._unit
        check_unit(unit)
        per_second = UNITS[unit]

        @functools.wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            if not _Switch.on:
                return function(*args, **keywords)
            write = _write_of(component, name, unit)
            start_s = perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                write((perf_counter() - start_s) * per_second)

        return timed  # type: ignore[return-value]


# a verb at the place where it is used, and a class so that a timer that is off costs no call more
timer = AutoTimer


def counter_name(component: str, name: str, unit: str = "ms") -> str:
    """What the counter of that timer is called."""
    return f"timer::{component}::{name}({unit})"


def check_unit(unit: str) -> None:
    """Raises ConfigError with the units there are."""
    if unit not in UNITS:
        raise ConfigError(f"a timer with unit={unit!r}: allowed are {', '.join(UNITS)}")


def _write_of(component: str, name: str, unit: str) -> Callable[[float], None]:
    key = component, name, unit
    return _Switch.writes.get(key) or _make_write(key)


def _make_write(key: Key) -> Callable[[float], None]:
    check_unit(key[2])
    # before its counters: enable_timers() may change both meanwhile, the counters first
    writes = _Switch.writes
    counter = _Switch.counters.counter(counter_name(*key), Timer(), FLUSH_COUNT, FLUSH_S)

    def write(duration: float) -> None:
        try:
            counter.write(duration)
        except BadArguments as error:
            # at most once a batch: what is timed must not fail because it is timed
            logger.warning("%s", error)

    writes[key] = write
    return write
