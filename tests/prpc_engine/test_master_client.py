"""A MasterClient and its master: every verb under its name, locks and barriers with deadlines,
watches with deltas.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    MasterUnreachable,
    NodeExists,
    NoSuchNode,
    Rejected,
    VersionMismatch,
)
from prpc_engine.master import session as session_module
from prpc_engine.master.client import CommInfo, MasterClient, RpcServiceInfo, ServerInfo, TreeEvent
from prpc_engine.master.protocol import WATCH_TARGET
from tests.ports import address_of, hold_port
from tests.program import halt
from tests.prpc_engine.inside import session_of
from tests.prpc_engine.master_processes import ClientProcess
from tests.prpc_engine.processes import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def _patience(patient_sessions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a client is closed the master knows it, however late it hears it."""
    monkeypatch.setattr(session_module, "CLOSE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def client(master: Master) -> Iterator[MasterClient]:
    with MasterClient(master.address, label="first") as one:
        yield one


@pytest.fixture
def other(master: Master) -> Iterator[MasterClient]:
    with MasterClient(master.address, label="second") as one:
        yield one


# -- names, ids, services --------------------------------------------------------------------------


def test_the_tree_is_shared_and_has_versions(client: MasterClient, other: MasterClient) -> None:
    client.tree_node_add("/a", "1")
    assert other.tree_node_get("/a") == ("1", 0, False)
    assert other.tree_node_set("/a", "2", expected_version=0) == 1
    with pytest.raises(
        VersionMismatch,
        match=r"tree_node_set\('/a', '3', 0\) at the master at .*: '/root/a' has version 1",
    ):
        client.tree_node_set("/a", "3", expected_version=0)
    with pytest.raises(NodeExists):
        client.tree_node_add("/a")
    assert client.tree_node_gen("/a", "x") == "_0000000000"
    assert client.tree_node_sub("/a") == ["_0000000000"]
    with pytest.raises(Rejected, match="has 1 children"):
        client.tree_node_del("/a")
    assert client.tree_clear_path("/a") == 2
    with pytest.raises(NoSuchNode):
        other.tree_node_get("/a")


def test_an_ephemeral_node_goes_with_its_session(master: Master, client: MasterClient) -> None:
    with MasterClient(master.address) as owner:
        owner.tree_node_add("/e", "", ephemeral=True)
        assert client.tree_node_get("/e").ephemeral
    with pytest.raises(NoSuchNode):
        client.tree_node_get("/e")


def test_ids_count_up_for_each_key(client: MasterClient, other: MasterClient) -> None:
    ids = [
        client.generate_id("a"),
        other.generate_id("a"),
        client.generate_id("b"),
        client.generate_id("a"),
    ]
    assert [one - ids[0] for one in ids] == [0, 1, 0, 2]
    client.reset_generate_id("a")
    assert other.generate_id("a") == ids[0]
    assert [
        client.count_up("a"),
        other.count_up("a"),
        client.count_up("b"),
        client.count_up("a"),
    ] == [0, 1, 0, 2]


def test_nodes_are_listed_in_order_of_rank(master: Master, client: MasterClient) -> None:
    clients = [MasterClient(master.address) for _ in range(3)]
    try:
        for rank, one in zip((10, 2, 0), clients, strict=True):
            one.register_node(CommInfo(rank, (f"10.0.0.{rank}:1",)))
        assert [info.global_rank for info in client.get_comm_info()] == [0, 2, 10]
        assert client.get_comm_info_of(2) == CommInfo(2, ("10.0.0.2:1",))
        assert client.get_comm_info_of(3) is None
        with pytest.raises(NodeExists):
            client.register_node(CommInfo(2, ()))
    finally:
        for one in clients:
            one.close()
    assert client.get_comm_info() == []


def test_services_have_ids_and_servers(client: MasterClient, other: MasterClient) -> None:
    assert client.register_rpc_service("api", "s") == 0
    assert other.register_rpc_service("api", "t") == 1
    client.register_node(CommInfo(7, ("tcp://a:1",)))
    assert client.register_server("api", "s", 7) == (0, 0)
    assert other.register_server("api", "s", 7, 5) == (0, 5)
    with pytest.raises(Rejected, match="server 5 of 's' exists already, at rank 7"):
        client.register_server("api", "s", 7, 5)
    info = RpcServiceInfo("s", 0, (ServerInfo(0, 7), ServerInfo(5, 7)))
    assert client.get_rpc_service_info("api") == [info, RpcServiceInfo("t", 1, ())]
    assert client.get_rpc_service_info_of("api", "s") == info
    assert other.deregister_server("api", "s", 5)
    assert not other.deregister_server("api", "s", 5)
    assert client.deregister_rpc_service("api", "t")
    assert client.get_rpc_service_info_of("api", "t") is None


def test_contexts_and_models(client: MasterClient) -> None:
    assert client.get_context(3) is None
    with pytest.raises(NoSuchNode):
        client.set_context(3, "x")
    for number in (10, 3):
        client.add_context(number, "x")
    client.set_context(3, "y")
    assert (client.get_context(3), client.get_storage_list()) == ("y", [3, 10])
    assert client.delete_storage(3)
    assert not client.delete_storage(3)
    client.add_model("a/b", "m")
    with pytest.raises(NodeExists):
        client.add_model("a/b", "m")
    client.set_model("a/b", "n")
    assert (client.get_model("a/b"), client.get_model("c"), client.get_model_names()) == (
        "n",
        None,
        ["a/b"],
    )
    assert client.del_model("a/b")
    assert not client.del_model("a/b")


def test_the_state_of_a_task(client: MasterClient, other: MasterClient) -> None:
    assert not client.get_task_ready()
    with pytest.raises(DeadlineExceeded, match="node '/_task_state_/ready' was not made"):
        client.wait_task_ready(timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_task_ready, PATIENCE_S)
        other.set_task_ready()
        waiting.result(PATIENCE_S)
    assert client.get_task_ready()
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.watch_task_fail(failures.put)
    assert client.get_task_failed() is None
    other.set_task_failed("out of memory")
    assert failures.get(timeout=PATIENCE_S) == client.get_task_failed() == "out of memory"
    other.watch_task_fail(failures.put)
    assert failures.get(timeout=PATIENCE_S) == "out of memory", "at once, as it has failed already"
    names = [one.add_task_node("worker", timeout_s=PATIENCE_S) for one in (client, other)]
    assert client.get_task_node("worker") == names
    assert client.del_task_node("worker", names[0])
    assert client.get_task_node("worker") == names[1:]
    assert client.get_task_node("chief") == []


def test_clearing_the_master_leaves_it_usable(client: MasterClient) -> None:
    client.tree_node_add("/a")
    client.add_context(1, "x")
    client.clear_master()
    assert client.get_storage_list() == []
    client.add_context(1, "x")


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda client: client.tree_node_get(7), "is no path|str"),
        (lambda client: client.tree_node_add("/a", b"bytes"), "value="),
        (lambda client: client.barrier("b", "two"), "count='two'"),
        (lambda client: client.generate_id(""), "1 to 256 characters"),
        (
            lambda client: client._ask(1.0, "format_disk"),
            "there is no verb 'format_disk'; there are acquire_lock",
        ),
        (lambda client: client._ask(1.0, "ranks", 1, 2), "asked with 2 arguments"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_the_master_goes_on(
    client: MasterClient, ask: Callable[[MasterClient], object], why: str
) -> None:
    with pytest.raises(Rejected, match=why):
        ask(client)
    assert client.count_up("still there") == 0


def test_a_timeout_that_is_none_is_refused(client: MasterClient) -> None:
    with pytest.raises(ConfigError, match="timeout_s=-1"):
        client.generate_id("a", timeout_s=-1)


# -- locks -----------------------------------------------------------------------------------------


def test_a_lock_is_held_by_one_and_who_waits_too_long_is_told_by_whom(
    client: MasterClient, other: MasterClient
) -> None:
    with client.lock("l") as token:
        with pytest.raises(
            DeadlineExceeded,
            match=(
                r"acquire_lock\('l'\) at the master at .*: lock 'l' was not free: "
                r"first \(session"
            ),
        ):
            other.acquire_lock("l", timeout_s=0.05)
        with pytest.raises(Rejected, match=f"held by this thread already \\(token {token}\\)"):
            client.acquire_lock("l")
    assert other.acquire_lock("l", timeout_s=PATIENCE_S) > token
    other.release_lock("l")
    with pytest.raises(Rejected, match="not held by this client"):
        other.release_lock("l")


def test_nested_locks_of_four_threads(client: MasterClient) -> None:
    """Ten pairs each, always in the same order; the counter is exact."""
    counter = 0

    def work() -> None:
        nonlocal counter
        for pair in range(10):
            with client.lock(f"outer {pair}", PATIENCE_S), client.lock(f"inner {pair}", PATIENCE_S):
                seen = counter
                client.generate_id("something in between")
                if pair == 0:
                    counter = seen + 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result(PATIENCE_S)
    assert counter == 4
    assert client.tree_node_sub("/_lock_") == []


def test_a_lock_is_free_when_its_holder_is_killed(master: Master, client: MasterClient) -> None:
    holder = ClientProcess(master.address, lease_s=600.0)
    assert holder.do("client.acquire_lock('l')").isdecimal()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.acquire_lock, "l", PATIENCE_S)
        holder.kill()
        waiting.result(PATIENCE_S)
    client.release_lock("l")


