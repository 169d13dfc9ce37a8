"""Tasks that live no longer than their block, and blocks that can be cancelled by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard import CancelledError, CancelScope, Future, Reactor, ShardError, TaskGroup, yield_now
from shard import sleep as shard_sleep
from tests.helpers import ManualClock


class World:
    """A reactor on a clock of its own, and what its tasks have noted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reactor = Reactor(self.clock)
        self.notes: list[Any] = []

    def turn(self, times: int = 30) -> None:
        for _ in range(times):
            self.reactor.poll(self.clock())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result, in as many turns and seconds as it takes."""
        task = self.reactor.spawn(coroutine)
        for _ in range(200):
            self.turn(10)
            if task.done():
                return task.result()
            self.clock.advance(0.1)
        raise AssertionError("it does not end")

    async def work(self, name: str, seconds: float, fails: bool = False, slow: int = 0) -> str:
        """Sleeps; notes how it ended, after so many turns of cleaning up."""
        try:
            await shard_sleep(seconds)
            if fails:
                raise KeyError(name)
        except CancelledError:
            for _ in range(slow):
                await yield_now()
            self.notes.append(f"{name} cancelled")
            raise
        self.notes.append(name)
        return name


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.reactor.close()


def test_a_group_ends_when_its_tasks_have_ended(world: World) -> None:
    async def program() -> list[str]:
        async with TaskGroup() as group:
            tasks = [group.spawn(world.work(name, 1.0 - 0.3 * at)) for at, name in enumerate("abc")]
            world.notes.append("block")
        return [task.result() for task in tasks]

    assert world.run(program()) == ["a", "b", "c"]
    assert world.notes == ["block", "c", "b", "a"]


def test_a_task_that_fails_ends_the_others_and_the_block_and_is_raised(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            group.spawn(world.work("long", 9.0, slow=5))
            group.spawn(world.work("short", 0.2, fails=True))
            await world.work("block", 9.0)

    with pytest.raises(KeyError, match="short"):
        world.run(program())
    assert sorted(world.notes) == ["block cancelled", "long cancelled"]


def test_a_task_that_fails_after_the_block_ends_the_others(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            group.spawn(world.work("long", 9.0, slow=5))
            group.spawn(world.work("short", 0.2, fails=True))

    with pytest.raises(KeyError, match="short"):
        world.run(program())
    assert world.notes == ["long cancelled"]


def test_of_two_failures_one_is_raised_and_the_other_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await shard_sleep(9.0)
        finally:
            raise OSError("cannot clean up")

    async def program() -> None:
        async with TaskGroup() as group:
            group.spawn(fail_when_cancelled())
            group.spawn(world.work("short", 0.2, fails=True))

    with pytest.raises(KeyError, match="short"):
        world.run(program())
    assert "one more task of a group failed" in caplog.text and "cannot clean up" in caplog.text


def test_what_the_block_raises_ends_the_tasks_which_are_awaited(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            group.spawn(world.work("task", 9.0, slow=7))
            await yield_now()
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        world.run(program())
    assert world.notes == ["task cancelled"]


def test_a_group_that_is_cancelled_raises_nothing(world: World) -> None:
    async def program() -> bool:
        async with TaskGroup() as group:
            group.spawn(world.work("task", 9.0))
            group.spawn(_then(0.2, group.cancel))
            await world.work("block", 9.0)
        return group.cancelled

    assert world.run(program()) is True
    assert sorted(world.notes) == ["block cancelled", "task cancelled"]


async def _then(seconds: float, function: Any) -> None:
    await shard_sleep(seconds)
    function()


def test_who_cancels_the_task_cancels_its_group(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            group.spawn(world.work("task", 9.0, slow=7))

    task = world.reactor.spawn(program())
    world.turn()
    task.cancel()
    world.turn()
    assert isinstance(task.error(), CancelledError)
    assert world.notes == ["task cancelled"]


def test_a_group_that_has_ended_takes_no_task(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            pass
        group.spawn(world.work("late", 0.1))

    with pytest.raises(ShardError, match="has ended"):
        world.run(program())
    with pytest.raises(ShardError, match="not begun"):
        TaskGroup().spawn(world.work("early", 0.1))


def test_tasks_of_a_cancelled_group_that_are_spawned_yet_end_too(world: World) -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            try:
                group.cancel()
                await yield_now()
            finally:
                group.spawn(world.work("late", 9.0))

    world.run(program())
    assert world.notes == []  # it had not begun


# -- scopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1.0, "1", float("nan"), True])
def test_what_is_no_number_of_seconds_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="seconds from 0 on"):
        CancelScope(wrong)


def test_a_block_ends_at_its_time_and_the_task_goes_on(world: World) -> None:
    async def program() -> tuple[bool, bool]:
        async with CancelScope(timeout_s=0.5) as late:
            await world.work("late", 9.0, slow=3)
        async with CancelScope(timeout_s=5.0) as timely:
            await world.work("timely", 0.1)
        await shard_sleep(9.0)  # no timer is left that would end it
        return late.cancelled, timely.cancelled

    assert world.run(program()) == (True, False)
    assert world.notes == ["late cancelled", "timely"]


def test_a_block_that_ends_as_it_is_cancelled_leaves_nothing_behind(world: World) -> None:
    async def program() -> str:
        async with CancelScope() as scope:
            scope.cancel()
        await shard_sleep(0.1)
        assert not scope.cancelled  # it had ended by itself
        return "goes on"

    assert world.run(program()) == "goes on"


def test_an_error_of_the_block_is_not_hidden_by_its_end(world: World) -> None:
    async def program() -> None:
        async with CancelScope(timeout_s=0.1):
            try:
                await shard_sleep(9.0)
            finally:
                raise OSError("cannot clean up")

    with pytest.raises(OSError, match="cannot clean up"):
        world.run(program())


@pytest.mark.parametrize("inner_first", [True, False])
def test_of_two_scopes_that_are_cancelled_at_once_the_outer_one_ends(
    world: World, inner_first: bool
) -> None:
    async def program() -> tuple[bool, list[str]]:
        passed = []
        async with CancelScope() as outer:
            async with CancelScope() as inner:
                for scope in (inner, outer) if inner_first else (outer, inner):
                    scope.cancel()
                await shard_sleep(9.0)
                passed.append("inner block")
            await shard_sleep(9.0)
            passed.append("outer block")
        await shard_sleep(0.1)
        return outer.cancelled, passed

    assert world.run(program()) == (True, [])


@pytest.mark.parametrize("scope_first", [True, False])
def test_a_task_that_is_cancelled_with_a_scope_ends(world: World, scope_first: bool) -> None:
    scopes = []

    async def program() -> None:
        async with CancelScope() as scope:
            scopes.append(scope)
            await world.work("inside", 9.0)
        await world.work("behind", 0.0)

    task = world.reactor.spawn(program())
    world.turn()
    for cancel in (
        (scopes[0].cancel, task.cancel) if scope_first else (task.cancel, scopes[0].cancel)
    ):
        cancel()
    world.turn()
    assert isinstance(task.error(), CancelledError)
    assert world.notes == ["inside cancelled"]


def test_what_is_awaited_is_cancelled_with_the_block(world: World) -> None:
    async def program() -> None:
        inner = world.reactor.spawn(world.work("inner", 9.0, slow=3))
        async with CancelScope(timeout_s=0.2):
            await inner
        world.notes.append("behind")

    world.run(program())
    assert world.notes == ["inner cancelled", "behind"]


def test_a_block_that_awaits_asyncio_ends_too(world: World) -> None:
    async def program() -> tuple[bool, bool]:
        async with CancelScope(timeout_s=0.2) as scope:
            await asyncio.Event().wait()
        async with TaskGroup() as group:
            group.spawn(_then(0.2, group.cancel))
            await asyncio.Event().wait()
        return scope.cancelled, group.cancelled

    assert world.run(program()) == (True, True)


@pytest.mark.parametrize("outer_first", [True, False])
@pytest.mark.parametrize("in_asyncio", [True, False])
def test_a_scope_that_ends_while_an_inner_one_cleans_up_ends_its_block(
    world: World, outer_first: bool, in_asyncio: bool
) -> None:
    async def wait(seconds: float) -> None:
        await (asyncio.sleep(seconds) if in_asyncio else shard_sleep(seconds))

    async def program() -> tuple[bool, str]:
        times = (0.2, 0.4) if outer_first else (0.4, 0.2)
        async with CancelScope(timeout_s=times[0]) as outer:
            async with CancelScope(timeout_s=times[1]):
                try:
                    await wait(9.0)
                finally:
                    await wait(1.0)
            await wait(9.0)
        await wait(0.1)
        return outer.cancelled, "goes on"

    assert world.run(program()) == (True, "goes on")


def test_a_group_that_fails_in_a_scope_that_ends_is_ended_by_that(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> bool:
        async with CancelScope(timeout_s=0.4) as scope, TaskGroup() as group:
            group.spawn(world.work("short", 0.2, fails=True))
            try:
                await asyncio.sleep(9.0)
            finally:
                await asyncio.sleep(1.0)
        return scope.cancelled

    assert world.run(program()) is True
    assert "short" in caplog.text


def test_in_a_task_of_asyncio_it_is_refused_by_name() -> None:
    async def program() -> None:
        async with CancelScope():
            raise AssertionError("it is not entered")

    with pytest.raises(ShardError, match=r"use asyncio.timeout"):
        asyncio.run(program())


def test_a_scope_is_one_block(world: World) -> None:
    async def program() -> None:
        scope = CancelScope()
        async with scope, scope:
            pass

    with pytest.raises(ShardError, match="one block"):
        world.run(program())


@given(st.data())
def test_whatever_is_cancelled_when_every_task_has_ended_behind_the_block(
    data: st.DataObject,
) -> None:
    plan = data.draw(
        st.lists(
            st.tuples(st.floats(0.0, 2.0), st.booleans(), st.integers(0, 3)), min_size=1, max_size=5
        )
    )
    cancel_at = data.draw(st.sampled_from([None, 0.0, 0.5, 1.5]))
    timeout_s = data.draw(st.sampled_from([None, 0.0, 0.7]))
    world = World()
    alive = 0

    async def child(seconds: float, fails: bool, slow: int) -> None:
        nonlocal alive
        alive += 1
        try:
            await world.work("child", seconds, fails, slow)
        finally:
            alive -= 1

    async def program() -> None:
        async with CancelScope(timeout_s), TaskGroup() as group:
            for each in plan:
                group.spawn(child(*each))
            await yield_now()
        assert alive == 0

    task = world.reactor.spawn(program())
    for _ in range(40):
        world.turn(5)
        if cancel_at is not None and world.clock() >= 1000.0 + cancel_at:
            task.cancel()
            cancel_at = None
        world.clock.advance(0.1)
    world.turn(50)
    world.reactor.close()
    error = task.error() if task.done() else AssertionError("it hangs")
    assert alive == 0
    assert error is None or isinstance(error, KeyError | CancelledError), error


def test_a_plain_future_that_a_block_awaits_is_left_to_others(world: World) -> None:
    future = Future()

    async def program() -> None:
        async with CancelScope(timeout_s=0.1):
            await future

    world.run(program())
    assert not future.done()
