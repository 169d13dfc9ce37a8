"""Each fault does what it says: drawn by the nemesis or by hand, in the timeline, with its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import RpcService, empty, errors
from prpc_engine.simulation import Process, Rates, Simulation, SimulationError
from prpc_engine.simulation.clock import HostClock
from prpc_engine.simulation.nemesis import DRIFT_MAX
from shard import runtime
from tests.simulation.jobs import MASTER_PORT, begin, begin_master

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


# -- when ------------------------------------------------------------------------------------------


def test_faults_that_are_let_loose_late_begin_then_and_not_all_at_once() -> None:
    with Simulation(3, keep=True) as simulation:
        simulation.process("a", nothing, host="one")
        simulation.run(limit_s=50.0)
        with pytest.raises(SimulationError, match=r"until_s=8.0\): it is 50.000 s already"):
            simulation.let_loose(QUIET(clock=1.0), until_s=8.0)
        simulation.let_loose(QUIET(clock=1.0), until_s=60.0)
        simulation.run(limit_s=20.0)
        happenings = simulation.timeline.happenings
        assert happenings is not None
        begun_s = [each.time_s for each in happenings if each.text.startswith("its clock")]
    assert 4 <= len(begun_s) <= 20
    assert begun_s == pytest.approx([each.begins_s for each in simulation.faults])
    assert len(set(begun_s)) == len(begun_s)


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


# -- disks -----------------------------------------------------------------------------------------


def written(path: Path, data: bytes, sync: bool) -> None:
    """Append that."""
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        if sync:
            runtime.fsync(file.fileno())


def folder_synced(path: Path) -> None:
    """The names in it are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        runtime.fsync(fd)
    finally:
        os.close(fd)


