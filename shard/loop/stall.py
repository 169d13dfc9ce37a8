"""The watchdog of a reactor: a handler that keeps it from turning for longer than its budget is
named, with its stack.

One thread of the process looks at each watched reactor twice per budget, so the reactor's path has
nothing to do for it. Each look goes through a table:

    reactor                     same as last time  what it means
    parked, or nobody turns it  -                  it rests: whatever stall there was has ended
    turning                     no                 it moves: whatever stall there was has ended
    turning                     yes                one turn since then; past the budget: a stall
    turning, but in no handler  yes                that too; with `handlers_only` it rests

A stall is told when it is noticed, each time that it has doubled, and when it is over;
REPORTS_PER_MINUTE stalls are told, the rest is counted. While the reactor is parked the looks are
PARKED_LOOK_S apart: 0.02 % of a core. (To be woken at the end of each park would cost what was
woken for its first microseconds.)

One that is over within 1.5 budgets, or in the first PARKED_LOOK_S after a park, may go unseen and
untold; what is told lasted at least the budget. Whoever turns the reactor in a loop of its own
(process.py) counts what this thread may miss: each turn that lasted the budget or longer, once,
when it is over.

A process that was stopped (SIGSTOP, a frozen machine) in the middle of a handler cannot be told
from one whose handler took so long. A thread that turns the reactor and is in no handler has no
core, or waits for the interpreter, which in inline mode (driver.py) the application's own threads
may keep from it: hence `handlers_only`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, Protocol

from shard import runtime
from shard.one_line import Lines

# Long enough that neither a lost core (10 ms on a busy machine) nor a collection of garbage is
# taken for a handler, short enough that one is named before anybody's deadline or heartbeat
# (seconds) suffers. asyncio's debug mode has the same figure.
STALL_BUDGET_S = 0.1
LOOKS_PER_BUDGET = 2
PARKED_LOOK_S = 0.25
# A reactor whose every turn is too long would fill the disk; Seastar tells as many.
REPORTS_PER_MINUTE = 5
# The innermost frames are those that say what it does.
FRAMES_MAX = 30
# For the thread to end: it may be in the middle of a report.
CLOSE_TIMEOUT_S = 5.0

_REACTOR = "shard.loop.reactor"
# the name of a stall that was over before anybody saw what it was in
ENDED = "something that ended just now"

logger = logging.getLogger("shard")


class Turning(Protocol):
    """What the stall watchdog reads of a reactor from another thread: how many turns and parks
    there have been, and whether it is parked now.
    """

    turns: int
    parks: int
    parked: bool


class StallFinding(NamedTuple):
    """What StallCheck.check() has to report of a stall: how many seconds it has lasted, whether it
    is over, and how many stalls were not reported since the last that was.
    """

    lasted_s: float
    over: bool
    untold: int  # stalls that went untold since the last that was


class StallCheck:
    """A stall check decides, look by look, whether a reactor stalls, and what of it is told.

    No thread and no clock here. Owned by one StallDetector. budget_s: how many seconds a turn may
    last; ValueError unless above 0. What a look finds: the table at the file's head.
    """

    def __init__(self, budget_s: float) -> None:
        if not budget_s > 0:
            raise ValueError(
                f"a stall budget of {budget_s} s: more than 0 is needed; "
                "leave the detector out to have none"
            )
        self.budget_s = budget_s
        self.stalls = 0
        self.longest_s = 0.0
        self._turn: int | None = None  # at the last look; None: it rested
        self._since = 0.0  # when that turn was first seen
        self._tell_at_s = budget_s  # how long it must have lasted to be told
        self._stalled = self._told = False  # the turn seen last is a stall; was told
        self._told_at: deque[float] = deque(maxlen=REPORTS_PER_MINUTE)
        self._untold = 0

    def check(self, now: float, turns: int, parked: bool) -> StallFinding | None:
        """One look at `now` seconds: `turns` changes whenever the reactor moves, `parked` that it
        rests. What to tell.
        """
        lasted_s = now - self._since
        if not parked and turns == self._turn:
            if lasted_s < self._tell_at_s:
                return None
            self._tell_at_s = 2 * lasted_s
            self.longest_s = max(self.longest_s, lasted_s)
            if not self._stalled:
                self._begin(now)
            return self._finding(lasted_s, over=False)
        finding = None
        if self._stalled:
            self.longest_s = max(self.longest_s, lasted_s)
            finding = self._finding(lasted_s, over=True)
            self._stalled = self._told = False
        self._turn = None if parked else turns
        self._since = now
        self._tell_at_s = self.budget_s
        return finding

    def saw(self, turns: int) -> bool:
        """Whether that is the turn of the last look: if it goes on, check() may have something to
        tell.
        """
        return turns == self._turn

    def _begin(self, now: float) -> None:
        self.stalls += 1
        self._stalled = True
        self._told = len(self._told_at) < REPORTS_PER_MINUTE or now - self._told_at[0] >= 60.0
        if self._told:
            self._told_at.append(now)
        else:
            self._untold += 1

    def _finding(self, lasted_s: float, over: bool) -> StallFinding | None:
        if not self._told:
            return None
        untold, self._untold = self._untold, 0
        return StallFinding(lasted_s, over, untold)


class StallDetector:
    """Watches one reactor from start() to close(). Owned by whoever owns the reactor.

    reactor       what is watched
    thread_ident  the thread that turns it, or what answers which one does at present (0: none, and
                  then there is no stall)
    budget_s      how long a turn may last, in seconds; math.inf: for ever, and then start() starts
                  no thread
    name          begins every report: "shard 3"
    report        called with each report, in the watchdog's thread; a warning of logger "shard" by
                  default
    engine        packages and modules whose frames are not what a user looks for: the outermost
                  function of none of them is named
    progress      changes whenever the reactor moves; for owners that move it without turns, or turn
                  it in several threads
    handlers_only  a thread that is in the engine's own functions alone does not stall
    counts         whoever turns the reactor calls count()
    on_look        called at the beginning of each look, in the watchdog's thread
    """

    def __init__(
        self,
        reactor: Turning,
        thread_ident: int | Callable[[], int],
        budget_s: float = STALL_BUDGET_S,
        name: str = "reactor",
        report: Callable[[str], object] = logger.warning,
        engine: tuple[str, ...] = ("shard",),
        progress: Callable[[], int] | None = None,
        handlers_only: bool = False,
        counts: bool = False,
        on_look: Callable[[], object] | None = None,
    ) -> None:
        self._reactor = reactor
        self._on_look = on_look
        self._thread_ident = thread_ident if callable(thread_ident) else lambda: thread_ident
        self._name = name
        self._report = report
        self._engine = engine
        self._progress = progress or (lambda: reactor.turns + reactor.parks)
        self._handlers_only = handlers_only
        self._check = StallCheck(budget_s)
        self._handler = ENDED  # that the present stall was last seen in
        self._counted: int | None = 0 if counts else None
        self._longest_s = 0.0  # of those counted

    @property
    def budget_s(self) -> float:
        """How long a turn may last, in seconds."""
        return self._check.budget_s

    @property
    def stalls(self) -> int:
        """Turns that lasted the budget or longer, told or not: where count() is called all that
        ended, else those noticed.
        """
        return self._counted if self._counted is not None else self._check.stalls

    @property
    def longest_s(self) -> float:
        """The longest of them, in seconds; of one under way, as long as it was when last told."""
        return max(self._check.longest_s, self._longest_s)

    def count(self, lasted_s: float) -> None:
        """A turn has ended that lasted so long. For whoever turns the reactor, who calls it for
        each that lasted the budget.
        """
        self._counted = (self._counted or 0) + 1
        self._longest_s = max(self._longest_s, lasted_s)

    def start(self) -> None:
        """Begin to watch. In a simulation, whose time stands still while a handler runs, nothing
        is watched.
        """
        if math.isfinite(self._check.budget_s) and not runtime.shares_process:
            _watch.add(self)

    def close(self) -> None:
        """Watch no longer. From any thread; again: does nothing."""
        _watch.remove(self)

    def next_look(self, now: float) -> float:
        """When to look again."""
        return now + (
            PARKED_LOOK_S if self._reactor.parked else self._check.budget_s / LOOKS_PER_BUDGET
        )

    def look(self, now: float) -> None:
        """One look, by the thread that watches."""
        if self._on_look is not None:
            self._on_look()
        ident = self._thread_ident()
        progress = self._progress()
        rests = self._reactor.parked or not ident
        frame = None
        if not rests and self._check.saw(progress):
            frame = sys._current_frames().get(ident)
            rests = self._handlers_only and not is_in_handler(frame, self._engine)
        finding = self._check.check(now, progress, rests)
        if finding is None:
            return
        if finding.over:
            self._report(
                f"{self._name}: {self._handler} let the reactor go on after "
                f"{finding.lasted_s:.2f} s"
            )
            self._handler = ENDED
            return
        handler, stack = whereabouts(frame, self._engine)
        if self._progress() == progress:
            self._handler = handler
        else:
            # the frame may be that of the next turn: what this one was seen in before, if it was,
            # stays its name
            stack = ""
        untold = (
            f" ({finding.untold} other stalls went untold in the last minute)"
            if finding.untold
            else ""
        )
        text = (
            f"{self._name}: {self._handler} has held the reactor for {finding.lasted_s:.2f} s, "
            f"{self._check.budget_s:g} s are "
            "allowed: nobody else is answered here; let it `await shard.run_blocking(function)`, "
            f"await shard.yield_now() now and then, or run in another shard{untold}"
            f"\n{stack}"
        )
        self._report(Lines(text.rstrip()))


class _Watch:
    """The thread that looks for all detectors of the process; there while one of them watches."""

    def __init__(self) -> None:
        self._due: dict[StallDetector, float] = {}  # when to look at whom
        # held during a look: who has been removed is looked at no more
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    def add(self, detector: StallDetector) -> None:
        """Look at it from now on."""
        with self._changed:
            self._due[detector] = detector.next_look(time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prpc-stalls", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, detector: StallDetector) -> None:
        """Look at it no more; the thread ends with the last one."""
        with self._changed:
            thread = self._thread
            if self._due.pop(detector, None) is None or self._due or thread is None:
                return
            self._thread = None
            self._changed.notify()
        if threading.current_thread() is not thread:
            thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                now = time.monotonic()
                for detector in [one for one, due in self._due.items() if due <= now]:
                    if detector in self._due:  # else removed by what another one reports to
                        self._due[detector] = detector.next_look(now)
                        detector.look(now)
                if self._due:
                    self._changed.wait(max(0.0, min(self._due.values()) - time.monotonic()))


_watch = _Watch()


def _watch_anew() -> None:
    """A child made by fork() has its parent's detectors, and no thread: it watches what it makes
    itself.
    """
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_watch_anew)


def whereabouts(frame: FrameType | None, engine: tuple[str, ...] = ("shard",)) -> tuple[str, str]:
    """The handler that a reactor's thread is in, as "name (file:line)", and the stack from it
    inwards.

    The handler is the outermost function below the innermost turn that is of no package in
    `engine`; without such a function, the innermost one.
    """
    inner = _below_turn(frame)
    if not inner:
        return "the reactor itself", ""
    foreign = [at for at, one in enumerate(inner) if _is_foreign(one, engine)]
    shown = inner[: foreign[-1] + 1] if foreign else inner
    outermost = shown[-1] if foreign else inner[0]
    code = outermost.f_code
    handler = (
        f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}:{outermost.f_lineno})"
    )
    summary = traceback.StackSummary.extract(
        (one, one.f_lineno) for one in reversed(shown[:FRAMES_MAX])
    )
    return handler, "".join(summary.format())


def is_in_handler(frame: FrameType | None, engine: tuple[str, ...] = ("shard",)) -> bool:
    """Whether a reactor's thread is in a function, below its innermost turn, that is of no package
    in `engine`.
    """
    return any(_is_foreign(one, engine) for one in _below_turn(frame))


def _below_turn(frame: FrameType | None) -> list[FrameType]:
    """The frames from `frame` down to the reactor's own, innermost first; none where no reactor
    turns.
    """
    inner = []
    while frame is not None and _module(frame) != _REACTOR:
        inner.append(frame)
        frame = frame.f_back
    return inner if frame is not None else []


def _is_foreign(frame: FrameType, engine: tuple[str, ...]) -> bool:
    module = _module(frame)
    return not any(module == one or module.startswith(f"{one}.") for one in engine)


def _module(frame: FrameType) -> str:
    names: object = frame.f_globals
    # that thread runs on: of a call that has just ended Python 3.11 has given a bool here
    return str(names.get("__name__", "?")) if isinstance(names, dict) else "?"
