"""Clients where a thread is held between two steps: by then a server has come or gone, a connection
is lost, somebody closes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prpc_engine import HedgePolicy, Master, RpcService, errors, idempotent
from prpc_engine.client import directory
from prpc_engine.client.directory import Directory
from prpc_engine.client.route import Route as Way
from prpc_engine.master import master as master_module
from prpc_engine.master.session import MasterSession
from prpc_engine.node import node
from prpc_engine.node.node import Node
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.service.serving import Servers
from shard import PeerLostError, run_blocking
from tests.prpc_engine.inside import (
    dispatcher_of,
    entries_of,
    node_of,
    peers_by_address,
    routes_of,
    watches_of,
)
from tests.prpc_engine.peers import Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_connected, wait_until

SHORT_S = 0.05


class World:
    """One service that serves "test", and one that calls it."""

    def __init__(self, master: Master) -> None:
        self.serving, self.calling = RpcService(master.address), RpcService(master.address)
        self.server = self.serving.create_server("test", self)

    @idempotent
    def echo(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.calling.close()
        self.serving.close()


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    made = World(master)
    yield made
    made.close()


# -- what others hear of is there ------------------------------------------------------------------


def test_a_server_answers_as_soon_as_others_hear_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, answers = MasterSession.register_server, []

    def slowly(session: MasterSession, *asked: Any) -> Any:
        registered = register(session, *asked)
        with world.calling.create_client("new", timeout_s=PATIENCE_S) as client:
            answers.append(client.call_to(0, "who"))
        return registered

    monkeypatch.setattr(MasterSession, "register_server", slowly)
    world.serving.create_server("new", {"who": lambda: "me"})
    assert answers == ["me"]


def test_who_connects_to_a_master_that_has_hardly_begun_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: list[int] = []

    def join(address: str) -> None:
        with RpcService(address, timeout_s=PATIENCE_S) as service:
            ranks.append(service.rank)

    class SlowNode(Node):
        def __init__(self, *settings: Any, **more: Any) -> None:
            super().__init__(*settings, **more)
            joining = threading.Thread(target=join, args=(self.address("tcp"),))
            joining.start()
            joining.join(PATIENCE_S)

    monkeypatch.setattr(master_module, "Node", SlowNode)
    Master().close()
    assert ranks == [0]


@pytest.mark.parametrize("stays", [True, False])
def test_of_two_nodes_that_are_offered_the_same_id_both_get_one(
    world: World, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Also when the faster one has gone again, and the same id is offered once more."""
    prepare, register, made = MasterSession.prepare_server, MasterSession.register_server, []

    def be_late(session: MasterSession, *asked: Any) -> Any:
        offered = prepare(session, *asked)
        offered.result(PATIENCE_S)
        monkeypatch.setattr(MasterSession, "prepare_server", prepare)
        made.append(world.calling.create_server("new", {"who": lambda: "the faster one"}))
        monkeypatch.setattr(MasterSession, "register_server", be_refused)
        return offered

    def be_refused(session: MasterSession, *asked: Any) -> Any:
        registered = register(session, *asked)
        assert isinstance(registered.error(PATIENCE_S), errors.NodeExists)
        monkeypatch.setattr(MasterSession, "register_server", register)
        if not stays:
            made.pop().close()
        return registered

    monkeypatch.setattr(MasterSession, "prepare_server", be_late)
    made.append(world.serving.create_server("new", {"who": lambda: "the slower one"}))
    assert [server.server_ids for server in made] == ([(0,), (1,)] if stays else [(0,)])
    with world.calling.create_client("new", len(made), timeout_s=PATIENCE_S) as client:
        assert client.broadcast("who") == ["the faster one", "the slower one"][-len(made) :]


# -- who serves ------------------------------------------------------------------------------------


def test_a_handler_may_ask_who_serves_while_another_thread_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, asked = threading.Event(), threading.Event()
    client = world.calling.create_client("test")
    look_again = world.calling._look_again

    async def held(name: str) -> Any:
        looking.set()
        assert await run_blocking(asked.wait, PATIENCE_S)
        return await look_again(name)

    def ask() -> tuple[int, ...]:
        asked.set()
        client.refresh()
        return client.server_ids

    monkeypatch.setattr(world.calling, "_look_again", held)
    world.calling.create_server("asks", {"ask": ask})
    threads = [threading.Thread(target=client.refresh, daemon=True)]
    threads[0].start()
    assert looking.wait(PATIENCE_S)
    with world.serving.create_client("asks") as asking:
        assert asking.call("ask", timeout_s=PATIENCE_S) == (0,)
    threads[0].join(PATIENCE_S)


