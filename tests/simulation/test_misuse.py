"""A simulation that is used wrongly, interrupted, or left with a thread that does not come back."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.simulation import (
    Deadlock,
    Process,
    ProcessFailed,
    Rates,
    Simulation,
    SimulationError,
    Stuck,
    explore,
)
from shard import runtime

NAN, INF = math.nan, math.inf


def nap(process: Process) -> None:
    """Ends after five seconds."""
    for _ in range(5):
        runtime.sleep(1.0)


WRONG: dict[str, Callable[[Any, Any], object]] = {
    "run: no limit": lambda simulation, _: simulation.run(limit_s=NAN),
    "run: limit of text": lambda simulation, _: simulation.run(limit_s="3"),
    "run: until text": lambda simulation, _: simulation.run("napper"),
    "run: until waits": lambda simulation, _: simulation.run(lambda: runtime.sleep(1.0)),
    "at: nan": lambda simulation, _: simulation.at(NAN, print),
    "at: no event": lambda simulation, _: simulation.at(1.0, None),
    "after: infinity": lambda simulation, _: simulation.after(INF, print),
    "after: text": lambda simulation, _: simulation.after("1", print),
    "drift: text": lambda simulation, _: simulation.drift("h", "1"),
    "drift: nan": lambda simulation, _: simulation.drift("h", NAN),
    "disk: no folder": lambda simulation, _: simulation.disk("h", "/nowhere/at/all"),
    "disk: empty": lambda simulation, _: simulation.disk("h", ""),
    "disk: a file": lambda simulation, _: simulation.disk("h", __file__),
    "disk: a number": lambda simulation, _: simulation.disk("h", 3),
    "process: no function": lambda simulation, _: simulation.process("other", None),
    "slow_down: nan": lambda _, process: process.slow_down(NAN),
    "slow_down: 0": lambda _, process: process.slow_down(0.0),
    "slow_down: text": lambda _, process: process.slow_down("2"),
    "set_clock: nan": lambda _, process: process.set_clock(NAN),
    "set_clock: too far": lambda _, process: process.set_clock(1e300),
    "entered twice": lambda simulation, _: simulation.__enter__(),
    "another one": lambda _, __: Simulation(2).__enter__(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_where_it_is_asked_for(wrong: str) -> None:
    with Simulation(1) as simulation:
        process = simulation.process("napper", nap, host="h")
        with pytest.raises(SimulationError):
            WRONG[wrong](simulation, process)
        simulation.run(until=process)
        assert process.is_dead, "and the simulation goes on"


def test_a_simulation_that_is_over_begins_nothing() -> None:
    with Simulation(1) as simulation:
        simulation.run(until=simulation.process("napper", nap))
    with pytest.raises(SimulationError, match="inside of"):
        simulation.process("late", nap)
    with pytest.raises(SimulationError, match="inside of"):
        simulation.start_again("napper")
    with pytest.raises(SimulationError, match="inside of"):
        simulation.run()
    with pytest.raises(SimulationError, match="entered once"):
        simulation.__enter__()


def test_what_until_raises_comes_out_of_run_whatever_thread_asks_it() -> None:
    def holds() -> bool:
        assert simulation.now < 2.0, "of the test"
        return False

    with Simulation(1) as simulation:
        simulation.process("napper", nap)
        with pytest.raises(AssertionError, match="of the test"):
            simulation.run(until=holds)


@pytest.mark.parametrize("after_s", [0.01, 0.03, 0.05, 0.07])
def test_an_interrupt_ends_a_run_and_leaves_no_thread(after_s: float) -> None:
    def busy(process: Process) -> None:
        while True:
            runtime.sleep(0.001)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # from now on handlers of signals are the engine's to hold back
    with Master() as master, RpcService(master.address):
        pass
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Simulation(1) as simulation:
            for number in range(4):
                simulation.process(f"busy {number}", busy)
            signal.setitimer(signal.ITIMER_REAL, after_s)
            simulation.run(limit_s=1e9)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert not [each for each in threading.enumerate() if "Simulated" in type(each).__name__]


def test_a_stuck_thread_is_waited_for_once_and_the_others_end() -> None:
    real = threading.Lock()
    real.acquire()
    ended: list[str] = []

    def waits(process: Process) -> None:
        with real:
            pass

    def other(process: Process) -> None:
        try:
            runtime.sleep(1e6)
        finally:
            ended.append(process.name)

    with (
        pytest.raises(Stuck, match=r"stuck/main .*shard\.runtime") as told,
        Simulation(1, patience_s=0.5) as simulation,
    ):
        simulation.process("stuck", waits)
        simulation.process("other", other)
        simulation.run(limit_s=10.0)
    assert told.value.__context__ is None, "it is said once"
    assert ended == ["other"]
    with Simulation(1) as simulation:
        assert simulation.run(until=simulation.process("napper", nap)), "the next one is as any"
    left = [each for each in threading.enumerate() if "Simulated" in type(each).__name__]
    real.release()
    for each in left:
        threading.Thread.join(each, 10.0)
        assert not each.is_alive()


def test_a_disk_of_a_folder_is_there(tmp_path: Path) -> None:
    with Simulation(1) as simulation:
        simulation.process("napper", nap, host="h")
        simulation.disk("h", tmp_path)
        with pytest.raises(SimulationError, match="one disk"):
            simulation.disk("h", str(tmp_path))


LET_LOOSE: dict[str, dict[str, Any]] = {
    "no rates": {"rates": None, "until_s": 1.0},
    "for ever": {"until_s": INF},
    "until nan": {"until_s": NAN},
    "until before": {"until_s": -1.0},
    "until text": {"until_s": "3"},
    "lasts nan": {"until_s": 1.0, "lasts_s": NAN},
    "a name": {"until_s": 1.0, "may_end": "napper"},
}


@pytest.mark.parametrize("wrong", LET_LOOSE)
def test_faults_that_cannot_be_drawn_are_refused(wrong: str) -> None:
    with Simulation(1) as simulation:
        simulation.process("napper", nap)
        with pytest.raises(SimulationError, match="let_loose"):
            simulation.let_loose(**{"rates": Rates(), **LET_LOOSE[wrong]})
        simulation.let_loose(Rates(), until_s=1.0)
        with pytest.raises(SimulationError, match="once"):
            simulation.let_loose(Rates(), until_s=1.0)


def test_a_scenario_that_exits_has_failed_with_its_seed(tmp_path: Path) -> None:
    def scenario(simulation: Simulation) -> None:
        if simulation.seed == 2:
            sys.exit("of the test")

    (failure,) = explore(scenario, range(4), keep=str(tmp_path / "kept"))
    assert failure.least.seed == 2
    assert failure.least.error == "SystemExit: of the test"
    assert (tmp_path / "kept" / "seed-2.json").exists()


def test_explore_says_what_it_cannot_run() -> None:
    with pytest.raises(SimulationError, match="jobs=0"):
        explore(lambda simulation: None, range(2), jobs=0)
    with pytest.raises(SimulationError, match="top of a module"):
        explore(lambda simulation: None, range(2), jobs=2)
    with pytest.raises(SimulationError, match="failures_max"):
        explore(lambda simulation: None, range(2), failures_max=0)


def test_a_host_without_power_begins_no_process() -> None:
    begun: list[float] = []

    def begin(process: Process) -> None:
        begun.append(simulation.now)
        runtime.sleep(100.0)

    with Simulation(1) as simulation:
        simulation.process("a", begin, host="h")
        simulation.run(limit_s=1.0)
        simulation.crash("h")
        with pytest.raises(SimulationError, match=r"boot\(\) it"):
            simulation.start_again("a")
        simulation.boot("h")
        simulation.start_again("a")
        simulation.run(limit_s=1.0)
    assert len(begun) == 2


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_disk_with_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "odd").symlink_to(__file__)
    else:
        os.mkfifo(tmp_path / "odd")
    with Simulation(1) as simulation:
        simulation.process("napper", nap, host="h")
        with pytest.raises(SimulationError, match="'odd'"):
            simulation.disk("h", tmp_path)


@pytest.mark.parametrize("code", [None, 0])
def test_a_process_that_exits_without_an_error_has_ended(code: int | None) -> None:
    with Simulation(1) as simulation:
        process = simulation.process("exits", lambda process: sys.exit(code))
        assert simulation.run(until=process, limit_s=1.0)
        assert process.is_dead
        assert process.error is None


def test_a_process_that_exits_with_an_error_has_failed() -> None:
    with Simulation(1) as simulation:
        process = simulation.process("exits", lambda process: sys.exit("of the test"))
        with pytest.raises(ProcessFailed, match="exits raised SystemExit: of the test"):
            simulation.run(until=process)
    with Simulation(1, may_fail=True) as simulation:
        process = simulation.process("exits", lambda process: sys.exit(3))
        assert simulation.run(until=process)
        assert isinstance(process.error, SystemExit)


def test_faults_to_skip_are_numbers_in_any_collection() -> None:
    Simulation(1, skip=[0, 2])
    Simulation(1, skip=())
    wrong: Any
    for wrong in (None, 3, "ab", [0.5]):
        with pytest.raises(SimulationError, match="skip="):
            Simulation(1, skip=wrong)


def test_a_deadlock_says_which_of_the_processes_are_stopped() -> None:
    with Simulation(1) as simulation:
        process = simulation.process("napper", nap)
        simulation.at(2.5, process.stop)
        with pytest.raises(Deadlock, match=r"napper/main \(stopped\)"):
            simulation.run(until=process)


def test_random_and_numpy_draw_from_the_seed_and_go_on_afterwards_as_before() -> None:
    def drawn(seed: int) -> list[float]:
        def draw(process: Process) -> None:
            found.extend((random.random(), float(np.random.random())))

        found: list[float] = []
        with Simulation(seed) as simulation:
            simulation.run(until=simulation.process("drawer", draw))
        return found

    random.seed("of the test")
    np.random.seed(3)
    before = random.getstate(), np.random.random()
    np.random.seed(3)
    assert drawn(1) == drawn(1) != drawn(2)
    assert (random.getstate(), np.random.random()) == before
    assert len(drawn(-1)) == 2, "of any seed"


def test_a_name_of_may_end_that_no_process_has_is_told() -> None:
    with Simulation(1) as simulation:
        process = simulation.process("napper", nap)
        simulation.let_loose(Rates(), 2.0, ["naper"])
        with pytest.raises(SimulationError, match=r"naper.*napper"):
            simulation.run(until=process)


def test_a_timeline_keeps_lines_apart_and_says_when_nothing_is_kept() -> None:
    with Simulation(1) as simulation:
        assert "keep=True" in simulation.timeline.text()
    with Simulation(1, keep=True) as simulation:
        simulation.note("one line\nand another")
        first, second = simulation.timeline.text().splitlines()
    assert first.index("one line") == second.index("and another"), "in its column"


def not_held(process: Process) -> None:
    """Waits for a condition whose lock another thread holds."""
    condition = runtime.Condition()

    def hold() -> None:
        with condition:
            runtime.sleep(2.0)

    runtime.Thread(target=hold).start()
    runtime.sleep(1.0)
    condition.wait(1.0)


def started_twice(process: Process) -> None:
    """Starts one thread twice."""
    thread = runtime.Thread(target=nap, args=(process,))
    thread.start()
    thread.start()


REFUSED: dict[str, tuple[Callable[[Process], object], str]] = {
    "wait: another thread holds the lock": (not_held, "cannot wait on un-acquired lock"),
    "wait: the lock is free": (lambda _: runtime.Condition().wait(1.0), "cannot wait on"),
    "wait: a plain lock": (lambda _: runtime.Condition(runtime.Lock()).wait(1.0), "cannot wait on"),
    "notify": (lambda _: runtime.Condition().notify(), "cannot notify on un-acquired lock"),
    "notify_all": (lambda _: runtime.Condition().notify_all(), "cannot notify on"),
    "start twice": (started_twice, "only be started once"),
    "join before start": (lambda _: runtime.Thread(target=nap).join(), "before it is started"),
    "event: nan": (lambda _: runtime.Event().wait(NAN), "NaN"),
    "sleep: nan": (lambda _: runtime.sleep(NAN), "NaN"),
    "sleep: negative": (lambda _: runtime.sleep(-1.0), "non-negative"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_the_library_refuses_is_refused_on_virtual_time_too(wrong: str) -> None:
    function, text = REFUSED[wrong]
    with Simulation(1, patience_s=5.0) as simulation:
        simulation.process("wrong", function)
        with pytest.raises(ProcessFailed, match=text) as caught:
            simulation.run(limit_s=100.0)
        assert isinstance(caught.value.__cause__, RuntimeError | ValueError)


def held_back_by(lock: threading.Lock) -> Callable[[Process], None]:
    """The function of a process whose end waits for a lock that is not simulated."""

    def leave(process: Process) -> None:
        try:
            runtime.sleep(100.0)
        finally:
            lock.acquire(timeout=10.0)

    return leave


def test_a_thread_that_is_stuck_at_the_end_leaves_no_descriptor(tmp_path: Path) -> None:
    lock = threading.Lock()
    leave = held_back_by(lock)
    before = len(os.listdir("/proc/self/fd"))
    with lock:
        simulation = Simulation(1, patience_s=0.3)
        with pytest.raises(Stuck), simulation:
            simulation.process("leaver", leave, host="h")
            simulation.disk("h", tmp_path)
            simulation.run(limit_s=1.0)
    assert len(os.listdir("/proc/self/fd")) == before


async def asynchronous(simulation: Simulation) -> None:
    """A scenario, or the function of a process, that nothing would run."""


def with_yield(simulation: Simulation) -> Iterator[None]:
    """The same."""
    yield


NEVER_RUN: list[Callable[[Any], object]] = [
    asynchronous,
    with_yield,
    lambda one: asynchronous(one),
    lambda one: with_yield(one),
]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("function", NEVER_RUN)
def test_what_nothing_would_run_is_refused(function: Callable[[Any], object]) -> None:
    with Simulation(1) as simulation, pytest.raises(SimulationError, match="nothing"):
        simulation.process("p", function)
        simulation.run()
    if function in (asynchronous, with_yield):
        with pytest.raises(SimulationError, match="is no scenario"):
            explore(function, [7])
    else:
        (failure,) = explore(function, [7])
        assert "which nothing runs" in failure.least.error


class Unspeakable(Exception):
    """Whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_fails_by_name_wherever_it_is_raised() -> None:
    def fail(_: object = None) -> None:
        raise Unspeakable

    def in_a_thread(process: Process) -> None:
        runtime.Thread(target=fail).start()
        runtime.sleep(1.0)

    for function in (fail, in_a_thread):
        with Simulation(1) as simulation, pytest.raises(ProcessFailed, match="Unspeakable"):
            simulation.process("p", function)
            simulation.run()
    (failure,) = explore(fail, [3])
    assert failure.least.error.startswith("Unspeakable: ")


