"""Connections are cut under live servers: each push is applied once, and nobody above notices."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import (
    Backpressure,
    Closed,
    DeadlineExceeded,
    MaybeExecuted,
    NoServer,
    RpcError,
    Stopping,
)
from prpc_engine.kv import TableServer, TableShard, TableWorker
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.client.partition_client import (
    REPEAT_BYTES_MAX,
    REPEATS_MAX,
    PartitionAddress,
    PartitionClient,
    PartitionRequest,
)
from prpc_engine.kv.consistency.ledger import WINDOW
from shard import Future, Limits, Reactor
from tests.faults.zygote import Life
from tests.helpers import ManualClock
from tests.program import halt
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end, kill
from tests.prpc_engine.workloads.servers import cut_socket

PUSHES = 150
KEYS_A_PUSH = 8
# at most: a machine on which an answer takes longer than the time between two cuts comes on all the
# same
CUTS_A_ROUND = 3
ADD = {"name": "add"}
LOST_S = 3.0  # for a server that comes back: none does


def serve_tables(life: Life, master: str, transport: str) -> None:
    """One server until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=[transport]) as service:
        TableServer(service)
        life.done = 1
        signal.sigwait({signal.SIGTERM})


def cut_all(service: RpcService) -> None:
    """Cut the connections over which calls are out, in the reactor's thread, where none of them is
    closed meanwhile.
    """

    def cut() -> None:
        for peer in node_of(service).peers():
            if (
                not peer.lost
                and peer.connection.transport in ("shm", "tcp")
                and peer.calls.in_flight
            ):
                cut_socket(peer)

    node_of(service).reactor.call_soon(cut)


@contextmanager
def cuts_at_random(
    service: RpcService,
    chance: random.Random,
    gap_s: tuple[float, float],
    rounds: Callable[[], int],
) -> Iterator[None]:
    """Meanwhile what is out is cut after each such time, CUTS_A_ROUND times at most while `rounds`
    stays the same.
    """
    done = threading.Event()

    def run() -> None:
        number, cuts = -1, 0
        while not done.wait(chance.uniform(*gap_s)):
            now = rounds()
            cuts = cuts + 1 if now == number else 1
            number = now
            if cuts <= CUTS_A_ROUND:
                cut_all(service)

    cutter = threading.Thread(target=run)
    cutter.start()
    try:
        yield
    finally:
        done.set()
        cutter.join()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_while_connections_are_cut_every_push_is_applied_once(
    farm: Farm, master: Master, transport: str, seed: int
) -> None:
    chance = random.Random(seed)
    servers = [farm.start_ready(serve_tables, master.address, transport) for _ in range(2)]
    with RpcService(master.address, transports=[transport]) as service:
        worker = TableWorker(service, expected_servers=2)
        worker.create_sparse("counts", 1, ADD)
        worker.create_dense("sum", (3, 2), ADD, split_bytes_min=0)
        grads, ones = np.ones((KEYS_A_PUSH, 1), np.float32), np.ones((3, 2), np.float32)
        number, deadline = 0, float("inf")
        with cuts_at_random(service, chance, (0.005, 0.05), lambda: number):
            while number < PUSHES or not worker.request_statistics().repeats:
                if number == PUSHES:
                    deadline = time.monotonic() + PATIENCE_S
                assert time.monotonic() < deadline, "no push was cut"
                keys = np.arange(number * KEYS_A_PUSH, (number + 1) * KEYS_A_PUSH)
                pushes = [
                    worker.submit_push("counts", keys, grads),
                    worker.submit_push("sum", ones),
                ]
                assert worker.push_pull("counts", keys[:1] + 10**9, grads[:1]).tolist() == [[1]]
                for push in pushes:
                    push.result()
                assert worker.pull("counts", keys).tolist() == [[1]] * KEYS_A_PUSH
                number += 1
        assert worker.pull("counts", np.arange(number * KEYS_A_PUSH)).min() == 1
        assert worker.pull("counts", np.arange(number * KEYS_A_PUSH)).max() == 1
        assert worker.pull("sum").tolist() == [[number] * 2] * 3
        assert worker.request_statistics().unanswered == 0
        wait_until(lambda: not worker.request_statistics().is_recovering, "the end of the recovery")
    for server in servers:
        end(server)


