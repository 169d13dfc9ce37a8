"""A whole job in one process, on virtual time, from a seed.

    def master(process):
        with Master(f"{process.host.address}:7000") as master:
            master.serve_forever()

    with Simulation(seed=7) as simulation:
        simulation.process("master", master, host="a")
        worker = simulation.process("worker", train, host="b")
        simulation.run(until=worker)

Masters, services, clients and tables are the real ones; time, threads, chance and the network are
the simulation's. Equal seeds give equal runs: `digest` says so.
"""

from __future__ import annotations

import asyncio  # noqa: F401 - the engine turns differently once a program has imported it
import functools
import gc
import logging
import math
import operator
import os
import random
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import numpy as np

from prpc_engine.errors import text_of
from prpc_engine.simulation import primitives
from prpc_engine.simulation.clock import RATE_MAX, RATE_MIN
from prpc_engine.simulation.disk import Disk
from prpc_engine.simulation.errors import ProcessFailed, SimulationError
from prpc_engine.simulation.nemesis import Fault, Nemesis, Rates
from prpc_engine.simulation.network import Network, SimulatedHost
from prpc_engine.simulation.process import Process, never_runs
from prpc_engine.simulation.scheduler import PATIENCE_S, Scheduler
from prpc_engine.simulation.timeline import Timeline
from prpc_engine.simulation.transport import transports_of
from shard import runtime

EPOCH_S = 1_767_225_600.0  # what wall clocks say at the beginning: 1 January 2026
COLLECTIONS_MAX = 10  # of garbage, at the end: what one frees may make more for the next
NUMPY_SEEDS = 2**32  # that numpy's own generator takes
LIMIT_S = 3600.0  # of virtual time, that run() takes at most