def test_a_seed_whose_threads_do_not_end_fails_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient = partial(Simulation, patience_s=0.3)
    # (the package has a function of the module's name)
    monkeypatch.setattr(sys.modules["prpc_engine.simulation.explore"], "Simulation", impatient)
    lock = threading.Lock()
    leave = held_back_by(lock)

    def scenario(simulation: Simulation) -> None:
        simulation.process("leaver", leave)
        simulation.run(limit_s=1.0)

    with lock:
        (failure,) = explore(scenario, [5])
    assert failure.first.seed == 5 and failure.first.error.startswith("Stuck: ")


def test_a_timeline_is_kept_whatever_the_error_says(tmp_path: Path) -> None:
    def scenario(simulation: Simulation) -> None:
        raise ValueError("a lone surrogate: \ud800")

    explore(scenario, [1], keep=tmp_path)
    assert "\\ud800" in (tmp_path / "seed-1.txt").read_text("utf-8")
    with pytest.raises(SimulationError, match="a folder, and that is a file"):
        explore(scenario, [1], keep=tmp_path / "seed-1.txt")


def failing(simulation: Simulation) -> None:
    """A scenario of another process."""
    raise ValueError(f"seed {simulation.seed}")


ENDLESS = """
from itertools import count
from prpc_engine.simulation import explore
from tests.simulation.test_misuse import failing

if __name__ == "__main__":
    print([each.first.seed for each in explore(failing, count(), jobs=2, failures_max=2)])
"""