# -- barriers and roles ----------------------------------------------------------------------------


def test_a_barriers_name_is_used_again_with_other_sizes(master: Master) -> None:
    clients = [MasterClient(master.address) for _ in range(10)]
    try:
        with ThreadPoolExecutor(10) as pool:
            for name, count in (("b1", 5), ("b1", 10), ("b2", 10), ("b1", 5), ("b2", 5)):
                for done in [
                    pool.submit(one.barrier, name, count, PATIENCE_S) for one in clients[:count]
                ]:
                    done.result(PATIENCE_S)
    finally:
        for one in clients:
            one.close()


def test_a_barrier_that_does_not_open_says_who_is_missing(
    client: MasterClient, other: MasterClient
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            client.barrier, "b", 3, PATIENCE_S, "alice", ["alice", "bob", "carol"]
        )
        with pytest.raises(
            DeadlineExceeded,
            match="barrier 'b' did not open: 2 of 3 arrived: alice, bob; missing: carol",
        ):
            wait_until(
                lambda: client.tree_node_sub("/_barrier_") and client.tree_node_sub("/_barrier_/b"),
                "alice",
            )
            other.barrier("b", 3, timeout_s=0.05, member="bob")
        with ThreadPoolExecutor(1) as second:
            later = second.submit(other.barrier, "b", 3, PATIENCE_S, "bob")
            client.barrier("b", 3, PATIENCE_S, "carol")
            later.result(PATIENCE_S)
        waiting.result(PATIENCE_S)


