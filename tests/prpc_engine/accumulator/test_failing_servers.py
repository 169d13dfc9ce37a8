"""Servers that do not answer, are closed, are killed, and come back: nothing counts twice, and
nothing is lost untold.
"""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future as FutureOfThread
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.accumulator import (
    Accumulator,
    AccumulatorClient,
    AccumulatorServer,
    AccumulatorShard,
    CounterSet,
    Sum,
    snapshot_file,
)
from prpc_engine.accumulator import sender as sender_module
from prpc_engine.accumulator.client import SERVICE_NAME
from prpc_engine.errors import Closed, ConfigError, DeadlineExceeded, NoServer
from shard import runtime
from tests.held import at, held_at
from tests.program import halt
from tests.prpc_engine.accumulator.processes import NEVER_S, Process
from tests.prpc_engine.inside import routes_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.shard.processes import in_fork


class Mumbling(AccumulatorShard):
    """Merges, and then fails to answer: so the client has to push again."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def push(self, *arguments: Any) -> Any:
        self.asked += 1
        answer = super().push(*arguments)
        if self.asked % 3:
            raise OSError("what was I about to say?")
        return answer


def test_a_push_whose_answer_is_lost_counts_once() -> None:
    counters, shard = CounterSet(), Mumbling()
    with Master() as master, RpcService(master=master.address) as service:
        service.create_server(SERVICE_NAME, shard)
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 0, NEVER_S, counters)
            for number in range(3):
                one.write(10**number)
                client.wait_empty(PATIENCE_S)
            assert one.read().value == 111
            statistics = client.statistics()
            assert (statistics.pushes, statistics.duplicates, statistics.failures) == (3, 3, 6)
            assert statistics.failure is None


def test_without_a_server_values_are_kept_and_wait_empty_ends_in_time() -> None:
    counters = CounterSet()
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service)
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 3, NEVER_S, counters)
            server.close()
            for _ in range(10_000):
                one.write(1)
            with pytest.raises(
                DeadlineExceeded,
                match=r"10000 values were not acknowledged by 'accumulator' within 0\.2 s; "
                r"they are kept",
            ):
                client.wait_empty(0.2)
            with AccumulatorServer(service):
                client.wait_empty(PATIENCE_S)
                assert one.read().value == 10_000


def test_the_sender_looks_at_what_waits_for_a_silent_server_while_nobody_else_adds_to_it() -> None:
    counters = CounterSet()
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service)
        with AccumulatorClient(service, counters=counters) as client:
            one, two = (Accumulator(name, Sum, 1, NEVER_S, counters) for name in ("one", "two"))
            server.close()
            one.write(1)
            wait_until(lambda: client.statistics().failures, "a push that nobody answers")
            other = threading.Thread(target=client.statistics)
            kept_out: list[bool] = []

            def look() -> None:
                other.start()
                other.join(0.05)
                kept_out.append(other.is_alive())

            with at("sender.looking", look, times=1) as looked:
                two.write(2)
                looked.wait()
                wait_until(lambda: kept_out, "the look")
            other.join(PATIENCE_S)
            assert kept_out == [True], "another thread waits while the sender looks"
            with AccumulatorServer(service):
                client.wait_empty(PATIENCE_S)
                assert (one.read().value, two.read().value) == (1, 2)


def test_a_server_that_answers_something_else_is_asked_again() -> None:
    counters = CounterSet()
    with Master() as master, RpcService(master=master.address) as service:
        server = service.create_server(SERVICE_NAME, {"push": lambda *_: "hello"})
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 1, NEVER_S, counters)
            one.write(1)
            wait_until(lambda: client.statistics().failures, "an answer that is none")
            server.close()
            with AccumulatorServer(service):
                client.wait_empty(PATIENCE_S)
                assert one.read().value == 1


def test_what_no_server_took_is_counted_and_told_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters = CounterSet()
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service)
        client = AccumulatorClient(service, counters=counters)
        one = Accumulator("one", Sum, 3, NEVER_S, counters)
        server.close()
        for _ in range(5):
            one.write(1)
        assert client.close(timeout_s=0.1) == 5
        assert client.close() == 0
        assert "5 values were dropped" in caplog.text
        assert client.statistics().dropped == 5
        with pytest.raises(Closed, match="closed here"):
            client.wait_empty()


def test_a_client_closes_within_its_time_although_a_server_stands_still_with_a_push(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_module, "PUSH_TIMEOUT_S", NEVER_S)
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        Process("server", master.address) as server,
    ):
        server.wait_until_ready()
        client = AccumulatorClient(service, counters=counters)
        one = Accumulator("one", Sum, 1, NEVER_S, counters)
        one.write(1)
        client.wait_empty(PATIENCE_S)
        halt(server.pid)
        try:
            one.write(2)
            wait_until(
                lambda: any(route.in_flight for route in routes_of(client._client).values()),
                "the push",
            )
            one.write(3)  # which waits behind it
            closing = begun(client.close, 0.1)
            assert closing.result(PATIENCE_S) == 2
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert "2 values were dropped" in caplog.text


def test_a_client_closes_in_a_handler_and_what_was_written_is_sent() -> None:
    """Whose thread turns the reactor that brings the answers."""
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service) as server,
    ):
        client = AccumulatorClient(service, counters=counters)
        Accumulator("one", Sum, 0, NEVER_S, counters).write(7)
        service.create_server("closer", {"close": client.close})
        assert service.create_client("closer").call("close", timeout_s=PATIENCE_S) == 0
        assert server.generate_output_info() == {"one": "7"}


def test_a_client_is_its_parents_in_a_fork_whatever_happens_there() -> None:
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service),
        AccumulatorClient(service, counters=counters) as client,
    ):
        one = Accumulator("one", Sum, 0, NEVER_S, counters)
        one.write(7)

        def in_child() -> None:
            with pytest.raises(Closed, match="make one in the fork"):
                client.wait_empty(PATIENCE_S)
            assert client.close() == 0

        # as another thread may have the lock, which no fork takes along
        with held_at("sender.draining") as held, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.wait_empty, PATIENCE_S)
            held.wait()
            assert in_fork(in_child) == 0
            held.release()
            waiting.result(PATIENCE_S)
        assert one.read().value == 7


def test_a_sender_for_which_there_is_no_thread_sends_once_there_is_one() -> None:
    """As the interpreter ends there is none, and close() comes last."""
    counters, ended = CounterSet(), ThreadPoolExecutor(1)
    ended.shutdown()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service) as server,
    ):
        client = AccumulatorClient(service, counters=counters)
        Accumulator("one", Sum, 1, NEVER_S, counters).write(7)
        threads = runtime.own("blocking threads", lambda: ThreadPoolExecutor(1))
        runtime.put("blocking threads", ended)
        try:
            assert client.close() == 0
        finally:
            runtime.put("blocking threads", threads)
        assert server.generate_output_info() == {"one": "7"}


def begun(function: Callable[..., Any], *arguments: Any) -> FutureOfThread[Any]:
    """What the function returns, in a thread that keeps nobody from ending the test."""
    done: FutureOfThread[Any] = FutureOfThread()
    threading.Thread(target=lambda: done.set_result(function(*arguments)), daemon=True).start()
    return done


def test_a_client_that_is_closed_after_its_service_ends_at_once_and_says_what_it_lost() -> None:
    counters = CounterSet()
    with Master() as master:
        with RpcService(master=master.address) as service:
            AccumulatorServer(service)
            client = AccumulatorClient(service, counters=counters)
        Accumulator("one", Sum, 3, NEVER_S, counters).write(1)
        assert client.close(timeout_s=PATIENCE_S) == 1


def test_a_server_that_was_killed_takes_its_values_along_and_what_comes_after_counts_once() -> None:
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        Process("server", master.address) as server,
    ):
        server.wait_until_ready()
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 2, NEVER_S, counters)
            one.write(1)
            client.wait_empty(PATIENCE_S)
            server.kill()
            for _ in range(1000):
                one.write(1)
            with Process("server", master.address) as after:
                after.wait_until_ready()
                client.wait_empty(PATIENCE_S)
                assert one.read(PATIENCE_S).value == 1000
            statistics = client.statistics()
            assert (statistics.restarts, statistics.pushes_lost) == (1, 1)
            assert (statistics.acknowledged, statistics.dropped) == (1001, 0)


def test_a_server_that_was_killed_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"

    def saved() -> list[Any]:
        return snapshot_file.load(path)[0]["counters"] if path.exists() else []

    with (
        Master() as master,
        RpcService(master=master.address) as service,
        Process("server", master.address, str(path)) as server,
    ):
        server.wait_until_ready()
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 2, NEVER_S, counters)
            one.write(1)
            client.wait_empty(PATIENCE_S)
            wait_until(saved, "the snapshot")
            server.kill()
            for _ in range(1000):
                one.write(1)
            with Process("server", master.address, str(path)) as after:
                after.wait_until_ready()
                client.wait_empty(PATIENCE_S)
                assert one.read(PATIENCE_S).value == 1001
            statistics = client.statistics()
            assert (statistics.restarts, statistics.pushes_lost, statistics.dropped) == (1, 0, 0)


def test_a_server_that_is_closed_and_comes_back_loses_nothing_while_others_write(
    tmp_path: Path,
) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service, snapshot_path=path)
        with AccumulatorClient(service, counters=counters) as client:
            one = Accumulator("one", Sum, 5, NEVER_S, counters)
            stop = threading.Event()
            written = 0

            def write() -> None:
                nonlocal written
                while not stop.is_set():
                    one.write(1)
                    written += 1

            writer = threading.Thread(target=write)
            writer.start()
            for round_number in range(5):
                before = client.statistics().pushes
                wait_until(
                    lambda seen=before: client.statistics().pushes > seen,
                    f"a push in round {round_number}",
                )
                server.close()
                server = AccumulatorServer(service, snapshot_path=path)
            stop.set()
            writer.join()
            client.wait_empty(PATIENCE_S)
            assert one.read(PATIENCE_S).value == written
            assert client.statistics().pushes_lost == 0
        server.close()


def test_what_is_being_saved_as_a_server_closes_comes_before_its_last_snapshot(
    tmp_path: Path,
) -> None:
    path, counters = tmp_path / "snapshot", CounterSet()
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service, snapshot_path=path, snapshot_s=0.01)
        with held_at("snapshot.saving") as saving, at("snapshot.retiring") as retiring:
            saving.wait()
            with AccumulatorClient(service, counters=counters) as client:
                Accumulator("one", Sum, 1, NEVER_S, counters).write(7)
                client.wait_empty(PATIENCE_S)
            closing = begun(server.close)
            retiring.wait()
            saving.release()
            closing.result(PATIENCE_S)
        assert len(snapshot_file.load(path)[0]["counters"]) == 1


def test_a_server_that_two_threads_close_at_once_is_saved_and_closed_once(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with Master() as master, RpcService(master=master.address) as service:
        server = AccumulatorServer(service, snapshot_path=path)

        def close_it_too() -> None:
            """Another thread closes the server before the first who does has begun to."""
            begun(server.close).result(PATIENCE_S)

        with at("snapshot.closing", close_it_too, times=1), at("snapshot.retiring") as saved:
            server.close()
        assert saved.count == 1
        assert snapshot_file.load(path)[0]["counters"] == []


def test_a_damaged_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    snapshot_file.save(path, [AccumulatorShard().snapshot()])
    good = path.read_bytes()
    with Master() as master, RpcService(master=master.address) as service:
        flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
        for bad in (b"", good[:-1], b"x" * 200, *flipped):
            path.write_bytes(bad)
            with pytest.raises(
                ConfigError, match=f"{path} is no snapshot of accumulators, or damaged"
            ):
                AccumulatorServer(service, snapshot_path=path)
        path.write_bytes(b"")
        with pytest.raises(ConfigError, match="it has 0 bytes, and its header alone has 24"):
            AccumulatorServer(service, snapshot_path=path)
        snapshot_file.save(path, [AccumulatorShard().snapshot()] * 2)
        with pytest.raises(ConfigError, match="was saved by 2 servers, and here are 1"):
            AccumulatorServer(service, snapshot_path=path)


def test_two_servers_cannot_save_to_one_path_and_the_second_is_told_who_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "snapshot"
    with (
        Master() as master,
        Process("server", master.address, str(path)) as server,
        RpcService(master=master.address) as service,
    ):
        server.wait_until_ready()
        with pytest.raises(
            ConfigError,
            match=f"is in use by another accumulator server, of process {server.pid} on",
        ):
            AccumulatorServer(service, snapshot_path=path)
        server.kill()
        with (
            AccumulatorServer(service, snapshot_path=path),
            pytest.raises(ConfigError, match=f"of process {os.getpid()} on"),
        ):
            AccumulatorServer(service, snapshot_path=path)
        AccumulatorServer(service, snapshot_path=path).close()


def test_a_snapshot_belongs_to_the_server_that_saved_it_and_gives_it_its_id_again(
    tmp_path: Path,
) -> None:
    with Master() as master, RpcService(master=master.address) as service:
        paths = [tmp_path / "0", tmp_path / "1"]
        for server in [AccumulatorServer(service, snapshot_path=path) for path in paths]:
            server.close()
        with pytest.raises(
            ConfigError,
            match="was saved by server 0 of 'accumulator', and this is server 1 of 'accumulator'",
        ):
            AccumulatorServer(service, server_id=1, snapshot_path=paths[0])
        with pytest.raises(
            ConfigError,
            match="was saved by server 0 of 'accumulator', and this is server -1 of 'other'",
        ):
            AccumulatorServer(service, "other", snapshot_path=paths[0])
        for number in (1, 0):  # in the other order
            with AccumulatorServer(service, snapshot_path=paths[number]) as server:
                assert server.server.server_ids == (number,)


@pytest.mark.parametrize("driven", ["by the engine", "by the main thread"])
def test_sigterm_saves_what_was_acknowledged_and_ends_the_process(
    tmp_path: Path, driven: str
) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"
    command = "server-without-end" if driven == "by the engine" else "server-in-main"
    with Master() as master, RpcService(master=master.address) as service:
        with Process(command, master.address, str(path)) as server:
            server.wait_until_ready()
            with AccumulatorClient(service, counters=counters, timeout_s=PATIENCE_S) as client:
                one = Accumulator("one", Sum, 2, NEVER_S, counters)
                for _ in range(1000):
                    one.write(1)
                client.wait_empty(PATIENCE_S)
                assert server.end(signal.SIGTERM) == -signal.SIGTERM
        states = snapshot_file.load(path)
        assert [(name, state) for name, _, _, state in states[0]["counters"]] == [
            ("one", ((), 1000))
        ]


def test_a_program_that_ends_without_closing_its_server_has_saved_it(tmp_path: Path) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"
    with Master() as master, RpcService(master=master.address) as service:
        with Process("server-without-end", master.address, str(path)) as server:
            server.wait_until_ready()
            with AccumulatorClient(service, counters=counters, timeout_s=PATIENCE_S) as client:
                Accumulator("one", Sum, 1, NEVER_S, counters).write(1)
                client.wait_empty(PATIENCE_S)
                assert server.end() == 0
        assert len(snapshot_file.load(path)[0]["counters"]) == 1


def is_dead(process: psutil.Process) -> bool:
    """Looked at, not waited for: that is for its parent's supervisor."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("restart", ["never", "on-failure"])
