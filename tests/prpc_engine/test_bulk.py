"""Methods in class BULK, by a clock that each step moves on: what others wait for is not delayed by
more than their share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import prpc_engine
from prpc_engine import errors
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import ServedObject
from shard import BULK, Future, Reactor
from tests.helpers import ManualClock
from tests.prpc_engine.peers import TARGET, Pair, Route

STEP_S = 1e-3


class Handlers:
    """Each step takes STEP_S."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.reactor: Reactor | None = None
        self.steps = {"bulk": 0, "latency": 0}
        self.gate = Future()

    async def _work(self, kind: str, steps: int) -> str:
        for _ in range(steps):
            self.steps[kind] += 1
            self.clock.advance(STEP_S)
            again = Future()
            assert self.reactor is not None
            self.reactor.call_soon(lambda future=again: future.set_result(None))  # type: ignore[misc]
            await again
        return kind

    @prpc_engine.bulk
    async def scan(self, steps: int) -> str:
        return await self._work("bulk", steps)

    async def answer(self, steps: int) -> str:
        return await self._work("latency", steps)

    def look(self) -> None:
        """Plain, and answered in the turn that found it."""
        self.steps["latency"] += 1
        self.clock.advance(STEP_S)

    @prpc_engine.bulk
    def compact(self, one: int, two: int = 1) -> int:
        """Plain, and yet a task."""
        self.steps["bulk"] += 1
        self.clock.advance(STEP_S)
        return one + two

    @prpc_engine.bulk
    def later(self) -> Future:
        return self.gate

    @prpc_engine.bulk
    @prpc_engine.idempotent
    def rows(self, to: int) -> Iterator[int]:
        yield from range(to)


class World(Pair):
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.handlers = Handlers(self.clock)
        super().__init__(ServedObject("test", 0, TARGET, self.handlers), clock=self.clock)
        self.handlers.reactor = self.reactor


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_bulk_task_gets_its_share_and_no_more_while_others_want_to_run(world: World) -> None:
    bulk = world.ask("scan", 10_000, timeout_s=None)
    world.turn()
    before = world.handlers.steps["bulk"]
    assert before > 0, "alone it runs as fast as it can"
    quick = world.ask("answer", 500, timeout_s=None)
    while not quick.done():
        world.reactor.poll(world.clock())
    beside = world.handlers.steps["bulk"] - before
    assert 30 <= beside <= 70, "a tenth of 500 steps of the same length"
    assert not bulk.done()
    while not bulk.done():
        world.reactor.poll(world.clock())
    assert bulk.result() == "bulk"


def test_plain_functions_of_the_class_share_as_its_tasks_do(world: World) -> None:
    calls = [world.ask("compact", number, timeout_s=None) for number in range(500)]
    quick = world.ask("answer", 500, timeout_s=None)
    while not quick.done():
        world.reactor.poll(world.clock())
    assert 30 <= world.handlers.steps["bulk"] <= 70, "a tenth of 500 steps of the same length"
    while not all(call.done() for call in calls):
        world.reactor.poll(world.clock())
    assert [call.result() for call in calls] == [number + 1 for number in range(500)]
    assert world.server.describe()["compact"]["kind"] == "task"


def test_plain_handlers_are_charged_for_their_time_as_tasks_are(world: World) -> None:
    steps = world.handlers.steps

    def scan() -> None:
        steps["bulk"] += 1
        world.clock.advance(STEP_S)
        if steps["latency"] < 500:
            world.reactor.call_soon(scan, queue=BULK)

    world.reactor.call_soon(scan, queue=BULK)
    looks = [world.ask("look", timeout_s=None) for _ in range(500)]
    while not all(look.done() for look in looks):
        world.reactor.poll(world.clock())
    assert steps["latency"] == 500
    assert 40 <= steps["bulk"] <= 60, "a tenth of the time of 500 requests"
    latency, bulk = world.reactor.statistics()
    assert latency.busy_ns == pytest.approx(500 * STEP_S * 1e9, rel=0.2)
    assert bulk.busy_ns == pytest.approx(steps["bulk"] * STEP_S * 1e9)


def test_its_arguments_are_checked_as_those_of_others(world: World) -> None:
    call = world.ask("compact", 1, 2, 3, timeout_s=None)
    world.turn()
    with pytest.raises(
        errors.BadArguments, match=r"too many positional arguments; it is compact\(one"
    ):
        call.result()


def test_it_may_answer_later(world: World) -> None:
    call = world.ask("later", timeout_s=None)
    world.turn()
    assert not call.done()
    world.handlers.gate.set_result("in the end")
    world.turn()
    assert call.result() == "in the end"


def test_a_generator_in_class_bulk_streams(world: World) -> None:
    stream = world.client.open(Route(), "rows", method_key("rows"), (3,), None)
    world.turn()
    assert [stream._inbox.take()[1] for _ in range(3)] == [0, 1, 2]
    assert world.server.describe()["rows"]["idempotent"]
