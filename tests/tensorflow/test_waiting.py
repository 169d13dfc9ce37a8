"""A part that may wait for another step is given up whenever that is said: before it has begun,
too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.errors import Cancelled
from prpc_engine.settings.cluster_spec import Task
from shard import Future
from tests.prpc_engine.processes import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, by its old face."""
    return pytest.importorskip(
        "tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'"
    ).compat.v1


def part_and_put(tf: Any, name: str) -> tuple[Any, Any]:
    """What takes a number from a queue of that name, and what puts one there."""
    from prpc_engine.tensorflow.rewrite import GraphPart

    parts = []
    for waits in (True, False):
        with tf.Graph().as_default() as graph:
            line = tf.FIFOQueue(3, [tf.float32], [[]], shared_name=name)
            op = line.dequeue() if waits else line.enqueue([2.5])
        fetches, waiting = ([op.name], [op.op.name]) if waits else ([], [])
        parts.append(
            GraphPart(graph.as_graph_def(), {}, [], fetches, [] if waits else [op.name], waiting)
        )
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def runtime(tf: Any) -> Any:
    from prpc_engine.tensorflow.runtime import Runtime

    made = Runtime(tf.ConfigProto())
    # TensorFlow opens a file then, which it keeps
    made.load(part_and_put(tf, "first")[1], "session").run(())
    return made


def test_a_run_that_was_given_up_before_it_began_takes_nothing(tf: Any, runtime: Any) -> None:
    from prpc_engine.tensorflow.runtime import WaitingPart

    part, put = part_and_put(tf, "before")
    waiting, first, second = WaitingPart(runtime, part, "session"), object(), object()
    runtime.load(put, "session").run(())
    for owner in (first, second):
        waiting.expect(owner)
    waiting.give_up(first)
    with pytest.raises(tf.errors.CancelledError, match="given up before it began"):
        waiting.run((), first)
    assert waiting.run((), second) == [2.5]


@pytest.mark.parametrize("is_expected", [False, True])
def test_when_all_are_given_up_those_to_come_are_too(
    is_expected: bool, tf: Any, runtime: Any
) -> None:
    from prpc_engine.tensorflow.runtime import WaitingPart

    waiting, owner = (
        WaitingPart(runtime, part_and_put(tf, f"all{is_expected}")[0], "session"),
        object(),
    )
    if is_expected:
        waiting.expect(owner)
    waiting.give_up_all()
    waiting.expect(owner)
    with pytest.raises(tf.errors.CancelledError, match="given up before it began"):
        waiting.run((), owner)


def test_a_run_that_waits_ends_when_it_is_given_up(tf: Any, runtime: Any) -> None:
    from prpc_engine.tensorflow.runtime import WaitingPart

    part, put = part_and_put(tf, "within")
    waiting, first, second = WaitingPart(runtime, part, "session"), object(), object()
    ended: list[Exception] = []

    def run() -> None:
        try:
            waiting.run((), first)
        except tf.errors.OpError as error:
            ended.append(error)

    waiting.expect(first)
    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: waiting._runs[first] is not None, "the run")
    waiting.give_up(first)
    thread.join(PATIENCE_S)
    assert len(ended) == 1
    runtime.load(put, "session").run(())
    waiting.expect(second)
    assert waiting.run((), second) == [2.5]


def test_a_run_that_was_given_up_as_it_began_leaves_what_has_come_since(
    tf: Any, runtime: Any
) -> None:
    from prpc_engine.tensorflow.rewrite import GraphPart
    from prpc_engine.tensorflow.runtime import WaitingPart

    part, put = part_and_put(tf, "as it began")
    with tf.Graph().as_default() as graph:
        size = tf.FIFOQueue(3, [tf.float32], [[]], shared_name="as it began").size()
    waiting, owner = WaitingPart(runtime, part, "session"), object()

    def run(loaded: Any) -> Any:
        waiting.give_up(owner)
        runtime.load(put, "session").run(())
        return loaded.run(())

    waiting.expect(owner)
    with pytest.raises(tf.errors.OpError):
        waiting._run(owner, run)
    assert runtime.load(
        GraphPart(graph.as_graph_def(), {}, [], [size.name], [], []), "session"
    ).run(()) == [1]


