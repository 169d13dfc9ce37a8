"""A service with shards: a server in each, which clients talk to directly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import prpc_engine
from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import Closed, ConfigError, NodeExists, RpcError
from prpc_engine.service.in_shard import open_shard
from prpc_engine.settings.node_config import NodeConfig
from shard import PeerLostError, ShardError
from tests.prpc_engine import seen
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import entries_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until


@pytest.fixture(params=["shm", "tcp"])
def services(
    request: pytest.FixtureRequest, forked_shards: None
) -> Iterator[tuple[RpcService, RpcService]]:
    """(one with two shards, one without)."""
    with (
        Master() as master,
        RpcService(master=master.address, shards=2, transports=[request.param]) as sharded,
        RpcService(master=master.address, transports=[request.param]) as plain,
    ):
        yield sharded, plain


def test_each_shard_serves_an_instance_of_its_own(services: tuple[RpcService, RpcService]) -> None:
    sharded, plain = services
    server = sharded.create_server("test", Plain, sharded=True)
    assert server.server_ids == (0, 1)
    client = plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    pids = client.broadcast("pid")
    assert len({*pids, os.getpid()}) == 3
    client.call_to(0, "hear", "only here")
    assert client.broadcast("heard_so_far") == [["only here"], []]
    big = prpc_engine.empty((500_000,), np.float64)
    big[:] = 3
    for answer in client.broadcast("first_and_last", big):
        assert answer == (3, 3)
    for double in client.broadcast("double", np.arange(100_000)):
        assert double[-1] == 199_998


def test_the_owner_of_the_shards_can_call_them_too(services: tuple[RpcService, RpcService]) -> None:
    sharded, _ = services
    sharded.create_server("test", Plain, sharded=True)
    client = sharded.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    assert client.broadcast("add", 1, 2) == [3, 3]


def test_shards_have_the_rank_of_their_service(services: tuple[RpcService, RpcService]) -> None:
    sharded, plain = services
    assert sorted((sharded.rank, plain.rank)) == [0, 1]
    assert seen.ranks(sharded) == [0, 1]


def test_sharded_servers_can_be_taken_back(services: tuple[RpcService, RpcService]) -> None:
    sharded, plain = services
    server = sharded.create_server("test", Plain, sharded=True)
    client = plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    assert client.broadcast("echo", 1) == [1, 1]
    server.close()
    wait_until(lambda: "test" not in seen.servers(plain), "the end of the service")
    with pytest.raises(RpcError):
        client.call("echo", 1, timeout_s=0.1)


@pytest.fixture
def mortal() -> Iterator[tuple[RpcService, RpcService]]:
    """As services, with shards that stay down."""
    with (
        Master() as master,
        RpcService(master=master.address, shards=2, restart="never") as sharded,
        RpcService(master=master.address) as plain,
    ):
        yield sharded, plain


def test_a_killed_shard_ends_its_server_and_not_the_other(
    mortal: tuple[RpcService, RpcService], caplog: pytest.LogCaptureFixture
) -> None:
    sharded, plain = mortal
    server = sharded.create_server("test", Plain, sharded=True)
    client = plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    first, second = client.broadcast("pid")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: seen.servers(plain)["test"] == [1], "the master's notice")
    assert client.call_to(1, "pid") == second
    with pytest.raises(RpcError):
        client.call_to(0, "pid", timeout_s=PATIENCE_S)
    wait_until(
        lambda: "and with it the servers 0 of 'test'" in caplog.text, "what went with it is told"
    )
    with pytest.raises(PeerLostError, match=r"shard 0 .* it stays down"):
        sharded.create_server("other", Plain, sharded=True)
    assert "other" not in seen.servers(plain)
    server.close()
    assert "test" not in seen.servers(plain)


def test_a_killed_shard_comes_back_with_its_servers_under_their_ids_and_a_new_incarnation(
    services: tuple[RpcService, RpcService], caplog: pytest.LogCaptureFixture
) -> None:
    sharded, plain = services
    servers = [sharded.create_server(name, Plain, sharded=True) for name in ("test", "second")]
    closed = sharded.create_server("closed", Plain, sharded=True)
    closed.close()
    client = plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    pids = client.broadcast("pid")
    client.call_to(1, "hear", "what is forgotten")
    before = {entry.server_id: entry.target for entry in entries_of(plain, "test", 2, PATIENCE_S)}
    for life in (1, 2):
        os.kill(client.call_to(1, "pid"), signal.SIGKILL)
        wait_until(
            lambda life=life: caplog.text.count("of 'test' is back in shard 1") == life,
            "it is back",
        )  # type: ignore[misc]
        wait_until(
            lambda life=life: caplog.text.count("of 'second' is back in shard 1") == life,
            "both are",
        )  # type: ignore[misc]
    after = {entry.server_id: entry.target for entry in entries_of(plain, "test", 2, PATIENCE_S)}
    assert after[0] == before[0]
    assert after[1] != before[1]
    wait_until(lambda: _answers(client, 1), "the client has found it")
    assert client.call_to(1, "heard_so_far") == []
    assert client.call_to(0, "pid") == pids[0] and client.call_to(1, "pid") != pids[1]
    assert "is gone: killed by SIGKILL; restart 1 of 5 follows" in caplog.text
    assert sharded.figures_of_shards(PATIENCE_S)[1].process.incarnation == 3
    assert "closed" not in seen.servers(plain), "what was taken back before does not come back"
    for server in servers:
        server.close()
    assert not {"test", "second"} & seen.servers(plain).keys(), "new instances are taken back, too"


def _answers(client: RpcClient, server_id: int) -> bool:
    with contextlib.suppress(RpcError):
        return bool(client.call_to(server_id, "pid", timeout_s=PATIENCE_S))
    return False


def test_servers_can_be_made_while_a_killed_shard_is_on_its_way_back(
    services: tuple[RpcService, RpcService],
) -> None:
    sharded, plain = services
    sharded.create_server("test", Plain, sharded=True)
    client = plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
    os.kill(client.call_to(0, "pid"), signal.SIGKILL)
    sharded.create_server("later", Plain, sharded=True)
    later = plain.create_client("later", expected_servers=2, timeout_s=PATIENCE_S)
    assert later.broadcast("add", 1, 2) == [3, 3]


def test_a_factory_may_be_a_lambda_and_what_cannot_be_sent_is_named(
    services: tuple[RpcService, RpcService],
) -> None:
    sharded, plain = services
    first = 7
    sharded.create_server("test", lambda: {"first": lambda: first}, sharded=True)
    assert plain.create_client("test", expected_servers=2, timeout_s=PATIENCE_S).broadcast(
        "first"
    ) == [7, 7]
    generator = (each for each in [1])
    with pytest.raises(ConfigError, match=r"the factory .*<lambda>.* cannot be sent to a shard"):
        sharded.create_server("other", lambda: {"next": lambda: next(generator)}, sharded=True)


def test_a_sharded_server_needs_shards_and_a_factory(
    services: tuple[RpcService, RpcService],
) -> None:
    sharded, plain = services
    with pytest.raises(ConfigError, match="sharded=True needs shards"):
        plain.create_server("test", Plain, sharded=True)
    with pytest.raises(ConfigError, match="needs a factory"):
        sharded.create_server("test", {"one": 1}, sharded=True)


def test_a_factory_that_raises_is_told_to_the_maker(
    services: tuple[RpcService, RpcService],
) -> None:
    sharded, _ = services
    with pytest.raises(ZeroDivisionError) as caught:
        sharded.create_server("test", _broken_factory, sharded=True)
    assert "_broken_factory" in str(caught.value.__cause__)
    sharded.create_server("test", Plain, sharded=True)


def _broken_factory() -> object:
    return 1 // 0


def test_where_one_shard_cannot_serve_none_does(services: tuple[RpcService, RpcService]) -> None:
    sharded, plain = services
    plain.create_server("test", Plain(), server_id=1)
    with pytest.raises(NodeExists):
        sharded.create_server("test", Plain, server_id=0, sharded=True)
    assert [entry.server_id for entry in entries_of(plain, "test", 0, PATIENCE_S)] == [1]


def test_a_service_that_is_closed_makes_no_sharded_servers(
    services: tuple[RpcService, RpcService],
) -> None:
    sharded, _ = services
    sharded.close()
    with pytest.raises(Closed):
        sharded.create_server("test", Plain, sharded=True)


def test_shards_that_cannot_be_started_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Master(secret="the right secret") as master:
        monkeypatch.setattr("prpc_engine.service.service.open_shard", _open_with_another_secret)
        with pytest.raises((RpcError, ShardError)):
            RpcService(master=master.address, shards=1, secret="the right secret")


async def _open_with_another_secret(
    master: str, rank: int, config: NodeConfig, cores: tuple[int, ...]
) -> None:
    await open_shard(master, rank, config.override(secret="the wrong secret"), cores)
