"""Functions in threads: their results, their errors, the end of the group."""

from __future__ import annotations

import contextlib
import gc
import threading
from concurrent.futures import Future

import pytest

from prpc_engine.errors import Backpressure, Closed, ConfigError
from prpc_engine.support import AsyncReturn, ThreadGroup
from tests.prpc_engine.processes import PATIENCE_S, wait_until


def test_a_function_runs_in_another_thread_and_its_value_comes_back() -> None:
    with ThreadGroup(2, name="workers") as group:
        answers = [group.async_exec(divmod, number, 7) for number in range(50)]
        assert [answer.result(PATIENCE_S) for answer in answers] == [
            divmod(number, 7) for number in range(50)
        ]
        assert group.async_exec(dict, a=1).result() == {"a": 1}
        assert (
            group.async_exec(lambda: threading.current_thread().name).result().startswith("workers")
        )


def test_a_waiter_is_woken_by_the_end_and_not_before() -> None:
    gate = threading.Event()
    with ThreadGroup(1) as group:
        answer = group.async_exec(gate.wait, PATIENCE_S)
        assert not answer.wait(0)
        assert not answer.done()
        with pytest.raises(TimeoutError, match=r"Event.wait of prpc-group has not ended after 0 s"):
            answer.result(timeout_s=0)
        gate.set()
        assert answer.wait(PATIENCE_S)
        assert answer.done()
        assert answer.result() is True


def test_what_a_function_raises_is_raised_where_its_result_is_asked_for() -> None:
    with ThreadGroup(1) as group:
        answer = group.async_exec(int, "seven")
        assert answer.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(ValueError, match="seven"):
                answer.result()


def test_an_error_nobody_asks_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    def late() -> None:
        gate.wait(PATIENCE_S)
        raise KeyError("late")

    with ThreadGroup(1) as group:
        group.async_exec(late)  # dropped before its end
        gate.set()
        wait_until(lambda: "KeyError: 'late'" in caplog.text)
        answer = group.async_exec(int, "seven")  # dropped after it
        assert answer.wait(PATIENCE_S)
        del answer
        gc.collect()
        # The thread that ran it may let go of it last.
        wait_until(lambda: "invalid literal for int() with base 10: 'seven'" in caplog.text)
        assert caplog.text.count("and nobody asked for its result") == 2


def test_an_error_that_is_dropped_before_all_have_heard_of_its_end_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: Future[int] = Future()
    answer = AsyncReturn(future, "work")
    tell = future._invoke_callbacks  # type: ignore[attr-defined]
    future._invoke_callbacks = lambda: None  # type: ignore[attr-defined]
    future.set_exception(KeyError("late"))
    assert answer.wait(0)
    del answer
    tell()
    assert caplog.text.count("work raised, and nobody asked for its result") == 1


def test_join_waits_for_what_was_given_so_far_and_the_group_goes_on() -> None:
    gate = threading.Event()
    with ThreadGroup(2) as group:
        answer = group.async_exec(gate.wait, PATIENCE_S)
        with pytest.raises(TimeoutError, match="1 functions of prpc-group"):
            group.join(0)
        gate.set()
        group.join(PATIENCE_S)
        assert answer.done()
        assert group.async_exec(int).result(PATIENCE_S) == 0


def test_leaving_a_group_waits_for_all_of_it() -> None:
    done: list[int] = []
    with ThreadGroup(1) as group:
        for number in range(20):
            group.async_exec(done.append, number)
    assert done == list(range(20))
    with pytest.raises(Closed):
        group.async_exec(int)


def test_leaving_it_by_an_error_does_not_begin_what_waits() -> None:
    began, gate = threading.Event(), threading.Event()

    def run() -> bool:
        began.set()
        return gate.wait(PATIENCE_S)

    with pytest.raises(ZeroDivisionError), ThreadGroup(1) as group:
        runs = group.async_exec(run)
        assert began.wait(PATIENCE_S)  # until then it waits, too
        waits = group.async_exec(int)
        group_left = threading.Thread(target=lambda: (waits.wait(PATIENCE_S), gate.set()))
        group_left.start()
        raise ZeroDivisionError
    group_left.join(PATIENCE_S)
    assert runs.result() is True
    with pytest.raises(Closed, match="did not run"):
        waits.result()


def test_more_than_the_bound_is_refused() -> None:
    gate = threading.Event()
    with ThreadGroup(1, pending_max=2) as group:
        answers = [group.async_exec(gate.wait, PATIENCE_S) for _ in range(2)]
        with pytest.raises(Backpressure, match="2 functions of prpc-group"):
            group.async_exec(int)
        gate.set()
        group.join(PATIENCE_S)
        assert all(answer.result() for answer in answers)
        more: list[AsyncReturn[int]] = []

        def is_taken() -> bool:  # who waits for an answer has it before it makes room
            with contextlib.suppress(Backpressure):
                more.append(group.async_exec(int))
            return bool(more)

        wait_until(is_taken, "room for another one")
        assert more[0].result(PATIENCE_S) == 0


def test_a_group_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        ThreadGroup(0)
