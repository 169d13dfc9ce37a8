"""One process of a job, beside others that stand still, fail, or start customers at the same
moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prpc_engine import RpcService
from prpc_engine.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    MasterUnreachable,
    Rejected,
    RpcError,
    Stopping,
)
from prpc_engine.pslite import (
    KVPairs,
    KVServer,
    KVServerDefaultHandle,
    KVWorker,
    ids,
    lifecycle,
    wire,
)
from prpc_engine.pslite.customer import Customer
from prpc_engine.pslite.customer_router import KV, CustomerRouter
from prpc_engine.pslite.environment import JobSettings
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.pslite.slicer import by_ranges
from prpc_engine.service.serving import RpcServer
from prpc_engine.settings.local_job import reserved_ports
from shard import Future
from tests.held import at
from tests.program import waiting_in
from tests.prpc_engine.processes import PATIENCE_S, wait_until

JOB = {"DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1"}
Join = Callable[..., Postoffice]


class Proxy:
    """What `inner` is, but for what is put in its place."""

    def __init__(self, inner: Any, instead: dict[str, Any]) -> None:
        self._inner, self._instead = inner, instead

    def __getattr__(self, name: str) -> Any:
        if name in self._instead:
            return self._instead[name]
        return getattr(self._inner, name)


class Service(RpcService):
    """Its client and its master's answer as they are told to, while they are."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.client_instead: dict[str, Any] = {}
        self.master_instead: dict[str, Any] = {}
        self.serves: Callable[[], object] = lambda: None  # before each server that is created
        super().__init__(*arguments, **more)

    def create_client(self, *arguments: Any, **more: Any) -> Any:
        return Proxy(super().create_client(*arguments, **more), self.client_instead)

    def create_server(self, *arguments: Any, **more: Any) -> RpcServer:
        self.serves()
        return super().create_server(*arguments, **more)

    @property
    def master_client(self) -> Any:
        return Proxy(super().master_client, self.master_instead)


class Services:
    """Makes them, and has the last one."""

    def __init__(self, **master_instead: Any) -> None:
        self.master_instead = master_instead
        self.last: Service

    def __call__(self, *arguments: Any, **more: Any) -> Service:
        self.last = Service(*arguments, **more)
        self.last.master_instead |= self.master_instead
        return self.last


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes a process's part in one job, of that role; they are closed in the end."""
    joined: list[Postoffice] = []
    with reserved_ports(1) as (port,):

        def join_as(role: str, kind: type[Postoffice] = Postoffice, **more: Any) -> Postoffice:
            settings = JobSettings.from_environment({**JOB, "DMLC_PS_ROOT_PORT": str(port)}, role)
            joined.append(kind(settings, PATIENCE_S, **more))
            return joined[-1]

        yield join_as
        for each in reversed(joined):
            each.close()


@pytest.fixture
def scheduler(join: Join) -> Postoffice:
    return join("scheduler")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize(
    ("asked", "error"),
    [("call_to", DeadlineExceeded), ("call_to", Stopping), ("refresh", DeadlineExceeded)],
)  # the node itself; the scheduler, where it is
def test_who_stands_still_for_longer_than_one_attempt_or_is_leaving_is_asked_again(
    join: Join, asked: str, error: type[RpcError]
) -> None:
    services = Services()
    scheduler = join("scheduler", make_service=services)
    scheduler.add_customer(0)
    instead = services.last.client_instead

    def fail_once(*_: Any, **__: Any) -> Any:
        del instead[asked]
        raise error("it stands still, or its successor is about to come")

    instead[asked] = fail_once
    scheduler.connect((ids.SCHEDULER,), PATIENCE_S)
    assert not instead


def test_who_starts_without_a_scheduler_says_once_for_how_long_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with reserved_ports(1) as (port,):
        settings = JobSettings.from_environment({**JOB, "DMLC_PS_ROOT_PORT": str(port)}, "worker")
        with pytest.raises(MasterUnreachable, match=r"no scheduler at .* within 0\.5 s"):
            Postoffice(settings, 0.5)
    (line,) = (each for each in caplog.messages if each.startswith("waiting for the master"))
    assert line.startswith(f"waiting for the master at 127.0.0.1:{port}, for up to 0.5 s: ")


def test_a_scheduler_that_was_slow_to_begin_its_job_finds_what_it_has_begun(
    join: Join,
) -> None:
    def be_slow_once(*_: Any) -> Any:
        services.master_instead.clear()
        raise DeadlineExceeded("the machine is busy")

    services = Services(tree_wait=be_slow_once)
    scheduler = join("scheduler", make_service=services)
    assert not services.master_instead
    assert scheduler.job == scheduler.incarnation


def test_a_customer_that_could_not_start_keeps_no_place(join: Join) -> None:
    def be_away(*_: Any) -> int:
        raise DeadlineExceeded("the master is away")

    services = Services(count_up=be_away)
    scheduler = join("scheduler", make_service=services)
    with pytest.raises(MasterUnreachable, match=r"took its place.*the master is away"):
        scheduler.add_customer(0)
    services.last.master_instead.clear()
    assert scheduler.add_customer(0, timeout_s=PATIENCE_S) == ids.SCHEDULER


