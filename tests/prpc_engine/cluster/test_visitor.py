"""A process that is no task of a cluster, and asks its tasks."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster import TaskUnreachable
from prpc_engine.cluster.control import Description
from prpc_engine.cluster.visitor import Visitor
from prpc_engine.errors import (
    AuthenticationFailed,
    Closed,
    ConfigError,
    DeadlineExceeded,
    RpcError,
)
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import Task
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host, rule_environment

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a server of HTTP/2 sends first (RFC 9113, 6.5)


@pytest.fixture
def host(seed: int) -> str:
    return fresh_host(seed)


def twice(value: int) -> int:
    return 2 * value


def serving(cluster: dict[str, list[str]], **config: Any) -> Server:
    return Server(cluster, "ps", 0, config=ServerConfig(**config), methods={"twice": twice})


def address_of(cluster: dict[str, list[str]]) -> Address:
    return Address.parse(cluster["ps"][0])


def ask(visitor: Visitor, task: str = PS, timeout_s: float = 30.0, patient: bool = True) -> Any:
    return visitor.ask(task, "twice", "twice 3", lambda _: (3,), timeout_s, patient).result()


@pytest.mark.parametrize("rule", ["exchange", "offset", "file"])
def test_it_is_told_the_cluster_and_where_data_is_by_each_rule(
    rule: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_at(host, ps=1, worker=2)
    for name, value in rule_environment(rule, cluster, tmp_path).items():
        monkeypatch.setenv(name, value)
    with serving(cluster):
        for name in rule_environment(rule, cluster, tmp_path):  # the visitor has no such file
            monkeypatch.delenv(name)
        visitor = Visitor(address_of(cluster), ServerConfig())
        try:
            assert visitor.task == Task("ps", 0)
            assert visitor.description.cluster.as_dict() == cluster
            assert bool(visitor.description.data) == (rule != "exchange")
            assert ask(visitor) == 6
            assert visitor.is_current()
        finally:
            visitor.close()


def test_another_secret_is_refused(host: str) -> None:
    cluster = cluster_at(host, ps=1)
    with serving(cluster, secret="a" * 32), pytest.raises(AuthenticationFailed):
        Visitor(address_of(cluster), ServerConfig(secret="b" * 32))


def test_who_does_not_answer_is_named_when_the_time_is_over(host: str) -> None:
    cluster = cluster_at(host, ps=1)
    with pytest.raises(TaskUnreachable, match=rf"{host}:\d+ does not answer"):
        Visitor(address_of(cluster), ServerConfig(), 0.0)


def test_a_grpc_server_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30.0)

        def answer() -> None:
            connection, _ = other.accept()
            connection.settimeout(30.0)
            with connection:  # gRPC hangs up on who is no client of HTTP/2
                connection.recv(4096)
                connection.sendall(EMPTY_SETTINGS)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=r"gRPC.*protocol='prpc' is expected there"):
            Visitor(Address("127.0.0.1", other.getsockname()[1]), ServerConfig())
        thread.join()


def test_a_short_time_to_find_the_cluster_is_not_how_long_its_tasks_are_waited_for(
    host: str,
) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with serving(cluster):
        visitor = Visitor(address_of(cluster), ServerConfig(), 0.0)
        try:
            with pytest.raises(DeadlineExceeded):  # and not TaskUnreachable, at once
                ask(visitor, WORKER, 0.2)
            with pytest.raises(ConfigError, match="no task"):
                ask(visitor, "/job:ps/task:7")
        finally:
            visitor.close()


def test_a_cluster_that_was_started_again_with_other_tasks_is_another_one(host: str) -> None:
    cluster = cluster_at(host, ps=1)
    with serving(cluster):
        visitor = Visitor(address_of(cluster), ServerConfig())
    try:
        assert visitor.is_current()  # nobody is there: it may come back
        with serving({**cluster, "worker": [f"{host}:3000"]}):
            assert not visitor.is_current()
    finally:
        visitor.close()
    with pytest.raises(Closed):
        ask(visitor)
    visitor.close()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ["plan", PS],
        ["plan", PS, []],
        ["plan", PS, [["ps", "0", "127.0.0.1:1", ""]]],
        ["plan", PS, [["ps", 0, "nowhere", ""]]],
        ["plan", PS, [["ps", 0, "127.0.0.1:1", "nowhere"]]],
        ["plan", "/job:ps/task:3", [["ps", 0, "127.0.0.1:1", ""]]],
        [b"\xff", PS, [["ps", 0, "127.0.0.1:1", ""]]],
    ],
)
def test_what_is_no_description_is_refused_by_name(answer: object) -> None:
    with pytest.raises(RpcError, match=r"127\.0\.0\.1:1 answers, but not as a task"):
        Description.read(answer, Address("127.0.0.1", 1))
