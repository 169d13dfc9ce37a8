"""What goes wrong in a simulation, and when: drawn from its seed before it begins, so that a fault
can be left out (shrink.py) and all others stay what they are.

    fault   what it does                              and its end
    cut     no message from one host to another, one  mended
            way or both
    reset   one connection is lost, with what is on
            its way: now, or when its next message
            has arrived
    kill    kill -9 of one process                    it is started again
    crash   a host loses its power                    it comes back, its processes are started again
    stop    SIGSTOP of one process                    SIGCONT
    slow    the threads of one process wake late      as before
    clock   the wall clock of one process is set      (it stays so)
    drift   the clocks of one host run faster or      (they stay so)
            slower
    full    there is no room on the disk of a host    there is again
    memory  one process has none for arrays           it has again

A fault picks its target when it begins, among those there are then. At the end of its time the
nemesis mends all: what is alive then has to come to an end by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, TypeVar

from prpc_engine.simulation.disk import Disk
from prpc_engine.simulation.errors import SimulationError
from prpc_engine.simulation.network import Network
from prpc_engine.simulation.process import Process
from prpc_engine.simulation.scheduler import Scheduler
from prpc_engine.simulation.timeline import Timeline

T = TypeVar("T")
SLOWNESS = 200.0  # how many times later threads of a slow process wake, at most
NOW_SHARE = 0.4  # of resets; the others wait for a message
RATE_MAX = 1000.0  # faults of one kind a second; they are all drawn before the run
CLOCK_S = 100.0  # how far a clock is set, at most
# How much faster or slower a host's clocks run: as quartz does, or, in a share of all cases, as no
# machine that is whole.
DRIFT_USUAL, DRIFT_MAX, DRIFT_MAX_SHARE = 200e-6, 0.05, 0.4


class Victim(Protocol):
    """What faults happen to: a Simulation."""

    scheduler: Scheduler
    network: Network
    timeline: Timeline
    processes: dict[str, Process]
    disks: dict[str, Disk]

    @property
    def now(self) -> float:
        """Seconds since the beginning."""

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        """Have that happen then."""

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        """The same, in so many seconds."""

    def start_again(self, name: str) -> Process:
        """A process that has ended runs once more."""

    def cut(self, one: str, other: str, both_ways: bool = True) -> None:
        """No message passes."""

    def mend(self, one: str, other: str) -> None:
        """All messages pass."""

    def crash(self, host: str) -> None:
        """A host loses its power."""

    def boot(self, host: str) -> None:
        """It is there again."""

    def drift(self, host: str, rate: float) -> None:
        """Its clocks run so fast."""

    def fill_disk(self, host: str, is_full: bool = True) -> None:
        """There is no room on it."""


@dataclass(frozen=True)
class Rates:
    """How many faults of each kind there are in a second, on the average: 0 to RATE_MAX. Those that
    a job lives through only if it expects their errors (full, memory) are 0 unless asked for.
    Raises ValueError.
    """

    cut: float = 0.1
    reset: float = 0.2
    kill: float = 0.1
    crash: float = 0.02
    stop: float = 0.1
    slow: float = 0.1
    clock: float = 0.05
    drift: float = 0.05
    full: float = 0.0
    memory: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            rate = getattr(self, each.name)
            if not isinstance(rate, int | float) or not 0.0 <= rate <= RATE_MAX:
                raise ValueError(
                    f"Rates({each.name}={rate!r:.100}): 0 to {RATE_MAX:g} faults a second"
                )


@dataclass(frozen=True)
class Fault:
    """One of them. picks: numbers from 0 to 1, for what it is done to."""

    number: int
    kind: str
    begins_s: float
    lasts_s: float
    picks: tuple[float, float, float]

    def __str__(self) -> str:
        return f"fault {self.number}: {self.kind} at {self.begins_s:.3f} s for {self.lasts_s:.3f} s"


@dataclass
class Nemesis:
    """Draws faults for a simulation, and brings them about.

    until_s       no fault begins later, and all have ended by then
    lasts_s       the longest of them
    may_end       names of processes that may be killed; they are started again
    may_kill      asked before one of them is killed: a fault that it forbids does not happen
    skip          numbers of faults that are left out: each does nothing when its time comes
    """

    simulation: Victim
    rates: Rates
    until_s: float
    lasts_s: float = 2.0
    may_end: Sequence[str] = ()
    skip: frozenset[int] = frozenset()
    may_kill: Callable[[Process], bool] = lambda process: True
    faults: list[Fault] = field(default_factory=list)
    _over: bool = False

    def __post_init__(self) -> None:
        draw = self.simulation.scheduler.stream("nemesis").random
        for each in fields(self.rates):
            rate = getattr(self.rates, each.name)
            at_s = self.simulation.now
            while rate > 0:
                at_s += 2 * draw() / rate
                if at_s >= self.until_s:
                    break
                lasts_s = min(self.lasts_s * draw() ** 2, self.until_s - at_s)
                self.faults.append(
                    Fault(len(self.faults), each.name, at_s, lasts_s, (draw(), draw(), draw()))
                )
        for fault in self.faults:
            self.simulation.at(fault.begins_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        self.simulation.at(self.until_s, self._end)

    def _begin(self, fault: Fault) -> None:
        if fault.number in self.skip:
            return  # it has its place in the agenda: up to there the run is what it was with it
        begin: dict[str, Callable[[Fault], Callable[[], object] | None]] = {
            "cut": self._cut,
            "reset": self._reset,
            "kill": self._kill,
            "crash": self._crash,
            "stop": self._stop,
            "slow": self._slow,
            "clock": self._clock,
            "drift": self._drift,
            "full": self._full,
            "memory": self._memory,
        }
        undo = begin[fault.kind](fault)
        if undo is not None:
            self.simulation.after(fault.lasts_s, undo)

    # -- the faults: each answers what ends it -----------------------------------------------------

    def _cut(self, fault: Fault) -> Callable[[], object] | None:
        hosts = list(self.simulation.network.hosts)
        if len(hosts) < 2:
            return None
        one = _pick(hosts, fault.picks[0])
        other = _pick([host for host in hosts if host != one], fault.picks[1])
        self.simulation.cut(one, other, both_ways=fault.picks[2] < 0.6)
        return lambda: self._unless_down(one, other)

    def _unless_down(self, one: str, other: str) -> None:
        hosts = self.simulation.network.hosts
        if not (hosts[one].is_down or hosts[other].is_down):
            self.simulation.mend(one, other)

    def _reset(self, fault: Fault) -> None:
        network = self.simulation.network
        connections = network.connections()
        if connections:
            one, other = _pick(connections, fault.picks[0])
            why = "the network was reset"
            if fault.picks[1] < NOW_SHARE:
                network.reset(one, why)
            else:
                network.reset_after_next(one if fault.picks[2] < 0.5 else other, why)

    def _kill(self, fault: Fault) -> Callable[[], object] | None:
        process = self._one(fault.picks[0], self._mortals())
        if process is None or not self.may_kill(process):
            return None
        process.kill()
        return lambda: self._start_again(process)

    def _mortals(self) -> list[Process]:
        """Those that may be killed and have begun."""
        processes = self.simulation.processes
        return [processes[name] for name in self.may_end if name in processes]

    def _start_again(self, process: Process) -> None:
        now = self.simulation.processes[process.name]
        if now is process and not process.host.is_down:
            self.simulation.start_again(process.name)

    def _crash(self, fault: Fault) -> Callable[[], object] | None:
        hosts = [
            host.name
            for host in self.simulation.network.hosts.values()
            if not host.is_down and self._may_crash(host.name)
        ]
        if not hosts:
            return None
        host = _pick(hosts, fault.picks[0])
        self.simulation.crash(host)
        return lambda: self._boot(host)

    def _may_crash(self, host: str) -> bool:
        on_it = [each for each in self.simulation.processes.values() if each.host.name == host]
        return bool(on_it) and all(each.name in self.may_end for each in on_it)

    def _boot(self, host: str) -> None:
        if self.simulation.network.hosts[host].is_down:
            self.simulation.boot(host)
            for process in list(self.simulation.processes.values()):
                if process.host.name == host and process.is_dead:
                    self.simulation.start_again(process.name)

    def _stop(self, fault: Fault) -> Callable[[], object] | None:
        process = self._one(fault.picks[0])
        if process is None:
            return None
        process.stop()
        return process.go_on

    def _slow(self, fault: Fault) -> Callable[[], object] | None:
        process = self._one(fault.picks[0])
        if process is None:
            return None
        process.slow_down(1.0 + SLOWNESS * fault.picks[1] ** 2)
        return lambda: process.slow_down(1.0)

    def _clock(self, fault: Fault) -> None:
        process = self._one(fault.picks[0])
        if process is not None:
            process.set_clock((fault.picks[1] - 0.5) * 2 * CLOCK_S)

    def _drift(self, fault: Fault) -> None:
        hosts = list(self.simulation.network.hosts)
        if hosts:
            most = DRIFT_MAX if fault.picks[1] < DRIFT_MAX_SHARE else DRIFT_USUAL
            rate = 1.0 + (fault.picks[2] - 0.5) * 2 * most
            self.simulation.drift(_pick(hosts, fault.picks[0]), rate)

    def _full(self, fault: Fault) -> Callable[[], object] | None:
        hosts = list(self.simulation.disks)
        if not hosts:
            return None
        host = _pick(hosts, fault.picks[0])
        self.simulation.fill_disk(host)
        return lambda: self.simulation.fill_disk(host, False)

    def _memory(self, fault: Fault) -> Callable[[], object] | None:
        process = self._one(fault.picks[0])
        if process is None:
            return None
        process.refuse_memory()
        return process.grant_memory

    def _one(self, pick: float, among: Sequence[Process] | None = None) -> Process | None:
        if among is None:
            among = list(self.simulation.processes.values())
        alive = [each for each in among if not each.is_dead and not each.is_stopped]
        return _pick(alive, pick) if alive else None

    # -- the end -----------------------------------------------------------------------------------

    def _end(self) -> None:
        simulation = self.simulation
        unknown = [name for name in self.may_end if name not in simulation.processes]
        if unknown:
            raise SimulationError(
                f"let_loose(may_end): no process was {unknown}, but {list(simulation.processes)}"
            )
        for host in list(simulation.network.hosts.values()):
            self._boot(host.name)
        simulation.network.mend_all()
        for name in simulation.disks:
            simulation.fill_disk(name, False)
        for process in list(simulation.processes.values()):
            process.go_on()
            process.slow_down(1.0)
            process.grant_memory()
            if process.is_dead and process.was_killed and process.name in self.may_end:
                simulation.start_again(process.name)
        self._over = True
        simulation.timeline.note(simulation.now, "nemesis", "fault", "all is mended")

    @property
    def is_over(self) -> bool:
        """All faults have ended."""
        return self._over


def _pick(among: Sequence[T], number: float) -> T:
    return among[int(number * len(among))]