@pytest.mark.slow
def test_a_push_whose_server_died_says_at_its_deadline_that_it_may_have_been_applied(
    farm: Farm, master: Master
) -> None:
    server = farm.start_ready(serve_tables, master.address, "tcp")
    with RpcService(master.address, transports=["tcp"]) as service:
        worker = TableWorker(service)
        worker.create_sparse("counts", 1, ADD)
        halt(server.pid)  # it takes no more from its sockets
        push = worker.submit_push(
            "counts", np.array([1]), np.ones((1, 1), np.float32), timeout_s=LOST_S
        )
        pull = worker.submit_pull("counts", np.array([1]), timeout_s=LOST_S)
        assert not push.done()
        kill(server)
        with pytest.raises(
            DeadlineExceeded,
            match=r"push 1 to partition 0 of 'kv'.* may have been applied, once.*no server 0",
        ):
            push.result(PATIENCE_S)
        with pytest.raises(
            DeadlineExceeded, match=r"pull to partition 0 of 'kv'.* has no answer at its deadline"
        ):
            pull.result(PATIENCE_S)
        wait_until(lambda: not worker.request_statistics().is_recovering, "the end of the recovery")
    assert server.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_server_applies_a_push_that_comes_twice_once_also_while_a_gate_holds_it() -> None:
    service = LocalService()
    TableServer(service)
    worker = TableWorker(service)
    worker.create_sparse("counts", 1, ADD)
    shard = service.servers["kv"][0]
    assert isinstance(shard, TableShard)
    keys, ones = np.array([5, 6]), np.ones((2, 1), np.float32)
    shard.apply(1, 1, "push", "counts", keys, ones)
    shard.checkpoint_enter("0" * 16, "/nowhere")
    first, second = (shard.apply(1, 2, "push_pull", "counts", keys, ones) for _ in range(2))
    other = shard.apply(2, 2, "push", "counts", keys, ones)
    assert not any(each.done() for each in (first, second, other))
    assert shard.ledger.highest(1) == 1
    shard.checkpoint_release("0" * 16)
    assert first.result().tolist() == second.result().tolist() == [[2], [2]]
    assert other.result() == 3  # the version that it made
    assert shard.apply(1, 2, "push_pull", "counts", keys, ones).tolist() == [[3], [3]]
    assert (shard.ledger.highest(1), shard.ledger.highest(2)) == (2, 2)
    shard.apply(1, 2 + WINDOW, "push", "counts", keys, ones)
    with pytest.raises(RpcError, match="whether it was applied is not remembered"):
        shard.apply(1, 2, "push", "counts", keys, ones)


class Silent:
    """A client whose calls end when the test says so."""

    server_ids = (0,)

    def __init__(self) -> None:
        self.calls: list[tuple[Future, tuple[object, ...]]] = []

    def submit_to(
        self, server_id: int, method: str, /, *args: object, timeout_s: float = 30.0
    ) -> Future:
        self.calls.append((Future(), args))
        return self.calls[-1][0]


class Turner:
    """A waiter whose reactor the test turns."""

    closing = False

    def __init__(self) -> None:
        self.clock = ManualClock(time.monotonic())
        self.reactor = Reactor(self.clock)

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        while self.reactor.poll(self.clock()):
            pass


def make_lane(waiter: Turner | None = None) -> tuple[Silent, PartitionClient]:
    client = Silent()
    return client, PartitionClient(
        client, "kv", 0, PartitionAddress(0), 7, lambda lane: None, waiter=waiter or Turner()
    )


def repeat(lane: PartitionClient) -> bool:
    """As the turns of the reactor do."""
    sent = set[PartitionRequest]()
    while (is_whole := lane.repeat_some(sent)) is None:
        pass
    return is_whole


