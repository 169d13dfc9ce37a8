"""Cancelling: CancelledError comes at the await, what is awaited is cancelled too, in other shards
as well, and what cleans up may await.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

import pytest

from shard import (
    BULK,
    CancelledError,
    ControlLoop,
    Driver,
    Future,
    Reactor,
    ShardError,
    ShardGroup,
    Task,
    gather,
    run_blocking,
    shield,
    sleep,
    yield_now,
)
from shard.loop.task import GOES_ON_S
from tests.helpers import ManualClock
from tests.program import wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S
from tests.shard.test_mesh import ask, figures


@pytest.fixture
def timed(clock: ManualClock) -> Iterator[Reactor]:
    made = Reactor(clock)
    yield made
    made.close()


def turn(reactor: Reactor, turns: int = 20) -> None:
    for _ in range(turns):
        reactor.poll(reactor.clock())


class Seen:
    """What a coroutine went through."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.error: BaseException | None = None

    async def wait(self, future: Future) -> object:
        try:
            return await future
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.steps.append("finally")
            await yield_now()
            self.steps.append("after the await in finally")


# -- what the coroutine sees -----------------------------------------------------------------------


def test_a_cancelled_coroutine_gets_the_error_at_its_await_and_cleans_up_with_awaits(
    reactor: Reactor,
) -> None:
    seen = Seen()
    task = reactor.spawn(seen.wait(Future()))
    assert task.cancel()
    assert not task.done(), "it is over when its coroutine has ended"
    turn(reactor)
    assert seen.steps == ["finally", "after the await in finally"]
    assert task.error() is seen.error
    assert isinstance(seen.error, CancelledError)
    assert not isinstance(seen.error, Exception), "`except Exception` keeps nobody alive"


def test_the_reason_is_the_cause_of_what_the_coroutine_sees_and_the_end_of_its_task(
    reactor: Reactor,
) -> None:
    seen, reason = Seen(), TimeoutError("the caller's 10 ms are over")
    task = reactor.spawn(seen.wait(Future()))
    assert task.cancel(reason)
    turn(reactor)
    assert task.error() is reason
    assert isinstance(seen.error, CancelledError)
    assert seen.error.__cause__ is reason
    assert str(seen.error) == str(reason)


def test_an_async_with_is_left_and_may_await_meanwhile(reactor: Reactor) -> None:
    left: list[type[BaseException] | None] = []

    class Resource:
        async def __aenter__(self) -> None:
            await yield_now()

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            await yield_now()
            left.append(kind)

    async def work() -> None:
        async with Resource():
            await Future()

    task = reactor.spawn(work())
    turn(reactor)
    task.cancel()
    turn(reactor)
    (kind,) = left
    assert kind is not None
    assert issubclass(kind, CancelledError)
    assert task.done()


def test_what_a_coroutine_that_swallows_it_returns_counts(reactor: Reactor) -> None:
    async def work() -> str:
        try:
            await Future()
        except CancelledError:
            await yield_now()
        return "its value"

    task = reactor.spawn(work())
    assert task.cancel(TimeoutError("late"))
    turn(reactor)
    assert task.result() == "its value"
    assert not task.cancel()


def test_an_error_raised_while_cleaning_up_is_the_end_of_the_task(reactor: Reactor) -> None:
    async def work() -> None:
        try:
            await Future()
        finally:
            raise ValueError("while cleaning up")

    task = reactor.spawn(work())
    task.cancel()
    turn(reactor)
    with pytest.raises(ValueError, match="while cleaning up"):
        task.result()


def test_a_second_cancel_is_raised_at_the_await_in_finally(reactor: Reactor) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await Future()
        finally:
            try:
                await Future()
            except CancelledError as error:
                seen.append(str(error))
                raise

    task = reactor.spawn(work())
    task.cancel()
    turn(reactor)
    assert not task.done()
    task.cancel(TimeoutError("the second"))
    turn(reactor)
    assert seen == ["the second"]
    assert isinstance(task.error(), TimeoutError)


def test_one_that_has_not_begun_never_runs(reactor: Reactor) -> None:
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    task = reactor.spawn(work(), queue=BULK)
    task.cancel()
    turn(reactor)
    assert isinstance(task.error(), CancelledError)
    assert ran == []


