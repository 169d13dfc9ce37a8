"""A simulated process: threads, an identity, a clock and chance of its own, on one host.

state     event                      then
runs      its function returns       ended: its kernel hangs up, its threads are gone
runs      its function raises        the same, with that error
runs      kill()                     the same, at any event; nothing of it runs on, no `finally`
runs      stop()                     stopped: its threads wait, its connections stay
stopped   go_on()                    runs
stopped   kill()                     ended
any       refuse_memory()            its slabs are full, and its heap has no room for arrays
any       grant_memory()             they have room again
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from prpc_engine.simulation.errors import SimulationError
from prpc_engine.simulation.network import Network, SimulatedHost
from prpc_engine.simulation.primitives import SimulatedThread
from prpc_engine.simulation.scheduler import Scheduler, ThreadState
from shard import Slab, Weather

T = TypeVar("T")

CLOCK_OFFSET_S_MAX = 1e9  # of a wall clock: some 30 years, so that each date is one


class World(Protocol):
    """What a process is part of: a Simulation."""

    scheduler: Scheduler
    network: Network

    def process_failed(self, process: Process, error: BaseException) -> None:
        """Its function raised."""

    def thread_failed(self, process: Process, thread: str, error: BaseException) -> None:
        """A thread of it ended by an error."""


class Process:
    """One process of a simulation. Made by Simulation.process().

    name, host   its name, and the machine that it runs on
    bind         "address:0", to listen at its host's address
    clock        the monotonic one of its host
    is_dead      it has ended, or was_killed
    slowness     how many times later than usual its threads wake
    result       what its function returned
    error        what that raised
    """

    def __init__(
        self,
        simulation: World,
        name: str,
        host: SimulatedHost,
        number: int,
        function: Callable[[Process], Any],
    ) -> None:
        self._simulation = simulation
        self._scheduler: Scheduler = simulation.scheduler
        self.name = name
        self.host = host
        self.clock = host.clock
        self.number = number
        self.function = function
        self.is_dead = self.was_killed = False
        self.is_stopped = False
        self.slowness = 1.0
        self.clock_offset_s = 0.0  # of its wall clock
        self.result: Any = None
        self.error: BaseException | None = None
        self.chance = self._scheduler.stream(f"{name}/{number}")
        self.own: dict[str, Any] = {}
        self.weather = Weather()
        self._limits: dict[Slab, int] = {}  # of its slabs, how much they may hold
        self._deferred: dict[ThreadState, None] = {}

    def __repr__(self) -> str:
        state = "ended" if self.is_dead else "stopped" if self.is_stopped else "runs"
        return f"<Process {self.name} on {self.host.name}: {state}>"

    @property
    def bind(self) -> str:
        """To listen at: its host's address, any port."""
        return f"{self.host.address}:0"

    def address_of(self, host: str) -> str:
        """The address of a host, which is made when it is first asked for."""
        return self._simulation.network.host(host).address

    @property
    def home(self) -> str:
        """As shard.runtime.this_process() has it."""
        return f"simulated/{self.host.name}/{self.number}/{self.number}"

    # -- what is done to it ------------------------------------------------------------------------

    def kill(self) -> None:
        """As kill -9. In it, in another process, or by the test. Again: does nothing."""
        if not self.is_dead:
            self._note("killed")
            self.was_killed = True
            self._end()
            self._scheduler.leave_if_dead()

    def stop(self) -> None:
        """As SIGSTOP: it does nothing until go_on(); its kernel keeps its connections."""
        if not self.is_stopped and not self.is_dead:
            self._note("stopped")
            self.is_stopped = True

    def go_on(self) -> None:
        """As SIGCONT."""
        if self.is_stopped and not self.is_dead:
            self._note("goes on")
            self.is_stopped = False
            deferred, self._deferred = self._deferred, {}
            for thread in deferred:
                self._scheduler.resume(thread)

    def slow_down(self, slowness: float) -> None:
        """Its threads wake so many times later than usual; 1.0: no longer."""
        if not isinstance(slowness, int | float) or not 1.0 <= slowness < math.inf:
            raise SimulationError(f"slow_down({slowness!r:.100}): how many times, 1.0 or more")
        if self.slowness != slowness and not self.is_dead:
            self._note(f"threads wake {slowness:.1f} times as late")
        self.slowness = slowness

    def set_clock(self, offset_s: float) -> None:
        """Its wall clock is so many seconds ahead of the simulation's."""
        if not isinstance(offset_s, int | float) or not abs(offset_s) <= CLOCK_OFFSET_S_MAX:
            raise SimulationError(
                f"set_clock({offset_s!r:.100}): seconds, at most {CLOCK_OFFSET_S_MAX:.0e} off"
            )
        if not self.is_dead:
            self._note(f"its clock is {offset_s:.3f} s ahead")
        self.clock_offset_s = offset_s

    def refuse_memory(self) -> None:
        """From now on there is none for arrays: empty() and a send that copies raise ShmFull, what
        comes raises MemoryError where it is read. Small messages pass.
        """
        if not self.weather.no_memory and not self.is_dead:
            self._note("no memory for arrays")
            self.weather.no_memory = True
            for slab in self._limits:
                slab.limit_bytes = 0

    def grant_memory(self) -> None:
        """There is again."""
        if self.weather.no_memory and not self.is_dead:
            self._note("has memory for arrays")
            self.weather.no_memory = False
            for slab, limit_bytes in self._limits.items():
                slab.limit_bytes = limit_bytes

    def _note(self, text: str) -> None:
        self._scheduler.timeline.note(self._scheduler.now, self.name, "fault", text)

    # -- for the scheduler -------------------------------------------------------------------------

    def defer(self, thread: ThreadState) -> None:
        """It was to run, and the process is stopped."""
        self._deferred[thread] = None

    def failed(self, thread: ThreadState, error: BaseException) -> None:
        """A thread of it ended by an error of its own."""
        self._simulation.thread_failed(self, thread.name, error)

    def begin(self) -> None:
        """Start its main thread."""

        def main() -> None:
            try:
                self.result = self.function(self)
                if never_runs(self.result):  # as of a lambda
                    raise SimulationError(f"it answers {self.result!r:.100}, which nothing runs")
            except (Exception, SystemExit) as error:
                if not isinstance(error, SystemExit) or error.code:  # sys.exit(0) is an end as any
                    self.error = error
                    self._simulation.process_failed(self, error)
            self._scheduler.timeline.note(self._scheduler.now, self.name, "note", "ended")
            self._end()

        SimulatedThread(self._scheduler, target=main, name="main").start_in(self)

    def _end(self) -> None:
        self.is_dead = True
        self.close_descriptors()
        self._simulation.network.process_ended(self)

    def close_descriptors(self) -> None:
        """Its kernel closes what it had open, as shard.runtime.close_with_process() was told."""
        for close in self.own.pop("descriptors", ()):
            close()

    def has_slab(self, slab: Slab) -> None:
        """A node of it, or the process, has that."""
        if slab not in self._limits:
            self._limits[slab] = slab.limit_bytes
            if self.weather.no_memory:
                slab.limit_bytes = 0

    def close_slabs(self) -> None:
        """Its simulation is over: nobody else closes that of empty()."""
        for slab in self._limits:
            slab.close()
        self._limits.clear()

    def made_once(self, key: str, make: Callable[[], T]) -> T:
        """As shard.runtime.own()."""
        if key not in self.own:
            self.own[key] = made = make()
            if isinstance(made, Slab):
                self.has_slab(made)
        found: T = self.own[key]
        return found


def never_runs(one: object) -> bool:
    """Whether it is `async`, or has a `yield`: a call of it would run none of its code; or what
    such a call answers.
    """
    return (
        inspect.iscoroutinefunction(one)
        or inspect.isgeneratorfunction(one)
        or inspect.isasyncgenfunction(one)
        or inspect.iscoroutine(one)
        or inspect.isgenerator(one)
        or inspect.isasyncgen(one)
    )