def test_pushes_without_an_answer_are_bounded() -> None:
    client, lane = make_lane()
    for _ in range(WINDOW):
        lane.push("push", 30.0, "t", np.zeros(1))
    with pytest.raises(
        Backpressure, match=f"{WINDOW} pushes of {WINDOW * 8} bytes to partition 0 of 'kv'"
    ):
        lane.push("push", 30.0, "t", np.zeros(1))
    for call, _ in client.calls[1:]:
        call.set_result(None)
    with pytest.raises(Backpressure):  # the oldest holds the window
        lane.push("push", 30.0, "t", np.zeros(1))
    client.calls[0][0].set_result(None)
    lane.push("push", 30.0, "t", np.zeros(1 << 25))
    with pytest.raises(Backpressure, match="268435456 bytes are allowed"):
        lane.push("push", 30.0, "t", np.zeros(1))


def test_what_is_lost_is_sent_again_in_order_and_what_comes_later_goes_behind_it() -> None:
    client, lane = make_lane()
    requests = [
        lane.push("push", 30.0, "t"),
        lane.ask("pull", 30.0, "t"),
        lane.push("push", 30.0, "t"),
    ]
    for call, _ in reversed(client.calls):
        call.set_error(MaybeExecuted("lost"))
    assert not any(request.done() for request in requests)
    requests.append(lane.push("push", 30.0, "t"))
    assert len(client.calls) == 3
    assert repeat(lane)
    assert [args for _, args in client.calls[3:]] == [
        (7, 1, "push", "t"),
        ("t",),
        (7, 2, "push", "t"),
        (7, 3, "push", "t"),
    ]
    for number, (call, _) in enumerate(client.calls[3:]):
        call.set_result(number)
    assert [request.result() for request in requests] == [0, 1, 2, 3]
    assert lane.unanswered() == 0
    assert lane.push("push", 30.0, "t").call is client.calls[-1][0]


