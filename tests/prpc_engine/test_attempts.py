"""Several that want a connection to one node: one attempt, whoever gives up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import Closed, NotSent
from prpc_engine.node.node import Node
from shard import CancelledError, ShardError, Task, control_loop
from tests.prpc_engine.inside import accepted_by, attempts_of, node_of
from tests.prpc_engine.processes import wait_until

PATIENCE_S = 30.0
WAITING = 8


@pytest.fixture
def calling(master: Master) -> Iterator[RpcService]:
    with RpcService(str(master.address), transports=["tcp"]) as service:
        yield service


@pytest.fixture
def serving(master: Master) -> Iterator[RpcService]:
    with RpcService(str(master.address), transports=["tcp"]) as service:
        yield service


class Silent:
    """Listens, and says nothing."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.settimeout(PATIENCE_S)
        self.addresses = [f"tcp://127.0.0.1:{self._sock.getsockname()[1]}"]

    def accept(self) -> socket.socket:
        sock, _ = self._sock.accept()
        sock.settimeout(PATIENCE_S)
        return sock

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    with contextlib.closing(Silent()) as made:
        yield made


def reach(node: Node, addresses: list[str]) -> Task:
    return control_loop().spawn(node.reach(addresses, PATIENCE_S, "it"))


def wait_for_wishes(node: Node, addresses: list[str], count: int) -> None:
    def are_there() -> bool:
        attempt = attempts_of(node).get(addresses[0])
        return attempt is not None and len(attempt.wishes) == count

    wait_until(are_there, f"{count} wait for one attempt")


def give_up(task: Task) -> None:
    """As whoever cancels a coroutine of the control loop does: there."""
    task.schedule(task.cancel)


def until_hung_up(sock: socket.socket) -> bytes:
    """All that it says before that."""
    said = b""
    while data := sock.recv(4096):
        said += data
    return said


def test_threads_and_coroutines_that_want_one_node_share_one_connection(
    calling: RpcService, serving: RpcService
) -> None:
    node, addresses = node_of(calling), node_of(serving).addresses
    with ThreadPoolExecutor(WAITING) as pool:
        threads = [pool.submit(node.peer_at, addresses, PATIENCE_S, "it") for _ in range(WAITING)]
        tasks = [reach(node, addresses) for _ in range(WAITING)]
        peers = {one.result(PATIENCE_S) for one in [*threads, *tasks]}
    assert len(peers) == 1
    wait_until(lambda: len(accepted_by(node_of(serving))) == 1, "it is accepted")
    assert not attempts_of(node)


def test_they_share_its_error_each_with_one_of_its_own(calling: RpcService, silent: Silent) -> None:
    node = node_of(calling)
    tasks = [reach(node, silent.addresses) for _ in range(WAITING)]
    with silent.accept() as sock:
        wait_for_wishes(node, silent.addresses, WAITING)
        sock.shutdown(socket.SHUT_RDWR)
        errors = [task.error(PATIENCE_S) for task in tasks]
    assert {type(error).__name__ for error in errors} == {"NoPath"}
    assert len({str(error) for error in errors}) == 1
    assert "hung up during the handshake" in str(errors[0])
    assert len(set(map(id, errors))) == WAITING


def test_one_that_gives_up_ends_it_for_nobody_else(calling: RpcService, silent: Silent) -> None:
    node = node_of(calling)
    first, second = reach(node, silent.addresses), reach(node, silent.addresses)
    with silent.accept() as sock:
        wait_for_wishes(node, silent.addresses, 2)
        give_up(first)
        assert isinstance(first.error(PATIENCE_S), CancelledError)
        wait_for_wishes(node, silent.addresses, 1)
        assert not second.done()
        sock.shutdown(socket.SHUT_RDWR)
        assert isinstance(second.error(PATIENCE_S), NotSent)


def test_the_last_that_gives_up_ends_it_and_the_next_begins_another(
    calling: RpcService, silent: Silent
) -> None:
    node = node_of(calling)
    tasks = [reach(node, silent.addresses) for _ in range(2)]
    with silent.accept() as sock:
        wait_for_wishes(node, silent.addresses, 2)
        for task in tasks:
            give_up(task)
        assert until_hung_up(sock).startswith(b"PRPC"), "its socket is closed"
    assert not attempts_of(node)
    again = reach(node, silent.addresses)
    with silent.accept():
        wait_for_wishes(node, silent.addresses, 1)
        give_up(again)
        again.error(PATIENCE_S)


def test_attempts_under_way_end_when_the_node_is_closed(master: Master, silent: Silent) -> None:
    with RpcService(str(master.address), transports=["tcp"]) as service:
        node = node_of(service)
        with ThreadPoolExecutor(1) as pool:
            thread = pool.submit(node.peer_at, silent.addresses, 10 * PATIENCE_S, "it")
            task = reach(node, silent.addresses)
            with silent.accept() as sock:
                wait_for_wishes(node, silent.addresses, 2)
                service.close()
                for error in (thread.exception(PATIENCE_S), task.error(PATIENCE_S)):
                    assert isinstance(error, Closed)
                    assert str(error) == "it: this side was closed meanwhile"
                assert until_hung_up(sock).startswith(b"PRPC"), "its socket is closed"
        with pytest.raises(Closed, match="this side was closed before"):
            node.peer_at(silent.addresses, PATIENCE_S, "it")


def test_a_thread_of_the_control_loop_may_not_wait_for_a_connection(
    calling: RpcService, silent: Silent
) -> None:
    """It would wait for itself."""
    node = node_of(calling)

    async def block() -> Any:
        return node.peer_at(silent.addresses, PATIENCE_S, "it")

    error = control_loop().spawn(block()).error(PATIENCE_S)
    assert isinstance(error, ShardError)
    assert "must not wait for itself" in str(error)
    wait_until(lambda: not attempts_of(node), "it is given up")


def test_a_node_of_this_process_is_there_at_once_for_a_coroutine_too(calling: RpcService) -> None:
    node = node_of(calling)
    found = node.near_peer(node.addresses)
    assert found is not None
    assert found.connection.transport == "memory"
    reaching = node.reach(node.addresses, 0.0, "itself")
    with pytest.raises(StopIteration) as stopped:
        reaching.send(None)
    assert stopped.value.value is found, "it awaited nothing"


def test_who_wants_a_peer_while_the_one_before_gives_up_has_a_connection(
    calling: RpcService, serving: RpcService
) -> None:
    """Whichever comes first of a new wish and the end of the attempt."""
    node, addresses = node_of(calling), node_of(serving).addresses
    for _ in range(50):
        first = reach(node, addresses)
        giving_up = threading.Thread(target=give_up, args=(first,))
        giving_up.start()
        peer = node.peer_at(addresses, PATIENCE_S, "it")
        giving_up.join(PATIENCE_S)
        first.error(PATIENCE_S)
        ended = threading.Event()

        def hang_up() -> None:
            peer.connection.close()  # noqa: B023 - waited for
            ended.set()  # noqa: B023

        node.reactor.call_soon(hang_up)
        assert ended.wait(PATIENCE_S)
    wait_until(lambda: not accepted_by(node_of(serving)), "none is left that nobody wanted")