def test_where_all_nodes_are_to_come_the_missing_rank_is_named(master: Master) -> None:
    missing = pytest.raises(DeadlineExceeded, match="1 of 2 arrived: rank 0; missing: rank 1")
    with RpcService(master=master.address) as one, RpcService(master=master.address), missing:
        one.master_client.barrier("b", 2, timeout_s=0.05)


def test_roles_are_ranked_by_number(master: Master) -> None:
    clients = [MasterClient(master.address) for _ in range(3)]
    try:
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(one.alloc_role_rank, "worker", 3, rank, PATIENCE_S)
                for one, rank in zip(clients, (10, 2, 1), strict=True)
            ]
            assert [done.result(PATIENCE_S) for done in asked] == [
                (2, [1, 2, 10]),
                (1, [1, 2, 10]),
                (0, [1, 2, 10]),
            ]
    finally:
        for one in clients:
            one.close()


# -- watches ---------------------------------------------------------------------------------------


class Seen:
    """What a watch called back with."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[TreeEvent] = queue.SimpleQueue()

    def next(self) -> tuple[str, str | None]:
        event = self.events.get(timeout=PATIENCE_S)
        return event.path, event.value


def test_a_watch_hears_of_every_change_below_its_path_in_order(
    client: MasterClient, other: MasterClient
) -> None:
    seen = Seen()
    client.tree_node_add("/a", "before")
    client.tree_watch("/a", seen.events.put)
    other.tree_node_set("/a", "1")
    other.tree_node_add("/ab", "no business of ours")
    other.tree_node_add("/a/b", "2")
    other.tree_node_set("/a/b", "3")
    other.tree_clear_path("/a")
    assert [seen.next() for _ in range(5)] == [
        ("/a", "1"),
        ("/a/b", "2"),
        ("/a/b", "3"),
        ("/a/b", None),
        ("/a", None),
    ]
    assert seen.events.empty()


def test_the_end_of_one_that_watches_itself_is_told_to_the_others(
    client: MasterClient, other: MasterClient
) -> None:
    seen = Seen()
    client.tree_node_add("/a")
    client.tree_watch("/a", seen.events.put)
    other.tree_watch("/a", lambda event: None)
    other.tree_node_add("/a/its", "", ephemeral=True)
    assert seen.next() == ("/a/its", "")
    other.close()
    assert seen.next() == ("/a/its", None)


def test_a_late_watcher_gets_what_there_is_and_then_the_changes(
    client: MasterClient, other: MasterClient
) -> None:
    for number in range(3):
        other.add_context(number, str(number))
    seen = Seen()
    client.tree_watch("/_context_", seen.events.put, existing=True)
    other.delete_storage(1)
    assert [seen.next() for _ in range(5)] == [
        ("/_context_", ""),
        *((f"/_context_/{number}", str(number)) for number in range(3)),
        ("/_context_/1", None),
    ]


def test_a_callback_may_use_the_client_and_watch_and_unwatch(
    client: MasterClient, other: MasterClient
) -> None:
    seen = Seen()
    values: queue.SimpleQueue[str] = queue.SimpleQueue()
    handles: list[int] = []

    def first(event: TreeEvent) -> None:
        values.put(client.tree_node_get("/a").value)
        client.cancel_watch(handles[0])
        client.tree_watch("/a", seen.events.put)
        client.tree_node_set("/a", "by the callback")

    client.tree_node_add("/a")
    handles.append(client.tree_watch("/a", first))
    other.tree_node_set("/a", "by the other")
    assert values.get(timeout=PATIENCE_S) == "by the other"
    assert seen.next() == ("/a", "by the callback")
    assert not client.cancel_watch(handles[0])


def test_a_callback_that_raises_is_logged_and_the_watch_goes_on(
    client: MasterClient, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()

    def fragile(event: TreeEvent) -> None:
        seen.events.put(event)
        raise ValueError("a bug of the user")

    client.tree_watch("/_context_", fragile)
    for number in range(2):
        client.add_context(number, "")
    assert [seen.next()[0] for _ in range(2)] == ["/_context_/0", "/_context_/1"]
    wait_until(
        lambda: caplog.text.count("ValueError: a bug of the user") == 2, "the second log line"
    )


def test_a_join_costs_one_message_a_watcher(master: Master) -> None:
    """Node N+1 joins: N watchers hear of it, once each, and read nothing again."""
    clients = [MasterClient(master.address) for _ in range(8)]
    try:
        seen = [Seen() for _ in clients]
        for one, log in zip(clients, seen, strict=True):
            one.watch_node(log.events.put)
        before = master.statistics().pushes
        clients[0].register_node(CommInfo(0, ("a:1",)))
        for log in seen:
            assert log.next()[0] == "/_node_/0"
        assert master.statistics().pushes == before + len(clients)
    finally:
        for one in clients:
            one.close()


# -- sessions --------------------------------------------------------------------------------------


def test_a_lost_connection_is_made_again_and_what_the_session_owns_stays(
    client: MasterClient, other: MasterClient
) -> None:
    seen = Seen()
    client.tree_node_add("/e", "", ephemeral=True)
    client.tree_watch("/_context_", seen.events.put)
    session = session_of(client)
    lost = session.peer
    session.node.reactor.call_soon(lost.connection.close)
    wait_until(lambda: session.peer not in (lost, None), "another connection")
    other.add_context(1, "x")
    assert other.tree_node_get("/e").ephemeral
    assert seen.next() == ("/_context_/1", "x")
    assert client.count_up("goes on") == 0


@pytest.mark.parametrize("another_follows", [True, False])
def test_what_a_watch_missed_is_made_up_for(
    master: Master, other: MasterClient, another_follows: bool
) -> None:
    """A notification that was dropped, as one to a watcher that does not read is, is noticed by the
    next one's number, or by a heartbeat."""
    seen = Seen()
    with MasterClient(
        master.address, lease_s=1200.0, heartbeat_s=600.0 if another_follows else 0.05
    ) as client:
        client.tree_watch("/_context_", seen.events.put)
        servers = session_of(client).node.servers
        watches = servers.pop(WATCH_TARGET)
        other.add_context(1, "x")
        client.generate_id("its answer comes after the notification")
        servers[WATCH_TARGET] = watches
        if another_follows:
            other.add_context(2, "y")
        assert seen.next() == ("/_context_/1", "x")
        if another_follows:
            assert seen.next() == ("/_context_/2", "y")


