"""A simulation that is used wrongly, interrupted, or left with a thread that does not come back."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.simulation import Process, Simulation, SimulationError, Stuck, scheduler
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


def test_a_stuck_thread_is_waited_for_once_and_the_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "REAL_PATIENCE_S", 0.5)
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
        Simulation(1) as simulation,
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
