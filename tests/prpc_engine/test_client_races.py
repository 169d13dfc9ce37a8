"""Clients where a thread is held between two steps: by then a server has come or gone, a connection
is lost, somebody closes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from prpc_engine import HedgePolicy, Master, RpcService, errors, idempotent
from prpc_engine.client.directory import Directory
from prpc_engine.client.route import Route as Way
from prpc_engine.node import node
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.service.serving import RpcServer
from shard import PeerLostError
from tests.held import at, held_at
from tests.helpers import ManualClock
from tests.prpc_engine.inside import (
    entries_of,
    is_guarded,
    leave_soon,
    looks_up,
    node_of,
    peers_by_address,
    routes_of,
)
from tests.prpc_engine.peers import Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_connected, wait_until

SHORT_S = 0.05


def cut(peer: Peer) -> None:
    peer.reactor.call_soon(lambda: peer.connection.close(PeerLostError("it was cut")))


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


def test_a_server_answers_as_soon_as_others_hear_of_it(world: World) -> None:
    answers: list[str] = []

    def ask() -> None:
        with world.calling.create_client("new", timeout_s=PATIENCE_S) as client:
            answers.append(client.call_to(0, "who"))

    with at("session.registering", ask):
        world.serving.create_server("new", {"who": lambda: "me"})
    assert answers == ["me"]


def test_who_connects_to_a_master_that_has_hardly_begun_is_answered() -> None:
    ranks: list[int] = []

    def join(address: str) -> None:
        with RpcService(address, timeout_s=PATIENCE_S) as service:
            ranks.append(service.rank)

    def let_one_join(self: Master) -> None:
        joining = threading.Thread(target=join, args=(self.address,))
        joining.start()
        joining.join(PATIENCE_S)

    with at("master.listening", let_one_join):
        Master().close()
    assert ranks == [0]


@pytest.mark.parametrize("stays", [True, False])
def test_of_two_nodes_that_are_offered_the_same_id_both_get_one(world: World, stays: bool) -> None:
    """Also when the faster one has gone again, and the same id is offered once more."""
    made: list[RpcServer] = []

    def be_faster() -> None:
        made.append(world.calling.create_server("new", {"who": lambda: "the faster one"}))

    def go_again() -> None:
        if not stays:
            made.pop().close()

    with (
        at("serving.prepared", be_faster, times=1),
        at("serving.refused", go_again, times=1) as refused,
    ):
        made.append(world.serving.create_server("new", {"who": lambda: "the slower one"}))
    assert refused.count == 1
    assert [server.server_ids for server in made] == ([(0,), (1,)] if stays else [(0,)])
    with world.calling.create_client("new", len(made), timeout_s=PATIENCE_S) as client:
        assert client.broadcast("who") == ["the faster one", "the slower one"][-len(made) :]


# -- who serves ------------------------------------------------------------------------------------


def test_a_handler_may_ask_who_serves_while_another_thread_does(world: World) -> None:
    client = world.calling.create_client("test")
    with held_at("service.looking", of=world.calling) as held:

        def ask() -> tuple[int, ...]:
            held.release()
            client.refresh()
            return client.server_ids

        world.calling.create_server("asks", {"ask": ask})
        refreshing = threading.Thread(target=client.refresh, daemon=True)
        refreshing.start()
        held.wait()
        with world.serving.create_client("asks") as asking:
            assert asking.call("ask", timeout_s=PATIENCE_S) == (0,)
    refreshing.join(PATIENCE_S)


def test_a_server_that_came_while_a_look_was_under_way_is_found_by_the_next(world: World) -> None:
    client = world.calling.create_client("test")

    def drop() -> None:
        raise errors.NotSent("the client hears of no change")

    with (
        at("service.servers_changed", drop, of=world.calling),
        held_at("service.looked", of=world.calling) as held,
    ):
        calls = [client.submit_to(7, "echo", 1, timeout_s=PATIENCE_S)]
        held.wait()
        world.serving.create_server("test", world, server_id=7)
        calls.append(client.submit_to(7, "echo", 2, timeout_s=PATIENCE_S))
        held.release()
        assert calls[1].result(PATIENCE_S) == 2
        assert isinstance(calls[0].error(PATIENCE_S), errors.NoServer | None)


def test_a_server_that_came_while_the_master_was_too_slow_to_say_so_is_found_later(
    world: World,
) -> None:
    def be_slow() -> None:
        raise errors.MasterUnreachable("it is slow")

    with at("session.looking") as watching:
        client = world.calling.create_client("test")
        watching.wait()
    with at("service.looking", be_slow, of=world.calling, times=2):
        world.serving.create_server("test", world)
        wait_until(lambda: client.server_ids == (0, 1), "the client knows of both")


def test_a_client_that_is_closed_while_it_looks_who_serves_knows_nobody(world: World) -> None:
    client = world.calling.create_client("test")
    closing = threading.Thread(target=client.close)

    def close() -> None:
        closing.start()
        closing.join(PATIENCE_S)

    with at("directory.found", close, times=1) as found:  # the watch may look, too
        with contextlib.suppress(errors.Closed):
            client.refresh()
        found.wait()
    closing.join(PATIENCE_S)
    assert client.server_ids == ()


def test_the_owner_of_a_key_is_one_of_those_that_are_known_together(world: World) -> None:
    class Going(dict[int, Way]):
        """The server that was found to own a key goes before the way to it is looked up."""

        def get(self, server_id: Any, default: Any = None) -> Any:
            directory.set_entries([])
            return default

    entries = entries_of(world.calling, "test", 1, PATIENCE_S)
    node, look = node_of(world.calling), looks_up(lambda: entries)
    directory = Directory("test", node, look, "random", Random(1))
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
    before, found = peers_by_address(made)[first], list[Peer]()
    connecting = threading.Thread(
        target=lambda: found.append(made.peer_at(route.addresses, PATIENCE_S, "it"))
    )

    def connect() -> None:
        connecting.start()
        if not is_guarded(made):
            connecting.join(PATIENCE_S)

    with at("node.forgetting", connect, of=made, times=1):
        cut(before)
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

    def leave(peer: Peer) -> None:
        leave_soon(node_of(world.calling), peer)
        wait_until(lambda: peer.connection.error is not None, "it is left")

    with at("client.sending", leave, of=client, times=1) as left:
        assert client.call("echo", 2, timeout_s=PATIENCE_S) == 2
    assert left.count == 1


def test_an_attempt_is_not_late_by_the_deadline_of_the_one_before() -> None:
    clock = ManualClock()
    pair = Pair(ServedObject("test", 0, 16, {"echo": lambda value: value}), clock=clock)
    call = pair.ask("echo", 1, timeout_s=1.0)
    assert pair.client.calls.in_flight.pop(call.call_id) is call
    clock.advance(2.0)
    call.body = pair.client.decoder.encode_arguments((1,))[0]
    with at("peer.sending", pair.turn) as turned:  # the reactor does at any time
        pair.client.resend(call, Route(), None)
    pair.turn()
    assert turned.count == 1
    assert call.result() == 1
    pair.close()


def test_a_hedged_call_whose_connection_is_lost_as_it_is_sent_ends_at_its_deadline(
    world: World,
) -> None:
    client = world.calling.create_client("test", hedge=HedgePolicy(delay_s=PATIENCE_S))
    assert client.call("echo", 1) == 1
    wait_connected(client)

    def lose(route: Any) -> None:
        peer = route.peer
        cut(peer)
        wait_until(lambda: peer.lost, "the end of the connection")

    with (
        held_at("node.reaching", of=node_of(world.calling)),
        at("dispatcher.sending", lose, times=1) as lost,
    ):
        call = client.submit("echo", 2, timeout_s=SHORT_S)
        assert isinstance(call.error(PATIENCE_S / 2), errors.DeadlineExceeded)
    assert lost.count == 1


# -- the end ---------------------------------------------------------------------------------------


def test_a_service_that_is_closed_before_its_watch_begins_leaves_none_behind(world: World) -> None:
    with at("service.watching", world.calling.close, of=world.calling) as watching:
        world.calling.create_client("test")
    assert watching.count == 1
    with pytest.raises(errors.Closed):
        _ = world.calling.master_client  # there is none, and none is made


@pytest.mark.parametrize("step", ["deregistering", "draining"])
def test_a_server_that_is_taken_back_as_its_service_is_closed_goes_with_it(
    world: World, step: str
) -> None:
    with at(f"serving.{step}", world.serving.close) as came:
        world.server.close(PATIENCE_S)
    assert came.count == 1


def test_threads_that_close_a_service_at_once_both_come_back(world: World) -> None:
    meeting = threading.Barrier(2)
    with (
        ThreadPoolExecutor(2) as pool,
        at("service.closing", lambda: meeting.wait(PATIENCE_S), of=world.calling),
        at("service.shutting", of=world.calling) as shut,
    ):
        for closing in [pool.submit(world.calling.close) for _ in range(2)]:
            closing.result(PATIENCE_S)
    assert shut.count == 1