def test_one_whose_result_is_there_but_not_taken_gets_the_error(reactor: Reactor) -> None:
    seen, future = Seen(), Future()
    task = reactor.spawn(seen.wait(future))
    future.set_result("too late")
    task.cancel()
    turn(reactor)
    assert isinstance(task.error(), CancelledError)


def test_a_coroutine_may_cancel_itself_and_gets_it_at_its_next_await(reactor: Reactor) -> None:
    tasks: list[Task] = []
    seen: list[str] = []

    async def work() -> None:
        await yield_now()
        tasks[0].cancel()
        seen.append("goes on to its next await")
        await Future()

    async def end() -> int:
        await yield_now()
        tasks[1].cancel()
        return 1

    tasks += [reactor.spawn(work()), reactor.spawn(end())]
    turn(reactor)
    assert seen == ["goes on to its next await"]
    assert [isinstance(task.error(), CancelledError) for task in tasks] == [True, True]


def test_a_wake_up_for_what_is_awaited_no_longer_wakes_nobody(reactor: Reactor) -> None:
    """A function that has begun ends long after its task was cancelled."""
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    later = Future()

    def block() -> None:
        begun.set()
        assert let_go.wait(PATIENCE_S)
        ended.set()

    async def work() -> object:
        try:
            await run_blocking(block)
        except CancelledError:
            return await later
        return "not cancelled"

    task = reactor.spawn(work())
    assert begun.wait(PATIENCE_S)  # one that has not begun never does
    task.cancel()
    turn(reactor)
    let_go.set()
    assert ended.wait(PATIENCE_S)
    for _ in range(1000):
        reactor.poll(reactor.clock())
    assert not task.done()
    later.set_result("later")
    turn(reactor)
    assert task.result() == "later"


