"""The plane "sendrecv": tasks send each other values under keys of the step, and ask for them
(transfers.py says which).

once for each set of feeds, fetches and targets  the graph is cut as for "star"; stages are
                                                 registered at their tasks, then for each task the
                                                 program that runs them; the own part is loaded,
                                                 with ops that send and receive
each step                                        gets a number of its own; each program is told to
                                                 run it; whoever will receive something asks for it
                                                 at once, and it is answered when it is there

    a step    ends when                                       and then
    ran       the own part has run, and so have all programs  its values are fetched
    failed    any of these fails                              all receives here end; programs that
                                                              go on are told to give up; the first
                                                              error that is not of giving up is
                                                              raised
    given up  the session is closed                           the same, with Cancelled

A step may take an hour, as any receive may. What it left elsewhere is forgotten with the next one,
or at the session's end.

What stages within branches and loops take and give is not sent, but called for as in "star"; one
line of the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import errors_impl as tf_errors
from tensorflow.python.ops import script_ops

from prpc_engine import errors as engine_errors
from prpc_engine.cluster.names import device
from prpc_engine.cluster.receipt import Receipt
from prpc_engine.settings.config import TIMEOUT_S_MAX
from prpc_engine.tensorflow import errors, programs, proto, tensors
from prpc_engine.tensorflow.partition import Plan
from prpc_engine.tensorflow.rewrite import Rewriter, StageCall
from prpc_engine.tensorflow.runtime import Loaded, WaitingPart
from prpc_engine.tensorflow.server import TaskServer
from prpc_engine.tensorflow.stage_calls import Run
from prpc_engine.tensorflow.star import CLOSE_TIMEOUT_S, StarPlane, StarStep
from prpc_engine.tensorflow.transfers import Op, Transfers, transfers
from shard import Future, ShardError

STEP_BITS = 63  # as many as a step's number may have: two of them never meet
GIVE_UP_TIMEOUT_S = 5.0  # for a program to say that it has given up

logger = logging.getLogger("prpc")
_ENGINE_ERRORS = (engine_errors.RpcError, ShardError)


@dataclass(frozen=True)
class SendRecvStatistics:
    """A snapshot of one session of the plane "sendrecv": how many steps and messages its tasks
    needed.
    """

    steps: int
    programs: int  # RunGraph: one a task and step
    # RecvTensor and FuseRecvTensor: requests for values, from whichever task to whichever
    messages: int
    tensors: int  # values that were asked for by them
    calls: int  # other requests: stages that are called, and what is registered
    plans: int  # sets of feeds, fetches and targets


class _Ops:
    """The functions of one op that sends or receives."""

    def __init__(self, plane: SendRecvPlane, op: Op, index: int) -> None:
        self._plane, self._index = plane, index
        self._peer, self._keys, self._kinds = device(op.peer), op.keys, op.kinds

    def send(self, number: Any, *values: Any) -> None:
        """Have the values ready; a key more than there are values is a token's. Raises what
        errors.keep() makes.
        """
        step, send = int(number), self._plane.engine.send
        try:
            for key, value in zip(self._keys, values, strict=False):
                send(key, tensors.to_array(value), to=self._peer, step=step)
            for key in self._keys[len(values) :]:
                send(key, None, to=self._peer, step=step, is_dead=True)
        except BaseException as error:  # Ctrl-C, too
            raise errors.keep(self._plane.failure(step, error)) from None

    def receive(self, number: Any) -> list[Any]:
        """Wait for the values; none for a token. Raises what errors.keep() makes."""
        step = int(number)
        try:
            arrays = self._plane.under_way[step].receipts[self._index].result()
        except BaseException as error:  # Ctrl-C, too
            raise errors.keep(self._plane.failure(step, error)) from None
        return [
            tensors.from_array(array, kind)
            for kind, array in zip(self._kinds, arrays, strict=True)
            if array is not None
        ]


class _UnderWay:
    """One step, as long as it takes."""

    def __init__(self, number: int, loaded: Loaded | WaitingPart, run: Run) -> None:
        self.number, self.loaded, self._run = number, loaded, run
        run.ends.append(self.fail)
        if isinstance(loaded, WaitingPart):
            loaded.expect(self)
        self.calls: dict[str, Future] = {}  # of the programs, by task
        self.receipts: list[Receipt] = []
        self.error: Exception | None = None

    def replied(self, call: Future) -> None:
        """A program has ended: with an error, all end."""
        error = _outcome(call)
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End what waits here: what is received, what is called, and an op of the own part."""
        if self.error is None or isinstance(self.error, tf_errors.CancelledError):
            self.error = error
        for receipt in list(self.receipts):
            receipt.cancel()
        if isinstance(self.loaded, WaitingPart):
            self.loaded.give_up(self)
        self._run.fail(self.error)

    def run(self, feeds: Sequence[Any]) -> Any:
        """The own part."""
        loaded = self.loaded
        return loaded.run(feeds) if isinstance(loaded, Loaded) else loaded.run(feeds, self)

    def run_checked(self, feeds: Sequence[Any], options: Any, metadata: Any) -> Any:
        """As run(), with RunOptions, and a buffer for RunMetadata or None; a fetch of a branch that
        was not taken is an error.
        """
        loaded = self.loaded
        if isinstance(loaded, Loaded):
            return loaded.run_checked(feeds, options, metadata)
        return loaded.run_checked(feeds, options, metadata, self)


