"""What somebody else does between two looks at a thing:
each test has it done at that very place.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

import pytest

from prpc_engine.errors import Closed
from prpc_engine.settings.cluster_spec import Task
from shard import Future
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.tensorflow.tasks import clusters

WHILE_S = 0.2  # how long somebody else has for what he would do at once if nobody kept him from it
PS = "/job:ps/task:0"


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, by its old face."""
    found = pytest.importorskip(
        "tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'"
    ).compat.v1
    with found.Graph().as_default(), found.Session() as session:
        session.run(found.constant(1.0))  # TensorFlow opens a file then, which it keeps
    return found


def meanwhile(function: Callable[..., object], *arguments: object) -> threading.Thread:
    """Another thread does that, as far as it may."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join(WHILE_S)
    return thread


def done(value: object) -> Future:
    future = Future()
    future.set_result(value)
    return future


# -- a task's server -------------------------------------------------------------------------------


@pytest.fixture
def servers(tf: Any) -> Iterator[Callable[[], Any]]:
    """Makes servers of one task at one port, one after the other."""
    from prpc_engine.tensorflow.server import TaskServer

    definition = tf.train.Server.__init__.__globals__["_make_server_def"](
        clusters(1, ps=1)["prpc"], "ps", 0, "prpc", None
    )
    made: list[TaskServer] = []

    def make() -> TaskServer:
        made.append(TaskServer(definition))
        return made[-1]

    yield make
    for server in made:
        server.close()


class Plane:
    """One that is asked to forget only."""

    def forget(self) -> None:
        """See Plane."""


class Watched(WeakSet[Any]):
    """Somebody comes in when the first one has been seen."""

    comes: Callable[[], object]

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self.comes()
            yield one


def test_a_session_may_begin_while_all_are_told_of_a_reset(servers: Callable[[], Any]) -> None:
    server, planes, entering = servers(), [Plane(), Plane(), Plane()], []
    server.sessions._planes = watched = Watched()
    watched.comes = lambda: (
        entering.append(meanwhile(server.sessions.add, planes[2])) if not entering else None
    )
    for plane in planes[:2]:
        server.sessions.add(plane)
    server._forget([], True)
    entering[0].join()
    assert len(server.sessions.planes()) == 3


def test_a_server_closed_again_does_not_take_its_ports_next_server_from_its_sessions(
    servers: Callable[[], Any],
) -> None:
    from prpc_engine.tensorflow.server import server_of

    before = servers()
    before.start()
    before.close()
    after = servers()
    after.start()
    before.close()
    assert server_of(after.target) is after


def test_a_hook_that_is_taken_out_serves_who_is_in_it(tf: Any) -> None:
    import prpc_engine.tensorflow as prpc_tf

    prpc_tf.install()
    try:
        hook = tf.Session.run
    finally:
        prpc_tf.uninstall()
    assert hook is not tf.Session.run
    with tf.Graph().as_default(), tf.Session() as session:
        assert hook(session, tf.constant(2.0)) == 2.0


class Filled(dict[int, Exception]):
    """Whoever goes through it finds that another thread adds to it."""

    def __iter__(self) -> Iterator[int]:
        found = super().__iter__()
        self[len(self)] = ValueError("of another thread")
        return found


def test_errors_are_kept_by_several_threads_at_once(
    tf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prpc_engine.tensorflow import errors

    monkeypatch.setattr(errors, "KEPT_MAX", 2)
    monkeypatch.setattr(errors, "_kept", Filled())
    kept = [errors.keep(ValueError(str(number))) for number in range(3)]
    found = [str(errors.of_step(one)) for one in kept]
    assert found[0].startswith("prpc-error-")  # too old
    assert found[1:] == ["1", "2"]


# -- stages and programs ---------------------------------------------------------------------------


class Engine:
    """Notes what it is asked to send and to forget."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_closed = False

    def send(self, key: str, value: object, **_: object) -> None:
        self.log.append(f"send {key}")

    def submit_recv_many(self, *_: object, **__: object) -> None:
        raise AssertionError("nothing is received")

    def cleanup(self, step: int) -> None:
        if self.is_closed:
            raise Closed("stopped")
        self.log.append(f"cleanup {step}")