def test_a_dead_shard_takes_nothing_from_the_snapshots_of_the_living(
    tmp_path: Path, restart: str
) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"
    with Master() as master, RpcService(master=master.address) as service:
        before = {child.pid for child in psutil.Process().children()}
        home = RpcService(master=master.address, shards=2, restart=restart)
        server = AccumulatorServer(home, snapshot_path=path, snapshot_s=NEVER_S)
        with AccumulatorClient(service, servers=2, counters=counters) as client:
            for number in range(20):
                Accumulator(f"counter {number}", Sum, counters=counters).write(1)
            client.wait_empty(PATIENCE_S)
            assert server.save() == {}
            living = {
                f"counter {number}"
                for number in range(20)
                if zlib.crc32(f"counter {number}".encode()) % 2 == 0
            }
            shards = [child for child in psutil.Process().children() if child.pid not in before]
            shards[-1].kill()
            wait_until(lambda: is_dead(shards[-1]), "the death of a shard")
            for name in living:
                counter = counters.get(name)
                assert counter is not None
                counter.write(1)
            found = client.snapshot(timeout_s=3.0)
            assert {name for name, one in found.items() if one.value == 2} == living  # type: ignore[attr-defined]
            missing = server.save()
            # Until it is started again, it is named; then it has what was saved of it.
            for named in (found.missing, missing):
                assert list(named) == ["server 1 of 'accumulator'"] or (
                    restart == "on-failure" and not named
                )
            assert server.generate_output_info().keys() >= living
        server.close()
        home.close()
        states = snapshot_file.load(path)
        values = {name: state[1] for one in states for name, _, _, state in one["counters"]}
        assert values == {
            f"counter {number}": 1 + (f"counter {number}" in living) for number in range(20)
        }


