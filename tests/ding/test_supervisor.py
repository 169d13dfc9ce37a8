"""A supervisor's children: processes and threads that answer, fail, are late, die and are started
again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prpc_engine.ding import ChildType, SendPayload, ShmBufferContainer, Supervisor
from prpc_engine.errors import BadArguments, Closed, ConfigError, MaybeExecuted, NotSent
from tests.ding.children import Counter, move_images, no_counter
from tests.program import halt, wait_until

BOTH = [ChildType.PROCESS, ChildType.THREAD]
SHORT_S = 0.05  # a timeout that is to pass
LONG_S = 60.0  # one that is not
KILLS = 30


@contextlib.contextmanager
def supervising(
    count: int = 2, init: Any = Counter, type_: ChildType = ChildType.PROCESS, **options: Any
) -> Iterator[Supervisor]:
    supervisor = Supervisor(type_, options.pop("mp_ctx", None))
    for _ in range(count):
        supervisor.register(init, **options)
    supervisor.start_link()
    try:
        yield supervisor
    finally:
        supervisor.shutdown(LONG_S)


def send(
    supervisor: Supervisor, proc_id: int, method: str, *args: Any, **kwargs: Any
) -> SendPayload:
    payload = SendPayload(proc_id=proc_id, method=method, args=list(args), kwargs=kwargs)
    supervisor.send(payload)
    return payload


def call(supervisor: Supervisor, proc_id: int, method: str, *args: Any, **kwargs: Any) -> Any:
    payload = send(supervisor, proc_id, method, *args, **kwargs)
    return supervisor.recv_all([payload], timeout=LONG_S)[0].data


@pytest.mark.parametrize("type_", BOTH)
def test_each_child_has_an_object_of_its_own(type_: ChildType) -> None:
    with supervising(3, type_=type_) as supervisor:
        for proc_id in range(3):
            for _ in range(proc_id + 1):
                call(supervisor, proc_id, "add", 2, times=5)
        assert supervisor.count == [10, 20, 30]
        assert supervisor.get_child_attr(1, "count") == 20
        assert supervisor.get_child_attrs("kind") == ["counter"] * 3
        own = os.getpid()
        assert [pid == own for pid in supervisor.pid] == [type_ is ChildType.THREAD] * 3


@pytest.mark.parametrize("type_", BOTH)
def test_answers_come_in_the_order_of_the_requests_and_others_stay(type_: ChildType) -> None:
    with supervising(2, type_=type_) as supervisor:
        first = [send(supervisor, one, "add", 1) for one in (0, 1)]
        second = [send(supervisor, one, "add", 10) for one in (1, 0)]
        answers = supervisor.recv_all(second, timeout=LONG_S)
        assert [(one.proc_id, one.data) for one in answers] == [(1, 11), (0, 11)]
        left = [supervisor.recv(timeout=LONG_S) for _ in first]
        assert {one.req_id for one in left} == {one.req_id for one in first}
        with pytest.raises(queue.Empty):
            supervisor.recv(timeout=0)


def test_an_object_that_is_made_already_is_taken_too() -> None:
    with supervising(1, init=Counter(7)) as supervisor:
        assert call(supervisor, 0, "add") == 8


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("nbytes", [100, 1 << 16, 40 << 20])
def test_arrays_come_whole_and_can_be_written(method: str, nbytes: int) -> None:
    context = multiprocessing.get_context(method)
    with supervising(1, mp_ctx=context) as supervisor:
        array = np.arange(nbytes // 8)
        payload = send(supervisor, 0, "double", array)
        array[:] = 0  # it is the caller's again
        (answer,) = supervisor.recv_all([payload], timeout=LONG_S)
        assert np.array_equal(answer.data, np.arange(nbytes // 8) * 2)
        answer.data[0] = 5


def test_large_requests_and_answers_at_a_time_do_not_wait_for_each_other() -> None:
    with supervising(2) as supervisor:
        array = np.ones(2 << 20)
        asked = [send(supervisor, one, "double", array) for _ in range(4) for one in (0, 1)]
        answers = supervisor.recv_all(asked, timeout=LONG_S)
        assert [float(one.data.sum()) for one in answers] == [array.size * 2.0] * 8


@pytest.mark.parametrize("type_", BOTH)
def test_what_a_method_raises_is_raised_or_told(type_: ChildType) -> None:
    with supervising(1, type_=type_) as supervisor:
        with pytest.raises(ValueError, match="no such key") as info:
            call(supervisor, 0, "fail", "no such key")
        if type_ is ChildType.PROCESS:
            assert "in fail" in str(info.value.__cause__), "its traceback there"
        payload = send(supervisor, 0, "fail", "again")
        (answer,) = supervisor.recv_all([payload], ignore_err=True)
        assert (type(answer.err), answer.data) == (ValueError, None)
        send(supervisor, 0, "no_such_method")
        with pytest.raises(AttributeError, match="no_such_method"):
            supervisor.recv(timeout=LONG_S)
        assert call(supervisor, 0, "add") == 1


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("fail_unpicklably", RuntimeError, "Unpicklable: with a lock"),
        ("fail_unreadably", BadArguments, "cannot be read"),
        ("get_lock", BadArguments, r"the result of get_lock\(\) cannot be sent"),
    ],
)
def test_what_cannot_cross_is_an_error_of_its_request(
    method: str, error: type[Exception], text: str
) -> None:
    with supervising(1) as supervisor:
        with pytest.raises(error, match=text):
            call(supervisor, 0, method)
        with pytest.raises(BadArguments, match=r"arguments of add\(\) for child 0"):
            send(supervisor, 0, "add", threading.Lock())
        assert call(supervisor, 0, "add") == 1


@pytest.mark.parametrize("type_", BOTH)
def test_a_child_that_cannot_begin_answers_why(type_: ChildType) -> None:
    with (
        supervising(1, init=no_counter, type_=type_) as supervisor,
        pytest.raises(LookupError, match="no such environment"),
    ):
        call(supervisor, 0, "add")


@pytest.mark.parametrize(
    ("method", "args", "how"),
    [
        ("kill", (), r"was ended by SIGKILL \(exit code -9\)"),
        ("leave", (3,), "ended with exit code 3"),
    ],
)
def test_a_child_that_dies_is_named_with_what_was_in_flight(
    method: str, args: tuple[Any, ...], how: str, fifo: str, caplog: pytest.LogCaptureFixture
) -> None:
    with supervising(2) as supervisor:
        pid = supervisor.pid[1]
        before = send(supervisor, 1, "wait_for", fifo)
        doomed = [send(supervisor, 1, method, *args), send(supervisor, 1, "add")]
        with open(fifo, "w"):
            pass
        assert supervisor.recv_all([before], timeout=LONG_S)[0].err is None
        text = rf"child 1 \(process {pid}\) {how} with 2 requests in flight: {method}\(\) \(.*add"
        with pytest.raises(MaybeExecuted, match=text):
            supervisor.recv_all(doomed[:1], timeout=LONG_S)
        (answer,) = supervisor.recv_all(doomed[1:], ignore_err=True, timeout=LONG_S)
        assert isinstance(answer.err, MaybeExecuted)
        assert call(supervisor, 0, "add") == 1, "the other one goes on"
        assert call(supervisor, 1, "add") == 1, "it was started again"
        assert supervisor.pid[1] != pid
    assert "child 1 is started again" in caplog.text


def test_a_thread_that_ends_in_a_method_is_named_and_another_takes_its_place(
    fifo: str, caplog: pytest.LogCaptureFixture
) -> None:
    with supervising(2, type_=ChildType.THREAD) as supervisor:
        before = send(supervisor, 1, "wait_for", fifo)
        doomed = [send(supervisor, 1, "exit", 3), send(supervisor, 1, "add")]
        with open(fifo, "w"):
            pass
        assert supervisor.recv_all([before], timeout=LONG_S)[0].err is None
        text = (
            r"child 1 \(a thread\) was ended by SystemExit with 2 requests in flight: exit\(\).*add"
        )
        for one in doomed:
            with pytest.raises(MaybeExecuted, match=text):
                supervisor.recv_all([one], timeout=LONG_S)
        assert call(supervisor, 0, "add") == 1, "the other one goes on"
        assert call(supervisor, 1, "add") == 1, "it was started again"
    assert "child 1 (a thread) was ended by SystemExit" in caplog.text


def test_a_child_that_dies_idle_is_named_to_the_next_request() -> None:
    with supervising(1) as supervisor:
        call(supervisor, 0, "add", 5)
        pid = supervisor.pid[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "its end")
        with pytest.raises(NotSent, match=rf"child 0 \(process {pid}\) was ended by SIGKILL"):
            call(supervisor, 0, "add")
        assert call(supervisor, 0, "add") == 1, "once; then it runs, with a new object"


def pids_of(supervisor: Supervisor) -> list[int]:
    """Of all children, as soon as none of them is about to die."""
    while True:
        with contextlib.suppress(MaybeExecuted, NotSent):
            return supervisor.get_child_attrs("pid")


def test_children_killed_at_any_instant_never_leave_a_request_unanswered(seed: int) -> None:
    chance = random.Random(seed)
    with supervising(2) as supervisor:
        for _ in range(KILLS):
            pids = pids_of(supervisor)
            array = np.ones(chance.choice([1, 1000, 300_000]))
            asked = [send(supervisor, one, "double", array) for _ in range(4) for one in (0, 1)]
            for _ in range(chance.randrange(20_000)):
                pass
            os.kill(pids[chance.randrange(2)], signal.SIGKILL)
            for answer in supervisor.recv_all(asked, ignore_err=True, timeout=LONG_S):
                if answer.err is None:
                    assert answer.data.sum() == 2 * array.size
                else:
                    assert isinstance(answer.err, MaybeExecuted | NotSent)
        assert len(set(pids_of(supervisor))) == 2


@pytest.mark.parametrize("timeout", ["1", float("nan"), -1, True])
def test_a_timeout_that_is_none_is_named(timeout: Any) -> None:
    with supervising(1, type_=ChildType.THREAD) as supervisor:
        calls: list[Callable[[], object]] = [
            lambda: supervisor.recv(timeout=timeout),
            lambda: supervisor.recv_all([SendPayload(proc_id=0, method="add")], timeout=timeout),
            lambda: supervisor.shutdown(timeout),
        ]
        for one in calls:
            with pytest.raises(ConfigError, match=f"timeout={timeout!r}: 0 to"):
                one()


@pytest.mark.parametrize("proc_id", [2, -1, "0", None])
def test_a_child_that_there_is_not_is_named(proc_id: Any) -> None:
    with supervising(2, type_=ChildType.THREAD) as supervisor:
        calls: list[Callable[[], object]] = [
            lambda: send(supervisor, proc_id, "add"),
            lambda: supervisor.get_child_attr(proc_id, "count"),
            lambda: supervisor.restart(proc_id),
        ]
        for one in calls:
            with pytest.raises(BadArguments, match=f"proc_id={proc_id!r}: .*2 are registered"):
                one()
        assert call(supervisor, 1, "add", 5) == 5


@pytest.mark.parametrize("type_", BOTH)
def test_a_restart_makes_the_object_anew(type_: ChildType, fifo: str) -> None:
    with supervising(1, type_=type_) as supervisor:
        call(supervisor, 0, "add", 5)
        supervisor.restart(0)
        assert supervisor.count == [0]
        supervisor.shutdown(LONG_S)
        supervisor.start_link()
        assert call(supervisor, 0, "add") == 1


def test_a_restart_answers_what_was_in_flight(fifo: str) -> None:
    with supervising(1) as supervisor:
        payload = send(supervisor, 0, "wait_for", fifo)
        supervisor.restart(0)
        with pytest.raises(MaybeExecuted, match="was shut down with 1 requests in flight"):
            supervisor.recv_all([payload], timeout=LONG_S)


@pytest.mark.parametrize("type_", BOTH)
def test_a_late_answer_is_a_timeout_and_is_dropped_when_it_comes(
    type_: ChildType, fifo: str
) -> None:
    with supervising(2, type_=type_) as supervisor:
        late = send(supervisor, 0, "wait_for", fifo)
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s: wait_for of child 0"):
            supervisor.recv_all([late], timeout=SHORT_S)
        prompt = send(supervisor, 1, "add")
        answers = supervisor.recv_all([late, prompt], ignore_err=True, timeout=SHORT_S)
        assert isinstance(answers[0].err, TimeoutError)
        with open(fifo, "w"):
            pass
        assert call(supervisor, 0, "add") == 1  # behind the other one
        with pytest.raises(queue.Empty):
            supervisor.recv(timeout=0)


def test_the_timeout_of_one_child_is_not_prolonged_by_another(fifo: str) -> None:
    with supervising(2) as supervisor:
        late = send(supervisor, 0, "wait_for", fifo)
        chatter = send(supervisor, 1, "add")

        def go_on(answer: Any, remain: dict[str, Any]) -> None:
            if answer.proc_id == 1 and late.req_id in remain:
                again = send(supervisor, 1, "add")
                remain[again.req_id] = again

        answers = supervisor.recv_all(
            [late, chatter], ignore_err=True, callback=go_on, timeout=SHORT_S * 4
        )
        assert isinstance(answers[0].err, TimeoutError)
        with open(fifo, "w"):
            pass


def test_a_callback_may_ask_for_more() -> None:
    with supervising(1) as supervisor:
        seen = []

        def retry(answer: Any, remain: dict[str, Any]) -> None:
            seen.append(answer.err or answer.data)
            if answer.err:
                again = send(supervisor, 0, "add", 3)
                remain[again.req_id] = again

        supervisor.recv_all(
            [send(supervisor, 0, "fail", "once")], True, callback=retry, timeout=LONG_S
        )
        assert isinstance(seen[0], ValueError)
        assert seen[1:] == [3]


def test_a_shm_callback_moves_data_to_shared_memory() -> None:
    buffers = {
        one: ShmBufferContainer({"image": np.uint8}, {"image": (4, 84, 84)}) for one in (0, 1)
    }
    with supervising(2, shm_buffer=buffers, shm_callback=move_images) as supervisor:
        for value in (1, 2, 3):
            asked = [send(supervisor, one, "image", value * 10 + one) for one in (0, 1)]
            for answer in supervisor.recv_all(asked, timeout=LONG_S):
                assert answer.data is None
                (found,) = set(buffers[answer.proc_id].get()["image"].ravel().tolist())
                assert found == value * 10 + answer.proc_id


@pytest.mark.parametrize("type_", BOTH)
def test_threads_that_send_and_wait_get_their_own_answers(type_: ChildType) -> None:
    with supervising(2, type_=type_) as supervisor:

        def work(number: int) -> None:
            for step in range(50):
                array = np.full(10, number * 1000 + step)
                got = call(supervisor, step % 2, "double", array.copy())
                assert got.tolist() == (array * 2).tolist()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


def test_a_thread_that_waits_hears_what_another_one_sends(fifo: str) -> None:
    with supervising(1) as supervisor, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(supervisor.recv, timeout=LONG_S)
        send(supervisor, 0, "double", np.ones(4 << 20))  # more than its socket takes
        assert waiting.result(LONG_S).data.sum() == 8 << 20


def test_children_end_with_their_supervisor(fifo: str, tmp_path: Any) -> None:
    """Killed with it in the middle, each hears that from its socket."""
    theirs, ours = os.pipe()

    def parent() -> None:
        supervisor = Supervisor()
        for _ in range(3):
            supervisor.register(Counter)
        supervisor.start_link()
        os.write(ours, (" ".join(map(str, supervisor.pid)) + "\n").encode())
        signal.pause()

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    pids = list(map(int, os.read(theirs, 100).split()))
    assert len(pids) == 3
    process.kill()
    process.join()
    process.close()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the children")
    os.close(theirs)
    os.close(ours)


def is_running(pid: int) -> bool:
    try:
        return field(pid, "State") not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("hold", ["block_sigterm", "shut_files", "stopped"])
def test_a_child_that_does_not_end_is_killed(hold: str) -> None:
    with supervising(1) as supervisor:
        pid = supervisor.pid[0]
        if hold == "stopped":
            halt(pid)
        elif hold == "shut_files":
            send(supervisor, 0, hold)
            wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= 3, "that it has shut them")
        else:
            send(supervisor, 0, hold)
            ignored = 1 << (signal.SIGTERM - 1)
            wait_until(lambda: int(field(pid, "SigIgn"), 16) & ignored, "that it ignores SIGTERM")
        supervisor.shutdown(timeout=SHORT_S)
        assert not is_running(pid)


def field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as status:
        return next(line.split()[1] for line in status if line.startswith(f"{name}:"))


def test_before_and_after_its_time_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prpc")
    supervisor = Supervisor(ChildType.THREAD)
    supervisor.register(Counter)
    calls: list[Callable[[], object]] = [
        lambda: send(supervisor, 0, "add"),
        lambda: supervisor.get_child_attr(0, "count"),
        lambda: supervisor.restart(0),
    ]
    for one in calls:
        with pytest.raises(Closed, match="start_link"):
            one()
    assert not hasattr(supervisor, "count")
    supervisor.shutdown()
    with pytest.raises(BadArguments, match="no requests"):
        supervisor.recv_all([])
