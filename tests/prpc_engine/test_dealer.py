"""Dealers: requests and responses as messages, in pRPC's words."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import (
    Dealer,
    ErrorCode,
    Master,
    RpcRequest,
    RpcResponse,
    RpcServer,
    RpcService,
    Terminated,
    errors,
)
from prpc_engine.client.mailbox import Mailbox
from shard import Future, ShmFull
from tests.helpers import ManualWaiter
from tests.prpc_engine.processes import wait_until

PATIENCE_S = 20.0
pytestmark = pytest.mark.usefixtures("patient_sessions")


class Echo(threading.Thread):
    """A dealer's worker: answers every request with what came, until terminated."""

    def __init__(self, dealer: Dealer) -> None:
        super().__init__(daemon=True)
        self.dealer = dealer
        self.served = 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                request = self.dealer.recv_request(PATIENCE_S)
            except Terminated:
                return
            self.served += 1
            self.dealer.send_response(RpcResponse(request, *request))


@pytest.fixture
def nodes() -> Iterator[tuple[RpcService, RpcService]]:
    with (
        Master("127.0.0.1:0") as master,
        RpcService(master.address) as one,
        RpcService(master.address) as two,
    ):
        yield one, two


@pytest.fixture
def echoing(nodes: tuple[RpcService, RpcService]) -> Iterator[tuple[RpcServer, list[Echo]]]:
    server = nodes[0].create_server("echo")
    workers = [Echo(server.create_dealer()) for _ in range(2)]
    yield server, workers
    server.close()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_responses_come_in_any_order_and_each_belongs_to_its_request(
    nodes: tuple[RpcService, RpcService], echoing: tuple[RpcServer, list[Echo]]
) -> None:
    with nodes[1].create_client("echo") as client, client.create_dealer() as dealer:
        requests = [RpcRequest(number) << np.full(5000, number) for number in range(20)]
        for request in requests:
            dealer.send_request(request)
        responses = [dealer.recv_response(PATIENCE_S) for _ in requests]
        assert dealer.in_flight == 0
        for response in responses:
            assert response.error_code == ErrorCode.SUCC
            number = response.read()
            assert requests[number] is response.request
            assert (response.read() == number).all()
            with pytest.raises(LookupError):
                response.read()
    assert sum(worker.served for worker in echoing[1]) == 20


def test_a_synchronous_call_gets_its_own_response(
    nodes: tuple[RpcService, RpcService], echoing: tuple[RpcServer, list[Echo]]
) -> None:
    with nodes[1].create_client("echo") as client, client.create_dealer() as dealer:
        dealer.send_request(RpcRequest("other"))
        assert list(dealer.sync_rpc_call(RpcRequest("mine", sid=echoing[0].server_id))) == ["mine"]
        assert list(dealer.recv_response(PATIENCE_S)) == ["other"]


def test_a_request_waits_for_the_first_dealer_and_is_answered_by_any(
    nodes: tuple[RpcService, RpcService],
) -> None:
    server = nodes[0].create_server("late")
    with nodes[1].create_client("late") as client, client.create_dealer() as dealer:
        dealer.send_request(RpcRequest("early"))
        dealer.send_request_one_way(RpcRequest("nobody waits"))
        receiving, answering = server.create_dealer(), server.create_dealer()
        received = sorted(
            (receiving.recv_request(PATIENCE_S) for _ in range(2)),
            key=lambda request: request.is_one_way,
        )
        assert [list(request) for request in received] == [["early"], ["nobody waits"]]
        assert not answering.send_response(RpcResponse(received[1], "unheard"))
        assert answering.send_response(RpcResponse(received[0], "late", 1))
        assert not answering.send_response(RpcResponse(received[0], "again"))
        assert list(dealer.recv_response(PATIENCE_S)) == ["late", 1]
    server.close()


def test_what_goes_wrong_is_an_error_code_and_an_error(
    nodes: tuple[RpcService, RpcService],
) -> None:
    server = nodes[0].create_server("wrong")
    answering = server.create_dealer()
    with nodes[1].create_client("wrong") as client, client.create_dealer() as dealer:
        dealer.send_request(RpcRequest("late"), timeout_s=0.05)
        response = dealer.recv_response(PATIENCE_S)
        assert (response.error_code, type(response.error)) == (
            ErrorCode.ETIMEOUT,
            errors.DeadlineExceeded,
        )
        dealer.send_request(RpcRequest(sid=99))
        assert dealer.recv_response(PATIENCE_S).error_code == ErrorCode.ENOSUCHSERVER
        response.error = ShmFull("an error of the engine below")
        assert response.error_code == ErrorCode.ELOGICERROR
        assert dealer.sync_rpc_call(RpcRequest(dest_rank=77)).error_code == ErrorCode.ENOSUCHSERVER
        dealer.send_request(RpcRequest())
        request = answering.recv_request(PATIENCE_S)
        if list(request) == ["late"]:  # it was sent before its time was over
            request = answering.recv_request(PATIENCE_S)
        failed = RpcResponse(request)
        failed.set_error("the table is not loaded")
        answering.send_response(failed)
        response = dealer.recv_response(PATIENCE_S)
        assert response.error_code == ErrorCode.ELOGICERROR
        assert "the table is not loaded" in str(response.error)
        dealer.send_request(RpcRequest())
        del failed, request
        answering.recv_request(PATIENCE_S)  # and dropped
        assert dealer.recv_response(PATIENCE_S).error_code == ErrorCode.ELOGICERROR
    server.close()