def test_a_customer_that_is_refused_waits_for_nobody_to_leave(join: Join) -> None:
    def refuse_once() -> None:
        services.last.serves = lambda: None
        # the scheduler has ended the session meanwhile, say
        raise Rejected("join before registering a server")

    services = Services()
    scheduler = join("scheduler", make_service=services)
    services.last.serves = refuse_once
    with pytest.raises(Rejected, match="join before"):
        scheduler.add_customer(0, timeout_s=0.1)
    assert scheduler.add_customer(0) == ids.SCHEDULER


def test_customers_may_start_while_others_come_to_a_barrier(
    join: Join, threads: ThreadPoolExecutor
) -> None:
    starting: list[Any] = []

    class Members(tuple[int, ...]):
        """Another customer begins to start while somebody looks who belongs to a group."""

        def __contains__(self, node: object) -> bool:
            if not starting:
                starting.append(threads.submit(scheduler.add_customer, 1, -1, PATIENCE_S))
                wait_until(lambda: waiting_in(Postoffice.add_customer) == 1, "the other customer")
            return super().__contains__(node)

    class Looked(Postoffice):
        def members(self, group: int) -> tuple[int, ...]:
            return Members(super().members(group))

    scheduler = join("scheduler", Looked)
    scheduler.add_customer(0)
    scheduler.barrier(0, ids.SCHEDULER)
    scheduler.close()
    with pytest.raises(Closed):
        starting[0].result(PATIENCE_S)


def test_who_waits_for_nodes_hears_that_the_process_leaves(
    scheduler: Postoffice, join: Join, threads: ThreadPoolExecutor
) -> None:
    worker = join("worker")
    for customer in range(2):
        worker.add_customer(customer)
    waits = [
        threads.submit(worker.connect, (8,), PATIENCE_S),
        threads.submit(worker.add_customer, 2, -1, PATIENCE_S),
    ]
    wait_until(
        lambda: waiting_in(Postoffice.connect) == waiting_in(Postoffice.add_customer) == 1,
        "both of them",
    )
    worker.close()
    for each in waits:
        with pytest.raises(Closed):
            each.result(PATIENCE_S / 2)


def test_a_barrier_whose_holder_leaves_is_held_by_its_successor(
    scheduler: Postoffice, join: Join, threads: ThreadPoolExecutor
) -> None:
    holder, other = join("worker"), join("worker")
    assert [each.add_customer(0) for each in (holder, other)] == [9, 11]
    waits = threads.submit(other.barrier, 0, ids.WORKER_GROUP, PATIENCE_S)
    wait_until(lambda: holder.waiting(ids.WORKER_GROUP) == {11}, "the other one")
    holder.close(after_barrier=True)
    successor = join("worker")
    assert successor.add_customer(0) == 9
    successor.barrier(0, ids.WORKER_GROUP, PATIENCE_S)
    waits.result(PATIENCE_S)


def test_a_barrier_ends_though_its_own_reactor_is_busy(join: Join) -> None:
    scheduler = join("scheduler", answer_s=0.0)
    scheduler.add_customer(0)
    busy, go_on = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        assert go_on.wait(PATIENCE_S)

    scheduler.driver.reactor.call_soon(keep_busy)
    try:
        assert busy.wait(PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match="missing: scheduler"):
            scheduler.barrier(0, ids.ALL, 0.0)
    finally:
        go_on.set()


def test_a_worker_is_asked_and_has_its_rank_while_another_of_its_customers_starts(
    scheduler: Postoffice, join: Join
) -> None:
    services = Services()
    worker = join("worker", make_service=services)
    assert worker.add_customer(1) == 9
    asked: list[bool] = []

    def look() -> None:
        asked.append(True)
        worker.expect_requests()
        assert worker.my_rank == 0
        with pytest.raises(ConfigError, match="customer 0 was not started"):
            worker.node_of(0)

    # the place it asks for is its own once that is there
    services.last.serves = look
    worker.add_customer(0)
    assert asked
    assert worker.driver.prompt


def test_who_takes_the_place_of_one_that_died_has_taken_it_whoever_starts_beside_it(
    scheduler: Postoffice, join: Join
) -> None:
    first = join("worker")
    assert first.add_customer(0) == 9
    first.close()
    successor = join("worker")
    assert [successor.add_customer(customer) for customer in range(2)] == [9, 11]
    assert successor.is_recovery


def test_what_waits_for_an_application_that_is_closed_meanwhile_waits_for_the_next_one() -> None:
    customer_router = CustomerRouter(
        "server 0", SimpleNamespace(call_soon=lambda function: function())
    )  # type: ignore[arg-type]
    first, second = (customer_router.take(KV, 0, (number,)) for number in range(2))

    def close_then_answer(number: int) -> str:
        customer_router.remove_handler(KV, 0, close_then_answer)
        return f"the first one, {number}"

    customer_router.add_handler(KV, 0, close_then_answer)
    assert first.result() == "the first one, 0"
    assert not second.done()
    customer_router.add_handler(KV, 0, lambda number: f"the next one, {number}")
    assert second.result() == "the next one, 1"
    assert not customer_router.early_messages


