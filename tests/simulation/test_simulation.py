"""The simulation itself: time, chance, threads, the network, and what ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import RpcService, errors
from prpc_engine.simulation import (
    Deadlock,
    Process,
    ProcessFailed,
    Rates,
    Simulation,
    SimulationError,
    Timeline,
    explore,
    run_once,
)
from prpc_engine.simulation.explore import Scenario
from shard import runtime, sleep
from tests.simulation.jobs import LEASE_S, begin, begin_master
from tests.simulation.scenarios_calls import calls
from tests.simulation.scenarios_remote import remotes_that_live


def add(ours: RpcService, process: Process) -> None:
    """A server of one function."""
    ours.create_server("adder", {"add": lambda one, other: one + other})
    ours.serve_forever()


def job(simulation: Simulation, caller: Any) -> Process:
    """A master, a server, and a process that calls it."""
    begin_master(simulation)
    begin(simulation, "server", add)
    return begin(simulation, "caller", caller)


# -- time and chance -------------------------------------------------------------------------------


def test_an_hour_passes_at_once() -> None:
    def nap(process: Process) -> float:
        before = runtime.monotonic()
        runtime.sleep(3600.0)
        return runtime.monotonic() - before

    # The bound on a test is far below an hour.
    with Simulation(1) as simulation:
        process = simulation.process("sleeper", nap)
        simulation.run(until=process, limit_s=1e6)
        assert 3600.0 <= process.result < 3600.1


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    first, again, other = (run_once(calls, seed) for seed in (5, 5, 6))
    assert first == again
    assert first.digest != other.digest


@pytest.mark.parametrize("scenario", [calls, remotes_that_live])
def test_a_run_is_the_same_in_another_interpreter_with_other_hashes(scenario: Scenario) -> None:
    """Whether or not the program has imported asyncio, beside which the engine turns otherwise."""
    module, name = scenario.__module__, scenario.__name__
    program = (
        "from prpc_engine.simulation import run_once\n"
        f"from {module} import {name}\n"
        f"print(run_once({name}, 5).digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", before + program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout.strip()
        for seed, before in (("1", ""), ("2", "import asyncio\n"))
    }
    assert digests == {run_once(scenario, 5).digest}


def test_a_run_is_the_same_in_the_debug_mode_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def nap(number: int) -> int:
        await asyncio.sleep(0.01)
        return await asyncio.to_thread(int, number)

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server("napper", {"nap": nap})
        ours.serve_forever()

    def ask(ours: RpcService, process: Process) -> None:
        client = ours.create_client("napper")
        assert [client.call("nap", number) for number in range(5)] == list(range(5))

    def scenario(simulation: Simulation) -> None:
        begin_master(simulation)
        begin(simulation, "server", serve)
        simulation.run(until=begin(simulation, "asker", ask))

    digests = set()
    for is_on in ("", "1"):
        monkeypatch.setenv("PYTHONASYNCIODEBUG", is_on)
        outcome = run_once(scenario, 1)
        assert not outcome.error, outcome.text
        digests.add(outcome.digest)
    assert len(digests) == 1


def test_chance_is_the_process_s_own_and_comes_from_the_seed() -> None:
    def draw(process: Process) -> list[Any]:
        return [runtime.random(), runtime.randbits(63), runtime.token_hex(4), runtime.randbelow(9)]

    def drawn(seed: int) -> list[Any]:
        with Simulation(seed) as simulation:
            processes = [simulation.process(name, draw) for name in ("one", "other")]
            simulation.run(until=lambda: all(each.is_dead for each in processes))
            return [each.result for each in processes]

    one, other = drawn(3)
    assert one != other
    assert [one, other] == drawn(3) != drawn(4)


def test_the_wall_clock_of_a_process_can_be_set_and_its_monotonic_one_cannot() -> None:
    seen: list[tuple[float, float]] = []

    def look(process: Process) -> None:
        for _ in range(2):
            seen.append((runtime.time(), runtime.monotonic()))
            runtime.sleep(1.0)

    with Simulation(1) as simulation:
        process = simulation.process("clock", look)
        simulation.at(0.5, lambda: process.set_clock(-50.0))
        simulation.run(until=process)
    (wall, steady), (later_wall, later_steady) = seen
    assert -49.1 < later_wall - wall < -48.9
    assert 1.0 <= later_steady - steady < 1.1


# -- threads and locks -----------------------------------------------------------------------------


def test_threads_of_a_process_take_turns_at_locks_conditions_and_events() -> None:
    def run(process: Process) -> list[int]:
        taken: list[int] = []
        condition, done = runtime.Condition(), runtime.Event()

        def work(number: int) -> None:
            with condition:
                while len(taken) != number:
                    condition.wait()
                taken.append(number)
                condition.notify_all()
            if number == 9:
                done.set()

        threads = [runtime.Thread(target=work, args=(number,)) for number in reversed(range(10))]
        for thread in threads:
            thread.start()
        assert done.wait(60.0)
        for thread in threads:
            thread.join()
            assert not thread.is_alive()
        return taken

    for seed in range(20):
        with Simulation(seed) as simulation:
            process = simulation.process("threads", run)
            simulation.run(until=process)
            assert process.result == list(range(10))


def test_a_lock_is_waited_for_until_its_time_is_over() -> None:
    def run(process: Process) -> tuple[bool, float]:
        lock = runtime.Lock()
        lock.acquire()
        before = runtime.monotonic()
        return lock.acquire(timeout=2.5), runtime.monotonic() - before

    with Simulation(1) as simulation:
        process = simulation.process("waits", run)
        simulation.run(until=process)
        was_taken, waited_s = process.result
    assert not was_taken and 2.5 <= waited_s < 2.6


def test_the_order_of_threads_is_drawn_from_the_seed() -> None:
    def run(process: Process) -> str:
        order: list[str] = []
        threads = [runtime.Thread(target=order.append, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "".join(order)

    def order(seed: int) -> str:
        with Simulation(seed) as simulation:
            process = simulation.process("threads", run)
            simulation.run(until=process)
            return str(process.result)

    assert len({order(seed) for seed in range(20)}) > 5


def test_nothing_of_a_simulation_is_left_behind() -> None:
    before = threading.active_count()
    for seed in range(5):
        with Simulation(seed) as simulation:
            job(simulation, lambda ours, process: runtime.sleep(100.0))
            simulation.run(limit_s=1.0)
    assert threading.active_count() == before
    assert runtime.monotonic is time.monotonic and not runtime.shares_process


# -- what ends a run -------------------------------------------------------------------------------


def test_what_a_process_raises_ends_the_run_and_names_seed_and_process() -> None:
    def fail(process: Process) -> None:
        raise ValueError("its own")

    with Simulation(42) as simulation:
        simulation.process("fails", fail)
        with pytest.raises(ProcessFailed, match=r"seed 42, .* s: fails raised ValueError: its own"):
            simulation.run()
    with Simulation(42, may_fail=True) as simulation:
        process = simulation.process("fails", fail)
        simulation.run(until=process)
        assert isinstance(process.error, ValueError)


def test_a_job_in_which_nothing_is_to_come_is_a_deadlock() -> None:
    with Simulation(1) as simulation:
        simulation.process("waits", lambda process: runtime.Event().wait())
        with pytest.raises(Deadlock, match="waits/main"):
            simulation.run()


def test_run_answers_whether_it_came_so_far() -> None:
    with Simulation(1) as simulation:
        process = simulation.process("sleeps", lambda process: runtime.sleep(10.0))
        assert not simulation.run(until=process, limit_s=5.0)
        assert 5.0 <= simulation.now < 5.1
        assert simulation.run(until=process, limit_s=6.0)


def test_a_second_simulation_and_real_descriptors_are_refused_by_name() -> None:
    with Simulation(1) as simulation:
        with pytest.raises(SimulationError, match="one at a time"), Simulation(2):
            raise AssertionError("it must not open")

        def watch(process: Process) -> None:
            reading, writing = os.pipe()
            try:
                runtime.Epoll().register(reading)
            finally:
                os.close(reading)
                os.close(writing)

        simulation.process("real", watch)
        with pytest.raises(ProcessFailed, match=r"descriptor \d+ is a real one"):
            simulation.run()


@pytest.mark.parametrize("rate", [-1, float("inf"), float("nan"), 1001, "1"])
def test_rates_that_cannot_be_drawn_are_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"Rates\(kill=.*: 0 to 1000 faults a second"):
        Rates(kill=rate)


@pytest.mark.parametrize("seed", [None, "7", 1.5])
def test_a_seed_is_a_number_that_can_be_told(seed: Any) -> None:
    with pytest.raises(SimulationError, match=r"Simulation\(seed=.*an int"):
        Simulation(seed)


def test_a_process_that_never_began_is_not_started_again_and_may_begin_late() -> None:
    with Simulation(1) as simulation:
        with pytest.raises(SimulationError, match="no process 'none' to start again"):
            simulation.start_again("none")
        simulation.let_loose(Rates(kill=5.0), 2.0, may_end=["later"])
        simulation.at(1.0, lambda: simulation.process("later", lambda process: runtime.sleep(9.0)))
        simulation.run(limit_s=3.0)
        assert not simulation.processes["later"].is_dead


def test_a_name_of_a_process_that_runs_is_refused() -> None:
    with Simulation(1) as simulation:
        simulation.process("one", lambda process: runtime.sleep(1.0))
        with pytest.raises(SimulationError, match=r"process one runs: kill\(\) it"):
            simulation.process("one", lambda process: None)


# -- processes and the network ---------------------------------------------------------------------


def test_calls_pass_between_hosts_and_over_shared_memory_on_one_host() -> None:
    transports: list[str] = []

    def call(ours: RpcService, process: Process) -> list[int]:
        client = ours.create_client("adder", 1, timeout_s=30.0)
        answers = [client.call("add", number, 1, timeout_s=5.0) for number in range(10)]
        transports.append(sorted(ours.transports.values())[0])
        return answers

    for host in ("elsewhere", "server"):
        with Simulation(1) as simulation:
            begin_master(simulation)
            begin(simulation, "server", add)
            caller = begin(simulation, "caller", call, host=host)
            simulation.run(until=caller)
            assert caller.result == list(range(1, 11))
    assert [each.partition(" ")[0] for each in transports] == ["tcp", "shm"]


def test_a_killed_server_is_heard_of_and_runs_no_finally() -> None:
    ended: list[str] = []

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server("slow", {"wait": lambda: runtime.sleep(100.0)})
        try:
            ours.serve_forever()
        finally:
            if not process.is_dead:
                ended.append("it cleaned up")

    def call(ours: RpcService, process: Process) -> str:
        client = ours.create_client("slow", 1, timeout_s=30.0)
        try:
            client.call("wait", timeout_s=50.0)
        except errors.RpcError as error:
            return type(error).__name__
        return "answered"

    with Simulation(1) as simulation:
        begin_master(simulation)
        server = begin(simulation, "server", serve)
        caller = begin(simulation, "caller", call)
        simulation.at(5.0, server.kill)
        simulation.run(until=caller)
        assert caller.result == "MaybeExecuted"
        assert simulation.now < 10.0, "long before its deadline"
    assert not ended


def test_what_was_sent_over_a_cut_link_arrives_when_it_is_mended() -> None:
    def call(ours: RpcService, process: Process) -> float:
        client = ours.create_client("adder", 1, timeout_s=30.0)
        assert client.call("add", 1, 1, timeout_s=5.0) == 2
        runtime.sleep(max(0.0, 1.0 - runtime.monotonic()))
        began = runtime.monotonic()
        assert client.call("add", 2, 2, timeout_s=30.0) == 4
        return runtime.monotonic() - began

    with Simulation(1) as simulation:
        caller = job(simulation, call)
        simulation.at(0.9, lambda: simulation.cut("caller", "server", both_ways=False))
        simulation.at(3.0, lambda: simulation.mend("caller", "server"))
        simulation.run(until=caller)
        assert 2.0 <= caller.result < 3.0


def test_a_link_that_stays_cut_is_a_peer_that_is_silent() -> None:
    def call(ours: RpcService, process: Process) -> list[str]:
        client = ours.create_client("adder", 1, timeout_s=30.0)
        client.call("add", 1, 1, timeout_s=5.0)
        runtime.sleep(2.0)
        try:
            client.call("add", 1, 1, timeout_s=60.0)
        except errors.RpcError as error:
            return [type(error).__name__, str(error)]
        return []

    with Simulation(1) as simulation:
        caller = job(simulation, call)
        simulation.at(1.5, lambda: simulation.cut("caller", "server"))
        simulation.run(until=caller)
        assert caller.result[0] == "MaybeExecuted"
        assert "answered nothing for" in caller.result[1]


def test_a_stopped_process_keeps_its_connections_and_goes_on() -> None:
    def call(ours: RpcService, process: Process) -> float:
        client = ours.create_client("adder", 1, timeout_s=30.0)
        client.call("add", 1, 1, timeout_s=5.0)
        runtime.sleep(max(0.0, 1.0 - runtime.monotonic()))
        assert client.call("add", 2, 2, timeout_s=30.0) == 4
        return runtime.monotonic()

    with Simulation(1) as simulation:
        begin_master(simulation)
        server = begin(simulation, "server", add, lease_s=30.0)
        caller = begin(simulation, "caller", call)
        simulation.at(0.9, server.stop)
        simulation.at(4.0, server.go_on)
        simulation.run(until=caller)
        assert 4.0 <= caller.result < 4.5


def test_a_crashed_host_is_silent_and_its_server_is_missed_after_the_lease() -> None:
    def look(ours: RpcService, process: Process) -> float:
        ours.create_client("adder", 1, timeout_s=30.0)
        runtime.sleep(max(0.0, 5.0 - runtime.monotonic()))
        while True:
            try:
                ours.create_client("adder", 1, timeout_s=0.05)
            except errors.NoServer:
                return runtime.monotonic()

    with Simulation(1) as simulation:
        caller = job(simulation, look)
        simulation.at(5.0, lambda: simulation.crash("server"))
        simulation.run(until=caller, limit_s=60.0)
        assert 5.0 + LEASE_S / 2 <= caller.result <= 5.0 + 2 * LEASE_S


def test_a_process_is_started_again_under_its_name() -> None:
    numbers: list[int] = []

    def run(process: Process) -> None:
        numbers.append(process.number)
        runtime.sleep(10.0)

    with Simulation(1) as simulation:
        process = simulation.process("one", run)
        simulation.at(1.0, process.kill)
        simulation.at(2.0, lambda: simulation.start_again("one"))
        simulation.run(until=lambda: len(numbers) == 2)
        assert process.is_dead and not simulation.processes["one"].is_dead
    assert numbers[0] != numbers[1]


def test_coroutines_of_handlers_and_asyncio_run_on_virtual_time() -> None:
    import asyncio

    async def ours_s() -> float:
        await sleep(7.0)
        return runtime.monotonic()

    async def asyncio_s() -> float:
        await asyncio.sleep(9.0)
        return runtime.monotonic()

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server("sleeper", {"ours": ours_s, "asyncio": asyncio_s})
        ours.serve_forever()

    def call(ours: RpcService, process: Process) -> list[float]:
        client = ours.create_client("sleeper", 1, timeout_s=30.0)
        futures = [client.submit(name, timeout_s=20.0) for name in ("ours", "asyncio")]
        return [future.result() for future in futures]

    with Simulation(1) as simulation:
        begin_master(simulation)
        begin(simulation, "server", serve)
        caller = begin(simulation, "caller", call)
        simulation.run(until=caller)
        one, other = caller.result
        assert 7.0 <= one < 7.5 and 9.0 <= other < 9.5


def test_asyncio_to_thread_runs_in_threads_of_the_process_on_virtual_time() -> None:
    import asyncio

    def block(number: int) -> tuple[int, float]:
        runtime.sleep(10.0)
        return number, runtime.monotonic()

    async def several() -> list[tuple[int, float]]:
        return list(await asyncio.gather(*(asyncio.to_thread(block, each) for each in range(20))))

    async def fails() -> None:
        await asyncio.to_thread(lambda: 1 // 0)

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server("threads", {"several": several, "fails": fails})
        ours.serve_forever()

    def call(ours: RpcService, process: Process) -> list[tuple[int, float]]:
        client = ours.create_client("threads", 1, timeout_s=30.0)
        with pytest.raises(errors.RemoteError, match="ZeroDivisionError"):
            client.call("fails", timeout_s=60.0)
        return [tuple(each) for each in client.call("several", timeout_s=60.0)]

    def run(seed: int) -> tuple[list[tuple[int, float]], str]:
        with Simulation(seed) as simulation:
            begin_master(simulation)
            begin(simulation, "server", serve)
            caller = begin(simulation, "caller", call)
            simulation.run(until=caller)
            return caller.result, simulation.digest

    answers, digest = run(1)
    assert [number for number, _ in answers] == list(range(20))
    ends = sorted(end_s for _, end_s in answers)
    assert ends[7] < 10.5 < 20.0 < ends[8] and 30.0 < ends[19] < 31.0, "eight at a time"
    assert run(1) == (answers, digest)


# -- faults, and what is said of them --------------------------------------------------------------


def test_faults_are_drawn_from_the_seed_and_one_left_out_changes_no_other() -> None:
    def faults(seed: int, skip: frozenset[int] = frozenset()) -> list[str]:
        with Simulation(seed, skip=skip) as simulation:
            simulation.let_loose(Rates(), 30.0)
            return [str(each) for each in simulation.faults]

    assert faults(1) == faults(1) == faults(1, frozenset({0}))
    assert faults(1) != faults(2)
    assert len(faults(1)) > 10


def test_a_failure_is_made_small_to_the_fault_that_it_takes() -> None:
    def scenario(simulation: Simulation) -> None:
        def serve(ours: RpcService, process: Process) -> None:
            ours.create_server("adder", {"add": lambda one, other: one + other})
            ours.serve_forever()

        begin_master(simulation)
        server = begin(simulation, "server", serve)
        simulation.let_loose(Rates(kill=0.4), 10.0, may_end=("server",))
        simulation.run(limit_s=11.0)
        assert simulation.processes["server"] is server, "it was never killed"

    (failure,) = explore(scenario, range(50), failures_max=1)
    assert [each.split()[2] for each in failure.least.faults] == ["kill"] or [
        each.split()[2] for each in failure.least.faults
    ] == ["crash"]
    assert len(failure.first.faults) > 1
    assert "seed" in str(failure) and "AssertionError: it was never killed" in str(failure)
    again = run_once(scenario, failure.least.seed, failure.least.skip)
    assert again.error == failure.least.error and again.digest == failure.least.digest


def test_a_failure_whose_later_faults_are_left_out_is_the_same_run() -> None:
    def scenario(simulation: Simulation) -> None:
        counts = [0]

        def count(process: Process) -> None:
            begin, lock = runtime.Event(), runtime.Lock()

            def add_some() -> None:
                begin.wait()
                for _ in range(5):
                    with lock:
                        seen = counts[0]
                    runtime.monotonic()  # where it may lose its turn
                    with lock:
                        counts[0] = seen + 1  # what another has added meanwhile is lost

            threads = [runtime.Thread(target=add_some) for _ in range(3)]
            for thread in threads:
                thread.start()
            runtime.sleep(1.0)
            begin.set()
            for thread in threads:
                thread.join()

        counter = simulation.process("counter", count)
        simulation.let_loose(Rates(stop=1.0), 20.0)
        simulation.run(until=counter)
        assert counts == [15], "an update is lost"

    failures = explore(scenario, range(100), failures_max=20)
    assert len(failures) == 20
    for failure in failures:
        for outcome in (failure.first, failure.least):
            again = run_once(scenario, outcome.seed, outcome.skip)
            assert again.error == outcome.error
            assert (again.digest, again.events) == (outcome.digest, outcome.events)


def test_a_failure_made_small_has_the_cause_that_it_had() -> None:
    def scenario(simulation: Simulation) -> None:
        def live(process: Process) -> None:
            if process.number > 1:
                raise KeyError("what it knew before it was killed")
            runtime.sleep(10.0)
            raise ValueError("it fails without any fault, too")

        simulation.process("p", live)
        simulation.let_loose(Rates(kill=1.0), 9.0, may_end=["p"])
        simulation.run(limit_s=20.0)

    (failure,) = explore(scenario, range(1), failures_max=1)
    assert "KeyError" in failure.first.error and "KeyError" in failure.least.error
    assert [each.split()[2] for each in failure.least.faults] == ["kill"]


def test_a_timeline_is_kept_as_text_and_as_a_trace(tmp_path: Path) -> None:
    outcome = run_once(calls, 5, keep=tmp_path)
    text = (tmp_path / "seed-5.txt").read_text()
    assert "master" in text and "begins on" in text
    trace = json.loads((tmp_path / "seed-5.json").read_text())["traceEvents"]
    names = {each["args"]["name"] for each in trace if each["name"] == "process_name"}
    assert {"master", "server0", "server1"} <= names
    assert outcome.events > 100


def test_a_digest_tells_runs_apart_by_anything_that_happened() -> None:
    one, same, other = Timeline(False), Timeline(False), Timeline(False)
    for timeline, text in ((one, "a"), (same, "a"), (other, "b")):
        timeline.note(1.0, "process", "note", text)
    assert one.digest == same.digest != other.digest