def test_a_stage_that_waits_ends_with_its_steps_deadline_whoever_notices_that_first(
    tf: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prpc_engine.tensorflow import stages as module

    timers: list[Callable[[], object]] = []
    reactor = SimpleNamespace(clock=None, call_later=lambda left_s, call: timers.append(call))
    peer = SimpleNamespace(reactor=reactor, connection=SimpleNamespace(peer_incarnation=1))
    monkeypatch.setattr(module, "calling_peer", lambda: peer)
    monkeypatch.setattr(module, "remaining_s", lambda clock: 1.0)
    threads, registering = ThreadPoolExecutor(), ThreadPoolExecutor(1)
    stages = module.Stages(
        runtime, lambda handles, is_all: None, lambda incarnation: True, threads, registering
    )
    part, put = part_and_put(tf, "its time")
    registered = stages.register("session", module.pack_part(part))
    wait_until(registered.done, "the stage")
    handle = registered.result()[1]
    for begins in (True, False):
        answer = stages.run(handle, "session", b"")
        if begins:
            wait_until(lambda answer=answer: stages.find(handle).loaded._runs[answer], "the run")
        timers.pop()()
        wait_until(answer.done, "its end")
        assert answer.result()[0] == tf.errors.DEADLINE_EXCEEDED
    runtime.load(put, "session").run(())
    answer = stages.run(handle, "session", b"")
    wait_until(answer.done, "the next run")
    assert answer.result()[0] == 0
    stages.close_session("session")
    registering.shutdown()
    threads.shutdown()


class LatePool(Executor):
    """Threads that take up what they are given when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def submit(  # type: ignore[override]
        self, function: Callable[..., object], *arguments: object
    ) -> None:
        self.work.append(partial(function, *arguments))

    def go_on(self) -> None:
        while self.work:
            self.work.pop(0)()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not self.work


def test_a_stage_whose_session_ends_before_a_thread_has_taken_it_up_does_not_run(
    tf: Any, runtime: Any
) -> None:
    from prpc_engine.tensorflow.stages import Stages, pack_part

    pool = LatePool()
    stages = Stages(runtime, lambda handles, is_all: None, lambda incarnation: True, pool, pool)
    registered = stages.register("session", pack_part(part_and_put(tf, "stage")[0]))
    pool.go_on()
    answer = stages.run(registered.result()[1], "session", b"")
    assert stages.statistics().running == 1
    stages.close_session("session")
    pool.go_on()
    assert answer.result()[0] == tf.errors.CANCELLED
    assert stages.statistics().running == 0
    stages.close()


class ClosingEngine:
    """Asks nobody. While it is asked to run something, another thread closes the session; while
    that tells the tasks, a third one meets one more."""

    plane: Any = None

    def ask(self, task: str, method: str, *_: object) -> Future:
        if method == "tf.run":
            self.plane.close()
        else:
            self.plane._met.add("/job:ps/task:1")
        return Future()


def test_what_is_asked_while_the_session_is_closed_is_given_up_too(tf: Any) -> None:
    from prpc_engine.tensorflow.star import StarPlane

    engine = ClosingEngine()
    server = SimpleNamespace(
        tasks=frozenset(),
        task=Task("worker", 0),
        master=Task("worker", 0),
        processes=1,
        config=tf.ConfigProto(),
        engine=engine,
    )
    engine.plane = plane = StarPlane(server, SimpleNamespace(_config=tf.ConfigProto(), graph=None))  # type: ignore[arg-type]
    plane._met.add("/job:ps/task:0")
    call = plane.submit("/job:ps/task:0", "tf.run", "a stage", (), is_patient=False)
    assert call.done()
    assert isinstance(call.error(), Cancelled)


def test_at_the_end_of_the_process_what_waits_is_given_up_and_nobody_is_answered(
    tf: Any, runtime: Any
) -> None:
    from prpc_engine.tensorflow.runtime import Runtime
    from prpc_engine.tensorflow.stages import Stages, pack_part

    runtime = Runtime(tf.ConfigProto())  # another test has closed that of this module
    threads, registering = ThreadPoolExecutor(), ThreadPoolExecutor(1)
    stages = Stages(
        runtime, lambda handles, is_all: None, lambda incarnation: True, threads, registering
    )
    registered = stages.register("session", pack_part(part_and_put(tf, "the end")[0]))
    wait_until(registered.done, "the stage")
    code, handle = registered.result()
    assert code == 0, handle
    answer = stages.run(handle, "session", b"")
    wait_until(lambda: stages.find(handle).loaded._runs.get(answer), "the run")  # type: ignore[union-attr]
    stages.end(time.monotonic() + PATIENCE_S)
    threads.shutdown()  # its thread has come back from TensorFlow
    assert not answer.done()  # who asked finds that the process is gone
    registering.shutdown()
    runtime.close()
