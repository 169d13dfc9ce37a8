"""pRPC's workloads of echoes: many threads to many servers, a mesh, large and small, servers that
come and go.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prpc_engine import (
    ErrorCode,
    Master,
    RpcClient,
    RpcRequest,
    RpcResponse,
    RpcService,
    Terminated,
    errors,
)
from tests.held import at
from tests.prpc_engine.inside import session_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.nodes import flicker, mesh_node
from tests.prpc_engine.workloads.pattern import any_piece, mixed
from tests.prpc_engine.workloads.servers import serve
from tests.prpc_engine.workloads.sizes import MIB, bound_s, scaled
from tests.prpc_engine.workloads.tally import Tally, run_threads

SERVERS, THREADS, BULK_THREADS = 10, 20, 7
CALLS_PER_THREAD = scaled(50, 1000)
NODES, MESH_CALLS = scaled(10, 20), scaled(30, 60)
ECHOES = 100
ROUNDS = 100  # of a server that comes and goes
CALLERS = 3
Tell = Callable[[str], None]


def echo_once(
    client: RpcClient, server_id: int, number: int, nbytes: int, chance: random.Random
) -> tuple[bool, int]:
    """Whether a number, a text and so many bytes come back as they were sent, and how many those
    are.
    """
    _, sent = any_piece(chance, nbytes)
    text = "x" * chance.randrange(50)
    back = client.call_to(server_id, "echo", number, text, sent)
    return (back[0], back[1]) == (number, text) and np.array_equal(back[2], sent), len(sent)


@pytest.mark.slow
def test_twenty_threads_call_ten_servers_in_turn_and_get_what_they_sent(
    farm: Farm, master: Master, transport: str, seed: int, tell: Tell
) -> None:
    servers = [
        farm.start(serve, master.address, "many", transport, number) for number in range(SERVERS)
    ]
    tallies = [Tally() for _ in range(THREADS)]
    sent_bytes = [0] * THREADS
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("many", SERVERS, timeout_s=PATIENCE_S) as client,
    ):

        def work(name: int) -> None:
            chance = random.Random(seed + name)
            nbytes_max = 5 * MIB if name < BULK_THREADS else 50
            for number in range(CALLS_PER_THREAD):

                def act(number: int = number) -> bool:
                    is_right, nbytes = echo_once(
                        client, number % SERVERS, number, chance.randrange(nbytes_max), chance
                    )
                    sent_bytes[name] += nbytes
                    return is_right

                tallies[name].count(True, act)

        elapsed_s = run_threads(
            [lambda name=name: work(name) for name in range(THREADS)], bound_s(150.0)
        )  # type: ignore[misc]
    tally = Tally().merge(*tallies)
    tell(
        f"{transport}: {tally.text(elapsed_s)}; {2 * sum(sent_bytes) / MIB / elapsed_s:,.0f} "
        "MiB/s both ways together"
    )
    assert tally.wrong == []
    assert tally.outcomes == {"right": THREADS * CALLS_PER_THREAD}
    for server in servers:
        assert end(server)["tasks"] == 0


@pytest.mark.slow
def test_nodes_that_all_call_each_other_get_what_they_sent(
    farm: Farm, master: Master, transport: str, seed: int, tell: Tell
) -> None:
    nodes = [
        farm.start(
            mesh_node, master.address, transport, number, NODES, MESH_CALLS, 4 * MIB, seed + number
        )
        for number in range(NODES)
    ]
    right = nbytes = 0
    for node in nodes:
        assert node.wait(bound_s(150.0)) == 0
        found = node.life.reported()
        right += found[0]
        nbytes += found[1]
    tell(f"{transport}: {NODES} nodes, {right} calls right, {nbytes / MIB:,.0f} MiB each way")
    assert right == NODES * MESH_CALLS


@pytest.mark.slow
@pytest.mark.parametrize("size", ["128 bytes", "5 MiB", "random"])
def test_a_hundred_echoes_are_equal_each_with_a_client_and_dealer_of_its_own(
    farm: Farm, master: Master, transport: str, size: str, seed: int
) -> None:
    server = farm.start_ready(serve_requests, master.address, transport)
    chance = random.Random(seed)
    with RpcService(master.address, transports=[transport]) as service:
        for number in range(ECHOES):
            nbytes = {"128 bytes": 128, "5 MiB": 5 * MIB}.get(size) or chance.randrange(5 * MIB)
            _, sent = any_piece(chance, nbytes)
            with service.create_client("dealers") as client, client.create_dealer() as dealer:
                response = dealer.sync_rpc_call(
                    RpcRequest(number, sent, bytes(sent[:1000])), timeout_s=PATIENCE_S
                )
            assert response.error is None
            assert response.values[0] == number
            assert np.array_equal(response.values[1], sent)
            assert response.values[2] == bytes(sent[:1000])
    assert end(server) == ECHOES


def test_of_two_servers_of_one_name_the_one_that_a_request_names_gets_it(
    master: Master, transport: str
) -> None:
    with (
        RpcService(master.address, transports=[transport]) as ours,
        RpcService(master.address, transports=[transport]) as theirs,
    ):
        receivers = [
            ours.create_server("two", server_id=number).create_dealer() for number in range(2)
        ]
        with (
            theirs.create_client("two", 2, timeout_s=PATIENCE_S) as client,
            client.create_dealer() as dealer,
        ):
            for number, receiver in enumerate(receivers):
                dealer.send_request(RpcRequest("hello", number, sid=number))
                request = receiver.recv_request(PATIENCE_S)
                receiver.send_response(RpcResponse(request, *request))
                response = dealer.recv_response(PATIENCE_S)
                assert (response.error_code, list(response)) == (ErrorCode.SUCC, ["hello", number])


def serve_requests(life: Any, master: str, transport: str) -> int:
    """A server with a dealer that answers every request with what came, until SIGTERM; how many."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    answered = 0
    with RpcService(master, transports=[transport]) as service:
        server = service.create_server("dealers")
        dealer = server.create_dealer()

        def answer() -> None:
            nonlocal answered
            while True:
                try:
                    request = dealer.recv_request()
                except Terminated:
                    return
                answered += dealer.send_response(RpcResponse(request, *request))

        worker = threading.Thread(target=answer)
        worker.start()
        life.done = 1
        signal.sigwait({signal.SIGTERM})
        server.terminate()
        worker.join()
    return answered


