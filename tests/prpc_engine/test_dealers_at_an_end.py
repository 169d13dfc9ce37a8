"""Dealers: requests that nobody waits for any more, and waits that end because something was
closed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from prpc_engine import (
    Dealer,
    ErrorCode,
    Master,
    RpcClient,
    RpcRequest,
    RpcResponse,
    RpcServer,
    RpcService,
    Terminated,
    errors,
)
from prpc_engine.client import client
from prpc_engine.client.mailbox import Ending, Mailbox
from tests.program import Program, halt
from tests.prpc_engine.processes import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("patient_sessions")


class World(NamedTuple):
    """A server of dealers called "work", and a client of it in another service."""

    serving: RpcService
    server: RpcServer
    calling: RpcService
    client: RpcClient

    @property
    def queued(self) -> int:
        assert self.server.queue is not None
        return len(self.server.queue.mailbox)


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    with RpcService(master.address) as serving, RpcService(master.address) as calling:
        server = serving.create_server("work")
        yield World(serving, server, calling, calling.create_client("work"))


# -- requests that are over ------------------------------------------------------------------------


def received(dealer: Dealer) -> list[Any]:
    """What is there to be received now."""
    values: list[Any] = []
    try:
        while True:
            values += list(dealer.recv_request(0.0))
    except TimeoutError:
        return values


def test_a_request_whose_deadline_has_passed_is_handed_to_no_dealer(world: World) -> None:
    asking, answering = world.client.create_dealer(), world.server.create_dealer()
    for number in range(10):
        asking.send_request(RpcRequest(f"hasty {number}"), timeout_s=0.05)
        asking.send_request(RpcRequest(f"patient {number}"), timeout_s=1000.0)
    for _ in range(10):
        assert asking.recv_response(PATIENCE_S).error_code == ErrorCode.ETIMEOUT
    wait_until(lambda: world.queued == 10, "the end of the others there")
    assert received(answering) == [f"patient {number}" for number in range(10)]


def test_a_request_past_its_deadline_is_not_received_before_the_reactor_has_seen_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = world.client.create_dealer(), world.server.create_dealer()
    asking.send_request(RpcRequest("hasty"), timeout_s=500.0)
    asking.send_request(RpcRequest("patient"), timeout_s=1000.0)
    kept = answering.recv_request(PATIENCE_S)
    asking.send_request(RpcRequest("hasty again"), timeout_s=500.0)
    wait_until(lambda: world.queued == 2, "the other requests")
    now = time.monotonic()
    monkeypatch.setattr("shard.runtime.monotonic", lambda: now + 700.0)
    assert received(answering) == ["patient"]
    assert not answering.send_response(RpcResponse(kept, "too late"))


def test_a_request_that_was_given_up_is_handed_to_no_dealer_and_its_answer_is_refused(
    world: World,
) -> None:
    answering = world.server.create_dealer()
    calls = [world.client.submit("request", number, timeout_s=None) for number in range(4)]
    kept = answering.recv_request(PATIENCE_S)
    wait_until(lambda: world.queued == 3, "the other requests")
    for call in calls[:3]:
        assert call.cancel()
    wait_until(lambda: world.queued == 1, "the word that two of them are given up")
    assert received(answering) == [3]
    assert not answering.send_response(RpcResponse(kept, "unheard"))


def test_requests_that_are_over_lock_no_living_ones_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prpc_engine.client.dealer.QUEUE_REQUESTS_MAX", 50)
    asking, answering = world.client.create_dealer(), world.server.create_dealer()
    for _ in range(3):
        for _ in range(50):
            asking.send_request(RpcRequest("hasty"), timeout_s=0.05)
        assert {asking.recv_response(PATIENCE_S).error_code for _ in range(50)} == {
            ErrorCode.ETIMEOUT
        }
        wait_until(lambda: world.queued == 0, "the end of the requests there")
    for number in range(50):
        asking.send_request(RpcRequest(number), timeout_s=1000.0)
    asking.send_request(RpcRequest("one too many"), timeout_s=1000.0)
    assert asking.recv_response(PATIENCE_S).error_code == ErrorCode.ELOGICERROR
    assert received(answering) == list(range(50))


class Asker(Program):
    """A process that sends requests and waits for their responses, for ever."""

    def __init__(self, master: str, count: int) -> None:
        super().__init__("tests.prpc_engine.test_dealers_at_an_end", master, str(count))
        assert self.read_line() == "ready"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_of_a_killed_caller_are_handed_to_no_dealer_and_their_answers_are_refused(
    master: Master, transport: str
) -> None:
    with RpcService(master.address, transports=[transport]) as serving:
        server = serving.create_server("work")
        answering = server.create_dealer()
        with Asker(master.address, 20) as asker:
            kept = [answering.recv_request(PATIENCE_S) for _ in range(5)]
            halt(asker.pid)  # so that it has not answered the end of what is given up
            asker.kill()
        assert server.queue is not None
        mailbox = server.queue.mailbox
        wait_until(lambda: len(mailbox) == 1, "the loss of the caller")
        last = answering.recv_request(PATIENCE_S)
        assert (list(last), last.is_one_way) == (["one way"], True), "nobody waits for that anyway"
        assert not any(answering.send_response(RpcResponse(request, "unheard")) for request in kept)
        wait_until(lambda: server.statistics().tasks == 0, "the end of what it owed")


# -- waits that end --------------------------------------------------------------------------------


def recv_response(world: World, asking: Dealer, answering: Dealer) -> object:
    return asking.recv_response()


def recv_request(world: World, asking: Dealer, answering: Dealer) -> object:
    return answering.recv_request()


def sync_rpc_call(world: World, asking: Dealer, answering: Dealer) -> object:
    return asking.sync_rpc_call(RpcRequest("unanswered"), timeout_s=1000.0)


ENDS: dict[str, tuple[Callable[..., object], Callable[[World, Dealer, Dealer], object]]] = {
    "recv_response, client.close()": (
        recv_response,
        lambda world, asking, answering: world.client.close(),
    ),
    "recv_response, dealer.close()": (
        recv_response,
        lambda world, asking, answering: asking.close(),
    ),
    "recv_response, dealer.terminate()": (
        recv_response,
        lambda world, asking, answering: asking.terminate(),
    ),
    "recv_response, service.close()": (
        recv_response,
        lambda world, asking, answering: world.calling.close(),
    ),
    "recv_request, dealer.close()": (
        recv_request,
        lambda world, asking, answering: answering.close(),
    ),
    "recv_request, dealer.terminate()": (
        recv_request,
        lambda world, asking, answering: answering.terminate(),
    ),
    "recv_request, server.terminate()": (
        recv_request,
        lambda world, asking, answering: world.server.terminate(),
    ),
    "recv_request, server.close()": (
        recv_request,
        lambda world, asking, answering: world.server.close(),
    ),
    "recv_request, service.close()": (
        recv_request,
        lambda world, asking, answering: world.serving.close(),
    ),
    "sync_rpc_call, client.close()": (
        sync_rpc_call,
        lambda world, asking, answering: world.client.close(),
    ),
    "sync_rpc_call, dealer.close()": (
        sync_rpc_call,
        lambda world, asking, answering: asking.close(),
    ),
    "sync_rpc_call, dealer.terminate()": (
        sync_rpc_call,
        lambda world, asking, answering: asking.terminate(),
    ),
    "sync_rpc_call, service.close()": (
        sync_rpc_call,
        lambda world, asking, answering: world.calling.close(),
    ),
}


@pytest.mark.parametrize("way", ENDS)
def test_a_wait_in_another_thread_ends_at_once_with_closed(world: World, way: str) -> None:
    wait, end = ENDS[way]
    asking, answering = world.client.create_dealer(), world.server.create_dealer()
    failures: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            wait(world, asking, answering)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE_S)
    if wait is sync_rpc_call:
        wait_until(lambda: world.queued == 1, "the request")
    end(world, asking, answering)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert isinstance(failures[0], errors.Closed), failures
    if wait is not sync_rpc_call:
        assert isinstance(failures[0], Terminated)
    with pytest.raises(errors.Closed):  # from now on, too
        wait(world, asking, answering)


def test_a_wait_that_is_under_way_ends_when_its_dealer_does_and_those_of_others_go_on() -> None:
    ending = Ending()

    class Waiter:
        def wait(self, future: Any, timeout_s: float | None) -> bool:
            ending.end(Terminated("closed here"))
            return bool(future.finished)

    mailbox = Mailbox("it", Waiter())  # type: ignore[arg-type]
    with pytest.raises(Terminated, match="closed here"):
        mailbox.get(None, ending)
    mailbox.put("for others")
    with pytest.raises(Terminated, match="closed here"):
        mailbox.get(None, ending)
    assert mailbox.get(None, Ending()) == "for others"
    assert not mailbox.waiting


def test_a_closed_dealer_withdraws_what_it_has_in_flight_and_sends_nothing_more(
    world: World,
) -> None:
    asking = world.client.create_dealer()
    for _ in range(3):
        asking.send_request(RpcRequest("unanswered"), timeout_s=None)
    wait_until(lambda: world.queued == 3, "the requests")
    asking.close()
    wait_until(lambda: world.queued == 0, "the word that they are given up")
    assert asking.in_flight == 0
    for use in (asking.send_request, asking.send_request_one_way, asking.sync_rpc_call):
        with pytest.raises(errors.Closed, match="this dealer was closed here"):
            use(RpcRequest("late"))
    asking.restart()
    with pytest.raises(Terminated, match="this dealer was closed here"):
        asking.recv_response(0.0)


def test_what_was_terminated_goes_on_after_restart_and_what_was_closed_does_not(
    world: World,
) -> None:
    asking, answering = world.client.create_dealer(), world.server.create_dealer()
    asking.send_request(RpcRequest("before"))
    asking.terminate()
    with pytest.raises(Terminated, match=r"restart\(\) lets it go on"):
        asking.sync_rpc_call(RpcRequest("meanwhile"))
    asking.restart()
    answering.send_response(RpcResponse(answering.recv_request(PATIENCE_S), "answered"))
    assert list(asking.recv_response(PATIENCE_S)) == ["answered"]
    world.server.close()
    world.server.restart()
    with pytest.raises(Terminated, match="was closed here"):
        answering.recv_request(0.0)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, -0.001, float("inf"), "5", True])
def test_an_impossible_wait_is_refused_by_name(world: World, timeout_s: Any) -> None:
    for wait in (
        world.server.create_dealer().recv_request,
        world.client.create_dealer().recv_response,
    ):
        with pytest.raises(errors.ConfigError, match="timeout_s="):
            wait(timeout_s)


def test_a_one_way_request_that_reaches_nobody_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 1.0)
    asking = world.client.create_dealer()
    with pytest.raises(errors.NoServer, match="has no server 99"):
        asking.send_request_one_way(RpcRequest("to nobody", sid=99))
    with pytest.raises(errors.NoServer, match="no server of 'work' has rank 77"):
        asking.send_request_one_way(RpcRequest("to nobody", dest_rank=77))
    asking.send_request_one_way(RpcRequest("to somebody"))
    assert list(world.server.create_dealer().recv_request(PATIENCE_S)) == ["to somebody"]
    world.server.close()
    wait_until(lambda: not world.client.server_ids, "the news")
    with pytest.raises(errors.NoServer, match="has no live server"):
        asking.send_request_one_way(RpcRequest("to nobody"))


def ask(master: str, count: str) -> None:
    """What the Asker runs."""
    with (
        RpcService(master) as service,
        service.create_client("work", timeout_s=PATIENCE_S) as client,
        client.create_dealer() as dealer,
    ):
        for number in range(int(count)):
            dealer.send_request(RpcRequest(number), timeout_s=None)
        dealer.send_request_one_way(RpcRequest("one way"))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    ask(*sys.argv[1:])