@pytest.mark.parametrize(
    ("nbytes", "a_turn"), [(0, REPEATS_MAX), (REPEAT_BYTES_MAX // 2, 2), (2 * REPEAT_BYTES_MAX, 1)]
)
def test_what_is_lost_is_sent_again_in_order_some_in_each_turn(nbytes: int, a_turn: int) -> None:
    client, lane = make_lane()
    arrays, many = np.zeros(nbytes, np.uint8), 2 * a_turn + 1
    for _ in range(many):
        lane.push("push", 30.0, "t", arrays)
    for call, _ in reversed(client.calls):
        call.set_error(MaybeExecuted("lost"))
    client.calls.clear()
    sent, turns = set[PartitionRequest](), list[int]()
    while lane.repeat_some(sent) is None:
        turns.append(len(client.calls))
    assert turns == [a_turn, 2 * a_turn, many]
    assert [args[1] for _, args in client.calls] == list(range(1, many + 1))


def test_what_its_caller_has_given_up_is_not_sent_again() -> None:
    client, lane = make_lane()
    request = lane.push("push", 30.0, "t")
    client.calls[0][0].set_error(MaybeExecuted("lost"))
    request.give_up()
    assert repeat(lane)
    assert len(client.calls) == 1


def test_what_is_lost_after_its_caller_gave_it_up_is_not_sent_again() -> None:
    client, lane = make_lane()
    request = lane.push("push", 30.0, "t")
    request.give_up()
    client.calls[0][0].set_error(MaybeExecuted("lost"))
    assert repeat(lane)
    assert len(client.calls) == 1
    assert lane.unanswered() == 0


def test_nobody_reads_the_arrays_of_a_push_that_was_given_up_as_it_was_sent_again() -> None:
    client, lane = make_lane()
    grads, begun, go_on = np.zeros(1), threading.Event(), threading.Event()
    request = lane.push("push", 30.0, "t", grads)
    client.calls[0][0].set_error(MaybeExecuted("lost"))
    sent: list[float] = []

    def encode_late(*args: object, timeout_s: float) -> Future:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        sent.append(float(grads[0]))
        return Future()

    def give_up_and_change() -> None:
        request.give_up()
        grads[0] = 1

    client.submit_to = encode_late  # type: ignore[assignment,method-assign]
    threads = [
        threading.Thread(target=repeat, args=(lane,)),
        threading.Thread(target=give_up_and_change),
    ]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sent == [0]


def test_what_is_lost_again_at_once_waits_for_the_next_round() -> None:
    client, lane = make_lane()
    request = lane.push("push", 5.0, "t")
    client.calls[0][0].set_error(MaybeExecuted("lost"))

    def refuse(*args: object, timeout_s: float) -> Future:
        client.calls.append((Future(), args))
        client.calls[-1][0].set_error(MaybeExecuted("lost at once"))
        return client.calls[-1][0]

    client.submit_to = refuse  # type: ignore[assignment,method-assign]
    assert not repeat(lane)
    assert len(client.calls) == 2
    assert not request.done()


@pytest.mark.parametrize("refusal", [Backpressure, Stopping])
def test_a_push_that_was_lost_and_is_refused_then_is_not_said_to_be_refused(
    refusal: type[RpcError],
) -> None:
    client, lane = make_lane()
    request = lane.push("push", 30.0, "t")
    client.calls[0][0].set_error(MaybeExecuted("lost"))
    assert repeat(lane)
    client.calls[1][0].set_error(refusal("not now"))
    if refusal is Backpressure:  # there will be room
        assert not request.done()
        assert repeat(lane)
        client.calls[2][0].set_result(7)
        assert request.result() == 7
    else:
        with pytest.raises(MaybeExecuted, match="may have been applied, once"):
            request.result()


def test_a_first_request_waits_for_a_server_that_the_client_has_not_heard_of_yet(
    master: Master,
) -> None:
    lost: list[PartitionClient] = []
    with RpcService(master.address) as service:
        client = Silent()
        lane = PartitionClient(
            client, "kv", 0, PartitionAddress(3), 7, lost.append, "apply", True, service.driver
        )
        submit_to = client.submit_to

        def refuse(*args: object, timeout_s: float) -> Future:
            raise NoServer("no server 3 of 'kv'")

        client.submit_to = refuse  # type: ignore[assignment,method-assign]
        request = lane.ask("create_table", 30.0)
        assert lost == [lane]
        client.submit_to = submit_to  # type: ignore[method-assign]
        assert repeat(lane)
        client.calls[0][0].set_result(True)
        assert request.result(PATIENCE_S) is True


def test_a_lost_push_ends_at_its_deadline(farm: Farm, master: Master) -> None:
    server = farm.start_ready(serve_tables, master.address, "tcp")
    with RpcService(master.address, transports=["tcp"]) as service:
        worker = TableWorker(service)
        worker.create_sparse("counts", 1, ADD)
        halt(server.pid)
        push = worker.submit_push(
            "counts", np.array([1]), np.ones((1, 1), np.float32), timeout_s=0.5
        )
        cut_all(service)
        with pytest.raises(DeadlineExceeded):
            push.result(PATIENCE_S)
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: not worker.request_statistics().is_recovering, "the end of the recovery")
    end(server)


def test_what_is_lost_ends_with_the_service(farm: Farm, master: Master) -> None:
    server = farm.start_ready(serve_tables, master.address, "tcp")
    # a server that stands still keeps its lanes open when one is cut
    soon = Limits(peer_silent_s=0.5)
    with RpcService(master.address, transports=["tcp"], limits=soon) as service:
        worker = TableWorker(service)
        worker.create_sparse("counts", 1, ADD)
        # else the push may not be out yet when what is out is cut
        worker.pull("counts", np.array([1]))
        halt(server.pid)
        push = worker.submit_push("counts", np.array([1]), np.ones((1, 1), np.float32))
        cut_all(service)
        wait_until(lambda: worker.request_statistics().repeats, "another attempt")
    with pytest.raises((Closed, MaybeExecuted)):
        push.result(PATIENCE_S)
    wait_until(lambda: not worker.request_statistics().is_recovering, "the end of the recovery")
    os.kill(server.pid, signal.SIGCONT)
    end(server)


def test_an_acknowledged_push_keeps_no_arrays() -> None:
    client, lane = make_lane()
    request = lane.push("push", 30.0, "t", np.zeros(1))
    assert len(request.args) == 5
    client.calls[0][0].set_result(None)
    assert request.result() is None
    assert request.args == ()
