"""Handlers run in the engine's threads: under no lock, in no context and on no stack of somebody
who waits for a call of their own.
"""

from __future__ import annotations

import contextvars
import decimal
import sys
import threading
from collections.abc import Iterator

import pytest

from prpc_engine import Master, RpcClient, RpcService, bulk, incoming
from prpc_engine.errors import Closed, DeadlineExceeded, MaybeExecuted, RemoteError
from tests.program import wait_until

PATIENCE_S = 20.0
NUMBERS = 6000
lock = threading.Lock()
calls = contextvars.ContextVar("calls", default=0)


class Here:
    """What the process under test serves."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.noted: list[int] = []
        self.other: RpcClient | None = None

    def thread(self) -> str:
        return threading.current_thread().name

    @bulk
    def thread_of_bulk(self) -> str:
        return threading.current_thread().name

    async def thread_of_task(self) -> str:
        return threading.current_thread().name

    def in_lock(self) -> str:
        with lock:
            return "taken and given back"

    def surroundings(self) -> tuple[int, bool]:
        return decimal.getcontext().prec, sys.exc_info()[0] is None

    def count_in_context(self) -> int:
        """How often it was called in this context."""
        calls.set(calls.get() + 1)
        return calls.get()

    async def count_in_task(self) -> int:
        calls.set(calls.get() + 1)
        assert self.other is not None
        await self.other.submit("thread")
        return calls.get()

    def note(self, number: int) -> None:
        self.noted.append(number)

    def note_and_call(self, number: int) -> str:
        self.noted.append(number)
        return self.call_other("thread")

    def noted_so_far(self) -> list[int]:
        return self.noted

    async def count_items(self) -> int:
        return len([each async for each in incoming()])

    def hold_the_reactor(self) -> None:
        assert self.let_go.wait(PATIENCE_S)

    def depth(self, left: int) -> int:
        """Calls the other side, which calls this one, and so on."""
        if not left:
            return 0
        assert self.other is not None
        return 1 + int(self.other.call("depth", left - 1))

    def call_other(self, method: str) -> str:
        assert self.other is not None
        return str(self.other.call(method))


class There(Here):
    """The other side: it calls back, and is waited for meanwhile."""

    def back(self, method: str) -> object:
        assert self.other is not None
        return self.other.call(method)

    def wait_for_event(self) -> str:
        return str(self.let_go.wait(PATIENCE_S))


class World:
    """Two services of one process, each with a server and a client of the other's."""

    def __init__(self, inline: bool = False) -> None:
        self.master = Master()
        self.near = RpcService(master=self.master.address)
        self.far = RpcService(master=self.master.address)
        self.here, self.there = Here(), There()
        self.near.create_server("here", self.here, inline=inline)
        self.far.create_server("there", self.there)
        self.client = self.near.create_client("there")
        self.here.other, self.there.other = self.client, self.far.create_client("here")
        self.client.call("thread")

    def allow_spares(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many threads of the near service may run handlers while others wait in theirs."""
        monkeypatch.setattr(self.near._driver, "_spares_max", count)

    def close(self) -> None:
        self.here.let_go.set()
        self.there.let_go.set()
        for one in (self.near, self.far, self.master):
            one.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize("method", ["thread", "thread_of_bulk", "thread_of_task"])
def test_a_handler_never_runs_in_a_thread_of_the_application_that_waits(
    world: World, method: str
) -> None:
    assert world.client.call("back", method) != threading.current_thread().name


def test_a_function_that_is_registered_inline_may() -> None:
    world = World(inline=True)
    try:
        names = {world.client.call("back", "thread") for _ in range(20)}
        assert threading.current_thread().name in names
    finally:
        world.close()


def test_a_handler_may_take_a_lock_that_the_waiting_thread_holds_and_the_wait_ends_in_time(
    world: World,
) -> None:
    # its own deadline, or that of the call that waits for it there, which is the same
    with lock, pytest.raises((DeadlineExceeded, RemoteError), match="no answer to"):
        world.client.call("back", "in_lock", timeout_s=0.2)
    assert world.client.call("back", "in_lock") == "taken and given back"


def test_the_context_and_the_exception_of_a_waiting_thread_are_not_those_of_a_handler(
    world: World,
) -> None:
    usual = decimal.DefaultContext.prec
    with decimal.localcontext() as context:
        context.prec = usual + 7
        try:
            raise ValueError("a secret")
        except ValueError:
            assert world.client.call("back", "surroundings") == (usual, True)


@pytest.mark.parametrize("method", ["count_in_context", "count_in_task"])
def test_what_a_handler_sets_in_its_context_no_other_finds(world: World, method: str) -> None:
    calls.set(100)
    assert [world.client.call("back", method) for _ in range(3)] == [1, 1, 1]
    caller = world.far.create_client("here")
    together = [caller.submit(method) for _ in range(3)]
    assert [one.result() for one in together] == [1, 1, 1]


def test_what_comes_while_handlers_wait_begins_in_the_order_in_which_it_was_sent(
    world: World,
) -> None:
    """Some is read by a thread that may not run it, some in the middle of a batch of a handler that
    waits.
    """
    caller = world.near.create_client("here")

    def send() -> None:
        pending = []
        for number in range(NUMBERS):
            if number % 4 < 2:
                caller.notify("note", number)
            else:
                method = "note" if number % 4 == 2 else "note_and_call"
                pending.append(caller.submit(method, number, timeout_s=PATIENCE_S))
            if number % 100 == 0:
                for one in pending:
                    one.result()
                pending.clear()

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        world.client.call("thread")
    assert caller.call("noted_so_far") == list(range(NUMBERS))


def test_where_as_many_handlers_wait_as_may_the_log_says_so_and_the_rest_begins_when_one_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.allow_spares(2, monkeypatch)
    with RpcService(master=world.master.address) as third:
        caller = third.create_client("here")
        slow = [caller.submit("call_other", "wait_for_event") for _ in range(5)]
        wait_until(lambda: "as many as may" in caplog.text, "the line")
        world.there.let_go.set()
        assert [one.result(PATIENCE_S) for one in slow] == ["True"] * 5


def test_items_of_a_stream_arrive_while_other_handlers_wait(world: World) -> None:
    """None of them before the stream's own beginning, which is held back like any request."""
    caller, stop = world.near.create_client("here"), threading.Event()

    def nest() -> None:
        while not stop.is_set():
            assert caller.call("depth", 2) == 2

    nesting = threading.Thread(target=nest)
    nesting.start()
    try:
        for _ in range(200):
            with caller.stream("count_items", timeout_s=PATIENCE_S) as stream:
                for item in range(20):
                    stream.send(item)
                stream.end()
                assert stream.result() == 20
    finally:
        stop.set()
        nesting.join()


def test_every_wait_ends_at_its_own_deadline_though_a_handler_keeps_the_reactor(
    world: World,
) -> None:
    kept = world.far.create_client("here").submit("hold_the_reactor")
    wait_until(lambda: "hold_the_reactor" in _under_way(), "the handler to run")
    with pytest.raises(DeadlineExceeded, match="keeps its reactor"):
        world.client.call("thread", timeout_s=0.1)
    pending = world.client.submit("wait_for_event", timeout_s=PATIENCE_S)
    with pytest.raises(TimeoutError):
        pending.result(0.1)
    world.here.let_go.set()
    world.there.let_go.set()
    assert kept.result() is None
    assert pending.result() == "True"


def _under_way() -> str:
    """The functions that threads of this process are in."""
    found = []
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            found.append(at.f_code.co_name)
            at = at.f_back  # type: ignore[assignment]
    return " ".join(found)


def test_a_handler_that_waits_holds_up_no_other_and_each_goes_on_when_its_answer_is_there(
    world: World,
) -> None:
    with RpcService(master=world.master.address) as third:
        caller = third.create_client("here")
        slow = [caller.submit("call_other", "wait_for_event") for _ in range(3)]
        wait_until(lambda: "wait_for_event" in _under_way(), "the slow one to wait")
        # It waits over there, and keeps that reactor; what needs only this one is answered.
        assert caller.call("thread") != threading.current_thread().name
        assert caller.call("thread_of_task") != threading.current_thread().name
        world.there.let_go.set()
        assert [one.result(PATIENCE_S) for one in slow] == ["True"] * 3


@pytest.mark.parametrize("depth", [1, 50])
def test_two_processes_that_call_each_other_may_do_so_to_any_depth(
    world: World, depth: int
) -> None:
    assert world.client.call("depth", depth) == depth
    assert world.client.call("depth", depth) == depth


def test_in_serve_forever_handlers_run_in_its_thread_and_others_in_spares_while_one_waits(
    world: World,
) -> None:
    name: list[str] = []
    serving = threading.Thread(target=world.near.serve_forever, name="serving")
    serving.start()
    try:
        caller = world.far.create_client("here")
        wait_until(lambda: name.append(caller.call("thread")) or name[-1] == "serving", "its turn")
        assert caller.call("thread_of_task") == "serving"
    finally:
        world.near.stop_serving()
        serving.join(PATIENCE_S)
    assert not serving.is_alive()


def test_a_request_that_is_held_can_be_cancelled_and_its_handler_does_not_run_twice(
    world: World,
) -> None:
    caller = world.far.create_client("here")
    for _ in range(50):
        asked = caller.submit("thread_of_task")
        asked.cancel()
        assert world.client.call("back", "thread") != threading.current_thread().name
    assert caller.call("thread_of_task")


def test_what_a_lost_peer_asked_does_not_begin_when_its_turn_comes_and_what_it_told_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allow_spares(0, monkeypatch)
    held = world.near.driver.reactor.held
    waits = world.far.create_client("here").submit("call_other", "wait_for_event")
    with RpcService(master=world.master.address) as third:
        caller = third.create_client("here")
        caller.notify("note", 1)
        asked = caller.submit("note", 2)
        wait_until(lambda: len(held) == 2, "both are there")
        peers = len(world.near.statistics().peers)
    wait_until(lambda: len(world.near.statistics().peers) < peers, "it is gone")
    assert isinstance(asked.error(), Closed | MaybeExecuted)
    world.there.let_go.set()
    assert waits.result(PATIENCE_S) == "True"
    wait_until(lambda: not held, "its turn has come")
    assert world.far.create_client("here").call("noted_so_far") == [1]