def test_peers_address_each_other_by_rank(nodes: tuple[RpcService, RpcService]) -> None:
    one, two = (node.create_dealer("peers") for node in nodes)
    for dealer, other in ((one, nodes[1].rank), (two, nodes[1].rank), (two, nodes[0].rank)):
        dealer.send_request(RpcRequest("hello", dest_rank=other))
        receiver = one if other == nodes[0].rank else two
        request = receiver.recv_request(PATIENCE_S)
        receiver.send_response(RpcResponse(request, *request, "back"))
        assert list(dealer.recv_response(PATIENCE_S)) == ["hello", "back"]


def test_time_out_and_termination_are_told_apart(nodes: tuple[RpcService, RpcService]) -> None:
    server = nodes[0].create_server("quiet")
    dealer = server.create_dealer()
    with pytest.raises(TimeoutError, match="received nothing within"):
        dealer.recv_request(0.01)
    waiting = Echo(server.create_dealer())
    server.terminate()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    with pytest.raises(Terminated):
        dealer.recv_request(0.0)
    server.restart()
    with pytest.raises(TimeoutError):
        dealer.recv_request(0.0)
    server.close()


def test_dealers_say_what_they_are_for(nodes: tuple[RpcService, RpcService]) -> None:
    server = nodes[0].create_server("one-sided")
    with pytest.raises(errors.ConfigError, match=r"client.create_dealer\(\)"):
        server.create_dealer().send_request(RpcRequest())
    with (
        nodes[1].create_client("one-sided") as client,
        pytest.raises(errors.ConfigError, match=r"server.create_dealer\(\)"),
    ):
        client.create_dealer().recv_request(0.0)
    methods = nodes[0].create_server("methods", {"f": len})
    with pytest.raises(errors.ConfigError, match="has methods"):
        methods.create_dealer()
    server.close()
    methods.close()


def test_a_message_put_before_the_wait_is_received_without_one() -> None:
    mailbox = Mailbox("a box", None)
    mailbox.put(1)
    mailbox.put(2)
    assert (mailbox.get(0.0), mailbox.get(None)) == (1, 2)


def test_a_dealer_that_never_receives_is_told_to(
    nodes: tuple[RpcService, RpcService],
) -> None:
    server = nodes[0].create_server("unheard")
    answering = server.create_dealer()
    with (
        nodes[1].create_client("unheard") as client,
        Dealer("unheard", nodes[1].driver, client, requests_max=3) as dealer,
    ):
        for _ in range(3):
            dealer.send_request(RpcRequest())
        answering.send_response(RpcResponse(answering.recv_request(PATIENCE_S)))
        wait_until(
            lambda: len(dealer._responses) == 1,
            "the response, which is no request in flight any more before it is there",
        )
        with pytest.raises(errors.Backpressure, match=r"call recv_response\(\)"):
            dealer.send_request(RpcRequest())
        assert dealer.recv_response(PATIENCE_S).error_code == ErrorCode.SUCC
        dealer.send_request(RpcRequest())
        assert dealer.in_flight == 3
    server.close()


def test_who_receives_nothing_again_and_again_leaves_nothing_behind() -> None:
    mailbox = Mailbox("it", ManualWaiter())
    for _ in range(3):
        with pytest.raises(TimeoutError):
            mailbox.get(0.0)
    assert not mailbox.waiting


def test_a_wait_that_was_terminated_ends_although_others_go_on_at_once() -> None:
    waiter = ManualWaiter()
    mailbox = Mailbox("it", waiter)

    def end_and_go_on() -> None:
        mailbox.terminate()
        mailbox.restart()

    waiter.meanwhile = end_and_go_on
    with pytest.raises(Terminated):
        mailbox.get(None)


def test_a_message_wakes_another_when_the_one_it_woke_does_not_take_it() -> None:
    waiter = ManualWaiter()
    mailbox = Mailbox("it", waiter)
    another = Future()

    def interrupted() -> None:
        mailbox._waiting.append(another)
        mailbox.put("message")
        raise KeyboardInterrupt

    waiter.meanwhile = interrupted
    with pytest.raises(KeyboardInterrupt):
        mailbox.get(None)
    assert another.done()


def test_a_message_that_comes_as_the_last_that_waited_was_woken_by_another_is_kept() -> None:
    class Taken(deque[Future]):
        def __bool__(self) -> bool:
            self.clear()  # by another thread
            return True

    mailbox = Mailbox("it", None)
    mailbox._waiting = Taken([Future()])
    mailbox.put("message")
    assert mailbox.get(None) == "message"
    mailbox.terminate()


def test_a_request_that_cannot_be_sent_for_want_of_memory_does_not_count_as_in_flight() -> None:
    class Client:
        ranks = ()

        def submit(self, *_: Any, **__: Any) -> Future:
            raise errors.ShmFull("no room")

    dealer = Dealer("it", None, Client())  # type: ignore[arg-type]
    with pytest.raises(errors.ShmFull):
        dealer.send_request(RpcRequest(1))
    assert dealer.in_flight == 0
