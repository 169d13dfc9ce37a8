"""What becomes of calls when servers are slow, die, or come back; and of services that are closed
in the middle.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import prpc_engine
from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import Cancelled, Closed, DeadlineExceeded, MaybeExecuted, NotSent, RpcError
from prpc_engine.node import slab
from shard import ForkedError
from tests.prpc_engine import seen
from tests.prpc_engine.handlers import Handlers
from tests.prpc_engine.inside import node_of, peers_by_address, routes_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_connected, wait_until
from tests.shard.processes import in_fork

# What "quickly" means here: far below the timeouts that would end the wait otherwise, far above
# what a busy machine takes.
BOUND_S = 10.0


class World(NamedTuple):
    """One server called "test" in a process of its own, and a client of it."""

    transport: str
    service: RpcService
    client: RpcClient
    master: Master
    server: ServerProcess


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        Master() as master,
        ServerProcess(master.address, "test", request.param) as server,
        RpcService(master=master.address, transports=[request.param]) as service,
    ):
        client = service.create_client("test", timeout_s=PATIENCE_S)
        client.call("echo", 0)
        wait_connected(client)
        yield World(request.param, service, client, master, server)


def late_replies(world: World) -> int:
    return sum(
        peer.calls.dropped_replies for peer in peers_by_address(node_of(world.service)).values()
    )


def test_a_blocked_handler_ends_the_call_at_its_deadline_and_its_late_reply_is_counted(
    world: World, fifo: str
) -> None:
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded,
        match=(
            r"no answer to 'read_fifo' from server 0 of 'test' \(rank \d+\) "
            r"at .* after \d+\.\d+ s"
        ),
    ):
        world.client.call("read_fifo", fifo, timeout_s=0.2)
    assert time.monotonic() - started < BOUND_S
    assert late_replies(world) == 0
    Path(fifo).write_text("go on")
    assert world.client.call("echo", 1, timeout_s=PATIENCE_S) == 1, "the server answers again"
    assert late_replies(world) == 1


def test_each_call_has_its_own_deadline(world: World, fifo: str) -> None:
    world.client.submit("read_fifo", fifo, timeout_s=PATIENCE_S)
    patient = world.client.submit("echo", "patient", timeout_s=PATIENCE_S)
    hurried = [
        world.client.submit("echo", number, timeout_s=0.05 * (number + 1)) for number in range(4)
    ]
    for call in hurried:
        assert isinstance(call.error(BOUND_S), DeadlineExceeded)
    assert not patient.done()
    Path(fifo).write_text("go on")
    assert patient.result(PATIENCE_S) == "patient"


def test_a_result_that_is_not_waited_for_long_enough_is_a_timeout_and_the_call_goes_on(
    world: World, fifo: str
) -> None:
    call = world.client.submit("read_fifo", fifo, timeout_s=PATIENCE_S)
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        call.result(0.05)
    assert not call.done()
    Path(fifo).write_text("there it is")
    assert call.result(PATIENCE_S) == "there it is"


def test_a_deadline_passes_although_nobody_waits(world: World, fifo: str) -> None:
    call = world.client.submit("read_fifo", fifo, timeout_s=0.05)
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    assert ended.wait(BOUND_S)
    assert isinstance(call.error(), DeadlineExceeded)
    Path(fifo).write_text("go on")


def test_a_cancelled_call_ends_at_once_and_its_reply_is_dropped(world: World, fifo: str) -> None:
    call = world.client.submit("read_fifo", fifo, timeout_s=PATIENCE_S)
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(Cancelled, match="'read_fifo' was cancelled"):
        call.result()
    Path(fifo).write_text("go on")
    assert world.client.call("echo", 1) == 1
    assert late_replies(world) == 1


def test_a_server_killed_in_the_middle_of_calls_ends_them_quickly_with_maybe_executed(
    world: World, fifo: str
) -> None:
    calls = [
        world.client.submit("read_fifo", fifo, timeout_s=None),
        world.client.submit("echo", np.zeros(1_000_000), timeout_s=None),
    ]
    started = time.monotonic()
    world.server.kill()
    for call in calls:
        error = call.error(BOUND_S)
        assert isinstance(error, MaybeExecuted)
        assert "was sent to server 0 of 'test'" in str(error)
        assert "it may have run" in str(error)
    assert time.monotonic() - started < BOUND_S


def told_to_threads_that_wait(
    world: World, fifo: str, end: Callable[[], object]
) -> list[type[RpcError]]:
    """Three threads wait in call() when `end` ends it: what each is told."""
    errors: list[RpcError] = []

    def ask() -> None:
        try:
            world.client.call("read_fifo", fifo, timeout_s=None)
        except RpcError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    (peer,) = [route.peer for route in routes_of(world.client).values()]
    assert peer is not None
    # A call stands in the table before it leaves, and has its time of sending after.
    wait_until(lambda: sum(call.sent > 0.0 for call in list(peer.calls.in_flight.values())) == 3)
    wait_until(lambda: not peer.connection.outbox_messages)
    end()
    for thread in threads:
        thread.join(BOUND_S)
    return [type(error) for error in errors]


def test_a_thread_that_waits_in_call_learns_of_the_death_too(world: World, fifo: str) -> None:
    assert told_to_threads_that_wait(world, fifo, world.server.kill) == [MaybeExecuted] * 3


def test_after_its_death_calls_are_not_sent_until_it_is_started_again_under_its_name(
    world: World,
) -> None:
    world.server.kill()
    wait_until(
        lambda: all(
            route.peer is None or route.peer.lost for route in routes_of(world.client).values()
        ),
        "the loss",
    )
    started = time.monotonic()
    # NoServer once the master knows, NotSent from the old address before; DeadlineExceeded where
    # the deadline finds an attempt under way.
    with pytest.raises((NotSent, DeadlineExceeded), match=r"was not sent|no live server"):
        world.client.call("echo", 1, timeout_s=1.0)
    assert time.monotonic() - started < BOUND_S
    with ServerProcess(world.master.address, "test", world.transport):
        assert world.client.call("echo", 2, timeout_s=BOUND_S) == 2
        assert world.client.call("pid") != world.server.pid


def test_the_master_gives_the_id_of_a_dead_server_to_the_next(world: World) -> None:
    world.server.kill()
    wait_until(lambda: "test" not in seen.servers(world.service), "the master's notice")
    with ServerProcess(world.master.address, "test", world.transport, server_id=0):
        assert world.service.create_client("test", timeout_s=PATIENCE_S).server_ids == (0,)


def test_with_several_servers_the_others_go_on(world: World) -> None:
    with ServerProcess(world.master.address, "test", world.transport) as second:
        client = world.service.create_client("test", expected_servers=2, timeout_s=PATIENCE_S)
        assert client.server_ids == (0, 1)
        assert sorted(client.broadcast("pid")) == sorted([world.server.pid, second.pid])
        assert client.broadcast("pid") == [client.call_to(0, "pid"), client.call_to(1, "pid")]
        assert {client.call("pid") for _ in range(100)} == {world.server.pid, second.pid}
        route = routes_of(client)[0]  # before the client hears that the server has gone
        world.server.kill()
        wait_until(lambda: route.peer is not None and route.peer.lost, "the loss")
        assert {client.call("pid") for _ in range(50)} == {second.pid}


def test_threads_that_wait_find_the_service_closed(world: World, fifo: str) -> None:
    assert told_to_threads_that_wait(world, fifo, world.service.close) == [Closed] * 3
    world.server.kill()  # it would go on with the second and third call


def test_a_call_in_flight_at_close_ends_with_closed(world: World, fifo: str) -> None:
    call = world.client.submit("read_fifo", fifo, timeout_s=None)
    with Path(fifo).open("w"):  # once the handler reads it
        world.service.close()
        with pytest.raises(
            Closed,
            match=r"the client of 'test' was closed here while 'read_fifo' of server 0 .* was "
            r"under "
            r"way",
        ):
            call.result(BOUND_S)


def test_a_server_outlives_its_clients(world: World) -> None:
    for _ in range(5):
        with RpcService(master=world.master.address, transports=[world.transport]) as other:
            client = other.create_client("test")
            client.submit("echo", np.zeros(100_000))
            assert client.call("echo", 1) == 1
    assert world.client.call("echo", 2) == 2


# blocks are lent through shared memory only
@pytest.mark.parametrize("world", ["shm"], indirect=True)
def test_blocks_that_a_handler_keeps_after_its_caller_closed_are_not_used_again(
    world: World,
) -> None:
    gc.collect()  # of earlier tests
    slab = node_of(world.service).slab
    before = slab.statistics().blocks_used
    with RpcService(master=world.master.address, transports=["shm"]) as other:
        array = np.full(100_000, 5.0)
        other.create_client("test").call("keep", array)
    fresh = [slab.empty((100_000,), np.float64) for _ in range(4)]
    for each in fresh:
        each[:] = 9
    assert world.client.call("peek", 99_999) == 5
    del fresh, each
    world.client.call("drop")
    wait_until(lambda: slab.statistics().blocks_used == before, "the end of the lease")


def test_a_fork_that_drops_what_it_received_and_makes_arrays_leaves_its_parent_alone(
    world: World,
) -> None:
    """Dropping a received array once wrote into the parent's ring, and the server hung up on the
    parent.
    """
    client = world.client
    received = [client.call("echo", np.full(100_000, 3, np.uint8)) for _ in range(3)]
    ours = prpc_engine.empty(100_000, np.uint8)
    ours[:] = 7
    inherited = slab.default_slab()

    def child() -> None:
        received.clear()
        gc.collect()
        for refused in (
            lambda: client.call("echo", 1),
            lambda: inherited.empty(100_000),
            lambda: inherited.reserve(1),
        ):
            with pytest.raises(ForkedError, match="its fork"):
                refused()
        prpc_engine.empty(100_000, np.uint8)[:] = 9  # of a slab of the child's own
        assert ours.max() == 7

    assert in_fork(child) == 0
    assert ours.min() == ours.max() == 7
    assert [array.max() for array in received] == [3, 3, 3]
    for number in range(20):
        assert client.call("echo", number) == number


def test_a_fork_of_a_client_is_refused_by_name_and_leaves_its_parent_alone(world: World) -> None:
    with warnings.catch_warnings():
        # of Python 3.12: we have threads. That is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            refusals = 0
            for verb in (world.client.call, world.client.submit, world.client.notify):
                for value in (1, b"x" * 100_000, np.zeros(100_000)):
                    try:
                        verb("echo", value)
                    except Exception as error:
                        refusals += f"used in its fork {os.getpid()}" in str(error)
            world.service.close()
            gc.collect()
            code = 0 if refusals == 9 else 10 + refusals
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for number in range(100):
        assert world.client.call("echo", number, timeout_s=PATIENCE_S) == number
        assert world.client.call(
            "first_and_last", np.full(10_000, number), timeout_s=PATIENCE_S
        ) == (number, number)


def test_in_one_process_a_closed_service_ends_calls_of_the_other() -> None:
    with Master() as master, RpcService(master=master.address) as caller:
        callee = RpcService(master=master.address)
        callee.create_server("test", Handlers(callee))
        client = caller.create_client("test")
        nap = client.submit("nap", 60.0, timeout_s=None)
        assert client.call("echo", 1) == 1
        callee.close()
        assert isinstance(nap.error(BOUND_S), MaybeExecuted)
