"""The ops of a session's own part that call stages of other tasks, and one run of all of them. No
step is cut or loaded here.

    a run        one of its calls failed                 it ended with an error
    goes on      the others are cancelled, with that     what it sent and nobody waits for is
                 error                                   forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.cluster.names import device
from prpc_engine.tensorflow import errors, stages, tensors
from prpc_engine.tensorflow.deal import device_of
from prpc_engine.tensorflow.partition import Stage
from prpc_engine.tensorflow.tracing import Trace
from prpc_engine.tensorflow.traffic import StepTraffic
from shard import Future


class _HasRun(Protocol):
    run: Run | None


class CallingPlane(Protocol):
    """What a plane has for the ops of its steps."""

    scope: str
    traffic: StepTraffic

    @property
    def now(self) -> _HasRun:
        """Of the step that runs in this thread."""

    def left_s(self, until: float | None) -> float:
        """For what a step that ends then asks of another task now."""

    def submit(
        self,
        task: str,
        method: str,
        what: str,
        arguments: tuple[Any, ...],
        is_patient: bool = True,
        left_s: float | None = None,
        waited_for: str = "",
    ) -> Future:
        """Ask a task. Raises RpcError."""

    def handle_of(self, registered: Future) -> int:
        """Of a stage. Waits for the task; raises errors of TensorFlow."""


class CalledStage:
    """The functions of the op that calls one stage, and of the one that sends before it when there
    are two.

    plane       of the session
    registered  the future of the stage's handle: wait_until_registered() before the first call
    runs        of the step, that go on
    """

    __slots__ = (
        *("_handle", "_plane", "_registered", "_runs", "_sent", "_stage", "_text"),
        *("_waited_for", "called", "task"),
    )

    def __init__(
        self, plane: CallingPlane, stage: Stage, registered: Future, runs: Sequence[Run]
    ) -> None:
        self._plane, self._stage, self._registered, self._runs = plane, stage, registered, runs
        self._handle = 0  # before wait_until_registered()
        self.task = device_of(stage.task)
        self._waited_for = "" if stage.may_wait else self.task
        self._text = f"a stage of {len(stage.members)} ops ({stage.members[0]}, ...)"
        self._sent: dict[int, _Sent] = {}

    def wait_until_registered(self) -> None:
        """Before the first call. Raises errors of TensorFlow."""
        self._handle = self._plane.handle_of(self._registered)

    def call(self, *values: Any) -> list[Any]:
        """Send, and wait. Raises what errors.keep() makes."""
        try:
            return self._result(*self._submit(values))
        except BaseException as error:  # Ctrl-C, too
            raise errors.keep(error) from None

    def send(self, *values: Any) -> np.int64:
        """Send; a number for wait()."""
        try:
            sent = self._submit(values)
        except BaseException as error:  # Ctrl-C, too
            raise errors.keep(error) from None
        self._sent[id(sent[0])] = sent
        return np.int64(id(sent[0]))

    def wait(self, number: Any) -> list[Any]:
        """Wait for what was sent."""
        try:
            return self._result(*self._sent.pop(int(number)))
        except BaseException as error:  # Ctrl-C, too
            raise errors.keep(error) from None

    def forget(self, run: Run) -> None:
        """Nobody will wait for what it sent."""
        for number, (_, one) in self._sent.copy().items():
            if one is run:
                del self._sent[number]

    def _run(self) -> Run | None:
        """Which it is called in. TensorFlow goes on in another step's thread when that had what an
        op waited for; then it is the only one that there is, or is not known."""
        runs, here = list(self._runs), self._plane.now.run
        if here in runs:
            return here
        return runs[0] if len(runs) == 1 else None

    def _submit(self, values: Sequence[Any]) -> _Sent:
        plane, packed, run = self._plane, tensors.pack_all(values), self._run()
        plane.traffic.sent(packed)
        until, trace = (None, None) if run is None else (run.until, run.trace)
        method, options = (stages.RUN, ()) if trace is None else (stages.TRACE, (trace.options,))
        arguments = (self._handle, plane.scope, *options, *packed)
        left_s = plane.left_s(until)
        call = plane.submit(
            self.task, method, self._text, arguments, False, left_s, self._waited_for
        )
        if run is not None:
            run.add(self, call)
        return call, run

    def _result(self, call: Future, run: Run | None) -> list[Any]:
        error = self.failure(call)
        if error is not None:
            raise errors.keep(error)
        packed = call.result()[1:]
        if run is not None and run.trace is not None:
            run.trace.add(device(self._stage.task), packed.pop(0))
        self._plane.traffic.received(packed)
        return tensors.unpack_all(packed)

    def failure(self, call: Future) -> Exception | None:
        """What a call ends with, as an error of TensorFlow. Waits for it."""
        error = call.error()
        if isinstance(error, Exception):
            return error if isinstance(error, tf_errors.OpError) else errors.from_engine(error)
        answer = call.result()
        return errors.read(answer[0], f"{answer[1]} (at {self.task})") if answer[0] else None


class Run:
    """One run of a step: what its caller said of it, and what it asks of other tasks. When any of
    that fails, nobody waits for the rest, which would take from a queue what nobody gets."""

    def __init__(self, until: float | None, trace: Trace | None) -> None:
        self.until, self.trace = until, trace
        self.ends: list[Callable[[Exception], object]] = []  # what else ends with it
        self._error: Exception | None = None  # the first one
        self._calls: set[Future] = set()  # under way
        self._called: set[CalledStage] = set()

    def add(self, stage: CalledStage, call: Future) -> None:
        """It asked for that."""
        self._calls.add(call)
        self._called.add(stage)
        call.when_done(partial(self._answered, stage))
        if self._error is not None:  # it may have come before this was there
            call.cancel(self._error)

    def _answered(self, stage: CalledStage, call: Future) -> None:
        self._calls.discard(call)
        error = stage.failure(call)
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Give up what is under way; again: does nothing."""
        if self._error is not None:
            return
        self._error = error
        for call in list(self._calls):
            call.cancel(error)
        for end in list(self.ends):
            end(error)

    def failed(self, error: Exception) -> None:
        """It is over, with that error."""
        self.fail(error)
        for stage in self._called:
            stage.forget(self)
        self._error = None  # whose traceback holds who holds this


_Sent = tuple[Future, Run | None]