def test_one_that_goes_on_is_named_in_the_log_and_one_that_cleans_up_is_not(
    timed: Reactor, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def goes_on() -> None:
        while True:
            with contextlib.suppress(CancelledError):
                await Future()

    async def cleans_up() -> None:
        try:
            await Future()
        finally:
            await sleep(GOES_ON_S / 2)

    tasks = [timed.spawn(goes_on()), timed.spawn(cleans_up())]
    for task in tasks:
        task.cancel()
    turn(timed)
    for _ in range(2):
        clock.advance(GOES_ON_S / 2)
        turn(timed)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "goes_on goes on 5.0 s after it was cancelled, at line " in line
    assert __file__ in line
    assert [task.done() for task in tasks] == [False, True]
    assert len(timed.timers) == 0


# -- what it awaits --------------------------------------------------------------------------------


def test_an_awaited_task_is_cancelled_and_ends_first(reactor: Reactor) -> None:
    order, causes = list[str](), list[BaseException | None]()
    reason = TimeoutError("late")

    async def inner() -> None:
        try:
            await Future()
        except CancelledError as error:
            causes.append(error.__cause__)
            raise
        finally:
            await yield_now()
            order.append("inner")

    async def outer() -> None:
        try:
            await reactor.spawn(inner())
        finally:
            order.append("outer")

    task = reactor.spawn(outer())
    task.cancel(reason)
    turn(reactor)
    assert order == ["inner", "outer"]
    assert causes == [reason]
    assert task.error() is reason


def test_all_members_of_an_awaited_gather_are_cancelled(reactor: Reactor) -> None:
    parts = [Seen() for _ in range(3)]

    async def work() -> None:
        await gather([reactor.spawn(part.wait(Future())) for part in parts])

    task = reactor.spawn(work())
    task.cancel()
    turn(reactor)
    assert [len(part.steps) for part in parts] == [2, 2, 2]
    assert isinstance(task.error(), CancelledError)


def test_a_cancelled_gather_is_done_when_its_members_have_ended(reactor: Reactor) -> None:
    seen, plain, done = Seen(), Future(), Future()
    done.set_result(1)
    whole = gather([reactor.spawn(seen.wait(Future())), plain, done])
    reason = TimeoutError("late")
    assert whole.cancel(reason)
    assert not whole.done(), "one of them cleans up"
    turn(reactor)
    assert whole.error() is reason
    assert not plain.done(), "there is no work behind it, and others may wait for it"
    assert not whole.cancel()


def test_what_is_shielded_goes_on(reactor: Reactor) -> None:
    future = Future()

    async def inner() -> object:
        return await future

    async def outer(awaited: Future) -> object:
        return await shield(awaited)

    work = reactor.spawn(inner())
    first, second = reactor.spawn(outer(work)), reactor.spawn(outer(work))
    first.cancel()
    turn(reactor)
    assert isinstance(first.error(), CancelledError)
    future.set_result("went on")
    turn(reactor)
    assert (work.result(), second.result()) == ("went on", "went on")


def test_a_shielded_error_is_passed_on() -> None:
    future = Future()
    shielded = shield(future)
    future.set_error(KeyError("passed on"))
    with pytest.raises(KeyError, match="passed on"):
        shielded.result()


def test_a_plain_future_goes_on_as_others_may_wait_for_it(reactor: Reactor) -> None:
    future = Future()
    tasks = [reactor.spawn(Seen().wait(future)) for _ in range(2)]
    tasks[0].cancel()
    turn(reactor)
    future.set_result("for the other")
    turn(reactor)
    assert tasks[1].result() == "for the other"
    assert isinstance(tasks[0].error(), CancelledError)


def test_a_sleep_ends_and_leaves_no_timer(timed: Reactor) -> None:
    async def work() -> None:
        await sleep(3600.0)

    task = timed.spawn(work())
    task.cancel()
    turn(timed)
    assert isinstance(task.error(), CancelledError)
    assert len(timed.timers) == 0


# -- from where ------------------------------------------------------------------------------------


def test_any_thread_may_cancel_whatever_runs_at_that_moment(driver: Driver) -> None:
    """Half of them are cancelled in a step, or as they are woken."""
    rounds, ended = 300, list[int]()

    async def work(number: int, gate: Future) -> None:
        try:
            while True:
                await yield_now()
                if number % 3 == 0:
                    gate.set_result(None)
        finally:
            await yield_now()
            ended.append(number)

    def spawn(number: int, gate: Future, made: Future) -> None:
        made.set_result(driver.reactor.spawn(work(number, gate), waiter=driver))

    for number in range(rounds):
        gate, made = Future(driver), Future(driver)
        driver.reactor.call_in_engine(lambda n=number, g=gate, m=made: spawn(n, g, m))  # type: ignore[misc]
        task = made.result(PATIENCE_S)
        if number % 3 == 0:
            gate.result(PATIENCE_S)
        assert task.cancel(TimeoutError(str(number)))
        assert isinstance(task.error(PATIENCE_S), TimeoutError)
    assert ended == list(range(rounds))


def test_a_task_whose_step_waits_in_another_thread_is_cancelled_after_it(driver: Driver) -> None:
    """The step has lent the lead: others turn the reactor, and the coroutine is in use."""
    answer, entered, made = Future(driver), threading.Event(), Future(driver)
    seen: list[str] = []

    async def work() -> None:
        await yield_now()
        entered.set()
        seen.append(str(answer.result(PATIENCE_S)))
        try:
            await Future()
        except CancelledError as error:
            seen.append(str(error))
            raise

    driver.reactor.call_in_engine(
        lambda: made.set_result(driver.reactor.spawn(work(), waiter=driver))
    )
    task = made.result(PATIENCE_S)
    assert entered.wait(PATIENCE_S)
    assert task.cancel(ShardError("meanwhile"))
    turned = Future(driver)
    driver.reactor.call_in_engine(lambda: turned.set_result(None))
    turned.result(PATIENCE_S)
    assert seen == []
    answer.set_result("answered")
    assert isinstance(task.error(PATIENCE_S), ShardError)
    assert seen == ["answered", "meanwhile"]


def test_a_coroutine_of_the_control_loop_is_cancelled_from_other_threads() -> None:
    loop = ControlLoop("test-control")
    seen: list[str] = []

    async def inner() -> None:
        try:
            await sleep(3600.0)
        finally:
            await sleep(0.001)
            seen.append(f"inner in {threading.current_thread().name}")

    async def outer() -> None:
        seen.append("began")
        await loop.spawn(inner())

    task = loop.spawn(outer())
    wait_until(lambda: seen == ["began"])
    assert task.cancel(TimeoutError("enough"))
    with pytest.raises(TimeoutError, match="enough"):
        task.result(PATIENCE_S)
    assert seen == ["began", "inner in test-control"]


def test_a_cancelled_wait_of_asyncio_cancels_the_task_that_it_is_for(driver: Driver) -> None:
    seen, made = Seen(), Future(driver)
    driver.reactor.call_in_engine(
        lambda: made.set_result(driver.reactor.spawn(seen.wait(Future()), waiter=driver))
    )
    task = made.result(PATIENCE_S)

    async def of(future: Future) -> object:
        return await future

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(of(task), 0.01)

    asyncio.run(wait())
    assert isinstance(task.error(PATIENCE_S), CancelledError)
    assert len(seen.steps) == 2


def test_a_reactor_that_ends_runs_the_finally_blocks_of_what_was_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reactor, ended = Reactor(lambda: 0.0), list[str]()

    async def work() -> None:
        try:
            await Future()
        finally:
            ended.append("ended")

    task = reactor.spawn(work())
    task.cancel()
    reactor.close()
    assert ended == ["ended"]
    assert caplog.text == ""


# -- in other shards -------------------------------------------------------------------------------


def test_a_call_into_another_shard_is_cancelled_there_at_its_await(group: ShardGroup) -> None:
    task = group.submit_to(0, functions.clean_up_with_awaits, "task")
    assert ask(group, 0, functions.notes) == ["task began"]
    assert task.cancel()
    assert isinstance(task.error(), CancelledError)
    wait_until(lambda: len(ask(group, 0, functions.notes)) == 3)
    assert ask(group, 0, functions.notes)[1:] == [
        "task was told: the caller cancelled it",
        "task cleaned up",
    ]


def test_what_a_cancelled_task_awaits_in_a_third_process_is_cancelled_too(
    group: ShardGroup,
) -> None:
    task = group.submit_to(0, functions.have_cleaned_up, 1, "task")
    wait_until(lambda: ask(group, 1, functions.notes) == ["task began"])
    assert task.cancel()
    wait_until(lambda: len(ask(group, 1, functions.notes)) == 3)
    wait_until(lambda: ask(group, 0, functions.notes) == ["task asked", "task ended"])


def test_what_is_gathered_in_a_shard_is_cancelled_with_it(group: ShardGroup) -> None:
    task = group.submit_to(0, functions.have_all_cleaned_up, 3, "task")
    wait_until(lambda: len(ask(group, 0, functions.notes)) == 3)
    assert task.cancel()
    wait_until(lambda: len(ask(group, 0, functions.notes)) == 9)


def test_one_that_swallows_it_goes_on_and_its_caller_has_no_answer(group: ShardGroup) -> None:
    task = group.submit_to(0, functions.swallow, 4)
    assert ask(group, 0, functions.notes) == ["swallows"]
    assert task.cancel()
    wait_until(lambda: ask(group, 0, functions.notes)[-1] == "swallowed, and gave 4")
    assert isinstance(task.error(), CancelledError)
    row = figures(group, 0)
    assert (row.tasks, row.cancelled, row.failures) == (1, 1, 0)


def test_a_group_closes_only_after_what_was_cancelled_has_cleaned_up(group: ShardGroup) -> None:
    task = group.submit_to(0, functions.clean_up_with_awaits, "task")
    assert ask(group, 0, functions.notes) == ["task began"]
    task.cancel()
    row = figures(group, 0)
    assert (row.tasks, row.cancelled, row.failures) == (1, 1, 0)
    assert group.statistics().shards[0].exit_code == 0


@pytest.mark.slow
def test_a_coroutine_that_never_ends_holds_a_group_no_longer_than_it_may() -> None:
    with ShardGroup(1, start_method="forkserver", drain_s=0.5) as group:
        task = group.submit_to(0, functions.go_on_for_ever)
        assert ask(group, 0, functions.notes) == ["goes on"]
        task.cancel()
        wait_until(lambda: "went on" in ask(group, 0, functions.notes))
    assert group.statistics().shards[0].exit_code == 0
