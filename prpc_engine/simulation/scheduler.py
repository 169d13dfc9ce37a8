r"""Virtual time, and one thread at a time: who runs next is drawn from a seed.

Simulated threads are real threads under a baton. Each runs until it waits for something (a lock, a
sleep, an empty epoll); it then takes the earliest entry of the agenda and hands the baton to the
thread that this entry wakes. Nothing else runs meanwhile, so what happens, and in which order,
follows from the seed alone.

    agenda    a heap of (time, chance, number, what): a thread to wake, or an event to run (a
              message arrives, a fault begins)
    wait      a thread waits once at a time, under a number of its own; entries of earlier waits
              that are still in the heap are passed over
    events    run in whatever thread has the baton, in the name of the process that they are for

    thread    begun -> ready -> runs <-> waits -> ended
                                  \-> abandoned (its process was killed; ended by close())

Time passes while a thread waits, and a little with each look at the clock (TICK_S): a loop that
polls its clock comes to an end. Entries that are due by then wait for the baton; where a thread
looks at the clock or takes a lock it may lose it to them, by a chance that is drawn for each seed.
Now and then a thread stands still there for a slice of the machine's scheduler, whatever it holds:
other threads, and messages, overtake it between two of its steps.
"""

from __future__ import annotations

import _thread
import hashlib
import heapq
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from prpc_engine.simulation.clock import HostClock
from prpc_engine.simulation.errors import Deadlock, SimulationError, Stuck
from prpc_engine.simulation.timeline import Timeline

TICK_S = 1e-6  # what a look at the clock takes
# A woken thread runs after so many seconds: half of the time soon, else up to a scheduler's slice.
WAKE_S_MIN, WAKE_S_USUAL, WAKE_S_MAX = 2e-6, 60e-6, 1e-3
LONG_WAKE_CHANCE = 0.02
# How likely a thread loses the baton where it may; one of these for each seed.
PREEMPTIONS = (0.0, 0.02, 0.2, 0.5)
# In those of them that are not 0 a thread stands still at one of so many looks, for so long.
LOOKS_A_SLICE, SLICE_S_MAX = 300, 6e-3
INTERRUPT_PATIENCE_S = 5.0  # a thread that is interrupted with run() comes to its next wait
PATIENCE_S = 60.0


class Abandoned(BaseException):
    """Raised in the threads that are left when a simulation ends. Not caught by handlers."""


class Owner(Protocol):
    """The process that a thread belongs to."""

    name: str
    is_dead: bool
    is_stopped: bool
    slowness: float  # how many times longer than usual its threads take to wake
    clock: HostClock  # of its host: timeouts of its threads are measured in it

    def defer(self, thread: ThreadState) -> None:
        """It was to run, and the process is stopped."""

    def failed(self, thread: ThreadState, error: BaseException) -> None:
        """A thread of it ended by an error of its own."""


class ThreadState:
    """One thread under the baton. Made by Scheduler.start()."""

    __slots__ = (
        "ended",
        "gate",
        "is_woken",
        "joiners",
        "name",
        "number",
        "owner",
        "until_s",
        "wait",
        "woke_by_time",
    )

    def __init__(self, number: int, name: str, owner: Owner) -> None:
        self.number = number
        self.name = name
        self.owner = owner
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.wait = 0  # the number of the wait it is in
        self.is_woken = False  # an entry of this wait is in the agenda, beside that of its time
        self.woke_by_time = False
        self.until_s: float | None = None  # what the host's clock shows when its time is over
        self.ended = False
        self.joiners: list[ThreadState] = []


Entry = tuple[float, float, int, "ThreadState | Callable[[], object]", int]