def after_crash(seed: int, folder: Path, write: Callable[[Path], None]) -> tuple[str, str]:
    """What write() leaves on a host that crashes behind it: the timeline, and the digest."""

    def run(process: Process) -> None:
        write(folder)
        runtime.sleep(100.0)

    with Simulation(seed, keep=True) as simulation:
        simulation.process("writer", run)
        simulation.disk("host", folder)
        simulation.at(50.0, lambda: simulation.crash("host"))
        simulation.run(limit_s=60.0)
        return simulation.timeline.text(), simulation.digest


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_keeps_what_was_synced_and_a_kill_keeps_all(seed: int, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        written(folder / "whole", b"synced", True)
        folder_synced(folder)
        written(folder / "whole", b", and this may be lost", False)

    after_crash(seed, tmp_path, write)
    data = (tmp_path / "whole").read_bytes()
    assert data.rstrip(b"\0").startswith(b"synced")
    assert b"synced, and this may be lost".startswith(data.rstrip(b"\0"))


def test_what_was_not_synced_is_lost_torn_or_whole_by_the_seed(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        written(folder / "torn", bytes(range(1, 200)), True)
        folder_synced(folder)
        written(folder / "torn", b"x" * 1000, False)

    lengths, digests, texts = [], set(), []
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        text, digest = after_crash(seed, tmp_path / str(seed), write)
        lengths.append(len((tmp_path / str(seed) / "torn").read_bytes()))
        texts.append(text)
        digests.add(digest)
    assert 199 in lengths and 1199 in lengths
    assert len({length for length in lengths if 199 < length < 1199}) > 5
    assert len(digests) == 40
    for length, text in zip(lengths, texts, strict=True):
        told = f"lost on its disk: torn: {length} bytes, 199 synced of 1199"
        assert (told in text) == (length < 1199 or "1199 bytes, 199" in text)
    (tmp_path / "again").mkdir()
    text, digest = after_crash(7, tmp_path / "again", write)
    assert text == texts[7] and digest in digests


def test_names_that_were_not_synced_come_or_go_and_a_rename_is_whole(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        for name in ("old", "kept", "removed"):
            written(folder / name, name.encode(), True)
        folder_synced(folder)
        written(folder / "new", b"new", True)
        os.rename(folder / "new", folder / "old")
        os.rename(folder / "kept", folder / "moved")
        (folder / "removed").unlink()
        (folder / "made").mkdir()

    outcomes = set()
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        after_crash(seed, folder, write)
        assert (folder / "old").read_bytes() in (b"old", b"new")
        assert (folder / "kept").exists() != (folder / "moved").exists()
        outcomes.add(
            (
                (folder / "old").read_bytes(),
                (folder / "kept").exists(),
                (folder / "removed").exists(),
                (folder / "made").exists(),
            )
        )
    assert len(outcomes) > 8, "each may happen or not, for itself"


def test_a_crash_during_a_sync_finds_it_not_begun(tmp_path: Path) -> None:
    lengths = set()
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        synced: list[float] = []

        def run(process: Process, folder: Path = folder, synced: list[float] = synced) -> None:
            written(folder / "file", b"", True)
            folder_synced(folder)
            synced.append(simulation.now)
            written(folder / "file", b"0123456789", True)
            synced.append(simulation.now)

        with Simulation(seed) as simulation:
            simulation.process("writer", run)
            simulation.disk("host", folder)
            simulation.run(lambda synced=synced: bool(synced))  # type: ignore[misc]
            simulation.after(20e-6, lambda: simulation.crash("host"))
            simulation.run(limit_s=1.0)
        assert len(synced) == 1
        lengths.add(len((folder / "file").read_bytes()))
    assert {0, 10} < lengths


def test_a_full_disk_refuses_syncs_until_it_has_room(tmp_path: Path) -> None:
    def run(process: Process) -> list[int]:
        refused = []
        for number in range(6):
            try:
                written(tmp_path / "file", b"x", True)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    refused.append(number)
            runtime.sleep(1.0)
        return refused

    with Simulation(1, keep=True) as simulation:
        process = simulation.process("writer", run)
        simulation.disk("host", tmp_path)
        simulation.at(1.5, lambda: simulation.fill_disk("host"))
        simulation.at(3.5, lambda: simulation.fill_disk("host", False))
        simulation.run(process)
        assert process.result == [2, 3]
        text = simulation.timeline.text()
        assert "its disk is full" in text and "its disk has room" in text


def test_the_nemesis_fills_disks_at_its_rate_and_empties_them(tmp_path: Path) -> None:
    def refused(rate: float) -> int:
        def run(process: Process) -> int:
            count = 0
            for _ in range(100):
                try:
                    written(tmp_path / "file", b"x", True)
                except OSError:
                    count += 1
                runtime.sleep(0.1)
            return count

        with Simulation(1) as simulation:
            process = simulation.process("writer", run)
            simulation.disk("host", tmp_path)
            simulation.let_loose(QUIET(full=rate), 10.0)
            simulation.run(process)
            assert not simulation.disks["host"].is_full
            return int(process.result)

    assert refused(0.0) == 0 < refused(1.0) < 100


def test_a_folder_is_on_one_host_s_disk(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with Simulation(1) as simulation:
        for name in ("a", "b"):
            simulation.process(name, nothing, host=name)
        simulation.disk("a", tmp_path)
        for host, folder in (("b", tmp_path / "below"), ("a", tmp_path.parent), ("b", tmp_path)):
            with pytest.raises(SimulationError, match="a host has one disk, and no other host's"):
                simulation.disk(host, folder)
        with pytest.raises(SimulationError, match=r"host 'b' has no disk\(\): \['a'\] have"):
            simulation.fill_disk("b")


# -- memory ----------------------------------------------------------------------------------------


def test_a_process_without_memory_is_refused_by_name_until_it_has_some_again() -> None:
    values = np.ones(50_000, np.float32)

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server(
            "arrays", {"twice": lambda values: 2 * values, "add": lambda a, b: a + b}
        )
        ours.serve_forever()

    def call(ours: RpcService, process: Process) -> list[str]:
        client = ours.create_client("arrays", 1, timeout_s=30.0)
        told = []
        made = empty(50_000)
        made[:] = 1
        simulation.note("it has begun")

        def ask(what: Callable[[], object]) -> None:
            try:
                what()
                told.append("answered")
            except errors.RpcError as error:
                told.append(type(error).__name__)

        for who in (process, simulation.processes["server"]):
            who.refuse_memory()
            ask(lambda: empty(10))
            ask(lambda: client.call("twice", values, timeout_s=5.0))
            ask(lambda: client.call("twice", made, timeout_s=5.0))
            ask(lambda: client.call("add", 1, 2, timeout_s=5.0))
            who.grant_memory()
            ask(lambda: client.call("twice", values, timeout_s=5.0))
            ask(lambda: empty(10))
        return told

    with Simulation(1, keep=True) as simulation:
        begin_master(simulation)
        begin(simulation, "server", serve)
        caller = begin(simulation, "caller", call)
        simulation.run(caller)
        text = simulation.timeline.text()
    # its own array is lent, and sent; the answer to it finds no memory here
    assert caller.result == [
        *("ShmFull", "ShmFull", "RpcError", "answered", "answered", "answered"),
        *("answered", "BadArguments", "BadArguments", "answered", "answered", "answered"),
    ]
    assert text.count("no memory for arrays") == 2 == text.count("has memory for arrays")


def test_the_nemesis_refuses_memory_at_its_rate_and_grants_it_again() -> None:
    def run(rate: float) -> tuple[int, str]:
        def make(process: Process) -> int:
            refused = 0
            for _ in range(100):
                try:
                    empty(1000)
                except errors.ShmFull:
                    refused += 1
                runtime.sleep(0.1)
            empty(1000)
            return refused

        with Simulation(1) as simulation:
            process = simulation.process("maker", make)
            simulation.let_loose(QUIET(memory=rate), 9.0)
            simulation.run(process)
            return int(process.result), simulation.digest

    assert run(0.0)[0] == 0 < run(1.0)[0] < 100
    assert run(1.0) == run(1.0)


# -- secrets ---------------------------------------------------------------------------------------


def test_a_process_with_another_secret_is_refused_by_name() -> None:
    def join(process: Process) -> str:
        master = f"{simulation.host('master').address}:{MASTER_PORT}"
        try:
            with RpcService(master, secret="t" * 32, bind=process.bind, timeout_s=10.0):
                return "joined"
        except errors.RpcError as error:
            return type(error).__name__

    with Simulation(1) as simulation:
        begin_master(simulation)
        other = simulation.process("other", join, host="other")
        simulation.run(other)
        assert other.result == "AuthenticationFailed"
