"""The plane "star": the session's task calls the others, and they never call each other.

once for each set of feeds, fetches and targets  the graph is cut (partition.py); each stage is
                                                 registered at its task; the own part is loaded,
                                                 with an op for each stage that calls it
each step                                        one run of the own part; each of those ops sends
                                                 what its stage is fed, and waits for what it
                                                 fetches; the first that fails ends them all
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as tf_session
from tensorflow.python.framework import errors_impl as tf_errors
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import script_ops

from prpc_engine import errors as engine_errors
from prpc_engine.cluster.names import device
from prpc_engine.rpc.message import TIMEOUT_S_MAX
from prpc_engine.tensorflow import errors, stages
from prpc_engine.tensorflow.bits import Refused, StepInBits, Unkept
from prpc_engine.tensorflow.deal import ShardPlacer, TaskShard, device_of
from prpc_engine.tensorflow.lower import lowered
from prpc_engine.tensorflow.nodes import OF_STEP, Edge, Graph, Signature, has_random_state
from prpc_engine.tensorflow.partition import Plan, Stage, Unsupported, cut
from prpc_engine.tensorflow.place import Misplaced, Placer, cpu_of, filtered
from prpc_engine.tensorflow.remote import RemoteMaster
from prpc_engine.tensorflow.rewrite import GraphPart, Rewriter, StageCall
from prpc_engine.tensorflow.runtime import Loaded, Runtime, WaitingPart
from prpc_engine.tensorflow.server import DEAL, TaskServer
from prpc_engine.tensorflow.stage_calls import CalledStage, Run
from prpc_engine.tensorflow.stalls import Awaited
from prpc_engine.tensorflow.tracing import Trace
from prpc_engine.tensorflow.traffic import StepTraffic
from shard import Future, ShardError

# ops that TensorFlow calls stateful: for their effects
KEEP_NOTHING = frozenset({"Assert", "Print", "PrintV2", "PyFunc"})
CLOSE_TIMEOUT_S = 5.0  # for other tasks to hear of it; nobody waits for them

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class StarStatistics:
    """A snapshot of one session of the plane "star": its steps, calls, and bytes of tensors sent,
    received and copied.
    """

    steps: int
    calls: int  # RunGraph: one for each stage of each step
    plans: int  # sets of feeds, fetches and targets
    bytes_sent: int  # of tensors, to other tasks
    bytes_received: int  # of tensors, from other tasks
    bytes_copied_before: int  # by this task, in order to send (traffic.py)
    bytes_copied_after: int  # by this task, of what it received, until TensorFlow had it
    leased: int  # tensors received that lie in the other task's memory
    nodes: int  # of own parts that go with the session


@dataclass(frozen=True)
class StarStep:
    """A step that has been cut and loaded, kept for all runs with the same feeds, fetches and
    targets.
    """

    loaded: Loaded | WaitingPart
    may_be_dead: bool  # a fetch is within a branch
    # what its key is made of, and the functions of its ops, while their numbers are in use
    kept: Any
    runs: list[Run]  # that go on
    # of tasks: where they are is found anew when one cannot be reached
    has_shards: bool = field(default=False, kw_only=True)

    def run(self, feeds: Sequence[Any]) -> Any:
        """What it fetches."""
        loaded = self.loaded
        return (
            loaded.run(feeds)
            if isinstance(loaded, Loaded)
            else loaded.run(feeds, _expected(loaded))
        )

    def run_checked(self, feeds: Sequence[Any], options: Any, metadata: Any) -> Any:
        """As run(), with RunOptions, and a buffer for RunMetadata or None; a fetch of a branch that
        was not taken is an error.
        """
        loaded = self.loaded
        if isinstance(loaded, Loaded):
            return loaded.run_checked(feeds, options, metadata)
        return loaded.run_checked(feeds, options, metadata, _expected(loaded))


def _expected(loaded: WaitingPart) -> object:
    """The owner of a run that begins now: only the end of the session gives it up."""
    owner = object()
    loaded.expect(owner)
    return owner


class _Now(threading.local):
    """What the caller of the step that runs in this thread said of it."""

    until: float | None = None  # by the monotonic clock
    trace: Trace | None = None
    run: Run | None = None
    connections: tuple[tuple[Edge, Edge], ...] = ()  # (an edge, what stands in its place)


class StarPlane:
    """Runs the steps of one session: its task calls the stages of the others, which never call each
    other.

    server   the task whose target the session has, in this process or in another one
    session  TensorFlow's

    Made by plane_for(), one for each session; thread-safe. Its steps raise errors of TensorFlow.
    What
    is done once, and what each step: the table at the file's head.
    """

    knows_shards = True  # tasks of several processes

    def __init__(self, server: TaskServer | RemoteMaster, session: Any) -> None:
        self._server = server
        # not the session, which would end in whichever thread collects garbage
        self._user_graph = session.graph
        self.scope = secrets.token_hex(8)
        self.traffic = StepTraffic()
        self._steps: dict[Any, StarStep] = {}
        self._in_bits: dict[str, StepInBits] = {}  # by handle
        self._alone: Runtime | None = None  # of own parts that keep no state
        self._era = object()  # another one after forget()
        # of steps: TensorFlow runs those of a session in many threads
        self._making = threading.Lock()
        self._graph: tuple[int, Graph] | None = None  # of which version
        config = session._config
        soft = config.allow_soft_placement or server.config.allow_soft_placement
        self.tasks = filtered(server.tasks, server.master, config.device_filters)
        placer = Placer(self.tasks, server.master, soft)
        self._placer = ShardPlacer(placer, [server.task] if server.processes == 1 else [])
        timeout_ms = config.operation_timeout_in_ms or server.config.operation_timeout_in_ms
        self._is_misplaced = False  # a task was started again: what is where is asked anew
        self._tells_places = bool(config.log_device_placement)
        self._told_places: set[str] = set()  # of which nodes
        self._timeout_s = timeout_ms / 1000 if timeout_ms else TIMEOUT_S_MAX
        self.calls_under_way: dict[Future, Awaited] = {}
        self.running: set[object] = set()  # one for each thread that is in a step
        self._met: set[str] = set()  # tasks that have stages of ours
        # class and text of what steps end with from then on
        self._ended: tuple[Any, str] | None = None
        self.now = _Now()
        self._runs = self._calls = 0

    def statistics(self) -> StarStatistics:
        """A snapshot."""
        took = self.traffic
        return StarStatistics(
            self._runs, self._calls, len(self._steps), took.bytes_sent, took.bytes_received,
            took.bytes_copied_before, took.bytes_copied_after, took.leased,
            0 if self._alone is None else self._alone.graph_size,
        )  # fmt: skip

    # -- steps -------------------------------------------------------------------------------------

    def run(
        self,
        targets: Sequence[Any],
        fetches: Sequence[Any],
        feeds: dict[Any, Any],
        options: Any,
        metadata: Any,
    ) -> list[Any]:
        """Run a step; the values of the fetches. Raises errors of TensorFlow.

        options   a buffer with RunOptions; None: the usual ones
        metadata  a buffer for RunMetadata; None: nobody wants it
        """
        key = (tuple(map(id, targets)), tuple(map(id, fetches)), tuple(feeds), self.now.connections)
        # None, as monitored sessions have it: nothing is said
        said = b"" if options is None else tf_session.TF_GetBuffer(options)

        def make() -> StarStep:
            names, fed = [one.name for one in targets], [one.deref() for one in feeds]
            kept = [list(targets), list(fetches)]
            return self._make(self._graph_now, names, edges_of(fetches), edges_of(fed), kept)

        return self._run(key, make, list(feeds.values()), said, metadata)

    def set_up(self, targets: Sequence[Any], fetches: Sequence[Any], feeds: Sequence[Any]) -> str:
        """Begin a step that is run bit by bit (bits.py); its handle, for run_bit(). It is kept
        until it is over, or the session is closed, as with stock. Raises InvalidArgumentError.
        """
        if not targets and not fetches:
            raise tf_errors.InvalidArgumentError(
                None, None, "a partial_run() needs a target to fetch or run"
            )
        with self._making:
            graph = self._graph_now()
        handle = secrets.token_hex(8)
        names = [one.name for one in targets]
        self._in_bits[handle] = StepInBits(graph, names, edges_of(fetches), edges_of(feeds))
        return handle

    def run_bit(self, handle: str, fetches: Sequence[Any], feeds: dict[Any, Any]) -> list[Any]:
        """Run what can be run of such a step with these feeds; the values of the fetches. Raises
        errors of TensorFlow; but for InvalidArgumentError of what was asked for, the step is over.
        """
        step = self._in_bits.pop(handle, None)  # one thread at a time has it
        if step is None:
            raise tf_errors.InvalidArgumentError(
                None, None, "no partial_run() has this handle: it is over, or was not set up"
            )
        wanted = edges_of(fetches)
        try:
            bit = step.next_bit(
                wanted,
                dict(zip(edges_of([one.deref() for one in feeds]), feeds.values(), strict=True)),
            )
        except Refused as error:
            self._in_bits[handle] = step
            raise tf_errors.InvalidArgumentError(None, None, str(error)) from None
        except Unkept as error:
            raise tf_errors.UnimplementedError(None, None, str(error)) from None
        if bit is not None:
            fetched, fed = [*bit.results, *bit.kept], list(bit.feeds)
            values = self._run(
                (tuple(bit.targets), tuple(fetched), tuple(fed), bit.done),
                lambda: self._make(partial(step.graph_of, bit), bit.targets, fetched, fed, []),
                [np.asarray(one) for one in bit.feeds.values()],
            )
            step.ran(bit, values)
        values = step.give_out(wanted)
        if not step.is_over:
            self._in_bits[handle] = step
        return values

    def _run(
        self,
        key: Any,
        make: Callable[[], StarStep],
        feeds: Sequence[Any],
        said: bytes = b"",
        metadata: Any = None,
    ) -> list[Any]:
        """Run the step of a key, which is made where it is not there yet."""
        self._runs += 1
        if self._ended is not None:
            raise self._ended[0](None, None, self._ended[1])
        timeout_ms = config_pb2.RunOptions.FromString(said).timeout_in_ms if said else 0
        if timeout_ms:
            self.now.until = time.monotonic() + timeout_ms / 1000
        self.running.add(running := object())
        try:
            return self._run_now(key, make, feeds, said, metadata)
        except Exception:  # of a session that was ended: whatever it is, the end brought it about
            if self._ended is None:
                raise
            raise self._ended[0](None, None, self._ended[1]) from None
        finally:
            self.running.discard(running)
            if timeout_ms:
                self.now.until = None

    @contextlib.contextmanager
    def traced(self, options: Any) -> Iterator[Trace]:
        """The step that runs in this thread meanwhile is traced by these RunOptions."""
        trace = Trace(self._server.task, options)
        self.now.trace = trace if trace.options else None
        try:
            yield trace
        finally:
            self.now.trace = None

    @contextlib.contextmanager
    def connected(self, connections: tuple[tuple[Edge, Edge], ...]) -> Iterator[None]:
        """In the step that runs in this thread meanwhile, the second edge of each pair stands in
        the place of the first.
        """
        self.now.connections = connections
        try:
            yield
        finally:
            self.now.connections = ()

    def _run_now(
        self,
        key: Any,
        make: Callable[[], StarStep],
        feeds: Sequence[Any],
        said: bytes,
        metadata: Any,
    ) -> list[Any]:
        step = self._steps.get(key)
        if step is None:
            with self._making:
                step = self._steps.get(key)
                while step is None:
                    era, step = self._era, make()
                    self._steps[key] = step
                    if self._ended is not None:  # close() may have looked before it was there
                        raise self._ended[0](None, None, self._ended[1])
                    if self._era is not era:  # and so may forget()
                        self._steps.pop(key, None)
                        step = None
        run, around = Run(self.now.until, self.now.trace), self.now.run
        self.now.run = run
        step.runs.append(run)
        try:
            values: list[Any]
            if not said and not step.may_be_dead:
                values = step.run(feeds)
            else:
                values = step.run_checked(feeds, said, metadata)
        except Exception as error:
            typed = errors.of_step(error)
            run.failed(errors.for_others(typed))
            if isinstance(typed, tf_errors.AbortedError) or (
                step.has_shards and isinstance(typed, tf_errors.UnavailableError)
            ):
                self._steps.pop(key, None)  # registered at a task that is another one by now
                self._is_misplaced = True
            raise typed from None
        finally:
            step.runs.remove(run)
            self.now.run = around
        return values

    def _make(
        self,
        graph_of: Callable[[], Graph],
        run: list[str],
        wanted: list[Edge],
        fed: list[Edge],
        kept: list[Any],
    ) -> StarStep:
        """A step that runs these nodes; `kept` is what its key is made of."""
        if self._is_misplaced:  # here, where one thread at a time is, and has not asked yet
            self._is_misplaced = False
            self._placer.forget()
        try:
            graph, placer, own = graph_of(), self._placer, self._server.task
            needed = graph.needed(wanted, run, fed)
            # whether a function is lowered is said by where its variables are
            self._find_shards(graph, {name for name in needed if graph.nodes[name].is_handle})
            graph, wanted, run = lowered(graph, placer, own, wanted, run, fed)
            self._find_shards(graph, graph.needed(wanted, run, fed))
            if self._tells_places:
                self._tell_places(graph, graph.needed(wanted, run, fed))
            plan = cut(graph, placer, own, wanted, run, fed)
        except Misplaced as error:
            raise tf_errors.InvalidArgumentError(None, None, str(error)) from None
        except Unsupported as error:
            raise tf_errors.UnimplementedError(
                None, None, f'{error}; protocol="grpc" may run it'
            ) from None
        return self._planned(plan, kept)

    def _planned(self, plan: Plan, kept: list[Any]) -> StarStep:
        rewriter, runs = Rewriter(plan, graph_pb2.GraphDef), list[Run]()
        calls, called = self._make_calls(rewriter, plan.stages, kept, runs)
        loaded = self._load(rewriter.own(calls))  # while the tasks load theirs
        for one in called:
            one.wait_until_registered()
        return StarStep(loaded, plan.may_be_dead, kept, runs, has_shards=has_shards(plan))

    def _make_calls(
        self, rewriter: Rewriter, called: Sequence[Stage], kept: list[Any], runs: Sequence[Run]
    ) -> tuple[list[StageCall], list[CalledStage]]:
        """Begin to register stages that are called; their ops, and what those call. Their functions
        are added to `kept`.
        """
        made = [
            CalledStage(self, stage, self._submit_register(rewriter, stage), runs)
            for stage in called
        ]
        calls = []
        rounds = [stage.round for stage in called]
        for stage, one in zip(called, made, strict=True):
            functions: list[Callable[..., Any]] = [one.call]
            if rounds.count(stage.round) > 1:
                functions = [one.wait, one.send]
            tokens = [script_ops._py_funcs.insert(function) for function in functions]
            kept.append(functions)
            calls.append(StageCall(stage, tokens[0], tokens[1] if len(tokens) > 1 else ""))
        return calls, made

    def _load(self, part: GraphPart) -> Loaded | WaitingPart:
        """The own task's part: where its state is, or else by itself, so that it goes with the
        session. TensorFlow cannot take nodes out of a graph, and takes longer for each next part of
        a large one.
        """
        if keeps_state(part):
            runtime = self._server.runtime
        else:
            runtime = self._alone = self._alone or Runtime(self._server.config)
        try:
            return (
                WaitingPart(runtime, part, self.scope)
                if part.waiting
                else runtime.load(part, self.scope)
            )
        except ValueError as error:
            raise tf_errors.InvalidArgumentError(None, None, errors.clean(str(error))) from None

    def _graph_now(self) -> Graph:
        graph = self._user_graph
        if self._graph is None or self._graph[0] != graph.version:
            self._graph = graph.version, Graph(graph.as_graph_def(), signature_of)
        connections = self.now.connections
        return self._graph[1].connected(dict(connections)) if connections else self._graph[1]

    # -- other tasks -------------------------------------------------------------------------------

    def _find_shards(self, graph: Graph, names: set[str]) -> None:
        """Ask the tasks which process of theirs has what these nodes use, where that is not
        known. Raises errors of TensorFlow, Misplaced.
        """
        order = [name for name in graph.nodes if name in names]  # the same at all workers
        what = "which of its processes has which variables"
        try:
            asked = [
                (
                    task,
                    groups,
                    self.submit(device(task), DEAL, what, ([list(group) for group in groups],)),
                )
                for task, groups in self._placer.missing(graph, order).items()
            ]
        except engine_errors.RpcError as error:
            raise errors.from_engine(error) from None
        for task, groups, call in asked:
            ports, shards = self._answer(call)
            if ports and not self.knows_shards:
                raise tf_errors.UnimplementedError(
                    None,
                    None,
                    f"{device(task)} has several processes (NETWORK_PS_CORE_NUMBER), which this "
                    "session's plane does not know: leave PRPC_TF_PLANE out, or that variable at "
                    "the ps",
                )
            for shard, port in enumerate(ports, 1):
                name = device_of(TaskShard(task.job, task.index, shard))
                self._server.engine.meet(name, device(task), port)
            self._placer.learn(task, len(ports) + 1, groups, shards)

    def _tell_places(self, graph: Graph, names: set[str]) -> None:
        """To stderr, as TensorFlow does with log_device_placement: each node once."""
        order = [name for name in graph.nodes if name in names]
        for name, task in self._placer.place(graph, order).items():
            if name not in self._told_places:
                self._told_places.add(name)
                print(f"{name}: ({graph.nodes[name].op}): {cpu_of(task)}", file=sys.stderr)

    def _submit_register(self, rewriter: Rewriter, stage: Stage) -> Future:
        task = device_of(stage.task)
        self._met.add(task)
        packed = stages.pack_part(rewriter.stage(stage))
        what = f"the graph of {len(stage.members)} ops ({stage.members[0]}, ...)"
        try:
            call = self.submit(task, stages.REGISTER, what, (self.scope, packed))
        except engine_errors.RpcError as error:
            raise errors.from_engine(error) from None
        if self._ended is not None:  # the task may have heard of the end before it heard of this
            self._tell_end(task)
        return call

    @staticmethod
    def _answer(call: Future) -> list[Any]:
        """What is in it behind its code. Raises errors of TensorFlow."""
        try:
            answer: list[Any] = call.result()
        except (engine_errors.RpcError, ShardError) as error:
            raise errors.from_engine(error) from None
        if answer[0]:
            raise errors.read(*answer)
        return answer[1:]

    @classmethod
    def handle_of(cls, registered: Future) -> int:
        """Of a stage or program. Waits for the task; raises errors of TensorFlow."""
        (handle,) = cls._answer(registered)
        return int(handle)

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
        """Ask a task; `left_s`: None for what the step in this thread has left; `waited_for`: who
        is named when there is no answer (stalls.py). What it was told to keep died with it, so only
        what makes that anew waits for it. Raises RpcError.
        """
        left_s = self.left_s(self.now.until) if left_s is None else left_s
        if self._ended is not None:
            raise engine_errors.Cancelled(self._ended[1])
        self._calls += 1
        call = self._server.engine.ask(task, method, what, lambda _: arguments, left_s, is_patient)
        self.calls_under_way[call] = Awaited(waited_for, time.monotonic())
        call.when_done(self.calls_under_way.pop)
        if self._ended is not None:  # close() may have looked before it was there
            call.cancel(engine_errors.Cancelled(self._ended[1]))
        return call

    def left_s(self, until: float | None) -> float:
        """For what a step that ends then, by the monotonic clock, asks of another task now."""
        return (
            self._timeout_s
            if until is None
            else min(self._timeout_s, max(until - time.monotonic(), 0.0))
        )

    def forget(self) -> None:
        """Make what is kept from step to step anew: the tasks have lost it."""
        self._era = object()
        self._steps.clear()

    def close(
        self, kind: Any = tf_errors.CancelledError, text: str = "the session was closed"
    ) -> None:
        """End the session: give up what it runs, with an error of class `kind`, and tell the tasks.
        Again: does nothing.
        """
        if self._ended is not None:
            return
        self._ended = kind, text
        for task in list(self._met):  # another thread may be about to meet one more
            self._tell_end(task)
        for call in list(self.calls_under_way):
            call.cancel(engine_errors.Cancelled(text))
        for step in list(self._steps.values()):
            if isinstance(step.loaded, WaitingPart):
                step.loaded.give_up_all()
        self._steps.clear()
        self._in_bits.clear()
        self._alone = None

    def _tell_end(self, task: str) -> None:
        """Nobody waits for the answer."""
        try:
            self._server.engine.ask(
                task, stages.CLOSE, "the end of a session", lambda _: (self.scope,), CLOSE_TIMEOUT_S
            )
        except engine_errors.RpcError as error:
            logger.debug("%s does not hear of the end of a session: %s", task, str(error))


def keeps_state(part: GraphPart) -> bool:
    """Whether something of it lives longer than a step, or may: handles, seeded random numbers,
    and whatever an op that is stateful keeps.
    """
    if part.fixed or part.kernels:
        return True
    for node in part.graph.node:
        if node.op in KEEP_NOTHING or node.op.startswith(OF_STEP):
            continue
        signature = signature_of(node.op)
        if signature is None or (signature.is_stateful and not has_random_state(node, signature)):
            return True
    return False


def edges_of(values: Sequence[Any]) -> list[Edge]:
    """Of tensors of TensorFlow's."""
    return [(one.op.name, one.value_index) for one in values]


def has_shards(plan: Plan) -> bool:
    """Whether a stage is at a process beside a task's own."""
    return any(isinstance(stage.task, TaskShard) for stage in plan.stages)


def signature_of(op: str) -> Signature | None:
    """What TensorFlow knows of an op."""
    definition = op_def_registry.get(op)
    return None if definition is None else Signature.of(definition)