class Stage:
    """One that makes a value, when the test says so."""

    is_quick = False

    def __init__(self) -> None:
        self.begins, self.goes_on = threading.Event(), threading.Event()

    def fetched(self, feeds: Sequence[Any]) -> list[Any]:
        self.begins.set()
        assert self.goes_on.wait(PATIENCE_S)
        return [1.0]


PROGRAM = [[7, [], [], ["key"], [[PS, "key", False]]]]  # one stage, whose value goes to a ps


@pytest.fixture
def programs(tf: Any) -> Iterator[Any]:
    from prpc_engine.tensorflow.programs import Programs

    stage, engine, threads = Stage(), Engine(), ThreadPoolExecutor()
    stages = SimpleNamespace(find=lambda handle: stage)
    made = Programs(stages, lambda: engine, threads)  # type: ignore[arg-type,return-value]
    made.stage, made.engine = stage, engine  # type: ignore[attr-defined]
    made.stages, made.threads = stages, threads  # type: ignore[attr-defined]
    yield made
    stage.goes_on.set()
    made.close()
    threads.shutdown()


def test_a_program_is_not_told_again_when_its_stage_is_freed_while_it_is_entered(
    programs: Any,
) -> None:
    freeing: list[threading.Thread] = []

    def find(handle: int) -> Any:
        if not freeing:
            freeing.append(meanwhile(programs.forget, [handle]))
        return programs.stage

    programs.stages.find = find
    programs.program(PROGRAM)
    freeing[0].join()
    assert programs.statistics().programs == 0


def test_what_a_stage_sends_in_a_step_that_was_given_up_meanwhile_is_forgotten(
    programs: Any,
) -> None:
    answer = programs.step(programs.program(PROGRAM)[1], 5, 60.0, [], b"")
    assert programs.stage.begins.wait(PATIENCE_S)
    programs.give_up([5])
    assert answer.done()
    programs.stage.goes_on.set()
    programs.threads.shutdown()
    assert "send key" in programs.engine.log
    assert programs.engine.log[-1] == "cleanup 5"


class Ended(dict[int, Any]):
    """When a step is about to be among those that have ended, who began it is lost."""

    lost: Callable[[], object]

    def __setitem__(self, step: int, peer: Any) -> None:
        self.lost()
        super().__setitem__(step, peer)


def test_a_step_that_ends_while_who_began_it_is_lost_is_forgotten(programs: Any) -> None:
    programs._ended = Ended()
    # which peer the step is of, outside of a handler
    programs._ended.lost = lambda: programs.peer_lost(None)
    programs.stage.goes_on.set()
    answer = programs.step(programs.program(PROGRAM)[1], 5, 60.0, [], b"")
    programs.threads.shutdown()
    assert answer.result() == [0]
    for _ in range(2):
        assert programs.engine.log == ["send key", "cleanup 5"]
        programs.peer_lost(None)  # once, and then no more


def test_a_peer_that_is_lost_while_the_server_stops_is_no_error(programs: Any) -> None:
    programs.stage.goes_on.set()
    programs.step(programs.program(PROGRAM)[1], 5, 60.0, [], b"")
    programs.threads.shutdown()
    programs.engine.is_closed = True
    programs.peer_lost(None)
    programs.engine.is_closed = False
    programs.give_up([5])
    assert programs.engine.log == ["send key"], "it was forgotten then"