def _outcome(call: Future, timeout_s: float | None = None) -> Exception | None:
    """The error that a program ended with. Raises TimeoutError."""
    error = call.error(timeout_s)
    if isinstance(error, Exception):
        return errors.from_engine(error)
    code, *text = call.result()
    return errors.read(code, *text) if code else None


class _Nothing(Loaded):
    """An own part of which all runs elsewhere: TensorFlow refuses to run nothing."""

    def __init__(self) -> None:
        """There is nothing to load."""

    def run(self, feeds: Sequence[Any]) -> Any:
        """Nothing."""
        return []

    def run_checked(self, feeds: Sequence[Any], options: Any, metadata: Any) -> Any:
        """Nothing."""
        return []


@dataclass(frozen=True)
class _Exchange(StarStep):
    """What is kept for one set of feeds, fetches and targets."""

    plane: SendRecvPlane
    programs: dict[str, int]  # handles, by task
    receives: list[Op]
    messages: int
    tensors: int

    def run(self, feeds: Sequence[Any]) -> Any:
        """What it fetches."""
        return self.plane.exchange(self, _UnderWay.run, feeds)

    def run_checked(self, feeds: Sequence[Any], options: Any, metadata: Any) -> Any:
        """As run(), with RunOptions, and a buffer for RunMetadata or None; a fetch of a branch that
        was not taken is an error.
        """
        return self.plane.exchange(
            self, lambda going, fed: going.run_checked(fed, options, metadata), feeds
        )


