"""Methods marked `once`: connections are cut under a live server, and each call runs once and is
answered.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prpc_engine import (
    Bounds,
    HedgePolicy,
    Master,
    RetryPolicy,
    RpcClient,
    RpcService,
    errors,
    idempotent,
    once,
)
from prpc_engine.client.retry import (
    BUDGET_SHARE,
    ONLY_THERE,
    GiveUp,
    Retry,
    RetryBudget,
    RetryState,
)
from prpc_engine.rpc.call import CALL_ID_BITS, NEVER, Call, CallTable
from prpc_engine.rpc.message import REPEAT, REQUEST
from prpc_engine.rpc.method import describe
from prpc_engine.rpc.server import ServedObject
from shard import Future
from tests.faults.zygote import Life
from tests.helpers import ManualClock
from tests.prpc_engine.inside import accepted_by, nap, node_of, numbered
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.servers import cut_socket

pytestmark = pytest.mark.usefixtures("patient_describe")

STUBBORN = RetryPolicy(attempts_max=100, unsent_max=100)  # a call may be hit by many cuts in a row
CALLS = 300  # of each thread, at least
THREADS = 3
# calls answered between two cuts: they pay for those that one cut has repeated
PER_CUT = round((THREADS + 1) / BUDGET_SHARE)
LOST = 10  # answers, one after the other
ARRAY_BYTES = 100_000


class Till:
    """Counts how often it ran for each number."""

    def __init__(self, service: RpcService | None = None) -> None:
        self._service = service
        self._ran: Counter[int] = Counter()
        self._held: list[Future] = []

    @once
    def add(self, number: int) -> int:
        self._ran[number] += 1
        return -number

    @once
    async def add_later(self, number: int) -> int:
        assert self._service is not None
        await nap(self._service, 0.002)
        return self.add(number)

    @once
    def add_array(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self.add(int(array[0]))
        return array + np.uint8(1)

    @once
    def add_and_cut(self, number: int) -> NDArray[np.uint8]:
        """Loses the way that its answer would go."""
        self.add(number)
        assert self._service is not None
        for peer in list(accepted_by(node_of(self._service))):
            cut_socket(peer)
        return np.full(ARRAY_BYTES, number, np.uint8)

    @once
    def fail(self, number: int) -> None:
        self.add(number)
        raise ValueError(f"there is no {number}")

    @once
    async def hold(self, number: int) -> int:
        """Answers when it is released."""
        self._held.append(Future())
        await self._held[-1]
        return self.add(number)

    @idempotent
    def held(self) -> int:
        return len(self._held)

    @idempotent
    def release(self) -> None:
        for one in self._held:
            one.set_result(None)

    @idempotent
    def ran(self) -> dict[int, int]:
        return dict(self._ran)

    @idempotent
    def figures(self) -> tuple[int, int]:
        """Calls that came again and were not run again; calls that wait in the queue."""
        assert self._service is not None
        now = next(iter(self._service.statistics().servers.values()))
        return now.repeated, now.queued


def serve_till(life: Life, master: str, transport: str, server_id: int, bounds: Bounds) -> None:
    """One server until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=[transport]) as service:
        service.create_server("till", Till(service), server_id=server_id, bounds=bounds)
        life.done = 1
        signal.sigwait({signal.SIGTERM})


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class World:
    """A master, and a service that calls."""

    def __init__(self, master: Master, farm: Farm, transport: str) -> None:
        self._farm, self._master, self._transport = farm, master, transport
        self.service = RpcService(master.address, transports=[transport])

    def start(self, server_id: int = 0, bounds: Bounds | None = None) -> Any:
        return self._farm.start_ready(
            serve_till, self._master.address, self._transport, server_id, bounds or Bounds()
        )

    def cut(self) -> None:
        """Cut the connections over which calls are out, in the reactor's thread, where none of them
        is closed meanwhile.
        """
        node_of(self.service).reactor.call_soon(self._cut_now)

    def _cut_now(self) -> None:
        for peer in node_of(self.service).peers():
            if (
                not peer.lost
                and peer.connection.transport == self._transport
                and peer.calls.in_flight
            ):
                cut_socket(peer)


