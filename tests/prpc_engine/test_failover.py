"""What a client does when a server does not answer: goes elsewhere, tries again, or says how often
and where it tried.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import (
    Bounds,
    Deferred,
    Master,
    RetryPolicy,
    RpcClient,
    RpcServer,
    RpcService,
    errors,
    idempotent,
    once,
)
from prpc_engine.client import dispatcher
from tests.held import at
from tests.program import Program
from tests.prpc_engine.inside import dispatcher_of, session_of
from tests.prpc_engine.processes import PATIENCE_S, wait_connected, wait_until

pytestmark = pytest.mark.usefixtures("patient_describe", "patient_sessions")


class Shop:
    """Answers with its own name; some methods hold the answer back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.held: list[Deferred] = []

    @idempotent
    def who(self) -> str:
        self.asked.append("who")
        return self.name

    @idempotent
    def look(self) -> Deferred:
        """Held back until somebody answers."""
        self.asked.append("look")
        answer = Deferred()
        self.held.append(answer)
        return answer

    def buy(self) -> Deferred:
        """The same, and not to be done twice."""
        return self.look()

    async def slow(self) -> str:
        await self.look()
        return self.name


class World:
    """Two nodes that serve, each a shop of its own, and one that calls."""

    def __init__(self, master: Master) -> None:
        self.shops = [Shop("one"), Shop("two")]
        self.services = [RpcService(master.address) for _ in self.shops]
        self.servers: list[RpcServer] = [
            service.create_server("shop", shop)
            for service, shop in zip(self.services, self.shops, strict=True)
        ]
        self.caller = RpcService(master.address)

    def client(self, **settings: Any) -> RpcClient:
        return self.caller.create_client("shop", 2, **settings)

    def wait_asked(self, times: int) -> int:
        """Until so many requests are held, in all; at which shop the last one is."""
        wait_until(
            lambda: sum(len(shop.held) for shop in self.shops) >= times, f"{times} requests arrived"
        )
        return 0 if self.shops[0].held else 1

    def close(self) -> None:
        for service in [self.caller, *self.services]:
            service.close()


@pytest.fixture
def world() -> Iterator[World]:
    with Master("127.0.0.1:0") as master:
        made = World(master)
        yield made
        made.close()


def test_calls_go_to_the_servers_that_are_left(world: World) -> None:
    with world.client() as client:
        assert {client.call("who") for _ in range(50)} == {"one", "two"}
        world.services[0].close()
        assert {client.call("who", timeout_s=PATIENCE_S) for _ in range(50)} == {"two"}


@pytest.mark.parametrize(
    ("method", "named"), [("look", []), ("buy", ["buy"])], ids=["by the server", "by the caller"]
)
def test_a_call_said_to_be_idempotent_is_answered_by_another_when_its_server_is_lost(
    world: World, method: str, named: list[str]
) -> None:
    with world.client(idempotent=named) as client:
        call = client.submit(method, timeout_s=PATIENCE_S)
        first = world.wait_asked(1)
        world.services[first].close()
        other = world.shops[1 - first]
        wait_until(lambda: bool(other.held), "the other shop was asked")
        other.held[0].reply("from the other one")
        assert call.result(PATIENCE_S) == "from the other one"


def test_a_call_that_may_have_run_is_not_repeated_unless_it_is_idempotent(world: World) -> None:
    with world.client() as client:
        call = client.submit("buy", timeout_s=PATIENCE_S)
        first = world.wait_asked(1)
        world.services[first].close()
        with pytest.raises(
            errors.MaybeExecuted,
            match=r"not retried: 'buy' may have run, and is not registered as idempotent",
        ):
            call.result(PATIENCE_S)
        assert world.shops[1 - first].held == []


def test_a_stopping_server_sends_its_callers_elsewhere(world: World) -> None:
    with world.client() as client:
        client.call("who")
        world.servers[0].close(drain_s=1.0)
        assert {client.call("who", timeout_s=PATIENCE_S) for _ in range(20)} == {"two"}


def test_when_nobody_is_left_the_error_says_where_it_was_tried(world: World) -> None:
    with world.client(retry=RetryPolicy(attempts_max=2, unsent_max=2)) as client:
        client.call("who")
        for service in world.services:
            service.close()
        with pytest.raises(errors.RpcError, match="shop") as raised:
            client.call("who", timeout_s=PATIENCE_S)
        assert isinstance(raised.value, errors.NotSent | errors.MaybeExecuted)


def test_a_key_finds_the_same_server_each_time(world: World) -> None:
    with world.client() as client:
        for key in (0, 1, 7, "user 17", b"\xff"):
            assert len({client.call_by(key, "who") for _ in range(5)}) == 1
        assert {client.call_by(number, "who") for number in range(8)} == {"one", "two"}


@pytest.mark.parametrize("balance", ["least_outstanding", "random", "round_robin", "local_first"])
def test_every_policy_reaches_every_server(world: World, balance: str) -> None:
    with world.client(balance=balance) as client:
        assert {client.call("who") for _ in range(60)} == {"one", "two"}
        assert client.statistics().policy == balance


