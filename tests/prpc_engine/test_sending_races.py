"""Calls on their way to a server, held between two steps: by then their connection has ended, or
the answer is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prpc_engine import Deferred, HedgePolicy, Master, RpcClient, once
from prpc_engine.client.route import Route
from prpc_engine.rpc.call import TIMEOUT_S, CallTable
from prpc_engine.rpc.peer import Peer
from shard import PeerLostError
from tests.held import at
from tests.prpc_engine.inside import (
    directory_of,
    dispatcher_of,
    node_of,
    peers_by_address,
    routes_of,
)
from tests.prpc_engine.processes import PATIENCE_S, wait_connected, wait_until
from tests.prpc_engine.test_client_races import World as Services


class World(Services):
    """Counts what runs."""

    def __init__(self, master: Master) -> None:
        self.ran = 0
        super().__init__(master)

    @once
    def add(self) -> int:
        self.ran += 1
        return self.ran

    def count(self) -> int:
        self.ran += 1
        return self.ran

    def items(self) -> Iterator[int]:
        self.ran += 1
        yield from range(3)


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    with contextlib.closing(World(master)) as made:
        yield made


@pytest.mark.usefixtures("patient_describe")
@pytest.mark.parametrize("way", ["first", "again"])
@pytest.mark.parametrize("method", ["add", "count"])
def test_a_call_whose_connection_ends_as_it_is_about_to_leave_runs_once_over_another(
    world: World, method: str, way: str
) -> None:
    with cut_before_sending(world, lambda: way == "again" or bool(world.ran)) as (client, route):
        if way == "first":
            assert client.call(method, timeout_s=PATIENCE_S) == 1
        else:
            call = dispatcher_of(client).encoded(route, method, (), PATIENCE_S, True, client)
            dispatcher_of(client).admit(call)
            dispatcher_of(client).send(call, route)
            assert call.result(PATIENCE_S) == 1
    assert client.call("echo", 2, timeout_s=PATIENCE_S) == 2
    assert world.ran == 1
    assert client.statistics().retries == 0, "it never left before"


@pytest.mark.parametrize("way", ["first", "again"])
def test_a_stream_whose_connection_ends_as_it_is_about_to_be_opened_is_opened_over_another(
    world: World, way: str
) -> None:
    with cut_before_sending(world, lambda: True) as (client, route):
        if way == "first":
            stream = client.stream("items", timeout_s=PATIENCE_S)
        else:
            stream = client._stream_later(route, "items", (), PATIENCE_S, client)
        assert list(stream) == [0, 1, 2]
    assert world.ran == 1


@contextlib.contextmanager
def cut_before_sending(
    world: World, has_followed: Callable[[], bool]
) -> Iterator[tuple[RpcClient, Route]]:
    """A client, connected to its only server: the connection ends when its next request is entered
    and not sent yet. If the dispatcher hears of that request, until then, it is not sent before
    has_followed()."""
    client = world.calling.create_client("test")
    assert client.call("echo", 1) == 1
    wait_connected(client)
    (route,) = routes_of(client).values()
    peer, node = route.peer, node_of(world.calling)
    assert peer is not None

    def cut() -> None:
        node.reactor.call_soon(lambda: peer.connection.close(PeerLostError("it was cut")))
        wait_until(lambda: peer not in peers_by_address(node).values(), "all are told of the end")
        wait_until(
            lambda: not dispatcher_of(client).held or has_followed(), "what follows from that"
        )

    with at("peer.sending", cut, of=peer) as was_cut:
        yield client, route
    assert was_cut.count == 1


def test_a_call_refused_before_its_sender_goes_on_keeps_its_deadline_at_the_next_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Deferred] = []

    def hang() -> Deferred:
        held.append(Deferred())
        return held[-1]

    world.calling.create_server("test", {"count": hang, "echo": world.echo})
    client = world.calling.create_client("test", 2)
    assert client.broadcast("echo", 1) == [1, 1]
    wait_connected(client)
    (server,) = (one for one in node_of(world.serving).servers.values() if one.service == "test")
    node_of(world.serving).reactor.call_soon(server.stop)
    wait_until(lambda: server.jobs.closed, "it stops")
    client._only = first = routes_of(client)[0]
    reactor = node_of(world.calling).reactor

    def be_refused() -> None:
        wait_until(lambda: dispatcher_of(client).held, "the refusal")
        followed = threading.Event()
        reactor.call_soon(lambda: reactor.call_soon(followed.set))
        assert followed.wait(PATIENCE_S)

    monkeypatch.setattr(directory_of(client), "is_stale", lambda *_: False)
    with at("peer.sent", be_refused, of=first.peer, times=1):
        call = client.submit("count", timeout_s=TIMEOUT_S / 2)
    wait_until(lambda: held and call.sent, "the next server has it")
    assert isinstance(call.table, CallTable)
    assert call.table.soonest <= call.deadline  # else nobody looks: the calls before have TIMEOUT_S
    held[0].reply(7)
    assert call.result(PATIENCE_S) == 7


class Forgetful(Route):
    """Whenever its peer was looked at, another thread finds that one lost."""

    __slots__ = ()

    @property
    def peer(self) -> Peer | None:  # type: ignore[override]
        seen: Peer | None = _PEER.__get__(self)
        _PEER.__set__(self, None)
        return seen

    @peer.setter
    def peer(self, peer: Peer | None) -> None:
        _PEER.__set__(self, peer)


_PEER: Any = Route.__dict__["peer"]


def connected(client: RpcClient) -> Route:
    """The way to its only server, from now on a forgetful one."""
    assert client.call("echo", 1) == 1
    wait_connected(client)
    (route,) = routes_of(client).values()
    route.__class__ = Forgetful
    return route


def test_a_server_whose_connection_is_found_lost_as_its_calls_are_counted_has_none(
    world: World,
) -> None:
    with world.calling.create_client("test") as client:
        route = connected(client)
        assert [len(route.in_flight), len(route.in_flight)] == [0, 0]


def test_a_hedged_call_is_sent_though_another_thread_finds_its_connection_lost(
    world: World,
) -> None:
    with world.calling.create_client("test", hedge=HedgePolicy(delay_s=PATIENCE_S)) as client:
        connected(client)
        assert client.call("echo", 2, timeout_s=PATIENCE_S) == 2


def test_servers_are_asked_what_may_be_repeated_though_another_thread_finds_one_lost(
    world: World,
) -> None:
    told = threading.Event()
    with world.calling.create_client("test") as client:
        connected(client)
        node_of(world.calling).reactor.call_soon(lambda: dispatcher_of(client).describe(told.set))
        assert told.wait(PATIENCE_S)
        assert dispatcher_of(client).is_idempotent("echo")
