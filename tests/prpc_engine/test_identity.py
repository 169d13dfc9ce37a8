"""Answers of `once` methods go to the node that asked for them, and the allow list is asked on
every way to a method.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator

import pytest

from prpc_engine import Master, RpcService, bulk, errors, once
from prpc_engine.client.dealer import RpcRequest
from prpc_engine.rpc.call import NEVER, Call
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.message import NOTIFY, OPEN, REPEAT, REQUEST, method_key
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.allow import AllowList, Rule
from shard import Future
from shard.transport.identity import PeerIdentity
from tests.prpc_engine.inside import node_of, numbered, routes_of
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.processes import PATIENCE_S


class Vault:
    """Two methods, of which one is for the same user alone."""

    @once
    def ping(self, value: int) -> int:
        return value

    @once
    def secret(self, value: int) -> str:
        return f"the secret of {value}"


ALLOW = AllowList([Rule("vault", ("any",), ("ping",)), Rule("vault", ("user:same",))])


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RpcService, RpcService]]:
    """A victim, whom the server knows as the same user, and an attacker that states the victim's
    incarnation.
    """
    with (
        Master() as master,
        RpcService(master.address, transports=["shm", "tcp"], allow=ALLOW) as serving,
    ):
        serving.create_server("vault", Vault())
        monkeypatch.setattr("shard.runtime.randbits", lambda bits: 4711)
        with (
            RpcService(master.address, transports=["shm"]) as victim,
            RpcService(master.address, transports=["tcp"]) as attacker,
        ):
            yield victim, attacker


def ask(service: RpcService, kind: int, call_id: int, method: str, value: int) -> Call:
    """A call with that number, as another connection may have had it before; once it has ended."""
    with service.create_client("vault") as client:
        assert client.call("ping", 0) == 0  # it is connected
        (route,) = routes_of(client).values()
        peer = node_of(service).peer_at(route.addresses, PATIENCE_S, "the vault")
        body, blocks = peer.decoder.encode_arguments((value,))
        call = Call(
            node_of(service).waiter,
            table=peer.calls,
            call_id=call_id,
            asked=(method, route),
            body=body,
            blocks=blocks,
        )
        call.overall = NEVER
        with numbered(peer, call_id):
            peer.resend(call, route, PATIENCE_S, kind)
        call.error(PATIENCE_S)
        return call


@pytest.mark.parametrize("method", ["ping", "secret"])
@pytest.mark.parametrize("kind", [REQUEST, REPEAT])
def test_a_peer_that_states_the_incarnation_of_another_gets_none_of_its_answers(
    nodes: tuple[RpcService, RpcService], kind: int, method: str
) -> None:
    victim, attacker = nodes
    asked = ask(victim, REQUEST, 99, "secret", 7)
    assert asked.result() == "the secret of 7"
    stolen = ask(attacker, kind, 99, method, 1)
    if method == "ping":
        assert stolen.result() == 1, "its own call, which is another one"
    else:
        assert isinstance(stolen.error(), errors.NotAllowed)


def test_a_peer_that_claims_numbers_of_another_beforehand_answers_none_of_its_calls(
    nodes: tuple[RpcService, RpcService],
) -> None:
    victim, attacker = nodes
    for kind in (REQUEST, REPEAT):
        assert ask(attacker, kind, 99, "ping", 666).result() == 666
    assert ask(victim, REQUEST, 99, "ping", 7).result() == 7
    assert ask(victim, REPEAT, 99, "ping", 7).result() == 7


def test_a_repeat_of_another_method_or_of_another_certificate_gets_no_answer() -> None:
    server = ServedObject("vault", 0, TARGET, Vault())
    pairs = [Pair(server) for _ in range(3)]
    pairs[0].served.connection.peer_identity = pairs[1].served.connection.peer_identity = (
        PeerIdentity(("worker-1",), "job")
    )
    pairs[2].served.connection.peer_identity = PeerIdentity(("worker-2",), "job")
    try:
        assert repeat(pairs[0], REQUEST, "secret").result() == "the secret of 7"
        assert repeat(pairs[1], REPEAT, "secret").result() == "the secret of 7"
        for pair, method in ((pairs[1], "ping"), (pairs[2], "secret")):
            with pytest.raises(
                errors.Forgotten,
                match="of another method, or of a peer that proved to be somebody else",
            ):
                repeat(pair, REPEAT, method).result()
        assert server.statistics().refused == {"forgotten": 2}
    finally:
        for pair in pairs:
            pair.close()


def repeat(pair: Pair, kind: int, method: str) -> Call:
    body, blocks = pair.client.decoder.encode_arguments((7,))
    call = Call(asked=(method, Route()), body=body, blocks=blocks, call_id=9, overall=NEVER)
    with numbered(pair.client, 9):
        pair.client.resend(call, Route(), PATIENCE_S, kind)
    pair.turn()
    return call


# -- the allow list, on every way ------------------------------------------------------------------


class Everything:
    """A method of each kind; `ran` says which of them a caller got to."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def plain(self) -> int:
        self.ran.append("plain")
        return 1

    def later(self) -> Future:
        self.ran.append("later")
        return Deferred()

    async def task(self) -> int:
        self.ran.append("task")
        return 1

    @bulk
    def scan(self) -> int:
        self.ran.append("scan")
        return 1

    @once
    def single(self) -> int:
        self.ran.append("single")
        return 1

    @once
    async def single_task(self) -> int:
        self.ran.append("single_task")
        return 1

    def items(self) -> Iterator[int]:
        self.ran.append("items")
        yield 1

    async def items_later(self) -> AsyncIterator[int]:
        self.ran.append("items_later")
        yield 1


METHODS = sorted(
    name for name, _ in inspect.getmembers(Everything, callable) if not name.startswith("_")
)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [REQUEST, REPEAT, OPEN, NOTIFY])
def test_the_allow_list_is_asked_for_every_kind_of_method_however_it_is_called(
    kind: int, method: str, stopped: bool
) -> None:
    served = Everything()
    server = ServedObject(
        "all", 0, TARGET, served, allow=AllowList([Rule("all", ("tls:worker-*",))])
    )
    pair = Pair(server)
    if stopped:
        server.stop()
    try:
        refused = {"not_allowed": 1}
        if kind == NOTIFY:
            pair.client.notify(Route(), method, method_key(method), ())
            pair.turn()
        elif kind == OPEN:
            stream = pair.client.open(Route(), method, method_key(method), (), PATIENCE_S)
            pair.turn()
            assert isinstance(stream.call.error(), errors.NotAllowed)
        else:
            body, blocks = pair.client.decoder.encode_arguments(())
            call = Call(asked=(method, Route()), body=body, blocks=blocks, call_id=9, overall=NEVER)
            pair.client.resend(call, Route(), PATIENCE_S, kind)
            pair.turn()
            assert isinstance(call.error(), errors.NotAllowed)
        assert server.statistics().refused == refused
        assert served.ran == []
    finally:
        pair.close()


def test_requests_for_dealers_are_asked_about_too() -> None:
    allow = AllowList([Rule("box", ("tls:worker-*",))])
    with (
        Master() as master,
        RpcService(master.address, transports=["tcp"], allow=allow) as serving,
        RpcService(master.address, transports=["tcp"]) as calling,
    ):
        dealer = serving.create_server("box").create_dealer()
        with calling.create_client("box") as client, client.create_dealer() as asking:
            asking.send_request(RpcRequest("hello"))
            response = asking.recv_response(timeout_s=PATIENCE_S)
            assert isinstance(response.error, errors.NotAllowed)
        with pytest.raises(TimeoutError):
            dealer.recv_request(timeout_s=0.0)
