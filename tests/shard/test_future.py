"""A result to come: completed once, seen by all who wait."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from shard import Driver, Future, ShardError

PATIENCE_S = 20.0


def test_a_value_is_there_for_all_who_ask() -> None:
    future = Future()
    assert not future.done()
    assert future.set_result(42)
    assert future.done()
    assert future.result() == future.result(0.0) == 42
    assert future.error() is None


def test_an_error_is_raised_and_can_be_looked_at() -> None:
    future, error = Future(), KeyError("x")
    assert future.set_error(error)
    with pytest.raises(KeyError):
        future.result()
    assert future.error() is error


@pytest.mark.parametrize("value", [None, 0, False, ""])
def test_an_empty_value_is_a_value(value: object) -> None:
    future = Future()
    future.set_result(value)
    assert future.done()
    assert future.result() == value


def test_only_the_first_completion_counts() -> None:
    future = Future()
    assert future.set_result(1)
    assert not future.set_result(2)
    assert not future.set_error(KeyError())
    assert future.result() == 1
    failed = Future()
    assert failed.set_error(KeyError("first"))
    assert not failed.set_result(2)
    with pytest.raises(KeyError, match="first"):
        failed.result()


def test_callbacks_run_once_in_order_also_when_added_afterwards() -> None:
    future, seen = Future(), list[object]()
    future.add_done_callback(lambda done: seen.append(("one", done.result())))
    future.add_done_callback(lambda done: seen.append(("two", done.result())))
    assert seen == []
    future.set_result(7)
    future.set_result(8)
    future.add_done_callback(lambda done: seen.append(("late", done.result())))
    assert seen == [("one", 7), ("two", 7), ("late", 7)]


def test_a_callback_that_raises_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    future, seen = Future(), list[int]()

    def broken(done: Future) -> None:
        raise RuntimeError("oh")

    future.add_done_callback(broken)
    future.add_done_callback(lambda _: seen.append(1))
    with caplog.at_level(logging.ERROR, "shard"):
        future.set_result(None)
        future.add_done_callback(broken)
    assert seen == [1]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "broken" in caplog.text
    assert "RuntimeError: oh" in caplog.text


def test_callbacks_added_while_another_thread_completes_run_exactly_once() -> None:
    for _ in range(300):
        future = Future()
        seen: list[tuple[int, int]] = []
        start = threading.Barrier(3)

        def add(name: int, future: Future = future, seen: list[tuple[int, int]] = seen, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE_S)
            for number in range(10):
                future.add_done_callback(lambda _, number=number: seen.append((name, number)))  # type: ignore[misc]

        threads = [threading.Thread(target=add, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        start.wait(PATIENCE_S)
        future.set_result(None)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(seen) == [(name, number) for name in range(2) for number in range(10)]


def test_without_anyone_to_make_progress_no_thread_may_block() -> None:
    with pytest.raises(ShardError, match="no thread may block"):
        Future().result(1.0)


def test_it_can_be_awaited_in_asyncio_although_no_thread_waits() -> None:
    driver = Driver(polling=False)

    async def work() -> list[object]:
        futures = [Future(driver) for _ in range(10)]
        for number, future in enumerate(futures):
            driver.reactor.call_soon(
                lambda number=number, future=future: driver.reactor.call_later(0.001, lambda: future.set_result(number))  # type: ignore[misc]
            )
        results = [await future for future in futures]
        results.append(await futures[0])
        failed = Future(driver)
        driver.reactor.call_soon(lambda: failed.set_error(KeyError("x")))
        with pytest.raises(KeyError):
            await failed
        return results

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE_S)) == [*range(10), 0]
    driver.close()


def test_a_cancelled_asyncio_wait_leaves_the_future_alone() -> None:
    future = Future()

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)
        future.set_result("later")
        assert await future == "later"

    asyncio.run(wait())


async def _awaited(future: Future) -> object:
    return await future


def test_a_loop_that_is_closed_before_the_result_comes_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    future = Future()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)

    asyncio.run(give_up())
    future.set_result(1)
    assert future.result() == 1
    assert caplog.text == ""