def test_an_unknown_policy_is_refused_with_those_there_are(world: World) -> None:
    with pytest.raises(
        errors.ConfigError, match="'least_outstanding', 'random', 'round_robin', 'local_first'"
    ):
        world.client(balance="fastest")


def test_a_full_server_is_backpressure_after_a_few_tries(world: World) -> None:
    shop = Shop("narrow")
    server = world.services[0].create_server(
        "narrow", shop, bounds=Bounds(tasks_max=1, queue_calls_max=0)
    )
    with world.caller.create_client("narrow", retry=RetryPolicy(attempts_max=2)) as client:
        running = client.submit("slow", timeout_s=PATIENCE_S)
        client.health()
        with pytest.raises(
            errors.Backpressure, match=r"tried 2 times .* given up after attempts_max=2 attempts"
        ):
            client.call("slow", timeout_s=PATIENCE_S)
        shop.held[0].reply(None)
        assert running.result(PATIENCE_S) == "narrow"
    server.close()


def test_a_client_is_told_of_servers_that_come_and_go(world: World) -> None:
    with world.client() as client:
        third = RpcService(session_of(world.caller).address)
        server = third.create_server("shop", Shop("three"))
        wait_until(lambda: len(client.server_ids) == 3, "the client knows of three servers")
        server.close()
        wait_until(lambda: len(client.server_ids) == 2, "the client knows of two servers")
        third.close()


def test_a_client_hears_of_a_server_that_went_before_its_watch_began(world: World) -> None:
    with (
        at("service.watching", world.services[0].close) as watching,
        world.client() as client,
    ):
        assert watching.count == 1
        wait_until(lambda: client.server_ids == (1,), "the client knows of one server")


def test_a_client_hears_of_a_server_that_went_while_it_was_made(world: World) -> None:
    with world.client() as other:

        def lose() -> None:
            world.services[0].close()
            wait_until(lambda: other.server_ids == (1,), "the other client knows of one server")

        assert other.call("who") in ("one", "two")
        with at("service.found", lose, of=world.caller), world.client() as client:
            wait_until(lambda: client.server_ids == (1,), "the new client knows of one server")


def test_a_call_to_one_server_that_cannot_be_reached_lets_the_client_look_who_is_there(
    world: World,
) -> None:
    def refuse() -> None:
        raise errors.NotSent("nobody watches")

    def asked() -> tuple[int, ...]:
        with pytest.raises(errors.NotSent):
            client.call_to(0, "who", timeout_s=PATIENCE_S)
        return client.server_ids

    with at("service.watching", refuse), world.client() as client:
        world.services[0].close()
        wait_until(lambda: asked() == (1,), "the client knows of one server")


def test_what_may_be_repeated_is_known_from_the_registration_and_no_busy_server_is_asked(
    master: Master, monkeypatch: pytest.MonkeyPatch, fifo: str
) -> None:
    """The server that is left is in the middle of a handler when the other one dies: it can say
    nothing for a while.
    """
    monkeypatch.setattr(dispatcher, "DESCRIBE_TIMEOUT_S", 0.001)
    with (
        Program("tests.prpc_engine.test_failover", master.address) as one,
        Program("tests.prpc_engine.test_failover", master.address) as two,
        RpcService(master.address) as service,
        service.create_client("files", 2, PATIENCE_S) as client,
    ):
        assert [program.read_line() for program in (one, two)] == ["ready", "ready"]
        assert dispatcher_of(client).is_idempotent("read") is True
        assert dispatcher_of(client).is_idempotent("take") is False
        assert dispatcher_of(client).marks.is_once("take")
        by_pid = dict(
            zip(client.broadcast("read", timeout_s=PATIENCE_S), client.server_ids, strict=True)
        )
        wait_connected(client)
        client.submit_to(by_pid[one.pid], "keep", f"{fifo}-of-one", timeout_s=PATIENCE_S)
        kept = client.submit_to(by_pid[two.pid], "keep", fifo, timeout_s=PATIENCE_S)
        assert [program.read_line() for program in (one, two)] == ["busy", "busy"]
        calls = [client.submit("read", timeout_s=PATIENCE_S) for _ in range(8)]
        one.kill()
        wait_until(lambda: client.statistics().retries, "another attempt at the one that is left")
        with Path(fifo).open("w") as file:
            file.write("enough")
        assert kept.result(PATIENCE_S) == "enough"
        assert {call.result(PATIENCE_S) for call in calls} == {two.pid}


class Files:
    """Keeps its server busy for as long as a named pipe is not written."""

    def keep(self, path: str) -> str:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        print("busy", flush=True)
        return Path(path).read_text()

    @idempotent
    def read(self) -> int:
        return os.getpid()

    @once
    def take(self) -> int:
        return os.getpid()


def serve(master: str) -> None:
    """What such a process runs."""
    with RpcService(master) as service:
        service.create_server("files", Files())
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(*sys.argv[1:])
