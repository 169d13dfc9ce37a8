"""Each fault does what it says: drawn by the nemesis or by hand, in the timeline, with its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from prpc_engine.simulation import Process, Rates, Simulation, SimulationError
from prpc_engine.simulation.clock import HostClock
from prpc_engine.simulation.nemesis import DRIFT_MAX
from shard import runtime

QUIET = partial(Rates, cut=0, reset=0, kill=0, crash=0, stop=0, slow=0, clock=0, drift=0)


def nothing(process: Process) -> None:
    """Sleeps."""
    runtime.sleep(100.0)


# -- hosts by their names --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "do",
    [
        lambda simulation: simulation.cut("one", "none"),
        lambda simulation: simulation.cut("none", "one"),
        lambda simulation: simulation.mend("one", "none"),
        lambda simulation: simulation.crash("none"),
        lambda simulation: simulation.boot("none"),
        lambda simulation: simulation.drift("none", 1.0),
    ],
)
def test_a_fault_of_a_host_that_there_is_not_names_those_there_are(
    do: Callable[[Simulation], object],
) -> None:
    with Simulation(1) as simulation:
        simulation.process("a", nothing, host="one")
        simulation.process("b", nothing, host="other")
        with pytest.raises(SimulationError, match=r"no host 'none': there are \['one', 'other'\]"):
            do(simulation)
        assert set(simulation.network.hosts) == {"one", "other"}


# -- clocks that drift -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.95, 1.0, 1.0002, 1.05, 2.0])
def test_a_clock_shows_a_time_when_it_says_so_and_not_before(rate: float) -> None:
    clock = HostClock()
    clock.set_rate(1.3, 3.7)
    clock.set_rate(rate, 10.1)
    at_s = 10.1
    for number in range(1000):
        shown_s = clock.shows(at_s)
        due_s = clock.when(shown_s + 1e-9 * number)
        assert clock.shows(due_s) >= shown_s + 1e-9 * number
        at_s = due_s + 0.1


@pytest.mark.parametrize("rate", [0.95, 1.0, 1.05])
def test_timers_and_both_clocks_of_a_host_run_at_its_rate(rate: float) -> None:
    def live(process: Process) -> tuple[float, float, float, bool]:
        begun_s, wall_s, steady_s = simulation.now, runtime.time(), runtime.monotonic()
        runtime.sleep(10.0)
        was_set = runtime.Event().wait(10.0)
        return (
            simulation.now - begun_s,
            runtime.time() - wall_s,
            runtime.monotonic() - steady_s,
            was_set,
        )

    with Simulation(1, keep=True) as simulation:
        one = simulation.process("one", live, host="drifts")
        beside = simulation.process("beside", live, host="drifts")
        other = simulation.process("other", live, host="other")
        simulation.drift("drifts", rate)
        simulation.run(lambda: all(each.is_dead for each in (one, beside, other)))
        text = simulation.timeline.text()
    for process in (one, beside):
        virtual_s, wall_s, steady_s, was_set = process.result
        assert 20.0 / rate <= virtual_s < 20.0 / rate + 0.01
        assert 20.0 <= steady_s < 20.01 and abs(wall_s - steady_s) < 1e-4 and not was_set
    assert 20.0 <= other.result[0] < 20.01
    assert "drifts" in text and f"its clocks run {rate:.6f} times as fast" in text


def test_a_rate_that_changes_while_a_thread_sleeps_counts_from_then_on() -> None:
    def nap(process: Process) -> tuple[float, float]:
        before_s = runtime.monotonic()
        runtime.sleep(10.0)
        return simulation.now, runtime.monotonic() - before_s

    for rate, ends_s in ((2.0, 7.5), (0.5, 15.0)):
        with Simulation(1) as simulation:
            sleeper = simulation.process("sleeper", nap)
            simulation.at(5.0, lambda rate=rate: simulation.drift("host", rate))  # type: ignore[misc]
            simulation.run(sleeper)
            assert ends_s <= sleeper.result[0] < ends_s + 0.01
            assert 10.0 <= sleeper.result[1] < 10.01


@pytest.mark.parametrize("rate", [0.0, -1.0, 0.4, 2.1, float("nan")])
def test_a_rate_at_which_no_clock_runs_is_refused(rate: float) -> None:
    with Simulation(1) as simulation:
        simulation.process("one", nothing)
        with pytest.raises(SimulationError, match=r"drift\('host', .*\): 0.5 to 2"):
            simulation.drift("host", rate)


def test_the_nemesis_draws_rates_within_bounds_and_a_digest_tells_them() -> None:
    def run(rate: float) -> tuple[list[float], str]:
        with Simulation(3) as simulation:
            for number in range(3):
                simulation.process(f"p{number}", nothing, host=f"h{number}")
            simulation.let_loose(QUIET(drift=rate), 20.0)
            simulation.run(limit_s=21.0)
            return [
                host.clock.rate for host in simulation.network.hosts.values()
            ], simulation.digest

    rates, digest = run(2.0)
    assert any(rate != 1.0 for rate in rates)
    assert all(abs(rate - 1.0) <= DRIFT_MAX for rate in rates)
    assert run(2.0) == (rates, digest) and run(0.0)[0] == [1.0] * 3 and run(0.0)[1] != digest
