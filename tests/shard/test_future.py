"""A result to come: completed once, seen by all who wait."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from shard import CancelledError, Driver, Future, ShardError, gather, sleep
from shard.loop import future as future_module

PATIENCE_S = 20.0


def test_a_value_is_there_for_all_who_ask() -> None:
    future = Future()
    assert not future.done()
    assert future.set_result(42)
    assert future.done()
    assert future.result() == future.result(0.0) == 42
    assert future.error() is None


def test_it_cannot_be_pickled_whether_it_is_done_or_not() -> None:
    """What would arrive would be completed by nobody."""
    failed, done = Future(), Future()
    failed.set_error(ValueError("mine"))
    done.set_result(42)
    for future in (Future(), failed, done):
        with pytest.raises(TypeError, match=r"a Future is no value: send what it brings"):
            pickle.dumps(future)


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


def test_two_threads_complete_a_future_once() -> None:
    """Fails within a second on Python 3.10 where looking and setting are two steps."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        futures = [Future() for _ in range(200_000)]
        start = threading.Barrier(2)
        won = [0, 0]

        def complete(who: int) -> None:
            start.wait()
            for future in futures:
                won[who] += future.set_result(who) if who else future.set_error(KeyError())

        threads = [threading.Thread(target=complete, args=(who,)) for who in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(won) == len(futures)


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("is_error", [False, True])
def test_a_completion_in_the_middle_of_another_one_changes_nothing(
    step: int, is_error: bool
) -> None:
    """Another thread, a signal handler or a destructor may come between any two lines."""
    future, answers = Future(), list[bool]()
    future.add_done_callback(lambda _: answers.append(future.done()))
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code.co_name not in ("set_result", "set_error"):
            return None
        if event == "line":
            lines += 1
            if lines == step + 1:
                sys.settrace(None)
                answers.append(
                    future.set_result("the other")
                    if is_error
                    else future.set_error(KeyError("the other"))
                )
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answers.append(
            future.set_error(KeyError("this")) if is_error else future.set_result("this")
        )
    finally:
        sys.settrace(before)
    done = answers.count(True)
    assert done == 2, "the callback ran once, and one of the two completed it"


def test_callbacks_run_once_in_order_also_when_added_afterwards() -> None:
    future, seen = Future(), list[object]()
    future.add_done_callback(lambda done: seen.append(("one", done.result())))
    future.add_done_callback(lambda done: seen.append(("two", done.result())))
    assert seen == []
    future.set_result(7)
    future.set_result(8)
    future.add_done_callback(lambda done: seen.append(("late", done.result())))
    assert seen == [("one", 7), ("two", 7), ("late", 7)]


def test_a_callback_that_raises_is_logged_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
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

        def add(
            name: int,
            future: Future = future,
            seen: list[tuple[int, int]] = seen,
            start: threading.Barrier = start,
        ) -> None:
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
                lambda number=number, future=future: driver.reactor.call_later(
                    0.001, lambda: future.set_result(number)
                )  # type: ignore[misc]
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


def test_a_loop_that_is_closed_before_the_result_comes_is_no_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future = Future()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)

    asyncio.run(give_up())
    future.set_result(1)
    assert future.result() == 1
    assert caplog.text == ""


# -- given up, and many as one ---------------------------------------------------------------------


def test_a_cancelled_future_is_done_with_an_error_and_what_comes_later_counts_no_more() -> None:
    future, seen = Future(), list[Future]()
    future.add_done_callback(seen.append)
    assert future.cancel()
    assert seen == [future]
    with pytest.raises(CancelledError, match="cancelled here"):
        future.result()
    assert not future.set_result(1)
    assert not future.cancel()


def test_whoever_cancels_may_say_why() -> None:
    future, error = Future(), ShardError("too old")
    assert future.cancel(error)
    assert future.error() is error


def test_a_future_that_is_done_is_not_cancelled() -> None:
    future = Future()
    future.set_result(1)
    assert not future.cancel()
    assert future.result() == 1


def test_gathered_values_keep_the_order_of_their_futures() -> None:
    futures = [Future() for _ in range(3)]
    whole = gather(futures)
    for number in (2, 0, 1):
        assert not whole.done()
        futures[number].set_result(number * 10)
    assert whole.result() == [0, 10, 20]


def test_of_several_errors_the_first_in_order_is_raised_when_all_are_done() -> None:
    futures = [Future() for _ in range(3)]
    whole = gather(futures)
    futures[2].set_error(KeyError("third"))
    futures[1].set_error(KeyError("second"))
    assert not whole.done(), "the others may still use what is awaited"
    futures[0].set_result(None)
    with pytest.raises(KeyError, match="second"):
        whole.result()


def test_nothing_gathered_is_an_empty_list() -> None:
    assert gather([]).result() == []


def test_what_are_no_futures_in_a_list_cannot_be_gathered() -> None:
    async def one() -> None:
        """A coroutine, which nothing would run."""

    coroutine = one()
    wrong: Any
    for wrong in ([coroutine], (Future(), coroutine), [sleep(0.1)], {5: Future()}):
        with pytest.raises(TypeError, match=r"gather\(\) of .*: futures are allowed; a coroutine"):
            gather(wrong)
    for wrong in (coroutine, Future(), (each for each in [Future()])):
        with pytest.raises(TypeError, match=r"gather\(.*\): futures in one list are allowed"):
            gather(wrong)
    coroutine.close()


def test_futures_that_are_done_can_be_gathered_and_one_of_them_twice() -> None:
    done, waits = Future(), Future()
    done.set_result(1)
    whole = gather([done, waits, waits])
    waits.set_result(2)
    assert whole.result() == [1, 2, 2]


def test_futures_completed_by_two_threads_are_gathered_once() -> None:
    for _ in range(200):
        futures = [Future(), Future()]
        whole, start = gather(futures), threading.Barrier(2)

        def complete(future: Future, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE_S)
            future.set_result(1)

        threads = [threading.Thread(target=complete, args=(future,)) for future in futures]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert whole.result() == [1, 1]


def test_a_collection_of_garbage_may_end_what_is_gathered_as_a_future_gets_a_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dropped(Future):
        def __del__(self) -> None:
            self.set_error(ShardError("dropped"))

    class Collecting:
        """The lock, and inside it a collection of garbage: any list that is made may begin one."""

        lock = future_module._making_callbacks

        def __enter__(self) -> None:
            assert self.lock.acquire(timeout=0.1), "this very thread has it"
            gc.collect()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    whole = gather([Dropped()])
    monkeypatch.setattr(future_module, "_making_callbacks", Collecting())
    Future().add_done_callback(lambda _: None)
    assert whole.done()
    assert isinstance(whole.error(), ShardError)


def test_a_thread_can_wait_for_what_was_gathered() -> None:
    driver = Driver(polling=False)
    futures = [Future(driver) for _ in range(3)]
    for future in futures:
        driver.reactor.call_soon(lambda future=future: future.set_result(1))  # type: ignore[misc]
    assert gather(futures, driver).result(PATIENCE_S) == [1, 1, 1]
    driver.close()


def test_a_future_can_be_printed_before_and_after_it_is_done() -> None:
    done, failed = Future(), Future()
    done.set_result([3])
    failed.set_error(ValueError("no"))
    assert [repr(one) for one in (Future(), done, failed)] == [
        "<Future pending>",
        "<Future value [3]>",
        "<Future error ValueError('no')>",
    ]