class SendRecvPlane(StarPlane):
    """Runs the steps of one session: each task runs its part, and the tasks send each other values
    under keys.

    server   the task whose target the session has
    session  TensorFlow's

    Made by plane_for(), one for each session; thread-safe. Its steps raise errors of TensorFlow.
    How a
    step ends: the tables at the file's head.
    """

    knows_shards = False

    def __init__(self, server: TaskServer, session: Any) -> None:
        super().__init__(server, session)
        self.engine = server.engine
        said = [
            one
            for one in map(proto.tensor_fuse, (session._config, server.config))
            if one is not None
        ]
        self._fuse = said[0] if said else server.engine.settings.tensor_fuse
        self.under_way: dict[int, _UnderWay] = {}
        self._guard = threading.Lock()  # of the next one
        # steps that are over, and that the task has not heard this of
        self._behind: dict[str, list[int]] = {}
        self._programs = self._messages = self._tensors = 0

    def statistics(self) -> SendRecvStatistics:  # type: ignore[override]
        """A snapshot."""
        calls = self._calls - self._programs
        return SendRecvStatistics(
            self._runs, self._programs, self._messages, self._tensors, calls, len(self._steps)
        )

    # -- once --------------------------------------------------------------------------------------

    def _planned(self, plan: Plan, kept: list[Any]) -> StarStep:
        found = transfers(plan, self._fuse)
        if found.called:
            logger.info(
                "%d of %d stages are called, as in the plane star: they depend on branches, "
                "loops or other steps, as %r",
                len(found.called),
                len(plan.stages),
                found.called[0].members[0],
            )
        rewriter = Rewriter(plan, graph_pb2.GraphDef)
        registered = [
            [(block, self._submit_register(rewriter, block.stage)) for block in blocks]
            for blocks in found.programs.values()
        ]
        runs: list[Run] = []
        calls, called = self._make_calls(rewriter, found.called, kept, runs)
        for op in found.sends:
            calls.append(self._op(op, _Ops(self, op, 0).send, kept))
        for index, op in enumerate(found.receives):
            calls.append(self._op(op, _Ops(self, op, index).receive, kept))
        programs_of = {}
        for task, stages in zip(found.programs, registered, strict=True):
            packed = [programs.pack_block(block, self.handle_of(one)) for block, one in stages]
            programs_of[device(task)] = self._ask(
                device(task), programs.PROGRAM, "the program of a graph", (packed,)
            )
        part = Rewriter(found.own, graph_pb2.GraphDef).own(calls)
        loaded = self._load(part) if part.fetches or part.targets else _Nothing()
        for one in called:
            one.wait_until_registered()
        handles = {task: self.handle_of(one) for task, one in programs_of.items()}
        return _Exchange(
            loaded, plan.may_be_dead, kept, runs, self, handles, found.receives, *_counts(found)
        )

    @staticmethod
    def _op(op: Op, function: Callable[..., Any], kept: list[Any]) -> StageCall:
        kept.append(function)
        return StageCall(op.stage, script_ops._py_funcs.insert(function), "")

    def _ask(
        self, task: str, method: str, what: str, arguments: tuple[Any, ...], is_patient: bool = True
    ) -> Future:
        try:
            return self.submit(task, method, what, arguments, is_patient)
        except engine_errors.RpcError as error:
            raise errors.from_engine(error) from None

    # -- each step ---------------------------------------------------------------------------------

    def exchange(
        self, step: _Exchange, run: Callable[[_UnderWay, Sequence[Any]], Any], feeds: Sequence[Any]
    ) -> Any:
        """Run a step: the own part by `run`. Raises errors of TensorFlow."""
        number, trace, this = secrets.randbits(STEP_BITS), self.now.trace, self.now.run
        assert this is not None  # StarPlane began it
        going = self.under_way[number] = _UnderWay(number, step.loaded, this)
        try:
            self._start(going, step)
            values = run(going, [*feeds, np.array(number, np.int64)])
            for task, call in going.calls.items():
                error = _outcome(call)
                if error is not None:
                    raise error
                if trace is not None:
                    for metadata in call.result()[1:]:
                        trace.add(task, metadata)
        except BaseException as error:  # Ctrl-C, too
            raise self._given_up(going, error) from None
        finally:
            this.ends.clear()  # they hold what was received, and each other
            del self.under_way[number]
            with self._guard:
                for task in going.calls:
                    self._behind.setdefault(task, []).append(number)
            if self._ended is not None:  # close() may have looked before it was there
                self._tell_of_all()
            # the server was stopped: nothing is left of the step
            with contextlib.suppress(engine_errors.Closed):
                self.engine.cleanup(number)
        return values

    def _start(self, going: _UnderWay, step: _Exchange) -> None:
        self._messages += step.messages
        self._tensors += step.tensors
        number, timeout_s, trace = (
            going.number,
            min(self.left_s(self.now.until), TIMEOUT_S_MAX),
            self.now.trace,
        )
        options = b"" if trace is None else trace.options
        for task, handle in step.programs.items():
            arguments = (handle, number, timeout_s, self._taken(task), options)
            call = going.calls[task] = self._ask(
                task, programs.STEP, f"its part of step {number}", arguments, False
            )
            self._programs += 1
            call.when_done(going.replied)
        for op in step.receives:
            try:
                receipt = self.engine.submit_recv_many(
                    op.keys, source=device(op.peer), step=number, timeout_s=timeout_s
                )
            except engine_errors.RpcError as error:
                raise errors.from_engine(error) from None
            going.receipts.append(receipt)
        if going.error is not None:
            going.fail(going.error)  # again: it may have come before they were asked for

    def failure(self, number: int, error: BaseException) -> BaseException:
        """What a step that an op of it failed with `error` is to raise."""
        if not isinstance(error, _ENGINE_ERRORS):
            return error
        going = self.under_way.get(number)
        return (
            going.error
            if going is not None and going.error is not None
            else errors.from_engine(error)
        )

    def _given_up(self, going: _UnderWay, error: BaseException) -> BaseException:
        """The error to raise, once all have given up."""
        typed = errors.of_step(error)
        going.fail(errors.for_others(typed))
        found = [typed if going.error is None else going.error, typed]
        for task in [task for task, call in going.calls.items() if not call.done()]:
            self._tell(task, [going.number])
        for call in going.calls.values():
            try:
                outcome = _outcome(call, GIVE_UP_TIMEOUT_S)
            except TimeoutError:
                call.cancel()
                continue
            if outcome is not None:
                found.append(outcome)
        if not isinstance(typed, Exception):
            return typed
        return next((one for one in found if not isinstance(one, tf_errors.CancelledError)), typed)

    def _tell(self, task: str, steps: list[int]) -> None:
        """Nobody waits for the answer."""
        try:
            self.engine.ask(
                task, programs.GIVE_UP, "giving steps up", lambda _: (steps,), CLOSE_TIMEOUT_S
            )
        except engine_errors.RpcError as error:
            logger.debug(
                "%s does not hear that %d steps are over: %s", task, len(steps), str(error)
            )

    def close(
        self, kind: Any = tf_errors.CancelledError, text: str = "the session was closed"
    ) -> None:
        """End the session as StarPlane does, and tell the other tasks which steps are over. Again:
        tells of what came since.
        """
        super().close(kind, text)
        self._tell_of_all()

    def _tell_of_all(self) -> None:
        for task in list(self._behind):
            self._tell(task, self._taken(task))

    def _taken(self, task: str) -> list[int]:
        """The steps to tell it of now."""
        with self._guard:  # else one might come to a list that has left already
            return self._behind.pop(task, [])


def _counts(found: Transfers) -> tuple[int, int]:
    """Requests of a step, and the values that they ask for."""
    of_own = [op.keys for op in found.receives]
    of_programs = [
        request.keys
        for blocks in found.programs.values()
        for block in blocks
        for request in block.receives
    ]
    return len(of_own) + len(of_programs), sum(map(len, of_own)) + sum(map(len, of_programs))