class Runtime:
    """Loads nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def load(self, part: object, scope: str) -> object:
        return None

    def forget(self, scope: str) -> None:
        self.log.append("forget")

    def reset(self, containers: list[str]) -> None:
        self.log.append("reset")

    def close(self) -> None:
        """Nothing runs."""


class Held(bytes):
    """Who looks at it waits."""

    begins, goes_on = threading.Event(), threading.Event()

    def __repr__(self) -> str:
        self.begins.set()
        assert self.goes_on.wait(PATIENCE_S)
        return "held"


def stages_of(
    runtime: Any, on_freed: Callable[[Sequence[int], bool], None] = lambda handles, is_all: None
) -> Any:
    from prpc_engine.tensorflow.stages import Stages

    return Stages(runtime, on_freed, lambda incarnation: True)


def test_what_a_session_registers_before_it_is_closed_is_freed(tf: Any) -> None:
    runtime = Runtime()
    stages = stages_of(runtime)
    answer = stages.register("session", [Held(), [], [], [], [], [], []])
    assert Held.begins.wait(PATIENCE_S)
    stages.close_session("session")
    meanwhile(lambda: wait_until(lambda: runtime.log, "the end of the session")).join(0)
    Held.goes_on.set()
    wait_until(lambda: answer.done() and runtime.log, "both")
    stages.close()
    assert stages.statistics().idle == 1


class Restless:
    """Adds to a dict whenever garbage is collected, as other threads may then."""

    def __init__(self, changed: dict[Any, Any]) -> None:
        self.changed, self.itself = changed, self

    def __del__(self) -> None:
        if self.changed:  # until the test has cleared it
            self.changed[len(self.changed)] = next(iter(self.changed.values()))
            Restless(self.changed)


@pytest.mark.parametrize("of", ["stages", "programs"])
def test_a_peer_may_be_lost_while_steps_end_in_other_threads(
    tf: Any, programs: Any, of: str
) -> None:
    stages = stages_of(Runtime())
    changed: dict[Any, Any] = stages._running if of == "stages" else programs._ended  # type: ignore[assignment]
    changed.update(
        {
            number: SimpleNamespace(peer=None, stage=SimpleNamespace(loaded=None))
            for number in range(50)
        }
    )
    Restless(changed)
    peer = SimpleNamespace(connection=SimpleNamespace(peer_incarnation=1), reactor=None)
    # more than Python keeps: the next ones are made anew
    pairs = [(number, number) for number in range(5000)]
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        (stages if of == "stages" else programs).peer_lost(peer)
    finally:
        changed.clear()
        pairs.clear()
        gc.set_threshold(*before)
        gc.collect()
        stages.close()


def test_what_sessions_here_make_of_the_graph_is_forgotten_once_its_containers_are_gone(
    tf: Any,
) -> None:
    runtime = Runtime()
    stages = stages_of(
        runtime, lambda handles, is_all: runtime.log.append("all") if is_all else None
    )
    answer = stages.reset([""])
    wait_until(answer.done, "the reset")
    stages.close()
    assert runtime.log == ["reset", "all"]


# -- sessions --------------------------------------------------------------------------------------


class Tasks:
    """Those that a session asks. `meanwhile`: what happens while they are asked, by verb, once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.meanwhile: dict[str, Callable[[], object]] = {}
        self.answer: Callable[[str], Future] = lambda method: done([0, 1])

    def ask(
        self,
        task: str,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *_: object,
    ) -> Future:
        self.meanwhile.pop(method, lambda: None)()
        self.asked.append((method, arguments(1)))
        return self.answer(method)

    def cleanup(self, step: int) -> None:
        """Nothing is here."""

    settings = SimpleNamespace(tensor_fuse=False)


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


def plane_of(tf: Any, kind: str, tasks: Tasks, session: Any = None) -> Any:
    from prpc_engine.tensorflow.plane import PLANES

    worker = Task("worker", 0)
    of_server = {"tasks": frozenset(), "task": worker, "master": worker, "processes": 1}
    server = SimpleNamespace(**of_server, config=tf.ConfigProto(), engine=tasks)
    return PLANES[kind](server, session or SimpleNamespace(_config=tf.ConfigProto(), graph=None))  # type: ignore[arg-type]


def test_a_session_that_is_dropped_ends_then_and_not_when_some_thread_collects_garbage(
    tf: Any, tasks: Tasks
) -> None:
    session = tf.Session(graph=tf.Graph())
    session._prpc = plane_of(tf, "star", tasks, session)
    seen = ref(session)
    gc.disable()
    try:
        del session
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_registered_while_the_session_is_closed_is_freed(tf: Any, tasks: Tasks) -> None:
    from prpc_engine.tensorflow.rewrite import GraphPart

    plane = plane_of(tf, "star", tasks)
    tasks.meanwhile["tf.register"] = plane.close
    stage = SimpleNamespace(task=Task("ps", 0), members=["op"], may_wait=False)
    plane._submit_register(
        SimpleNamespace(stage=lambda _: GraphPart(tf.Graph().as_graph_def())), stage
    )
    assert [method for method, _ in tasks.asked] == ["tf.close", "tf.register", "tf.close"]


def test_a_step_made_while_the_tasks_forgot_what_it_is_made_of_is_made_again(
    tf: Any, tasks: Tasks
) -> None:
    plane, made = plane_of(tf, "star", tasks), []

    def make(*_: object) -> Any:
        number = len(made)
        step = {"may_be_dead": False, "runs": [], "has_shards": False}
        made.append(SimpleNamespace(run=lambda feeds: number, **step))
        if len(made) == 1:
            plane.forget()
        return made[-1]

    plane._make = make
    assert [plane.run([], [], {}, None, None) for _ in range(2)] == [1, 1]