def test_whether_a_request_is_done_is_told_while_another_thread_hears_of_its_call(
    scheduler: Postoffice,
) -> None:
    calls = [Future()]

    class Heard:
        """A request whose call is somebody else's to hear of, once we have seen it."""

        @property
        def call(self) -> Future | None:
            return calls.pop() if calls else None

    customer = Customer(scheduler, 0)
    customer._open[0] = Heard()  # type: ignore[assignment]
    assert not customer.is_done(0)


def test_what_was_under_way_when_the_process_left_is_done(scheduler: Postoffice) -> None:
    customer = Customer(scheduler, 0)
    early = customer.request(customer.new_timestamp(), KV, [(8, (b"",), 0)], None)
    scheduler.close()
    # by a thread that has not heard of it
    late = customer.request(customer.new_timestamp(), KV, [(8, (b"",), 0)], None)
    for timestamp in (early, late):
        assert customer.is_done(timestamp)
        with pytest.raises(Closed, match=f"request {timestamp} of app 0 was under way"):
            customer.wait(timestamp)


def test_whoever_else_hears_of_the_call_a_wait_takes_as_long_as_it_may(
    scheduler: Postoffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer, waits = Customer(scheduler, 0), list[float]()
    timestamp = customer.request(customer.new_timestamp(), KV, [(8, (b"",), 0)], None)

    def pass_the_time(future: Future, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(scheduler.driver, "wait", pass_the_time)
        with pytest.raises(DeadlineExceeded, match="by: server 0"):
            customer.wait(timestamp, 5.0)
    assert sum(waits) == 5.0


def test_who_waits_for_a_callback_that_runs_is_told_so(
    scheduler: Postoffice, threads: ThreadPoolExecutor
) -> None:
    customer, runs, go_on = Customer(scheduler, 0), threading.Event(), threading.Event()

    def finish(timestamp: int, answers: list[Any]) -> None:
        runs.set()
        assert go_on.wait(PATIENCE_S)

    request = threads.submit(customer.request, customer.new_timestamp(), KV, (), finish)
    assert runs.wait(PATIENCE_S)
    with pytest.raises(DeadlineExceeded, match="all have answered, and its callback still runs"):
        customer.wait(0, 0.0)
    go_on.set()
    request.result(PATIENCE_S)
    customer.wait(0)


def test_a_request_that_comes_as_its_server_is_closed_waits_for_the_next_one(
    scheduler: Postoffice, join: Join, threads: ThreadPoolExecutor
) -> None:
    joined = join("server")
    joined.add_customer(0)
    closed = KVServer(0, handler_threads=1, postoffice=joined)
    closed.set_request_handle(KVServerDefaultHandle())

    def close() -> None:
        threads.submit(closed.close).result(PATIENCE_S)

    customer = Customer(scheduler, 0)
    arguments, nbytes = wire.pack(
        0, 9, 0, 0, 0, wire.PUSH, KVPairs(np.array([1], np.uint64), np.ones(1, np.float32))
    )
    with at("kv_server.reading", close, times=1):
        timestamp = customer.request(customer.new_timestamp(), KV, [(8, arguments, nbytes)], None)
        wait_until(
            lambda: joined.customer_router(8).early_messages or customer.is_done(timestamp),
            "the request",
        )
    KVServer(0, postoffice=joined).set_request_handle(KVServerDefaultHandle())
    customer.wait(timestamp)
    closed.close()  # again: the next one keeps its handle
    customer.wait(
        customer.request(customer.new_timestamp(), KV, [(8, arguments, nbytes)], None),
        PATIENCE_S / 2,
    )


def test_a_request_is_put_together_as_it_was_cut_though_the_slicer_is_changed_meanwhile(
    scheduler: Postoffice, join: Join
) -> None:
    def crossed(pairs: KVPairs, ranges: object) -> list[KVPairs]:
        return [
            KVPairs(pairs.keys[half], pairs.vals[half]) for half in (slice(1, None), slice(0, 1))
        ]

    def crossed_for_the_last_time(pairs: KVPairs, ranges: object) -> list[KVPairs]:
        kv.set_slicer(by_ranges)  # as another thread may
        return crossed(pairs, ranges)

    for role in ("server", "server", "worker"):
        joined = join(role)
        joined.add_customer(0)
        if role == "server":
            KVServer(0, postoffice=joined).set_request_handle(KVServerDefaultHandle())
    kv = KVWorker(0, 0, postoffice=joined)
    keys, vals, got = (
        np.array([1, 2], np.uint64),
        np.array([10, 20], np.float32),
        np.zeros(2, np.float32),
    )
    kv.set_slicer(crossed)
    kv.wait(kv.push(keys, vals))
    kv.set_slicer(crossed_for_the_last_time)
    kv.wait(kv.pull(keys, got))
    assert got.tolist() == [10, 20]


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, "5"])
def test_a_wait_that_would_not_end_is_refused_before_a_job_is_looked_for(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s="):
        lifecycle.start(timeout_s=timeout_s)