class Scheduler:
    """The agenda, the clock and the baton of one simulation. Owned by a Simulation.

    seed      what all is drawn from
    timeline  is told what happens
    patience_s  real seconds without an entry taken, after which a thread waits for something real
    """

    def __init__(self, seed: int, timeline: Timeline, patience_s: float = PATIENCE_S) -> None:
        self.now = 0.0
        self.events = 0
        self.timeline = timeline
        self._seed = seed
        self._patience_s = patience_s
        self._chance = self.stream("scheduler").random
        self._preemption = PREEMPTIONS[int(self._chance() * len(PREEMPTIONS))]
        self._looks = self._looks_to_come()
        self._agenda: list[Entry] = []
        self._numbers = 0
        self._counts: dict[str, int] = {}
        self._is_in_event = False
        self._threads: dict[int, ThreadState] = {}  # by ident, those that have begun
        self._all: list[ThreadState] = []
        self._real: list[threading.Thread] = []
        self._baton: ThreadState | None = None  # who runs; None: who called run()
        self._controller = _thread.allocate_lock()
        self._controller.acquire()
        self._is_running = False
        self._until: Callable[[], bool] = lambda: False
        self._limit_s = 0.0
        self._why: BaseException | None = None
        self._ending: ThreadState | None = None  # close() waits for its end
        self._stuck: set[ThreadState] = set()  # have not come back, and are left to themselves
        self.is_over = False

    def stream(self, name: str) -> random.Random:
        """A source of chance of its own, so that one draw more here changes none elsewhere."""
        return random.Random(f"{self._seed}/{name}")

    def draw(self) -> float:
        """A number from 0 to 1, for a choice between threads."""
        return self._chance()

    def count(self, what: str) -> int:
        """How many there have been of those, this one included."""
        self._counts[what] = count = self._counts.get(what, 0) + 1
        return count

    # -- who is here -------------------------------------------------------------------------------

    def here(self) -> ThreadState | None:
        """The simulated thread that calls this; None: another thread of the interpreter."""
        return self._threads.get(_thread.get_ident())

    # -- time --------------------------------------------------------------------------------------

    def clock_or(self, otherwise: Callable[[], float]) -> Callable[[], float]:
        """The function that replaces time.monotonic. A simulated thread gets the clock of its host;
        each call takes TICK_S, and the thread may lose the baton there. Other threads of the
        interpreter get `otherwise`. One function, since a third of a simulation's calls are this.
        """
        threads, agenda, here = self._threads, self._agenda, _thread.get_ident

        def look() -> float:
            me = threads.get(here())
            if me is None:
                return otherwise()
            if not self.is_over:
                self.now += TICK_S
                self._looks -= 1
                if self._preemption and (self._looks < 0 or (agenda and agenda[0][0] <= self.now)):
                    self.give_way()
            return me.owner.clock.shows(self.now)

        return look

    def clock(self) -> float:
        """What the clock of the caller's host shows, without a look: for deadlines."""
        me = self.here()
        return self.now if me is None else me.owner.clock.shows(self.now)

    def set_rate(self, clock: HostClock, rate: float) -> None:
        """A host's clock runs so fast from now on; what waits there for its time waits on."""
        clock.set_rate(rate, self.now)
        for thread in self._all:
            waits = not (thread.ended or thread.is_woken or thread.owner.is_dead)
            if waits and thread.owner.clock is clock and thread.until_s is not None:
                thread.wait += 1  # the entry that it has is passed over
                self._enter(max(self.now, clock.when(thread.until_s)), thread, thread.wait)

    def pass_by(self) -> None:
        """A place where a thread may lose the baton: before it has a lock, say."""
        agenda = self._agenda
        self._looks -= 1  # as clock_or() has it
        if self._preemption and (self._looks < 0 or (agenda and agenda[0][0] <= self.now)):
            self.give_way()

    def _looks_to_come(self) -> int:
        return int(2 * LOOKS_A_SLICE * self._chance())

    def give_way(self) -> None:
        """Let something else that is due run first, perhaps; or stand still for a slice."""
        if self._is_in_event or self.is_over:
            return
        if self._looks < 0:
            self._looks = self._looks_to_come()
            self._stand_still(SLICE_S_MAX * self._chance() ** 2)
        elif self._chance() < self._preemption:
            self._stand_still(0.0)

    def _stand_still(self, seconds: float) -> None:
        me = self.here()
        if me is None or me is not self._baton:
            return
        me.wait += 1
        me.is_woken = True
        self._enter(self.now + seconds, me, me.wait)
        self._hand_over(me)

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        """Run event() then, in no thread of its own."""
        self._enter(max(time_s, self.now), event, 0)

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        """The same, in so many seconds."""
        self._enter(self.now + delay_s, event, 0)

    def _enter(self, time_s: float, what: ThreadState | Callable[[], object], wait: int) -> None:
        self._numbers += 1
        heapq.heappush(self._agenda, (time_s, self._chance(), self._numbers, what, wait))

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until woken, `timeout_s` seconds of its host's clock at most; whether it was
        woken.
        """
        me = self.here()
        if self._is_in_event:
            raise SimulationError(
                "an event of a simulation, or the until of run(), may not wait: "
                "have a process do what waits"
            )
        if me is None:
            raise SimulationError(
                "a thread that is not simulated would wait for a simulated one: "
                "look at the objects of a simulation inside a process of it"
            )
        if self.is_over:
            raise Abandoned
        if timeout_s is not None and math.isnan(timeout_s):  # of no order: it would never be over
            raise ValueError("Invalid value NaN (not a number)")
        me.wait += 1
        me.is_woken = False
        if timeout_s is None:
            me.until_s = None
        else:
            clock = me.owner.clock
            me.until_s = clock.shows(self.now) + max(0.0, timeout_s)
            self._enter(clock.when(me.until_s), me, me.wait)
        self._hand_over(me)
        return not me.woke_by_time

    def wake(self, thread: ThreadState) -> None:
        """End its wait, soon. It may have ended, or be woken already."""
        if thread.is_woken or thread.ended or self.is_over:
            return
        thread.is_woken = True
        self._enter(self.now + self._wake_s(thread.owner), thread, thread.wait)

    def _wake_s(self, owner: Owner) -> float:
        chance = self._chance()
        if chance < LONG_WAKE_CHANCE:
            latency_s = WAKE_S_MAX * self._chance()
        else:
            latency_s = WAKE_S_MIN + WAKE_S_USUAL * (chance * chance)
        return latency_s * owner.slowness

    def resume(self, thread: ThreadState) -> None:
        """Its process goes on after it was stopped."""
        thread.is_woken = True
        self._enter(self.now + self._wake_s(thread.owner), thread, thread.wait)

    def leave_if_dead(self) -> None:
        """The process of whoever calls this was killed: nothing of it runs on."""
        me = self.here()
        if not self._is_in_event and me is not None and me is self._baton and me.owner.is_dead:
            me.wait += 1
            self._hand_over(me)

    # -- threads -----------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        owner: Owner,
        run: Callable[[], object],
        launch: Callable[[Callable[[], None]], threading.Thread],
    ) -> ThreadState:
        """Begin a thread of that process: launch(live) has a real one call live()."""
        thread = ThreadState(len(self._all), name, owner)
        self._all.append(thread)
        thread.is_woken = True
        ready = _thread.allocate_lock()
        ready.acquire()
        self._real.append(launch(lambda: self._live(thread, ready, run)))
        ready.acquire()  # until it waits for the baton
        self._enter(self.now + self._wake_s(owner), thread, 0)
        return thread

    def _live(
        self, thread: ThreadState, ready: _thread.LockType, run: Callable[[], object]
    ) -> None:
        self._threads[_thread.get_ident()] = thread
        ready.release()
        thread.gate.acquire()
        try:
            if not self.is_over:
                run()
        except Abandoned:
            pass  # the simulation is over
        except BaseException as error:
            if not self.is_over:
                thread.owner.failed(thread, error)
        finally:
            thread.ended = True
            self._threads.pop(_thread.get_ident(), None)
            if self.is_over:
                if self._ending is thread:  # else close() has given it up
                    self._controller.release()
            else:
                for joiner in thread.joiners:
                    self.wake(joiner)
                self._hand_over(None)

    # -- the baton ---------------------------------------------------------------------------------

    def _hand_over(self, me: ThreadState | None) -> None:
        """Take entries until one wakes a thread; returns once `me` has the baton again, at once for
        None, which ends.
        """
        next_thread = self._next()
        if next_thread is me is not None:
            return
        self._baton = next_thread
        (self._controller if next_thread is None else next_thread.gate).release()
        if me is not None:
            me.gate.acquire()
            if self.is_over or me.owner.is_dead:
                raise Abandoned

    def _next(self) -> ThreadState | None:
        """Whose turn it is; None: the controller's, as run() is over. Runs the events that come
        before.
        """
        agenda = self._agenda
        while self._why is None and not self._has_come():
            if not agenda:
                waiting = self._waiting()
                if waiting:  # else all processes have ended
                    self._why = Deadlock(waiting)
                break
            time_s, _, _, what, wait = agenda[0]
            if time_s > self._limit_s:
                self.now = max(self.now, self._limit_s)
                break
            heapq.heappop(agenda)
            if isinstance(what, ThreadState):
                if what.ended or what.wait != wait or what.owner.is_dead:
                    continue
                if what.owner.is_stopped:
                    what.owner.defer(what)
                    continue
                self.now = max(self.now, time_s)
                self.events += 1
                what.woke_by_time = not what.is_woken
                what.is_woken = True
                what.wait += 1
                self.timeline.thread(self.now, what.number, what.owner.name, what.name)
                return what
            self.now = max(self.now, time_s)
            self.events += 1
            self._is_in_event = True
            try:
                what()
            except BaseException as error:
                self._why = SimulationError(f"an event of the simulation raised {error!r}")
                self._why.__cause__ = error
            finally:
                self._is_in_event = False
        return None

    def _has_come(self) -> bool:
        """Whether until() holds. Like an event it is asked in any thread, and may not wait."""
        self._is_in_event = True
        try:
            return self._until()
        except BaseException as error:
            self._why = error
            return True
        finally:
            self._is_in_event = False

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Let the simulation go on until that holds, or for so many seconds of its time. Called
        outside of it. Raises Deadlock, Stuck, SimulationError, and what until() raises.
        """
        if self._is_running or self.here() is not None:
            raise SimulationError("run() is called by the test, not inside of the simulation")
        self._is_running, self._until, self._limit_s = True, until, self.now + limit_s
        try:
            self._hand_over_to_all()
        finally:
            self._is_running = False
        why, self._why = self._why, None
        if why is not None:
            raise why

    def _hand_over_to_all(self) -> None:
        thread = self._next()
        if thread is None:
            return
        self._baton = thread
        thread.gate.release()
        try:
            self._wait_for_baton()
        except Stuck:
            raise
        except BaseException as error:  # KeyboardInterrupt: no thread may run on while others end
            self._why = error
            if not self._controller.acquire(timeout=INTERRUPT_PATIENCE_S):
                self._give_up()
            self._why = None
            raise

    def _wait_for_baton(self) -> None:
        seen = self.events
        while not self._controller.acquire(timeout=self._patience_s):
            if seen == self.events:
                raise self._give_up()
            seen = self.events

    def _waiting(self) -> list[str]:
        return [
            f"{each.owner.name}/{each.name}{' (stopped)' if each.owner.is_stopped else ''}"
            for each in self._all
            if not each.ended and not each.owner.is_dead
        ]

    def close(self) -> None:
        """End all threads that are left, one after the other."""
        self.is_over = True
        stuck = None
        for thread in self._all:
            if not thread.ended:
                stuck = self._end(thread) or stuck
        for thread, real in zip(self._all, self._real, strict=False):
            if thread.ended:  # what their frames hold is garbage once they have ended
                threading.Thread.join(real, self._patience_s)
        self._agenda.clear()
        self._until = lambda: True  # it may hold what the test does
        self._all.clear()
        self._real.clear()
        if stuck is not None:
            raise stuck

    def _end(self, thread: ThreadState) -> Stuck | None:
        if thread in self._stuck:
            return None  # run() has said so; it ends by itself once what it waits for has come
        self._ending = self._baton = thread
        thread.gate.release()
        return None if self._controller.acquire(timeout=self._patience_s) else self._give_up()

    def _give_up(self) -> Stuck:
        """The thread that has the baton does not come back."""
        thread = self._baton
        if thread is None:
            return Stuck("?", _stacks())
        self._stuck.add(thread)
        return Stuck(f"{thread.owner.name}/{thread.name}", _stacks())


def _stacks() -> str:
    frames = sys._current_frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )


def digest_of(lines: list[str]) -> str:
    """A name for what happened: equal for equal runs."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
