"""The master is killed with kill -9 and started again: sessions resume, ids go on, the data plane
notices nothing.
"""

from __future__ import annotations

import logging
import queue
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    JournalError,
    MasterUnreachable,
    MaybeExecuted,
    NoSuchNode,
    RpcError,
)
from prpc_engine.master.client import MasterClient, TreeEvent
from tests.program import halt
from tests.prpc_engine import seen
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.master_processes import ClientProcess, MasterProcess
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until

LEASE_S = 60.0  # no session of these tests may end by it


@pytest.mark.usefixtures("patient_sessions")
def test_everything_is_there_again_and_nothing_is_given_twice(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as first, MasterClient(first.address, lease_s=LEASE_S) as client:
        ids = [client.generate_id("a") for _ in range(3)]
        client.tree_node_add("/kept", "value")
        client.tree_node_set("/kept", "changed")
        client.tree_node_add("/mine", "", ephemeral=True)
        token = client.acquire_lock("l")
        client.tree_node_add("/seq")
        names = [client.tree_node_gen("/seq")]
        first.kill()
        with first.again(), MasterClient(first.address) as other:
            assert client.tree_node_get("/kept") == ("changed", 1, False)
            assert other.tree_node_get("/mine").ephemeral, "the session was resumed"
            ids += [client.generate_id("a"), other.generate_id("a")]
            names.append(other.tree_node_gen("/seq"))
            with pytest.raises(DeadlineExceeded, match=r"process \d+ \(session \d+\) holds it"):
                other.acquire_lock("l", timeout_s=0.05)
            client.release_lock("l")
            assert other.acquire_lock("l") > token
    assert ids == [0, 1, 2, 3, 4]
    assert names == ["_0000000000", "_0000000001"]


@pytest.mark.usefixtures("patient_sessions")
def test_tokens_and_ids_grow_over_the_restart_of_a_master_that_remembers_nothing() -> None:
    with MasterProcess() as first:
        tokens, ids = [], []
        with MasterClient(first.address, lease_s=LEASE_S) as client:
            for _ in range(3):
                with client.lock("l") as token:
                    tokens.append(token)
                ids.append(client.generate_id("a"))
        first.kill()
        with first.again(), MasterClient(first.address, lease_s=LEASE_S) as client:
            tokens.append(client.acquire_lock("l"))
            ids += [client.generate_id("a"), client.generate_id("a")]
            assert client.count_up("a") == 0
    assert tokens == sorted(set(tokens))
    assert ids == sorted(set(ids))


def test_tokens_grow_where_a_journal_begins_after_a_master_without_one(tmp_path: Path) -> None:
    with Master() as master, MasterClient(master.address) as client:
        token = client.acquire_lock("l")
    with Master(journal=tmp_path) as master, MasterClient(master.address) as client:
        assert client.acquire_lock("l") > token
        assert [client.generate_id("a") for _ in range(3)] == [0, 1, 2]


def test_calls_between_nodes_go_on_without_a_master(tmp_path: Path) -> None:
    with (
        MasterProcess(tmp_path) as first,
        ServerProcess(first.address, "test", "shm") as server,
        RpcService(master=first.address) as service,
    ):
        client = service.create_client("test", timeout_s=PATIENCE_S)
        before = client.call("echo", "before")
        stop = threading.Event()
        answered: list[int] = []
        failures: list[BaseException] = []

        def call_on() -> None:
            number = 0
            while not stop.is_set():
                try:
                    assert client.call("echo", number, timeout_s=PATIENCE_S) == number
                except BaseException as error:
                    failures.append(error)
                    return
                answered.append(number)
                number += 1

        caller = threading.Thread(target=call_on)
        caller.start()
        try:
            first.kill()
            during = len(answered)
            wait_until(lambda: len(answered) > during + 100 or failures, "calls without a master")
            with first.again(), MasterClient(first.address) as other:
                wait_until(lambda: service.master_client.connected, "the session")
                assert seen.ranks(service) == [0, 1]
                assert [len(info.servers) for info in other.get_rpc_service_info("RpcService")] == [
                    1
                ]
                again = service.create_client("test", timeout_s=PATIENCE_S)
                assert again.call("echo", "after") == "after"
                stop.set()
                caller.join(PATIENCE_S)
                service.create_server("new", {"one": lambda: 1})
                assert service.create_client("new").call("one") == 1
                server.end()
                wait_until(lambda: "test" not in seen.servers(service), "its end")
        finally:
            stop.set()
            caller.join(PATIENCE_S)
        assert before == "before"
        assert not failures


@pytest.mark.slow
def test_a_call_goes_on_waiting_where_the_master_dies_as_it_is_asked_who_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What may have run at the master is the look: the call has not left."""
    with MasterProcess(tmp_path) as first, RpcService(master=first.address) as service:
        client = service.create_client("late", expected_servers=0)

        def asked() -> int:
            return sum(peer.requests for peer in service.statistics().peers)

        halt(first.process.pid)
        before = asked()
        with caplog.at_level(logging.DEBUG, "prpc"):
            future = client.submit("echo", 1, timeout_s=PATIENCE_S)
            wait_until(lambda: asked() > before, "the look")
            first.kill()
            wait_until(lambda: "could not be looked up" in caplog.text, "the end of the look")
        assert "lookup('late', 0) was sent to the master" in caplog.text
        with first.again(), ServerProcess(first.address, "late", "tcp"):
            assert future.result(PATIENCE_S) == 1


def test_a_master_without_a_journal_is_joined_anew(tmp_path: Path) -> None:
    with (
        MasterProcess() as first,
        RpcService(master=first.address) as one,
        RpcService(master=first.address) as two,
    ):
        two.create_server("test", {"one": lambda: 1})
        client = one.create_client("test", timeout_s=PATIENCE_S)
        assert client.call("one") == 1
        ranks = one.rank, two.rank
        first.kill()
        with first.again():
            for service in (one, two):
                wait_until(
                    lambda service=service: len(seen.ranks(service)) == 2,
                    "both to be back",
                )  # type: ignore[misc]
            fresh = one.create_client("test", timeout_s=PATIENCE_S)
            assert (fresh.call("one"), client.call("one")) == (1, 1)
            assert {one.rank, two.rank} == set(ranks)


def test_what_waits_goes_on_waiting_over_a_restart(tmp_path: Path) -> None:
    with (
        MasterProcess(tmp_path) as first,
        MasterClient(first.address, lease_s=LEASE_S) as holder,
        MasterClient(first.address, lease_s=LEASE_S) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        holder.acquire_lock("l")
        lock = pool.submit(other.acquire_lock, "l", PATIENCE_S)
        barrier = pool.submit(other.barrier, "b", 2, PATIENCE_S)
        wait_until(lambda: len(holder.tree_node_sub("/_lock_/l")) == 2, "the claim")
        wait_until(lambda: holder.tree_node_sub("/_barrier_") == ["b"], "the arrival")
        first.kill()
        with first.again():
            holder.barrier("b", 2, PATIENCE_S)
            barrier.result(PATIENCE_S)
            holder.release_lock("l")
            lock.result(PATIENCE_S)
            other.release_lock("l")
            assert holder.tree_node_sub("/_lock_") == []


def test_ids_that_many_ask_for_while_it_is_killed_again_and_again_are_never_the_same(
    tmp_path: Path,
) -> None:
    """Every id that was given is given once, and none is lost either: who asks again is answered
    the same.
    """
    master = MasterProcess(tmp_path)
    stop = threading.Event()
    ids: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ask(client: MasterClient) -> None:
        while not stop.is_set():
            ids.put(client.generate_id("k", timeout_s=PATIENCE_S))

    with (
        MasterClient(master.address, lease_s=LEASE_S) as one,
        MasterClient(master.address, lease_s=LEASE_S) as two,
    ):
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, client) for client in (one, two, one, two)]
            try:
                for turn in range(3):
                    wait_until(lambda turn=turn: ids.qsize() > 50 * (turn + 1), "some ids")  # type: ignore[misc]
                    master.kill()
                    master = master.again()
            finally:
                stop.set()
            for done in asking:
                done.result(PATIENCE_S)
        found = sorted(ids.get() for _ in range(ids.qsize()))
        assert found == list(range(len(found)))
    with master:
        pass


def test_a_watch_goes_on_over_a_restart(tmp_path: Path) -> None:
    seen: queue.SimpleQueue[TreeEvent] = queue.SimpleQueue()
    with (
        MasterProcess(tmp_path) as first,
        MasterClient(first.address, lease_s=LEASE_S) as watcher,
        MasterClient(first.address, lease_s=LEASE_S) as other,
    ):
        other.add_context(1, "old")
        watcher.tree_watch("/_context_", seen.put)
        other.add_context(2, "before")
        assert seen.get(timeout=PATIENCE_S).path == "/_context_/2"
        first.kill()
        with first.again():
            other.delete_storage(1)
            other.add_context(3, "after")
            events = [seen.get(timeout=PATIENCE_S) for _ in range(2)]
            assert [(event.path, event.value) for event in events] == [
                ("/_context_/1", None),
                ("/_context_/3", "after"),
            ]


def test_who_died_while_there_was_no_master_is_gone_when_it_is_back(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as first, MasterClient(first.address, lease_s=LEASE_S) as client:
        dying = ClientProcess(first.address, lease_s=LEASE_S)
        dying.do("client.tree_node_add('/e', '', True)")
        first.kill()
        dying.kill()
        with first.again(), pytest.raises(NoSuchNode):
            client.tree_node_get("/e")


def test_a_verb_that_no_master_answers_ends_at_its_deadline_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    with MasterProcess(tmp_path) as first, MasterClient(first.address, lease_s=LEASE_S) as client:
        first.kill()
        wait_until(lambda: not client.connected, "its notice")
        with pytest.raises(
            MasterUnreachable,
            match=rf"generate_id\('a'\) was not asked: no master answers at {first.address} for "
            rf"\d+\.\d+ s .*start it again",
        ):
            client.generate_id("a", timeout_s=0.2)


def test_a_stopped_master_hangs_nobody_and_blames_nobody_when_it_goes_on(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as first, MasterClient(first.address, lease_s=LEASE_S) as client:
        client.tree_node_add("/e", "", ephemeral=True)
        halt(first.pid)
        with pytest.raises(RpcError):
            client.generate_id("a", timeout_s=0.1)
        first.process.send_signal(signal.SIGCONT)
        assert client.tree_node_get("/e", timeout_s=PATIENCE_S).ephemeral


def test_a_second_master_on_the_same_journal_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as first:
        with pytest.raises(
            JournalError, match=f"another master serves from {tmp_path}: pid {first.process.pid}, "
        ):
            Master(journal=tmp_path)
        first.kill()
        with Master(journal=tmp_path):
            pass


def test_a_journal_with_damage_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with Master(journal=tmp_path) as master, MasterClient(master.address) as client:
        for _ in range(10):
            client.generate_id("a")
    path = tmp_path / "journal-0"
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 1
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(JournalError, match=re.escape(f"{path} is damaged at byte")):
            Master(journal=tmp_path)
    assert path.read_bytes() == damaged


@pytest.mark.usefixtures("patient_sessions")
@pytest.mark.parametrize("shards", [0, 1])
def test_a_server_is_created_within_its_own_time_or_not_at_all(shards: int) -> None:
    with MasterProcess() as master, RpcService(master.address, shards=shards, pin=False) as service:
        served: object = Plain if shards else Plain()
        halt(master.pid)
        try:
            with pytest.raises(
                (MaybeExecuted, DeadlineExceeded, MasterUnreachable), match=r"(within|after) 0\.2"
            ):
                service.create_server("x", served, sharded=bool(shards), timeout_s=0.2)
        finally:
            master.process.send_signal(signal.SIGCONT)
        assert service.create_server("x", served, sharded=bool(shards), timeout_s=PATIENCE_S)
        with pytest.raises(ConfigError, match="timeout_s"):
            service.create_server("y", served, timeout_s=-1.0)
