"""Functions at other workers: what comes back, what is raised, who waits for whom."""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine import remote as rpc
from shard import CancelledError
from tests.program import wait_until
from tests.prpc_engine.remote import functions_there as there
from tests.prpc_engine.remote.conftest import Group


def of_this_script(value: int) -> int:
    return value + 1


@pytest.mark.parametrize("begin", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_what_cannot_be_sent_is_named_as_the_caller_does(
    pair: Group, begin: Callable[..., Any]
) -> None:
    lock = threading.Lock()
    wait_until(lambda: len(rpc.get_worker_infos()) == 2, "news of the other one")
    for args, kwargs, named in (
        ((lock, 1), None, "args[0]"),
        ((1, [lock]), None, "args[1][0]"),
        ((1,), {"second": lock}, "kwargs['second']"),
    ):
        with pytest.raises(errors.BadArguments, match=rf"\(rank 1\): {re.escape(named)} cannot be"):
            begin("there", there.add, args=args, kwargs=kwargs)
    rref = rpc.remote("there", there.Model, args=(1,))
    rref.to_here()
    with pytest.raises(errors.BadArguments, match=r"\(rank 1\): args\[0\] cannot be"):
        rref.rpc_sync().times(lock)


def test_what_is_no_future_is_refused_by_its_place(pair: Group) -> None:
    future = rpc.rpc_async("there", there.add, args=(1, 2))
    for wait in (rpc.wait_all, rpc.collect_all):
        with pytest.raises(errors.BadArguments, match=r"futures\[1\]=5: a Future is expected"):
            wait([future, 5])
    assert future.wait() == 3


def test_a_function_runs_in_the_other_process_with_all_its_arguments(pair: Group) -> None:
    assert rpc.rpc_sync("there", there.pid) == pair.programs["there"].pid
    assert rpc.rpc_sync("there", there.add, args=(1, 2)) == 3
    assert rpc.rpc_sync("there", there.add, (1,), {"second": 5}) == 6
    assert rpc.rpc_sync("there", there.add, (1,)) == 101
    assert rpc.rpc_async("there", there.add, args=(1, 2)).wait() == 3


def test_a_worker_is_named_by_name_rank_or_info(pair: Group) -> None:
    for to in ("there", 1, rpc.WorkerInfo("there", 1)):
        assert rpc.rpc_sync(to, there.here) == "there", to


def test_a_worker_may_call_itself(pair: Group) -> None:
    assert rpc.rpc_sync("here", there.pid) == os.getpid()
    rref = rpc.remote("here", there.Model, (3,))
    assert rref.is_owner()
    assert rref.rpc_sync().times(4) == 12
    assert rref.local_value().factor == 3


def test_any_callable_can_be_sent(pair: Group, subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, tuple[Any, ...], Any]] = [
        (math.sqrt, (4.0,), 2.0),
        (operator.add, (1, 2), 3),
        (str.upper, ("a",), "A"),
        (complex, (1, 2), 1 + 2j),
        (np.add, (1, 2), 3),
        (there.Batch.put, (7, 1), [7]),
        (functools.partial(there.add, 3), (4,), 7),
        ("text".replace, ("t", "T"), "TexT"),
        (lambda value: value * 2, (4,), 8),
        (of_this_script, (1,), 2),
    ]
    for function, args, value in cases:
        with subtests.test(function=function):
            assert rpc.rpc_sync("there", function, args=args) == value


def test_arrays_travel_out_of_band_and_come_back_equal(pair: Group) -> None:
    array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    back = rpc.rpc_sync("there", there.same, args=({"a": [array]},))
    np.testing.assert_array_equal(back["a"][0], array)
    assert not back["a"][0].flags.writeable


def test_an_exception_arrives_as_it_was_raised_with_its_traceback_as_the_cause(
    pair: Group, subtests: pytest.Subtests
) -> None:
    for error in (
        ValueError("a", 1),
        KeyError("k"),
        OSError(2, "No such file"),
        KeyError(10**5000),  # of more digits than Python writes
        KeyError(-(2**8192) + 1),
        UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates not allowed"),
        there.TwoThings(1, "two"),
    ):
        with subtests.test(error=error):
            with pytest.raises(type(error)) as caught:
                rpc.rpc_sync("there", there.raise_it, args=(error,))
            assert type(caught.value) is type(error)
            assert caught.value.args == error.args
            assert vars(caught.value) == vars(error)
            cause = caught.value.__cause__
            assert isinstance(cause, rpc.RemoteTraceback)
            assert "functions_there.py" in str(cause)
            assert "'raise_it' at worker 'there' (rank 1)" in str(cause)