def test_a_call_without_any_server_outlives_a_master_that_is_too_slow_to_say_who_serves(
    master: Master,
) -> None:
    def refuse() -> None:
        raise errors.NotSent("nobody looks but the call")

    with (
        at("service.watching", refuse),
        RpcService(master.address) as ours,
        RpcService(master.address) as theirs,
        theirs.create_client("late", 0) as client,
    ):

        def be_late(verb: str) -> None:
            assert verb == "lookup"
            ours.create_server("late", {"one": lambda: 1})
            raise errors.DeadlineExceeded("the master did not answer in time")

        with at("session.submitting", be_late, of=session_of(theirs), times=1) as late:
            assert client.call("one", timeout_s=PATIENCE_S) == 1
        assert late.count == 1


@pytest.mark.slow
def test_a_server_that_is_registered_and_taken_back_a_hundred_times_answers_in_between(
    farm: Farm, master: Master, transport: str, tell: Tell
) -> None:
    """Its callers see right answers and named errors, and go on until it has come and gone for the
    last time. Then another one answers those that still look for it.
    """
    server = farm.start(flicker, master.address, "flicker", transport, ROUNDS)
    tallies = [Tally() for _ in range(CALLERS)]
    with (
        RpcService(master.address, transports=[transport]) as successor,
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("flicker", 0) as client,
    ):

        def succeed() -> None:
            wait_until(lambda: server.life.done == ROUNDS or server.is_dead(), "the last round")
            successor.create_server("flicker", {"mix": mixed})

        def work(name: int) -> None:
            chance = random.Random(name)
            while server.life.done < ROUNDS:
                number = chance.randrange(1 << 32)
                tallies[name].count(mixed(number), client.call, "mix", number, timeout_s=PATIENCE_S)

        elapsed_s = run_threads(
            [succeed, *(lambda name=name: work(name) for name in range(CALLERS))],  # type: ignore[misc]
            bound_s(150.0),
        )
    assert server.wait(PATIENCE_S) == 0
    assert server.life.reported() == ROUNDS
    tally = Tally().merge(*tallies)
    tell(f"{transport}: {tally.text(elapsed_s)}")
    assert tally.wrong == []
    assert tally.outcomes["right"] >= ROUNDS
    refusals = {
        errors.NoServer,
        errors.UnknownService,
        errors.Stopping,
        errors.MaybeExecuted,
        errors.NotSent,
    }
    assert set(tally.outcomes) - {"right"} <= {refusal.__name__ for refusal in refusals}
