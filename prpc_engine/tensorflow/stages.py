"""What a task does for the sessions of others: it is given stages once, and runs them step after
step.

    verb      arguments                 answer                      runs in
    register  session, packed part      [0, handle]; [code, text]   the registering thread
    run       handle, session, tensors  [0, tensors...]; [code,     the turn that found the request
                                        text]                       when the stage took little time
                                                                    lately; else a thread
    trace     handle, session, options  [0, metadata, tensors...];  a thread
              and tensors               [code, text]
    close     session                   [0]; what runs for it is    the turn; frees in the
                                        given up                    registering thread
    reset     containers                [0]; [code, text]; all      the registering thread
                                        stages are freed

Tensors are what tensors.pack_all() makes of them.

The registering thread is one, and takes what it is given in the order in which it was asked: what a
session registered before it was closed is freed.

A handle is a number that no other process has, so that one of a task that was started again is
unknown: AbortedError, as the sessions of TensorFlow want it. Equal stages of several sessions are
one, unless a kernel's state is a session's own.

    a stage that no open session has  when it is freed
    has a state of its session's own  at once
    any other                         when IDLE_MAX later ones have become so: the next session of
                                      the same script has the same stages, and TensorFlow's graph
                                      cannot lose those of the last one
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.rpc.context import remaining_s
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.tensorflow import errors, tensors
from prpc_engine.tensorflow.rewrite import Fixed, GraphPart
from prpc_engine.tensorflow.runtime import Loaded, Runtime, WaitingPart
from prpc_engine.tensorflow.session_owners import SessionOwners
from prpc_engine.tensorflow.threads import DaemonThreads, StageThreads, end_threads

REGISTER, RUN, TRACE, CLOSE, RESET = "tf.register", "tf.run", "tf.trace", "tf.close", "tf.reset"
IDLE_MAX = 512  # stages that no session has; a script has some ten to fifty at a task
# a stage that takes less is run by the reactor's thread: a change of threads costs a tenth of that
QUICK_S = 0.001
FOREVER_S = 86_400.0  # a run that may wait for longer has no timer
END_LOOK_S = 0.001  # at the end of the process, between two looks at what runs
RUNS_AT_ONCE_MAX = 4096  # threads: each waits for a step, or for what a queue will bring


def pack_part(part: GraphPart) -> list[Any]:
    """What register() is given of it."""
    graph = part.graph.SerializeToString(deterministic=True)
    names = (part.feeds, part.fetches, part.targets, part.waiting)
    return [graph, _pack_fixed(part.fixed), _pack_fixed(part.kernels), *names]


def unpack_part(packed: Sequence[Any]) -> GraphPart:
    """The part. Raises ValueError and DecodeError for anything else."""
    graph, fixed, kernels, feeds, fetches, targets, waiting = packed
    graph_def = graph_pb2.GraphDef.FromString(graph)
    return GraphPart(
        graph_def, _unpack_fixed(fixed), feeds, fetches, targets, waiting, _unpack_fixed(kernels)
    )


def _pack_fixed(fixed: Mapping[str, Fixed]) -> list[list[Any]]:
    return [
        [name, one.is_private, [node.SerializeToString() for node in one.definitions]]
        for name, one in fixed.items()
    ]


def _unpack_fixed(packed: Sequence[Any]) -> dict[str, Fixed]:
    return {
        name: Fixed([node_def_pb2.NodeDef.FromString(one) for one in nodes], private)
        for name, private, nodes in packed
    }


@dataclass(frozen=True)
class StagesStatistics:
    """A snapshot of the stages that a task has registered and runs for sessions of other tasks."""

    stages: int  # registered
    idle: int  # of those, that no open session has: kept for the next one
    shared: int  # registrations of a stage that was there already
    runs: int
    runs_in_turn: int  # of those, in the reactor's thread
    running: int  # now, in threads


class Registered:
    """A stage that sessions of other tasks have registered here, loaded and ready to run."""

    def __init__(self, loaded: Loaded | WaitingPart, content: bytes, is_private: bool) -> None:
        self.loaded, self.content, self.is_private = loaded, content, is_private
        self.sessions: set[str] = set()  # that registered it
        self.is_quick = False  # not before it has run: its first run makes executors

    def run(self, packed: Sequence[Any], owner: object = None) -> list[Any]:
        """The answer."""
        try:
            return [0, *tensors.pack_all(self.fetched(tensors.unpack_all(packed), owner))]
        except Exception as error:
            return list(errors.told(error))

    def fetched(self, feeds: Sequence[Any], owner: object = None) -> Sequence[Any]:
        """What it fetches, for what it is fed. Raises errors of TensorFlow."""
        started = time.perf_counter()
        loaded = self.loaded
        fetched: Sequence[Any] = (
            loaded.run(feeds) if isinstance(loaded, Loaded) else loaded.run(feeds, owner)
        )
        self.is_quick = isinstance(loaded, Loaded) and time.perf_counter() - started < QUICK_S
        return fetched

    def run_traced(self, options: bytes, packed: Sequence[Any], owner: object) -> list[Any]:
        """The answer, with RunMetadata."""
        try:
            fetched, metadata = self.traced(tensors.unpack_all(packed), options, owner)
            return [0, metadata, *tensors.pack_all(fetched)]
        except Exception as error:
            return list(errors.told(error))

    def traced(
        self, feeds: Sequence[Any], options: bytes, owner: object = None
    ) -> tuple[Sequence[Any], bytes]:
        """What it fetches, and RunMetadata by these RunOptions: of a part that may wait, none.
        Raises errors of TensorFlow.
        """
        loaded = self.loaded
        return (
            loaded.run_traced(feeds, options)
            if isinstance(loaded, Loaded)
            else (loaded.run(feeds, owner), b"")
        )


@dataclass(frozen=True)
class _Run:
    """One that goes on in a thread."""

    stage: Registered
    session: str
    peer: Peer | None


def _time_is_over(loaded: WaitingPart, answer: Deferred, late: list[Deferred]) -> None:
    late.append(answer)
    loaded.give_up(answer)


_made: weakref.WeakSet[Stages] = weakref.WeakSet()
os.register_at_fork(after_in_child=_made.clear)  # none of their threads is there


class Stages:
    """Keeps the stages that sessions of other tasks register here, runs them step after step, and
    frees them.

    runtime       loads and runs them
    on_freed      told the handles of stages that are gone, and whether the task was reset, in the
                  registering thread
    is_connected  whether a process, by its incarnation, has a connection to this one
    threads       run stages that take longer than a turn may. None: of its own
    registering   runs what loads and frees them, one after the other. None: a thread of its own

    Both are shut down by close().

    Owned by a task's server, which closes it; its verbs run in the reactor's thread. A verb that
    fails answers [code, text]. Verbs, and when a stage is freed: the tables at the file's head.
    """

    def __init__(
        self,
        runtime: Runtime,
        on_freed: Callable[[Sequence[int], bool], None],
        is_connected: Callable[[int], bool],
        threads: StageThreads | None = None,
        registering: StageThreads | None = None,
    ) -> None:
        self._runtime, self._on_freed = runtime, on_freed  # handles; and that the task was reset
        self._threads = threads or DaemonThreads(RUNS_AT_ONCE_MAX, "prpc-stage")
        self._stages: dict[int, Registered] = {}
        self._by_content: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # that no session has, the oldest first
        self._registering = registering or DaemonThreads(1, "prpc-register")
        self._next_handle = secrets.randbits(40) << 20
        self._running: dict[Deferred, _Run] = {}
        self._owners = SessionOwners(is_connected, self.close_session)
        self._is_in_turn = False  # a stage runs in the reactor's thread
        self._is_over = False  # the process ends: no stage is run, and no request is answered
        _made.add(self)
        self._shared = self._runs = self._in_turn = 0

    @property
    def verbs(self) -> dict[str, Callable[..., Any]]:
        """By name, for the server."""
        return {
            REGISTER: self.register,
            RUN: self.run,
            TRACE: self.trace,
            CLOSE: self.close_session,
            RESET: self.reset,
        }

    def statistics(self) -> StagesStatistics:
        """A snapshot."""
        return StagesStatistics(
            len(self._stages),
            len(self._idle),
            self._shared,
            self._runs,
            self._in_turn,
            len(self._running),
        )

    def find(self, handle: int) -> Registered | None:
        """The stage that has it."""
        return self._stages.get(handle)

    def register(self, session: str, packed: list[Any]) -> Deferred:
        """Load a stage for a session, or find an equal one; [0, its handle] or [code, text]. In the
        registering thread.
        """
        answer = Deferred()
        self._owners.add(session, calling_peer())
        self._registering.submit(self._register, session, packed, answer)
        return answer

    def _register(self, session: str, packed: list[Any], answer: Deferred) -> None:
        try:
            is_private = any(private for made_once in packed[1:3] for _, private, _ in made_once)
            content = hashlib.sha256(
                repr([session if is_private else "", packed]).encode()
            ).digest()
            handle = self._by_content.get(content)
            if handle is None:
                part = unpack_part(packed)
                runtime = self._runtime
                loaded = (
                    WaitingPart(runtime, part, session)
                    if part.waiting
                    else runtime.load(part, session)
                )
                handle = self._by_content[content] = self._next_handle
                self._next_handle += 1
                self._stages[handle] = Registered(loaded, content, is_private)
            else:
                self._shared += 1
            self._stages[handle].sessions.add(session)
            self._idle.pop(handle, None)
        except Exception as error:
            answer.reply(list(errors.told(error)))
            return
        answer.reply([0, handle])

    def run(self, handle: int, session: str, *packed: Any) -> list[Any] | Deferred:
        """Run a stage on these tensors; [0, tensors...] or [code, text]. In a thread, unless it
        took little time lately.
        """
        stage = self._stages.get(handle)
        if stage is not None and stage.is_quick and not self._is_over:
            self._runs += 1
            self._in_turn += 1
            self._is_in_turn = True
            answer = stage.run(packed)
            self._is_in_turn = False
            return answer
        return self._in_thread(handle, session, lambda stage, answer: stage.run(packed, answer))

    def trace(
        self, handle: int, session: str, options: bytes, *packed: Any
    ) -> list[Any] | Deferred:
        """As run(), traced by these RunOptions, always in a thread; [0, RunMetadata, tensors...] or
        [code, text].
        """
        return self._in_thread(
            handle, session, lambda stage, answer: stage.run_traced(options, packed, answer)
        )

    def _in_thread(
        self, handle: int, session: str, run: Callable[[Registered, Deferred], list[Any]]
    ) -> list[Any] | Deferred:
        stage = self._stages.get(handle)
        if stage is None:
            return [
                tf_errors.ABORTED,
                f"no graph of handle {handle} is registered here: the task was started again",
            ]
        self._runs += 1
        answer, peer = Deferred(), calling_peer()
        self._running[answer] = _Run(stage, session, peer)
        answer.when_done(self._over)
        late: list[Deferred] = []  # this one, once its time is over
        if isinstance(stage.loaded, WaitingPart):
            stage.loaded.expect(answer)
            left_s = None if peer is None else remaining_s(peer.reactor.clock)
            if peer is not None and left_s is not None and left_s < FOREVER_S:
                peer.reactor.call_later(left_s, partial(_time_is_over, stage.loaded, answer, late))

        def carry_out() -> None:
            said = run(stage, answer)
            if late and said[0]:  # what ended it is how it was given up; its caller may still wait
                said = [tf_errors.DEADLINE_EXCEEDED, "the step's time was over"]
            if not self._is_over:  # else its caller hears that the process ends
                answer.reply(said)

        try:
            self._threads.submit(carry_out)
        except RuntimeError as error:  # the system has no more threads
            answer.reply(list(errors.told(error)))
        return answer

    def _over(self, answer: Any) -> None:
        run = self._running.pop(answer, None)
        if run is not None and isinstance(run.stage.loaded, WaitingPart):
            # its caller has given it up, or it failed before it could begin
            run.stage.loaded.give_up(answer)

    def close_session(self, session: str) -> list[Any]:
        """A session is over: give up what waits for it here, and free its stages in the registering
        thread; [0] at once.
        """
        self._owners.remove(session)
        self._give_up(lambda run: run.session == session)
        self._registering.submit(self._free, session)
        return [0]

    def _free(self, session: str) -> None:
        freed = []
        for handle, stage in self._stages.items():
            if session in stage.sessions:
                stage.sessions.remove(session)
                if stage.is_private:
                    freed.append(handle)
                elif not stage.sessions:
                    self._idle[handle] = None
        freed.extend(list(self._idle)[: max(len(self._idle) - IDLE_MAX, 0)])
        self._drop(freed)
        self._runtime.forget(session)

    def _drop(self, handles: list[int]) -> None:
        for handle in handles:
            self._idle.pop(handle, None)
            del self._by_content[self._stages.pop(handle).content]
        self._on_freed(handles, False)

    def reset(self, containers: list[str]) -> Deferred:
        """Free all stages, and drop what is in these containers; [0] or [code, text]. In the
        registering thread.
        """
        answer = Deferred()
        self._registering.submit(self._reset, containers, answer)
        return answer

    def _reset(self, containers: list[str], answer: Deferred) -> None:
        try:
            self._drop(list(self._stages))
            try:
                self._runtime.reset(containers)
            finally:
                # last: what was made of the task's graph until now may mean what is gone
                self._on_freed([], True)
        except Exception as error:
            answer.reply(list(errors.told(error)))
            return
        answer.reply([0])

    def peer_lost(self, peer: Peer) -> None:
        """A connection is lost: cancel its runs that wait for a queue, since an item that they took
        could not be sent. Close its sessions if it does not connect again (session_owners.py).
        """
        self._give_up(lambda run: run.peer is peer)
        self._owners.lost(peer)

    def _give_up(self, is_meant: Callable[[_Run], bool]) -> None:
        # list() collects garbage on its way: other threads come in
        for answer, run in self._running.copy().items():
            if isinstance(run.stage.loaded, WaitingPart) and is_meant(run):
                run.stage.loaded.give_up(answer)

    def end(self, until: float) -> None:
        """At the end of the process: run nothing any more, give up what waits, and wait for what
        runs in the reactor's thread, until then by time.monotonic() at most. Requests are not
        answered: their callers are told that the connection is lost.
        """
        self._is_over = True
        self._give_up(lambda run: True)
        while self._is_in_turn and time.monotonic() < until:
            time.sleep(END_LOOK_S)

    def close(self) -> None:
        """Give up what runs."""
        self._runtime.close()
        self._registering.shutdown(wait=False)
        self._threads.shutdown(wait=False)


def end_stages(until: float) -> None:
    """At the end of the process: all of them, as Stages.end(), and their threads."""
    for stages in list(_made):
        stages.end(until)
    end_threads(until)