def test_an_exception_that_cannot_be_rebuilt_is_told_by_its_texts(pair: Group) -> None:
    with pytest.raises(errors.RemoteError, match="Odd: 1 and 2") as caught:
        rpc.rpc_sync("there", there.raise_odd)
    assert caught.value.type_name.endswith("Odd")
    assert "functions_there.py" in caught.value.remote_traceback
    assert isinstance(caught.value, RuntimeError)  # as torch's
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        rpc.rpc_async("there", there.raise_odd).wait()


def test_an_exception_of_a_future_is_raised_by_wait(pair: Group) -> None:
    future = rpc.rpc_async("there", there.raise_it, args=(KeyError("k"),))
    with pytest.raises(KeyError, match="k"):
        future.wait()
    assert future.done()
    with pytest.raises(KeyError):
        future.value()
    with pytest.raises(KeyError):
        future.then(lambda done: done.wait()).wait()


def test_then_of_a_future_that_was_cancelled_ends(pair: Group) -> None:
    """A CancelledError is no Exception, nor is what sys.exit() raises."""
    future = rpc.rpc_async("there", there.wait_for_event)
    after = future.then(lambda done: done.wait())
    exits = future.then(lambda _: sys.exit(3))
    assert future.cancel()
    rpc.rpc_sync("there", there.set_event)
    with pytest.raises(CancelledError):
        after.result(there.PATIENCE_S)
    with pytest.raises(SystemExit):
        exits.result(there.PATIENCE_S)


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "raised SystemExit: 3"), ("wait", "CancelledError: cancelled here")]
)
def test_a_function_that_blocks_and_ends_by_what_is_no_exception_is_told_as_another_is(
    pair: Group, how: str, text: str
) -> None:
    for _ in range(2):  # in the engine's thread, and as it blocks there, in one of its own
        future = rpc.rpc_async("there", there.wait_and_end, args=(how,))
        rpc.rpc_sync("there", there.set_event)
        with pytest.raises(errors.RemoteError, match=text):
            future.result(there.PATIENCE_S)


@pytest.mark.parametrize("how", ["exit", "wait"])
def test_a_value_whose_function_ends_by_what_is_no_exception_is_told_to_all(
    three: Group, how: str
) -> None:
    """In the engine's thread, and as it blocks there, in one of its own."""
    for _ in range(2):
        made = rpc.remote("there", there.wait_and_end, args=(how,))
        fetched = rpc.rpc_async("elsewhere", there.fetch, args=(made,))
        # over the same connection, so it was asked there
        assert rpc.rpc_sync("elsewhere", there.add_elsewhere, args=("there", 1, 2, 3)) == 6
        rpc.rpc_sync("there", there.set_event)
        text = "SystemExit: 3" if how == "exit" else "CancelledError: cancelled here"
        with pytest.raises(errors.RemoteError, match=text):
            made.to_here(there.PATIENCE_S)
        with pytest.raises(errors.RemoteError, match=text):
            fetched.result(there.PATIENCE_S)


def test_a_method_of_a_value_that_is_made_later_may_exit(three: Group) -> None:
    exits = rpc.remote("there", there.Exits)
    future = rpc.rpc_async("elsewhere", there.exit_of, args=(exits,))
    wait_until(lambda: bool(rpc.rpc_sync("elsewhere", there.asking_to_exit)))
    # over the same connection, so it was asked there
    assert rpc.rpc_sync("elsewhere", there.add_elsewhere, args=("there", 1, 2, 3)) == 6
    rpc.rpc_sync("there", there.set_event)
    with pytest.raises(errors.RemoteError, match="raised SystemExit: 3"):
        future.result(there.PATIENCE_S)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (there.drops_its_future, r"prpc_engine\.remote\.Future"),
        (there.drops_one_of_threads, r"concurrent\.futures\._base\.Future"),
    ],
)
def test_a_future_that_a_function_returns_and_drops_is_named(
    pair: Group, function: Callable[[], object], name: str
) -> None:
    with pytest.raises(errors.RemoteError, match=f"returned a {name} that was dropped before it"):
        rpc.rpc_sync("there", function)