@pytest.fixture
def world(farm: Farm, transport: str) -> Iterator[World]:
    with Master() as master:
        made = World(master, farm, transport)
        yield made
        made.service.close()


def learn(world: World, client: RpcClient) -> None:
    """Have the client find out which methods are `once`, by a call whose connection is cut."""
    call = client.submit("hold", 0, timeout_s=PATIENCE_S)
    wait_until(lambda: client.call("held") == 1, "the call runs")
    world.cut()
    wait_until(lambda: client.call("figures") == (1, 0), "the call came again")
    assert not call.done()
    client.call("release")
    assert call.result(PATIENCE_S) == 0


def test_a_method_that_runs_while_its_connection_is_cut_answers_over_the_new_one(
    world: World,
) -> None:
    server = world.start()
    with world.service.create_client("till") as client:
        learn(world, client)
        assert client.call("ran") == {0: 1}
        assert client.call("held") == 1
    end(server)


@pytest.mark.slow
def test_while_connections_are_cut_at_random_every_call_runs_once_and_none_fails(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    server = world.start()
    done, repeated = threading.Event(), threading.Event()
    with world.service.create_client("till", retry=STUBBORN) as client:
        learn(world, client)
        added = [0]

        def cut_at_random() -> None:
            answered = 0
            while not done.wait(chance.uniform(0.005, 0.05)):
                if len(added) >= answered + PER_CUT:
                    answered = len(added)
                    world.cut()

        def add_all(first: int) -> None:
            for calls, number in enumerate(itertools.count(first, THREADS)):
                if calls >= CALLS and repeated.is_set():
                    return
                assert (
                    client.call("add_later" if number % 3 else "add", number, timeout_s=PATIENCE_S)
                    == -number
                )
                added.append(number)

        cutter = threading.Thread(target=cut_at_random)
        cutter.start()
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                adding = [threads.submit(add_all, 1 + thread) for thread in range(THREADS)]
                try:
                    wait_until(
                        lambda: client.call("figures", timeout_s=PATIENCE_S)[0] > 1,
                        "calls that came again",
                    )
                finally:
                    repeated.set()
                for future in adding:
                    future.result()
        finally:
            done.set()
            cutter.join()
        assert client.call("ran") == dict.fromkeys(added, 1)
    end(server)


def test_an_answer_that_was_lost_on_its_way_is_sent_again_with_its_arrays(world: World) -> None:
    server = world.start()
    with world.service.create_client("till", retry=STUBBORN) as client:
        learn(world, client)
        for number in range(1, 1 + LOST):
            answer = client.call("add_and_cut", number, timeout_s=PATIENCE_S)
            assert answer.nbytes == ARRAY_BYTES and (answer == number).all()
        assert client.call("ran") == dict.fromkeys(range(1 + LOST), 1)
    end(server)


def test_a_call_that_waited_in_the_queue_when_its_connection_was_cut_waits_there_again(
    world: World,
) -> None:
    server = world.start(bounds=Bounds(tasks_max=1))
    with world.service.create_client("till", retry=STUBBORN) as client:
        calls = [
            client.submit(method, number, timeout_s=PATIENCE_S)
            for number, method in enumerate(["hold", "add", "add_later"])
        ]
        wait_until(lambda: client.call("figures") == (0, 2), "two wait")
        world.cut()
        wait_until(lambda: client.call("figures") == (1, 2), "all are there again")
        client.call("release")
        assert [call.result(PATIENCE_S) for call in calls] == [0, -1, -2]
        assert client.call("ran") == {0: 1, 1: 1, 2: 1}
    end(server)


def test_when_the_server_is_killed_its_callers_are_told_and_no_other_server_runs_the_call(
    world: World,
) -> None:
    victim = world.start(1)
    # asks there until the master says that it has gone
    with world.service.create_client("till", retry=STUBBORN) as client:
        calls = [client.submit("hold", number, timeout_s=PATIENCE_S) for number in range(3)]
        wait_until(lambda: client.call("held") == 3, "they run")
        other = world.start(2)
        wait_until(lambda: client.server_ids == (1, 2), "the client knows of both")
        victim.kill()
        for call in calls:
            with pytest.raises(errors.MaybeExecuted, match=ONLY_THERE):
                call.result(PATIENCE_S)
        assert client.call("held", timeout_s=PATIENCE_S) == 0
    end(other)


def test_a_repeat_that_finds_its_answer_forgotten_is_refused_by_name_and_does_not_run(
    world: World,
) -> None:
    server = world.start(bounds=Bounds(answers_max=0))
    with world.service.create_client("till", retry=STUBBORN) as client:
        learn(world, client)
        calls = 0
        with pytest.raises(errors.MaybeExecuted, match="may have run") as raised:
            while True:  # over shared memory the answer may be there before the cut is seen
                calls += 1
                client.call("add_and_cut", calls, timeout_s=PATIENCE_S)
        assert isinstance(raised.value.__cause__, errors.Forgotten)
        assert client.call("ran") == dict.fromkeys(range(1 + calls), 1)
    end(server)


@pytest.mark.slow
def test_a_client_that_hedges_repeats_such_a_call_where_it_runs_and_hedges_it_never(
    world: World,
) -> None:
    servers = [world.start(server_id) for server_id in (1, 2)]
    with world.service.create_client(
        "till", 2, retry=STUBBORN, hedge=HedgePolicy(delay_s=0.0)
    ) as client:
        call = client.submit("hold", 5, timeout_s=PATIENCE_S)
        wait_until(
            lambda: sum(client.call_to(server_id, "held") for server_id in (1, 2)) == 1, "it runs"
        )
        there, table = call.asked[1].server_id, call.table
        world.cut()
        wait_until(lambda: call.table is not table, "it is sent over another connection")
        wait_until(lambda: client.call_to(there, "figures") == (1, 0), "it came again")
        client.call_to(there, "release")
        assert call.result(PATIENCE_S) == -5
        assert client.statistics().hedges == 0
        assert client.call_to(3 - there, "held") == 0
    for server in servers:
        end(server)


def test_calls_of_a_named_server_are_not_repeated(world: World) -> None:
    server = world.start()
    with world.service.create_client("till") as client:
        call = client.submit_to(0, "hold", 1)
        wait_until(lambda: client.call("held") == 1, "it runs")
        world.cut()
        with pytest.raises(errors.MaybeExecuted):
            call.result(PATIENCE_S)
        assert client.call("figures")[0] == 0
    end(server)


# -- without processes -----------------------------------------------------------------------------


@pytest.fixture
def connect() -> Iterator[Callable[[ServedObject], Pair]]:
    pairs: list[Pair] = []

    def connected(server: ServedObject) -> Pair:
        pair = Pair(server)
        pair.served.number = len(pairs)
        pairs.append(pair)
        return pair

    yield connected
    for pair in pairs:
        pair.close()


def send(pair: Pair, kind: int, call_id: int, method: str, *args: Any) -> Call:
    """A request with that number, as another connection of the same node may have sent it
    before.
    """
    body, blocks = pair.client.decoder.encode_arguments(args)
    call = Call(asked=(method, Route()), body=body, blocks=blocks, call_id=call_id, overall=NEVER)
    with numbered(pair.client, call_id):
        pair.client.resend(call, Route(), PATIENCE_S, kind)
    pair.turn()
    return call


@pytest.mark.parametrize("method", ["add", "fail"])
def test_who_asks_again_gets_the_same_answer_or_failure(
    connect: Callable[[ServedObject], Pair], method: str
) -> None:
    till = Till()
    server = ServedObject("till", 0, TARGET, till)
    first, second = [send(connect(server), kind, 9, method, 5) for kind in (REQUEST, REPEAT)]
    assert till.ran() == {5: 1}
    assert type(first.error()) is type(second.error())
    assert str(first.error()) == str(second.error())
    assert first.error() is not None or first.result() == second.result() == -5
    assert server.statistics().repeated == 1


def test_arrays_of_a_repeated_answer_are_those_of_the_first(
    connect: Callable[[ServedObject], Pair],
) -> None:
    server = ServedObject("till", 0, TARGET, Till())
    answers = [
        send(connect(server), kind, 9, "add_array", np.full(ARRAY_BYTES, 6, np.uint8))
        for kind in (REQUEST, REPEAT)
    ]
    for answer in answers:
        assert (answer.result() == 7).all()


def test_a_repeat_that_comes_before_its_first_attempt_is_the_one_that_runs(
    connect: Callable[[ServedObject], Pair],
) -> None:
    till = Till()
    server = ServedObject("till", 0, TARGET, till)
    older, newer = connect(server), connect(server)
    assert send(newer, REPEAT, 9, "add", 5).result() == -5
    send(older, REQUEST, 9, "add", 5)
    assert till.ran() == {5: 1}


def test_a_running_call_is_answered_where_it_was_asked_last(
    connect: Callable[[ServedObject], Pair],
) -> None:
    till = Till()
    server = ServedObject("till", 0, TARGET, till)
    oldest, older, newest = [connect(server) for _ in range(3)]
    calls = {
        pair: send(pair, kind, 9, "hold", 5)
        for pair, kind in [(older, REQUEST), (newest, REPEAT), (oldest, REPEAT)]
    }
    assert till.held() == 1
    till.release()
    for pair in calls:
        pair.turn()
    oldest.turn()
    newest.turn()
    assert [call.done() for call in calls.values()] == [False, True, False]


def test_a_repeat_of_what_was_forgotten_or_of_another_method_is_refused_and_counted(
    connect: Callable[[ServedObject], Pair],
) -> None:
    till = Till()
    server = ServedObject("till", 0, TARGET, till, Bounds(answers_max=1))
    pair = connect(server)
    for number in (1, 2):
        assert send(pair, REQUEST, number, "add", number).result() == -number
    for call in (send(pair, REPEAT, 1, "add", 1), send(pair, REPEAT, 3, "ran")):
        assert isinstance(call.error(), errors.Forgotten)
    assert till.ran() == {1: 1, 2: 1}
    assert server.statistics().refused == {"forgotten": 2}
    assert server.statistics().forgotten == 1


def test_a_method_cannot_be_once_and_run_twice_nor_stream() -> None:
    def add() -> None: ...

    def items() -> Iterator[int]:
        yield 1

    for function in (idempotent(once(add)), once(items)):
        with pytest.raises(errors.ConfigError, match="is marked once and is"):
            describe("it", function)


def test_calls_of_one_node_have_different_numbers_on_all_its_connections() -> None:
    tables = [CallTable(number << CALL_ID_BITS) for number in range(3)]
    assert len({table.next_id() for table in tables for _ in range(10)}) == 30
    assert [table.started for table in tables] == [10, 10, 10]


def test_from_when_it_may_have_run_a_call_goes_only_there(seed: int, clock: ManualClock) -> None:
    state: RetryState[str] = RetryState(
        RetryPolicy(), RetryBudget(), random.Random(seed), "add", clock()
    )
    decisions = [
        state.decide(kind("x"), "a", clock(), NEVER, False, True)
        for kind in (errors.NotSent, errors.MaybeExecuted, errors.NotSent, errors.Backpressure)
    ]
    assert [decided.only for decided in decisions if isinstance(decided, Retry)] == [
        None,
        "a",
        "a",
        "a",
    ]
    gave_up = state.decide(errors.Stopping("x"), "a", clock(), NEVER, False, True)
    assert gave_up == GiveUp(ONLY_THERE)
    assert isinstance(
        state.final_error(errors.Stopping("x"), gave_up, time.monotonic()), errors.MaybeExecuted
    )


def test_a_deadline_that_is_over_is_the_end_of_a_call_that_runs_once(
    seed: int, clock: ManualClock
) -> None:
    state: RetryState[str] = RetryState(
        RetryPolicy(), RetryBudget(), random.Random(seed), "add", clock()
    )
    assert isinstance(
        state.decide(errors.DeadlineExceeded("x"), "a", clock(), NEVER, False, True), GiveUp
    )