def test_seeds_without_an_end_end_with_the_failures_that_were_asked_for() -> None:
    failures = explore(failing, itertools.count(), failures_max=2)
    assert [each.first.seed for each in failures] == [0, 1]
    # in a program of its own, with which the server that forks its processes ends
    command = [sys.executable, "-c", ENDLESS]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    assert told.stdout == "[0, 1]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seeds": 100}, "seeds=100: several"),
        ({"seeds": [1], "jobs": "2"}, "jobs='2'"),
        ({"seeds": [1], "jobs": 0}, "jobs=0"),
    ],
)
def test_wrong_arguments_of_explore_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        explore(failing, **arguments)


def test_an_event_outside_of_the_simulation_is_refused() -> None:
    simulation = Simulation(1)
    for set_up in (simulation.at, simulation.after):
        with pytest.raises(SimulationError, match="inside of `with"):
            set_up(1.0, list)


def test_an_executor_of_a_process_waits_for_its_work_and_takes_none_afterwards() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        runtime.sleep(1.0)
        done.append(number)

    def use(process: Process) -> None:
        with runtime.Threads() as threads:
            for number in range(4):
                threads.submit(work, number)
        assert sorted(done) == list(range(4))
        with pytest.raises(RuntimeError, match="after shutdown"):
            threads.submit(work, 4)
        one = runtime.Threads(1)
        results = [one.submit(work, number) for number in (5, 6)]
        runtime.sleep(0.5)
        one.shutdown(cancel_futures=True)
        assert [each.cancelled() for each in results] == [False, True]

    with Simulation(1) as simulation:
        assert simulation.run(until=simulation.process("p", use), limit_s=100.0)
    assert sorted(done) == [0, 1, 2, 3, 5]