def test_futures_have_the_verbs_of_torchs(pair: Group) -> None:
    futures = [rpc.rpc_async("there", there.add, args=(number, 1)) for number in range(5)]
    assert rpc.wait_all(futures) == [1, 2, 3, 4, 5]
    assert [one.value() for one in rpc.collect_all(futures).wait()] == [1, 2, 3, 4, 5]
    called: list[int] = []
    heard = threading.Event()

    def hear(done: rpc.Future) -> None:
        called.append(done.value())
        heard.set()

    futures[0].add_done_callback(hear)
    assert heard.wait(there.PATIENCE_S)
    assert called == [1]
    assert (
        futures[0].then(lambda done: done.value() + 1).then(lambda done: -done.value()).wait() == -2
    )
    mine = rpc.Future()
    with pytest.raises(RuntimeError, match="not done"):
        mine.value()
    mine.set_exception(KeyError("mine"))
    with pytest.raises(KeyError):
        mine.wait()


def test_a_future_can_be_awaited_in_asyncio(pair: Group) -> None:
    async def main() -> list[int]:
        return list(
            await asyncio.gather(
                *(rpc.rpc_async("there", there.add, args=(number, 1)) for number in range(3))
            )
        )

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_function_may_return_a_future_and_its_caller_gets_what_that_brings(three: Group) -> None:
    assert rpc.rpc_sync("there", there.add_elsewhere, args=("elsewhere", 1, 2, 3)) == 6
    assert rpc.rpc_sync("there", there.of_threads, args=(1,)) == 2
    with pytest.raises(KeyError, match="of elsewhere"):
        rpc.rpc_sync("there", there.fail_elsewhere, args=("elsewhere",))
    futures = [rpc.rpc_async("there", there.Batch.put, args=(part, 3)) for part in range(3)]
    assert rpc.wait_all(futures) == [[0, 1, 2]] * 3


def test_a_coroutine_function_runs_as_a_task(pair: Group) -> None:
    assert rpc.rpc_sync("there", there.sleeps, args=(4,)) == 8
    with pytest.raises(there.TwoThings) as caught:
        rpc.rpc_sync("there", there.fails)
    assert caught.value.second == "two"
    assert rpc.remote("there", there.sleeps, (5,)).to_here() == 10


def test_a_future_is_no_argument(pair: Group) -> None:
    future = rpc.rpc_async("there", there.add, args=(1, 2))
    for one in (future, rpc.Future()):
        with pytest.raises(errors.BadArguments, match=r"args\[0\] .* a Future is no value: send"):
            rpc.rpc_sync("there", there.same, args=(one,))
    assert future.wait() == 3


def test_a_generator_is_refused_by_name(pair: Group) -> None:
    with pytest.raises(TypeError, match="counts' yields its results"):
        rpc.rpc_sync("there", there.counts, args=(3,))
    with pytest.raises(TypeError, match="counts_async' yields its results: return a list"):
        rpc.rpc_sync("there", there.counts_async, args=(3,))


def test_calls_may_nest_back_and_forth_fifty_deep(three: Group) -> None:
    assert rpc.rpc_sync("there", there.down, args=("elsewhere", 50)) == 50


def test_a_function_that_blocks_lets_others_run_beside_it(pair: Group) -> None:
    """At first in the engine's thread, which others leave behind; from then on in one of its
    own.
    """
    for _ in range(3):
        rpc.rpc_sync("there", there.clear_event)
        blocked = [rpc.rpc_async("there", there.wait_for_event) for _ in range(3)]
        rpc.rpc_sync("there", there.set_event)
        assert rpc.wait_all(blocked) == [True] * 3
    assert rpc.rpc_sync("there", there.figures)["overtaken"] >= 1


def test_more_functions_block_than_there_are_threads(group: Group) -> None:
    group.join("there", num_worker_threads=2)
    for _ in range(2):
        rpc.rpc_sync("there", there.clear_event)
        blocked = [rpc.rpc_async("there", there.wait_for_event) for _ in range(6)]
        rpc.rpc_sync("there", there.set_event)
        assert rpc.wait_all(blocked) == [True] * 6


def test_a_function_that_the_caller_gives_up_goes_on_and_others_are_served(pair: Group) -> None:
    with pytest.raises(errors.DeadlineExceeded, match="'wait_for_event' at worker 'there'") as late:
        rpc.rpc_sync("there", there.wait_for_event, timeout=0.05)
    assert isinstance(late.value, RuntimeError)
    rpc.rpc_sync("there", there.set_event)


def test_a_timeout_of_0_waits_as_long_as_it_takes(group: Group) -> None:
    group.join("there", rpc_timeout=0.05)
    blocked = rpc.rpc_async("there", there.wait_for_event, timeout=0)
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("there", there.wait_for_event)
    rpc.rpc_sync("there", there.set_event, timeout=there.PATIENCE_S)
    assert blocked.wait()