def exchange_of(plane: Any) -> Any:
    """A step of which a ps runs all."""
    from prpc_engine.tensorflow.sendrecv import _Exchange, _Nothing

    return _Exchange(_Nothing(), False, [], [], plane, {PS: 1}, [], 0, 0)


def steps_told(tasks: Tasks) -> list[int]:
    """Those of which a ps has heard that they are over."""
    return [
        step for method, arguments in tasks.asked if method == "tf.give_up" for step in arguments[0]
    ]


class Behind(dict[str, list[int]]):
    """When a step is about to be noted, somebody else closes the session."""

    close: Callable[[], object]

    def setdefault(self, task: str, steps: list[int]) -> list[int]:  # type: ignore[override]
        found = super().setdefault(task, steps)
        self.close()
        return found


def test_a_step_that_ends_while_the_tasks_are_told_of_those_before_is_told_too(
    tf: Any, tasks: Tasks
) -> None:
    plane, closing = plane_of(tf, "sendrecv", tasks), []
    tasks.answer = lambda method: done([0])
    plane._make = lambda *_: exchange_of(plane)
    plane._behind = Behind()
    plane._behind.close = lambda: closing.append(meanwhile(plane.close))
    plane.run([], [], {}, None, None)
    closing[0].join()
    (number,) = [arguments[1] for method, arguments in tasks.asked if method == "tf.step"]
    assert steps_told(tasks) == [number]


def test_a_step_that_ends_after_its_session_was_closed_is_told_to_be_over(
    tf: Any, tasks: Tasks
) -> None:
    plane = plane_of(tf, "sendrecv", tasks)
    tasks.answer = lambda method: done([0])
    tasks.meanwhile["tf.step"] = plane.close
    plane._make = lambda *_: exchange_of(plane)
    plane.run([], [], {}, None, None)
    (number,) = [arguments[1] for method, arguments in tasks.asked if method == "tf.step"]
    assert number in steps_told(tasks)


def test_statistics_of_a_step_that_begins_count_no_call_twice(tf: Any, tasks: Tasks) -> None:
    plane, seen = plane_of(tf, "sendrecv", tasks), []
    tasks.answer = lambda method: done([0])
    tasks.meanwhile["tf.step"] = lambda: seen.append(plane.statistics().calls)
    plane._make = lambda *_: exchange_of(plane)
    plane.run([], [], {}, None, None)
    assert plane.statistics().calls == 0
    assert seen[0] >= 0


def test_what_a_step_received_goes_with_it_and_not_when_garbage_is_collected(
    tf: Any, tasks: Tasks
) -> None:
    plane, seen = plane_of(tf, "sendrecv", tasks), []
    tasks.answer = lambda method: done([0])
    tasks.meanwhile["tf.step"] = lambda: seen.extend(
        (ref(plane.now.run), ref(*plane.under_way.values()))
    )
    plane._make = lambda *_: exchange_of(plane)
    gc.disable()
    try:
        plane.run([], [], {}, None, None)
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()


def test_the_first_call_of_a_step_that_fails_ends_the_others(tf: Any, tasks: Tasks) -> None:
    from prpc_engine.tensorflow.stage_calls import CalledStage

    plane, calls, runs = plane_of(tf, "star", tasks), [Future(), Future()], []  # type: ignore[var-annotated]
    tasks.answer = lambda method: calls[len(tasks.asked) - 1]
    stages = [
        CalledStage(
            plane, SimpleNamespace(task=Task("ps", index), members=["op"], may_wait=False), 1, runs
        )
        for index in (0, 1)
    ]  # type: ignore[arg-type]

    def run(feeds: object) -> Any:
        numbers = [stage.send() for stage in stages]
        calls[1].set_result([3, "no number"])
        return stages[0].wait(numbers[0])

    plane._make = lambda *_: SimpleNamespace(
        run=run, may_be_dead=False, has_shards=False, runs=runs
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"no number \(at /job:ps/task:1\)"):
        plane.run([], [], {}, None, None)
    assert calls[0].done()
    assert not runs
    assert not any(stage._sent for stage in stages)