class Simulation:
    """One job in this process. A context manager: inside, shard.runtime is the simulation's for the
    threads of simulated processes, and for no others.

    seed      what all is drawn from: who runs next, what a message takes, what is random
    keep      keep all events for timeline.text() and timeline.write_trace(), not their digest alone
    may_fail  functions of processes may raise; else run() raises ProcessFailed
    skip      numbers of the nemesis's faults that are left out
    patience_s  real seconds that a thread may compute, or wait for something that is not simulated,
              before run() raises Stuck

    Raises SimulationError where another one is open.
    """

    def __init__(
        self,
        seed: int,
        keep: bool = False,
        may_fail: bool = False,
        skip: Collection[int] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        if not _seconds("patience_s", patience_s) > 0:
            raise SimulationError(f"Simulation(patience_s={patience_s}): more than 0")
        if not isinstance(seed, int):
            raise SimulationError(f"Simulation(seed={seed!r:.100}): an int, to have it again")
        self.seed = seed
        try:
            self._skip = frozenset(map(operator.index, skip))
        except TypeError:
            raise SimulationError(f"skip={skip!r:.100}: numbers of faults, as [0, 2]") from None
        self.nemesis: Nemesis | None = None
        self.timeline = Timeline(keep)
        self.scheduler = Scheduler(seed, self.timeline, patience_s)
        self.network = Network(self.scheduler)
        self.processes: dict[str, Process] = {}
        self.disks: dict[str, Disk] = {}  # by host
        self._homes: dict[str, Process] = {}
        self._may_fail = may_fail
        self._failure: BaseException | None = None
        self._bells: dict[int, primitives.SimulatedBell] = {}
        self._leaving = ExitStack()
        self._is_open = False

    # -- what takes part ---------------------------------------------------------------------------

    def host(self, name: str) -> SimulatedHost:
        """The machine of that name, made when it is first asked for."""
        return self.network.host(name)

    def process(self, name: str, function: Callable[[Process], Any], host: str = "host") -> Process:
        """Begin a process: function(process) is its main thread, and ends it. A name that was used
        by a process that has ended is that process, started again.
        """
        self._check_open("process()")
        if not callable(function):
            raise SimulationError(f"process({name!r:.100}, {function!r:.100}): function(process)")
        if never_runs(function):
            raise SimulationError(
                f"process({name!r:.100}, {function!r:.100}): nothing would run what is `async` or "
                "has a `yield`: a plain function; handlers of a service may be `async def`"
            )
        before = self.processes.get(name)
        if before is not None and not before.is_dead:
            raise SimulationError(f"process {name} runs: kill() it before it is started again")
        if self.host(host).is_down:
            raise SimulationError(f"host {host!r:.100} has no power: boot() it, then begin {name}")
        number = self.scheduler.count("process")
        process = Process(self, name, self.host(host), number, function)
        self.processes[name] = self._homes[process.home] = process
        self.timeline.note(self.now, name, "note", f"begins on {host}")
        process.begin()
        return process

    def start_again(self, name: str) -> Process:
        """The process of that name, which has ended, runs the same function once more, in a new
        process on its host.
        """
        before = self.processes.get(name)
        if before is None:
            raise SimulationError(f"no process {name!r} to start again: {sorted(self.processes)}")
        return self.process(name, before.function, before.host.name)

    def disk(self, host: str, folder: str | Path) -> None:
        """That folder, which exists, is on a disk of this host's own: when it crashes, what its
        processes did not sync there is lost or torn. One for each host, with files of its processes
        alone. Raises SimulationError.
        """
        self.network.known(host)
        if (
            not isinstance(folder, str | os.PathLike)
            or not str(folder)
            or not Path(folder).is_dir()
        ):
            raise SimulationError(
                f"disk({host!r}, {folder!r:.100}): no such folder: make it before"
            )
        path = os.path.realpath(folder)
        others = [disk.folder for disk in self.disks.values()]
        if host in self.disks or any(
            other.is_relative_to(path) or Path(path).is_relative_to(other) for other in others
        ):
            raise SimulationError(
                f"disk({host!r}, {str(folder)!r:.100}): a host has one disk, and no other host's "
                "folder is on it"
            )
        self.disks[host] = Disk(Path(path), self.scheduler.stream(f"disk of {host}"))

    # -- time --------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.scheduler.now

    @property
    def events(self) -> int:
        """How many there have been."""
        return self.scheduler.events

    @property
    def digest(self) -> str:
        """Equal for two runs in which the same happened in the same order, at the same times."""
        return self.timeline.digest

    def run(
        self,
        until: Process | Callable[[], bool] | None = None,
        limit_s: float = LIMIT_S,
    ) -> bool:
        """Let it go on, called by the test: until a process has ended, or that holds, `limit_s`
        seconds of its time at most; whether it came so far (always, where `until` is None). Raises
        ProcessFailed, Deadlock, Stuck, SimulationError, and what `until` raises.
        """
        done: Callable[[], bool]
        if isinstance(until, Process):
            process = until

            def done() -> bool:
                return process.is_dead or self._failure is not None
        elif callable(until):
            holds = until

            def done() -> bool:
                return self._failure is not None or holds()
        elif until is None:

            def done() -> bool:
                return self._failure is not None

        else:
            raise SimulationError(
                f"run(until={until!r:.100}): a process, or a function without args"
            )

        self._check_open("run()")
        if math.isnan(_number("run(limit_s)", limit_s)):
            raise SimulationError("run(limit_s=nan): seconds of virtual time; math.inf: no limit")
        self.scheduler.run(done, limit_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return until is None or done()

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        """Have that happen then: a fault, say. It may not wait."""
        self._check_open("at()")
        self.scheduler.at(_seconds("at(time_s)", time_s), _event(event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        """The same, in so many seconds."""
        self._check_open("after()")
        self.scheduler.at(self.now + _seconds("after(delay_s)", delay_s), _event(event))

    def note(self, text: str) -> None:
        """Have a line in the timeline, and in the digest."""
        here = self.scheduler.here()
        self.timeline.note(self.now, here.owner.name if here is not None else "test", "note", text)

    # -- faults ------------------------------------------------------------------------------------

    def cut(self, one: str, other: str, both_ways: bool = True) -> None:
        """Nothing passes from host `one` to host `other`, and back. As all that is done to hosts,
        raises SimulationError for a name that no host has.
        """
        self.network.known(one, other)
        self.network.cut(one, other)
        if both_ways:
            self.network.cut(other, one)

    def mend(self, one: str, other: str) -> None:
        """All passes between the two again."""
        self.network.known(one, other)
        self.network.mend(one, other)
        self.network.mend(other, one)

    def crash(self, host: str) -> None:
        """The machine loses its power: its processes are gone, and say nothing to anybody."""
        self.network.known(host)
        self.network.crash(host)
        for process in list(self.processes.values()):
            if process.host.name == host:
                process.kill()
        disk = self.disks.get(host)
        for loss in disk.crash() if disk is not None else ():
            self.timeline.note(self.now, host, "fault", f"lost on its disk: {loss}")

    def boot(self, host: str) -> None:
        """A host that crashed is there again; its processes are not."""
        self.network.known(host)
        self.network.boot(host)

    def drift(self, host: str, rate: float) -> None:
        """From now on the clocks of that host run `rate` times as fast as the simulation's, from
        RATE_MIN to RATE_MAX: 1.0002 is 200 ppm fast. Raises SimulationError.
        """
        self.network.known(host)
        if not RATE_MIN <= _number("drift(rate)", rate) <= RATE_MAX:
            raise SimulationError(
                f"drift({host!r}, {rate!r:.100}): {RATE_MIN} to {RATE_MAX} times as fast"
            )
        self.timeline.note(self.now, host, "fault", f"its clocks run {rate:.6f} times as fast")
        self.scheduler.set_rate(self.network.hosts[host].clock, rate)

    def fill_disk(self, host: str, is_full: bool = True) -> None:
        """Syncs fail on the disk() of that host, for lack of room; or go on, where `is_full` says
        that it is not. Raises SimulationError.
        """
        disk = self.disks.get(host)
        if disk is None:
            raise SimulationError(f"host {host!r:.100} has no disk(): {sorted(self.disks)} have")
        if disk.is_full != is_full:
            self.timeline.note(
                self.now, host, "fault", f"its disk {'is full' if is_full else 'has room'}"
            )
        disk.is_full = is_full

    def let_loose(
        self,
        rates: Rates,
        until_s: float,
        may_end: Sequence[str] = (),
        lasts_s: float = 2.0,
        may_kill: Callable[[Process], bool] = lambda process: True,
    ) -> Nemesis:
        """Have faults happen from now until then, drawn from the seed: `rates` of each kind, on the
        average, a second. may_end: processes that may be killed, and are started again; may_kill:
        asked before one of them is. Raises SimulationError.
        """
        if self.nemesis is not None:
            raise SimulationError("let_loose() once in a simulation, with the rates of all faults")
        if not isinstance(rates, Rates):
            raise SimulationError(f"let_loose({rates!r:.100}): Rates(kill=0.1), say")
        if isinstance(may_end, str):
            raise SimulationError(f"let_loose(may_end={may_end!r:.100}): a list of names")
        for what, seconds in (("until_s", until_s), ("lasts_s", lasts_s)):
            if _seconds(f"let_loose({what})", seconds) < 0:
                raise SimulationError(f"let_loose({what}={seconds}): 0 seconds or more")
        if until_s < self.now:
            raise SimulationError(
                f"let_loose(until_s={until_s}): it is {self.now:.3f} s already; later than that"
            )
        self.nemesis = Nemesis(self, rates, until_s, lasts_s, may_end, self._skip, may_kill)
        return self.nemesis

    @property
    def faults(self) -> Sequence[Fault]:
        """Those of the nemesis, in the order of their numbers."""
        return self.nemesis.faults if self.nemesis is not None else ()

    # -- for processes -----------------------------------------------------------------------------

    def process_failed(self, process: Process, error: BaseException) -> None:
        """The function of a process raised."""
        self.timeline.note(self.now, process.name, "note", f"raised {type(error).__name__}")
        if not self._may_fail:
            said = f"{type(error).__name__}: {text_of(error)}"
            self._fail(f"{process.name} raised {said}", error)

    def thread_failed(self, process: Process, thread: str, error: BaseException) -> None:
        """A thread of a process ended by an error."""
        said = f"{type(error).__name__}: {text_of(error)}"
        self._fail(f"{process.name}/{thread} ended by {said}", error)

    def _fail(self, text: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = ProcessFailed(f"seed {self.seed}, {self.now:.6f} s: {text}")
            self._failure.__cause__ = error

    # -- shard.runtime -----------------------------------------------------------------------------

    def _here(self) -> Process | None:
        here = self.scheduler.here()
        return here.owner if here is not None and isinstance(here.owner, Process) else None

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise SimulationError(f"{what}: inside of `with Simulation(...) as simulation`, once")

    def _names(self) -> dict[str, Any]:
        """What stands in shard.runtime meanwhile: for threads of the simulation what is simulated,
        for others what was there.
        """
        scheduler, here = self.scheduler, self._here
        real = {name: getattr(runtime, name) for name in runtime.NAMES}

        def choose(name: str, simulated: Callable[..., Any]) -> Callable[..., Any]:
            otherwise = real[name]

            def call(*args: Any, **kwargs: Any) -> Any:
                chosen = otherwise if scheduler.here() is None else simulated
                return chosen(*args, **kwargs)

            return call

        def of_process(ask: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                process = here()
                assert process is not None, "a thread of the simulation asks"
                return ask(process, *args, **kwargs)

            return call

        def wall_s(process: Process) -> float:
            return EPOCH_S + process.clock.shows(scheduler.now) + process.clock_offset_s

        def sync(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            disk = next((each for each in self.disks.values() if each.has(path)), None)
            if disk is not None and not scheduler.is_over:
                begun = disk.begin_sync(fd)
                scheduler.wait(disk.sync_s())
                disk.end_sync(begun)

        def sleep(seconds: float) -> None:
            if seconds < 0:
                raise ValueError("sleep length must be non-negative")
            scheduler.wait(seconds)

        def gone(home: str) -> bool:
            process = self._homes.get(home)
            mine = here()
            return (
                process is not None
                and mine is not None
                and process.host is mine.host
                and process.is_dead
            )

        simulated: dict[str, Callable[..., Any]] = {
            "time": of_process(wall_s),
            "time_ns": of_process(lambda process: int(wall_s(process) * 1e9)),
            "sleep": sleep,
            "random": of_process(lambda process: process.chance.random()),
            "Random": of_process(lambda process: Random(process.chance.getrandbits(64))),
            "randbits": of_process(lambda process, k: process.chance.getrandbits(k)),
            "randbelow": of_process(lambda process, n: int(process.chance.random() * n)),
            "token_hex": of_process(
                lambda process, n=32: f"{process.chance.getrandbits(8 * n):0{2 * n}x}"
            ),
            "pid": of_process(lambda process: process.number),
            "Lock": partial(primitives.SimulatedLock, scheduler),
            "RLock": partial(primitives.SimulatedRLock, scheduler),
            "Condition": partial(primitives.SimulatedCondition, scheduler),
            "Semaphore": partial(primitives.SimulatedSemaphore, scheduler),
            "Event": partial(primitives.SimulatedEvent, scheduler),
            "Thread": partial(primitives.SimulatedThread, scheduler),
            "Threads": partial(primitives.SimulatedThreads, scheduler),
            "Epoll": partial(primitives.SimulatedEpoll, scheduler, self._bells),
            "Bell": partial(primitives.SimulatedBell, scheduler, self._bells),
            "own": of_process(Process.made_once),
            "put": of_process(lambda process, key, one: process.own.update({key: one})),
            "this_process": of_process(lambda process: process.home),
            "process_is_gone": gone,
            "at_exit": void,  # a simulated process ends as by os._exit()
            "not_at_exit": void,
            "fsync": sync,
            "fdatasync": sync,
        }
        names = {name: choose(name, call) for name, call in simulated.items()}
        names["monotonic"] = scheduler.clock_or(real["monotonic"])
        names["transports"] = of_process(
            lambda process, node, slab: transports_of(process, self.network, node, slab)
        )
        return names

    def __enter__(self) -> Simulation:
        if self.scheduler.is_over:
            raise SimulationError("a simulation is entered once: make another of the same seed")
        with ExitStack() as entering:
            try:
                entering.enter_context(runtime.simulate(self._names()))
            except RuntimeError as error:
                raise SimulationError(str(error)) from None
            if gc.isenabled():  # destructors of cycles would run whenever garbage is collected
                gc.disable()
                entering.callback(gc.enable)
            if not _is_frozen_by_others():
                gc.freeze()  # what was there before is not looked through at the end
                entering.callback(gc.unfreeze)
            # what a test's own code draws is part of the run, whichever of these it calls
            entering.callback(random.setstate, random.getstate())
            entering.callback(np.random.set_state, np.random.get_state())
            random.seed(self.seed)
            np.random.seed(self.seed % NUMPY_SEEDS)
            self._leaving = entering.pop_all()
        self._is_open = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        with self._leaving, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Threads end in the middle of something here, and coroutines that a process left behind
            # are dropped: what they say of that is no news.
            level, hook = logging.root.manager.disable, sys.unraisablehook
            logging.disable(logging.CRITICAL)
            sys.unraisablehook = void
            try:
                try:
                    self.scheduler.close()  # raises Stuck
                finally:
                    self._let_go()
            finally:
                logging.disable(level)
                sys.unraisablehook = hook

    def _let_go(self) -> None:
        """Close what is real, once no thread runs on."""
        self.network.close()
        for process in self._homes.values():
            process.close_descriptors()
            for close in process.own.get("to close", ()):
                close()
            process.own.clear()
            process.close_slabs()
            process.function = _ended  # which holds what the test does
        for disk in self.disks.values():
            disk.close()
        self._homes.clear()
        self._bells.clear()
        # Coroutines that are dropped run their `finally`, and keep what they hold until
        # the next time.
        for _ in range(COLLECTIONS_MAX):
            if not gc.collect():
                break


@functools.cache  # which counts them one by one: 25 ms of a worker of pytest
def _is_frozen_by_others() -> bool:
    """Objects were frozen before the first simulation of this process: by whom unfreezes them, if
    anybody. It is all or none.
    """
    return gc.get_freeze_count() > 0


def _number(what: str, number: float) -> float:
    if not isinstance(number, int | float):
        raise SimulationError(f"{what} is {number!r:.100}: a number")
    return number


def _seconds(what: str, seconds: float) -> float:
    if not math.isfinite(_number(what, seconds)):
        raise SimulationError(f"{what} is {seconds}: seconds of virtual time")
    return seconds


def _event(event: Callable[[], object]) -> Callable[[], object]:
    if not callable(event):
        raise SimulationError(f"an event is a function without arguments, not {event!r:.100}")
    return event


def _ended(process: Process) -> None:
    """In the place of a process's function, once its simulation is over."""


def void(*_: object) -> None:
    """Nothing is said."""
