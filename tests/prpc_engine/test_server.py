"""A table of methods, asked over a pair of connections in this process;
the test turns the reactor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import Deferred, errors, once
from prpc_engine.rpc.message import HEADER, REPLY, REQUEST, method_key
from prpc_engine.rpc.method import public_methods
from prpc_engine.rpc.peer import calling_peer
from prpc_engine.rpc.server import Bounds, ServedObject
from shard import Future
from tests.prpc_engine.peers import TARGET, Pair, Route


class Handlers:
    limit = 7  # not a method

    class Inner:
        """A class is no method either."""

    def __init__(self) -> None:
        self.gate = Future()
        self.callers: list[Any] = []

    def add(self, one: int, two: int = 1) -> int:
        return one + two

    def caller(self) -> None:
        self.callers.append(calling_peer())

    async def wait(self) -> str:
        return str(await self.gate)

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def _private(self) -> None:
        """Not for others."""


class World(Pair):
    """The test turns the reactor."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.server = ServedObject("test", 0, TARGET, self.handlers)
        super().__init__(self.server)

    def answer(self, method: str, *args: Any) -> Any:
        call = self.ask(method, *args)
        self.turn()
        assert call.done()
        return call.result()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_public_methods_are_served_and_nothing_else() -> None:
    assert sorted(public_methods(Handlers())) == ["add", "caller", "of_class", "static", "wait"]
    assert public_methods({"f": len}) == {"f": len}


def test_methods_whose_numbers_collide_are_refused() -> None:
    assert method_key("plumless") == method_key("buckeroo")
    with pytest.raises(
        errors.ConfigError,
        match=r"('plumless' and 'buckeroo'|'buckeroo' and 'plumless') have the same CRC-32: "
        r"rename one",
    ):
        ServedObject("test", 0, TARGET, {"plumless": len, "buckeroo": len})


def test_values_come_back_from_all_kinds_of_methods(world: World) -> None:
    assert world.answer("add", 1) == 2
    assert world.answer("static") == "static"
    assert world.answer("of_class") == "Handlers"


def test_a_builtin_without_a_signature_can_be_served(world: World) -> None:
    world.server = ServedObject("test", 0, TARGET, {"max": max})
    world.servers[TARGET] = world.server
    assert world.answer("max", 3, 9) == 9
    with pytest.raises((errors.BadArguments, errors.RemoteError)):
        world.answer("max")


def test_a_handler_can_see_who_calls(world: World) -> None:
    world.answer("caller")
    assert world.handlers.callers == [world.served]


def test_nobody_calls_any_more_once_a_handler_has_answered_failed_or_begun(world: World) -> None:
    world.answer("caller")
    assert calling_peer() is None
    with pytest.raises(errors.BadArguments):
        world.answer("add")
    assert calling_peer() is None
    world.ask("wait")
    world.turn()
    assert calling_peer() is None


def test_async_handlers_count_as_tasks_until_they_end(world: World) -> None:
    calls = [world.ask("wait") for _ in range(3)]
    world.turn()
    assert world.server.statistics().tasks == 3
    world.handlers.gate.set_result("open")
    world.turn()
    assert [call.result() for call in calls] == ["open"] * 3
    assert world.server.statistics().tasks == 0


def test_tasks_over_the_bound_wait_and_what_is_over_that_is_backpressure(world: World) -> None:
    world.server.bounds = Bounds(tasks_max=2, queue_calls_max=1)
    calls = [world.ask("wait") for _ in range(4)]
    world.turn()
    assert (world.server.statistics().tasks, world.server.statistics().queued) == (2, 1)
    with pytest.raises(
        errors.Backpressure,
        match=r"'wait' of server 0 of 'test' .* was refused: 2 tasks run and 1 calls of",
    ):
        calls[3].result()
    world.handlers.gate.set_result("open")
    world.turn()
    assert [call.result() for call in calls[:3]] == ["open"] * 3
    assert world.server.statistics().rejected == 1
    assert (world.server.statistics().tasks, world.server.statistics().queued) == (0, 0)


def test_a_task_is_cut_at_its_callers_deadline(world: World) -> None:
    call = world.ask("wait", timeout_s=0.01)
    deadline = time.monotonic() + 20
    while world.server.statistics().tasks or not call.done():
        assert time.monotonic() < deadline
        world.reactor.poll(time.monotonic())
    assert isinstance(call.error(), errors.DeadlineExceeded)


def test_a_task_whose_caller_has_gone_ends_without_a_trace(world: World) -> None:
    call = world.ask("wait", timeout_s=None)
    world.turn()
    world.client.connection.close()
    world.turn()
    assert isinstance(call.error(), errors.Closed)
    assert world.lost == [world.client, world.served]
    world.handlers.gate.set_result("open")
    world.turn()
    assert world.server.statistics().tasks == 0


def send(
    world: World, kind: int, method: str, archive: bytes, call_id: int = 1, target: int = TARGET
) -> None:
    world.client.connection.send(
        HEADER.pack(kind, target, call_id, method_key(method), 0) + archive
    )
    world.turn()