def test_who_comes_after_server_0_died_does_not_write_where_nobody_reads() -> None:
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        RpcService(master=master.address) as other,
    ):
        first, second = AccumulatorServer(service), AccumulatorServer(service)
        for servers in (1, 2):
            if servers == 2:
                first.close()
            with pytest.raises(
                ConfigError,
                match=(
                    rf"servers=1, and 'accumulator' has the servers "
                    rf"\[{'0, ' * (servers == 1)}1\]"
                ),
            ):
                AccumulatorClient(other, counters=counters)
        with pytest.raises(NoServer):
            AccumulatorClient(other, servers=2, counters=counters, timeout_s=0.1)
        third = AccumulatorServer(service, server_id=2)
        with pytest.raises(ConfigError, match=r"has the servers \[1, 2\]"):
            AccumulatorClient(other, servers=2, counters=counters, timeout_s=0.1)
        with pytest.raises(NoServer):
            AccumulatorClient(other, servers=3, counters=counters, timeout_s=0.1)
        with (
            AccumulatorServer(service),
            AccumulatorClient(other, servers=3, counters=counters) as client,
        ):
            names = [f"counter {number}" for number in range(30)]
            for name in names:
                Accumulator(name, Sum, counters=counters).write(1)
            client.wait_empty(PATIENCE_S)
            for server, server_id in ((second, 1), (third, 2)):
                assert set(server.generate_output_info()) == {
                    name for name in names if zlib.crc32(name.encode()) % 3 == server_id
                }