def test_a_process_that_is_stopped_beyond_its_lease_loses_its_session_and_opens_another(
    master: Master, client: MasterClient
) -> None:
    with ClientProcess(master.address, lease_s=0.3) as stopped:
        stopped.do("client.tree_node_add('/e', '', True)")
        # its lease may end meanwhile, too
        wait_until(lambda: stopped.do("client.acquire_lock('l')").isdecimal(), "its lock")
        halt(stopped.pid)
        client.acquire_lock("l", PATIENCE_S)
        with pytest.raises(NoSuchNode):
            client.tree_node_get("/e")
        stopped.process.send_signal(signal.SIGCONT)
        assert "was lost before its release" in stopped.do("client.release_lock('l')")
        assert stopped.do("client.count_up('x')") == "0"


def test_a_client_that_ended_without_a_word_is_noticed_at_once_on_one_host(
    master: Master, client: MasterClient
) -> None:
    gone = ClientProcess(master.address, lease_s=600.0)
    gone.do("client.register_node(CommInfo(5, ('a:1',)))")
    seen = Seen()
    client.watch_node(seen.events.put)
    gone.kill()
    assert seen.next() == ("/_node_/5", None)


def test_nobody_at_the_address_is_said_with_what_to_do() -> None:
    with hold_port() as held:
        address = address_of(held)
        with pytest.raises(
            MasterUnreachable, match=rf"no master answers at {address}.*start one with"
        ):
            MasterClient(address, timeout_s=0.3)


def test_a_closed_client_refuses_and_says_so(client: MasterClient) -> None:
    client.close()
    client.close()
    with pytest.raises(Closed, match=r"'generate_id' was asked of the master at .* closed before"):
        client.generate_id("x")


def test_closing_ends_what_waits(client: MasterClient, other: MasterClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.barrier, "b", 2, PATIENCE_S)
        wait_until(lambda: other.tree_node_sub("/_barrier_"), "its arrival")
        client.close()
        with pytest.raises(Closed):
            waiting.result(PATIENCE_S)
    assert other.tree_node_sub("/_barrier_") == []


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s"), [(0.0, None), (1e9, None), (1.0, 0.9), (1.0, 0.0)]
)
def test_a_lease_or_heartbeat_that_makes_no_sense_is_refused(
    master: Master, lease_s: float, heartbeat_s: float | None
) -> None:
    with pytest.raises(ConfigError, match=r"are allowed|is allowed"):
        MasterClient(master.address, lease_s=lease_s, heartbeat_s=heartbeat_s)