def test_a_server_that_came_while_a_look_was_under_way_is_found_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, go_on = threading.Event(), threading.Event()
    client = world.calling.create_client("test")
    look_again = world.calling._look_again

    async def late(name: str) -> Any:
        found = await look_again(name)
        looked.set()
        assert await run_blocking(go_on.wait, PATIENCE_S)
        return found

    monkeypatch.setattr(world.calling, "_look_again", late)
    monkeypatch.setattr(world.calling, "_servers_changed", lambda event: None)
    calls = [client.submit_to(7, "echo", 1, timeout_s=PATIENCE_S)]
    assert looked.wait(PATIENCE_S)
    world.serving.create_server("test", world, server_id=7)
    calls.append(client.submit_to(7, "echo", 2, timeout_s=PATIENCE_S))
    go_on.set()
    assert calls[1].result(PATIENCE_S) == 2
    assert isinstance(calls[0].error(PATIENCE_S), errors.NoServer | None)


def test_a_server_that_came_while_the_master_was_too_slow_to_say_so_is_found_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "CHANGED_S", SHORT_S, raising=False)
    client = world.calling.create_client("test")
    wait_until(lambda: watches_of(world.calling.master_client)._watches, "the watch")
    look_again, looks = world.calling._look_again, []

    async def slow(name: str) -> Any:
        looks.append(1)
        if len(looks) < 3:
            raise errors.MasterUnreachable("it is slow")
        return await look_again(name)

    monkeypatch.setattr(world.calling, "_look_again", slow)
    world.serving.create_server("test", world)
    wait_until(lambda: client.server_ids == (0, 1), "the client knows of both")


def test_a_client_that_is_closed_while_it_looks_who_serves_knows_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would have the client look once more, at any time
    monkeypatch.setattr(RpcService, "_watch_servers", lambda self: None)
    client = world.calling.create_client("test")
    set_entries = Directory.set_entries

    def late(self: Directory, entries: list[Any]) -> None:
        if entries:
            closing.start()
            wait_until(lambda: not closing.is_alive(), "close()")
        set_entries(self, entries)

    closing = threading.Thread(target=client.close)
    monkeypatch.setattr(Directory, "set_entries", late)
    client.refresh()
    closing.join(PATIENCE_S)
    assert client.server_ids == ()


def test_the_owner_of_a_key_is_one_of_those_that_are_known_together(world: World) -> None:
    class Going(dict[int, Way]):
        """The server that was found to own a key goes before the way to it is looked up."""

        def get(self, server_id: Any, default: Any = None) -> Any:
            directory.set_entries([])
            return default

    directory = world.calling.create_client("test")._directory
    entries = entries_of(world.calling, "test", 1, PATIENCE_S)
    directory.set_entries([])
    sought = directory.by(1)
    for find in (sought.find, lambda: directory.by(1)):  # type: ignore[attr-defined]
        directory.set_entries(entries)
        directory.routes = Going(directory.routes)
        assert find().text == "server 0 of 'test' (rank 0)"


# -- connections -----------------------------------------------------------------------------------


def test_a_connection_made_while_the_one_before_is_being_forgotten_is_kept(world: World) -> None:
    client = world.calling.create_client("test")
    assert client.call("echo", 1) == 1
    made = node_of(world.calling)
    (route,) = routes_of(client).values()
    (first,) = [address for address in route.addresses if address in peers_by_address(made)]
    found: list[Peer] = []

    class Peers(dict[str, Peer]):
        """Another thread connects while these are looked at."""

        def items(self) -> Any:
            seen = list(super().items())
            is_guarded = made._guard.locked()
            if connecting.ident is None:
                connecting.start()
                if not is_guarded:
                    connecting.join(PATIENCE_S)
            return seen

    before, made._peers = peers_by_address(made)[first], Peers(peers_by_address(made))
    connecting = threading.Thread(
        target=lambda: found.append(made.peer_at(route.addresses, PATIENCE_S, "it"))
    )
    made.reactor.call_soon(lambda: before.connection.close(PeerLostError("it was cut")))
    wait_until(lambda: found, "another connection")
    connecting.join(PATIENCE_S)
    wait_until(lambda: before not in peers_by_address(made).values(), "the first is forgotten")
    assert peers_by_address(made).get(first) is found[0]