def test_arguments_that_are_no_archive_are_refused_and_the_connection_stays(world: World) -> None:
    call = world.ask("wait")
    for archive in (b"", b"\xc1", b"\x92\x01", b"\x91\xc7\x01\x63?"):
        send(world, REQUEST, "add", archive, call_id=call.call_id + 100)
    assert world.server.statistics().rejected == 4
    assert world.client.calls.dropped_replies == 4
    assert world.answer("add", 1) == 2


def test_arguments_that_are_no_list_are_refused_or_raise_there(world: World) -> None:
    for archive in (b"\x07", b"\xc0", b"\x80", b"\xa3abc"):
        send(world, REQUEST, "add", archive, call_id=100)
    assert world.client.calls.dropped_replies == 4
    assert world.answer("add", 1) == 2


def test_replies_to_nobody_are_counted_and_dropped(world: World) -> None:
    send(world, REPLY, "", b"\x01", call_id=77)
    assert world.served.calls.dropped_replies == 1


def test_a_result_that_cannot_be_read_ends_its_call_by_name(world: World) -> None:
    call = world.ask("wait")
    world.served.connection.send(HEADER.pack(REPLY, 0, call.call_id, 0, 0) + b"\xc1")
    world.turn()
    with pytest.raises(
        errors.RpcError, match="the answer to 'wait' from server 0 of 'test' cannot be read"
    ):
        call.result()


def test_a_target_that_nobody_has_is_an_unknown_service(world: World) -> None:
    world.servers.clear()
    with pytest.raises(errors.UnknownService):
        world.answer("add", 1)


def test_arrays_go_through_the_server(world: World) -> None:
    world.server = ServedObject("test", 0, TARGET, {"double": lambda array: array * 2})
    world.servers[TARGET] = world.server
    assert world.answer("double", np.arange(3)).tolist() == [0, 2, 4]


# -- held between two steps ------------------------------------------------------------------------


class Slow(Handlers):
    """Answers later, and lets others run in the middle of a handler, as one that calls and waits
    does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.later: list[Deferred] = []
        self.threads: list[int] = []
        self.meanwhile: list[Callable[[], object]] = []

    def defer(self) -> Deferred:
        self.later.append(Deferred())
        return self.later[-1]

    async def where(self) -> None:
        self.threads.append(threading.get_ident())

    @once
    def linger(self) -> str:
        while self.meanwhile:
            self.meanwhile.pop()()
        return "done"

    def future(self) -> Future:
        self.linger()
        return Future()


class SlowWorld(Pair):
    """One task at a time."""

    def __init__(self) -> None:
        self.handlers = Slow()
        super().__init__(ServedObject("test", 0, TARGET, self.handlers, Bounds(tasks_max=1)))


@pytest.fixture
def slow() -> Iterator[SlowWorld]:
    made = SlowWorld()
    yield made
    made.close()


def test_an_answer_from_another_thread_starts_and_cancels_nothing_there(slow: SlowWorld) -> None:
    calls = [slow.ask("defer"), slow.ask("where")]
    slow.turn()
    timers = len(slow.reactor.timers)
    answering = threading.Thread(target=slow.handlers.later[0].reply, args=("later",))
    answering.start()
    answering.join()
    assert len(slow.reactor.timers) == timers, (
        "timers are the reactor's: another thread would lose what it sets meanwhile"
    )
    slow.turn()
    assert [call.result() for call in calls] == ["later", None]
    assert slow.handlers.threads == [threading.get_ident()]


def test_a_notification_that_was_cut_is_not_ended_again_by_its_answer(
    slow: SlowWorld, caplog: pytest.LogCaptureFixture
) -> None:
    slow.client.notify(Route(), "defer", method_key("defer"), ())
    slow.turn()
    slow.server.stop()
    assert slow.server.cut() == 1
    caplog.clear()
    slow.handlers.later[0].reply(None)
    slow.turn()
    assert (slow.server.statistics().tasks, slow.server.jobs.inside, caplog.text) == (0, 0, "")


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_handler_that_waited_in_the_queue_is_not_taken_out_of_it_once_it_runs(
    slow: SlowWorld, how: str
) -> None:
    first, second = slow.ask("wait"), slow.ask("linger")
    slow.turn()
    slow.handlers.meanwhile = [slow.turn, second.cancel if how == "cancelled" else slow.server.cut]
    slow.handlers.gate.set_result("over")
    slow.turn()
    assert first.result() == "over"
    assert (slow.server.failures, slow.server.statistics().tasks) == (0, 0)
    assert second.done()


def test_a_handler_that_answers_later_is_answered_for_when_its_server_was_closed(
    slow: SlowWorld,
) -> None:
    call = slow.ask("future")
    slow.handlers.meanwhile = [slow.server.stop]
    slow.turn()
    with pytest.raises(errors.Cancelled, match="'test' was closed before it was done"):
        call.result()