def test_the_timeout_of_verbs_that_say_nothing_can_be_changed(group: Group) -> None:
    group.join("there", rpc_timeout=50)
    assert rpc.get_rpc_timeout() == 50
    rpc.set_rpc_timeout(0.05)
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("there", there.wait_for_event)
    refused: list[Any] = [-1, math.nan, "1", True]
    for seconds in refused:
        with pytest.raises(errors.ConfigError, match="seconds="):
            rpc.set_rpc_timeout(seconds)
    assert rpc.get_rpc_timeout() == 0.05
    rpc.set_rpc_timeout(0)
    blocked = rpc.rpc_async("there", there.wait_for_event)
    rpc.rpc_sync("there", there.set_event)
    assert blocked.wait()


def test_a_timeout_that_is_none_is_refused(pair: Group, subtests: pytest.Subtests) -> None:
    timeouts: list[Any] = [-2, math.nan, "1", True, 1e12]
    for timeout in timeouts:
        for verb in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with (
                subtests.test(timeout=timeout, verb=verb.__name__),
                pytest.raises(errors.ConfigError, match="timeout="),
            ):
                verb("there", there.pid, timeout=timeout)


def test_who_is_not_in_the_group_is_named_beside_those_who_are(pair: Group) -> None:
    for verb in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(rpc.UnknownWorker, match=r"'nobody' is not in the group.*'there' \(1\)"):
            verb("nobody", there.pid)
        with pytest.raises(errors.ConfigError, match="to=None"):
            verb(None, there.pid)  # type: ignore[arg-type]
    with pytest.raises(rpc.UnknownWorker):
        rpc.get_worker_info("nobody")
    with pytest.raises(RuntimeError):
        rpc.rpc_sync(17, there.pid)


def test_what_is_no_function_is_refused_here(pair: Group) -> None:
    with pytest.raises(errors.BadArguments, match="5 is not callable"):
        rpc.rpc_sync("there", 5)  # type: ignore[arg-type]


def test_what_cannot_be_sent_is_named(pair: Group) -> None:
    with pytest.raises(errors.BadArguments):
        rpc.rpc_sync("there", there.same, args=(threading.Lock(),))
    with pytest.raises(RuntimeError, match="what cannot be sent"):
        rpc.rpc_sync("there", threading.Lock)


def test_a_worker_that_is_killed_ends_its_calls_and_is_named(pair: Group) -> None:
    blocked = rpc.rpc_async("there", there.wait_for_event)
    assert rpc.rpc_sync("there", there.pid)  # it has begun
    pair.programs["there"].kill()
    with pytest.raises(errors.MaybeExecuted, match="'wait_for_event' at worker 'there'") as lost:
        blocked.wait()
    assert isinstance(lost.value, RuntimeError)
    # a server has another rank at the master: workers are named by their own
    assert "server" not in str(lost.value) and "to the worker" in str(lost.value)
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("there", there.pid, timeout=there.PATIENCE_S)


def test_errors_of_calls_survive_being_pickled(pair: Group) -> None:
    with pytest.raises(errors.DeadlineExceeded) as late:
        rpc.rpc_sync("there", there.wait_for_event, timeout=0.01)
    again = pickle.loads(pickle.dumps(late.value))
    assert type(again) is type(late.value)
    assert str(again) == str(late.value)
    rpc.rpc_sync("there", there.set_event)


def test_the_deadline_is_inherited_by_nested_calls(three: Group) -> None:
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("there", _wait_at, args=("elsewhere",), timeout=0.2)
    # the nested call's own limit is 60 s: "there" would be stuck in it
    while rpc.rpc_sync("there", _is_waiting):
        assert time.monotonic() - began < there.PATIENCE_S
    rpc.rpc_sync("elsewhere", there.set_event)


_waits = 0


def _wait_at(to: str) -> None:
    global _waits
    _waits += 1
    try:
        rpc.rpc_sync(to, there.wait_for_event)
    finally:
        _waits -= 1


def _is_waiting() -> int:
    return _waits


def test_an_idle_worker_has_few_threads_and_descriptors(pair: Group) -> None:
    assert len(rpc.rpc_sync("there", there.names_of_threads)) <= 5  # a spare may be there yet
    assert rpc.rpc_sync("there", there.descriptors) <= 40


def test_no_function_and_no_worker_are_named_as_what_they_are(pair: Group) -> None:
    with pytest.raises(errors.BadArguments, match="None is not callable: a function is expected"):
        rpc.rpc_sync("there", None)  # type: ignore[arg-type]
    with pytest.raises(rpc.UnknownWorker, match="rank 7 is there: it has left, died or"):
        rpc.rpc_sync(7, there.add, args=(1, 2), timeout=5)