def test_a_call_that_is_about_to_use_a_connection_that_is_left_goes_over_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "LEAVE_S", 0.0)
    client = world.calling.create_client("test")
    assert client.call("echo", 1) == 1
    wait_connected(client)
    (route,) = routes_of(client).values()
    peer = route.peer
    assert peer is not None
    request = peer.request

    def late(*arguments: Any) -> Any:
        node_of(world.calling).reactor.call_soon(
            lambda: node_of(world.calling)._leave_later(peer, 0.0)
        )
        wait_until(lambda: peer.connection.error is not None, "it is left")
        return request(*arguments)

    monkeypatch.setattr(peer, "request", late)
    assert client.call("echo", 2, timeout_s=PATIENCE_S) == 2


def test_an_attempt_is_not_late_by_the_deadline_of_the_one_before() -> None:
    pair = Pair(ServedObject("test", 0, 16, {"echo": lambda value: value}))
    call = pair.ask("echo", 1, timeout_s=0.0)
    assert pair.client.calls.in_flight.pop(call.call_id) is call
    send = pair.client._send

    def late(*message: Any) -> None:
        pair.client._expire()  # as the reactor may at any time, for another call
        send(*message)

    pair.client._send = late  # type: ignore[assignment]
    call.body = pair.client.decoder.encode_arguments((1,))[0]
    pair.client.resend(call, Route(), None)
    pair.turn()
    assert call.result() == 1
    pair.close()


def test_a_hedged_call_whose_connection_is_lost_as_it_is_sent_ends_at_its_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    client = world.calling.create_client("test", hedge=HedgePolicy(delay_s=PATIENCE_S))
    assert client.call("echo", 1) == 1
    wait_connected(client)
    send, reach = dispatcher_of(client).send, Node.reach

    def lose(call: Any, route: Any) -> None:
        peer = route.peer
        peer.reactor.call_soon(lambda: peer.connection.close(PeerLostError("it was cut")))
        wait_until(lambda: peer.lost, "the end of the connection")
        send(call, route)

    async def hang(*arguments: Any) -> Any:
        assert await run_blocking(go_on.wait, PATIENCE_S)
        return await reach(*arguments)

    monkeypatch.setattr(dispatcher_of(client), "send", lose)
    monkeypatch.setattr(Node, "reach", hang)
    call = client.submit("echo", 2, timeout_s=SHORT_S)
    try:
        assert isinstance(call.error(PATIENCE_S / 2), errors.DeadlineExceeded)
    finally:
        go_on.set()


# -- the end ---------------------------------------------------------------------------------------


def test_a_service_that_is_closed_before_its_watch_begins_leaves_none_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, late = RpcService._watch_servers, list[RpcService]()
    monkeypatch.setattr(RpcService, "_watch_servers", lambda self: late.append(self))
    world.calling.create_client("test")
    world.calling.close()
    for service in late:
        watch(service)
    assert late == [world.calling]
    assert world.calling._master_backend is None


@pytest.mark.parametrize("step", ["_deregister", "_drain"])
def test_a_server_that_is_taken_back_as_its_service_is_closed_goes_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    go_on = getattr(Servers, step)

    def late(servers: Servers, *arguments: Any) -> None:
        world.serving.close()
        go_on(servers, *arguments)

    monkeypatch.setattr(Servers, step, late)
    world.server.close(PATIENCE_S)


def test_threads_that_close_a_service_at_once_both_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut, closing = world.calling._shut, threading.Barrier(2)
    shuts: list[int] = []
    failures: list[BaseException] = []

    def meet() -> None:
        shuts.append(1)
        shut()

    class Flag:
        """Both see that it is open."""

        def __bool__(self) -> bool:
            closing.wait(PATIENCE_S)
            return False

    def close() -> None:
        try:
            world.calling.close()
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(world.calling, "_shut", meet)
    world.calling._closed = Flag()  # type: ignore[assignment]
    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures
    assert len(shuts) == 1
