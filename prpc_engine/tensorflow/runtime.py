"""Where the parts of a task run: one session of TensorFlow's own in this process, whose graph only
grows.

    what                              in that graph
    a part                            under "prpc_g<k>/", once for each load()
    a handle                          under "prpc_h<k>/", once a task: all parts that name it mean
                                      one variable, queue or table
    what has a state of its kernel's  under "prpc_h<k>/", once for each session of a user; where its
                                      inputs differ from part to part, they are placeholders, and a
                                      PyFunc in each part runs it

A container that was reset goes on under another name: parts that were loaded before mean what is
gone, and are to be loaded again. TensorFlow cannot take a node out of a graph.

A part runs in the thread that calls it, but for kernels that use several cores: an op of it that is
Python needs no change of threads, and one that waits keeps nobody else from a thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client import pywrap_tf_session as tf_session
from tensorflow.python.client import session as tf_sessions
from tensorflow.python.framework import config as tf_config
from tensorflow.python.framework import errors_impl as tf_errors
from tensorflow.python.ops import script_ops

from prpc_engine.tensorflow.gate import CLEAR, GIVE, with_gate
from prpc_engine.tensorflow.nodes import REF, RESOURCE, Edge, edge_of
from prpc_engine.tensorflow.rewrite import Fixed, GraphPart
from prpc_engine.tensorflow.session_graph import AddedNode, SessionGraph

_ENDS = ("DestroyResourceOp", "Assign")
IN_CALLERS_THREAD = -1  # RunOptions.inter_op_thread_pool


class _AddedPart(NamedTuple):
    """A part in the session's graph: what it is fed, and what it fetches and runs."""

    feeds: list[tuple[str, Any]]  # the name of a tensor there, and the TF_Output
    fetches: list[tuple[str, Any]]
    targets: list[AddedNode]
    # that its ops call: TensorFlow has weak references to them
    functions: Sequence[Callable[..., Any]] = ()


class Loaded:
    """A part of a graph that is loaded into TensorFlow and can be run by several threads at a time.
    run() raises errors of TensorFlow.
    """

    def __init__(self, session: Any, part: _AddedPart) -> None:
        self._python_session, self._part = session, part
        options = config_pb2.CallableOptions(
            feed=[name for name, _ in part.feeds],
            fetch=[name for name, _ in part.fetches],
            target=[one.name for one in part.targets],
        )
        options.run_options.inter_op_thread_pool = IN_CALLERS_THREAD
        self._callable = session._make_callable_from_options(options)  # its end releases the handle
        self._session, self._handle = session._session, self._callable._handle

    def run(self, feeds: Sequence[Any]) -> Any:
        """What it fetches, for what it is fed. Raises errors of TensorFlow; of a fetch within a
        branch that was not taken it returns an empty array."""
        return tf_session.TF_SessionRunCallable(self._session, self._handle, feeds, None)

    def run_checked(self, feeds: Sequence[Any], options: bytes, metadata: Any) -> Any:
        """The same with RunOptions as bytes, and a buffer for RunMetadata or None; a fetch of a
        branch that was not taken is an error. It takes longer."""
        part = self._part
        fed = {output: value for (_, output), value in zip(part.feeds, feeds, strict=True)}
        said = config_pb2.RunOptions.FromString(options)
        said.inter_op_thread_pool = IN_CALLERS_THREAD
        buffer = tf_session.TF_NewBufferFromString(said.SerializeToString())
        try:
            return self._python_session._call_tf_sessionrun(
                buffer,
                fed,
                [output for _, output in part.fetches],
                [one.operation for one in part.targets],
                metadata,
            )
        finally:
            tf_session.TF_DeleteBuffer(buffer)

    def run_traced(self, feeds: Sequence[Any], options: bytes) -> tuple[Any, bytes]:
        """As run_checked(); and RunMetadata."""
        buffer = tf_session.TF_NewBuffer()
        try:
            return self.run_checked(feeds, options, buffer), tf_session.TF_GetBuffer(buffer)
        finally:
            tf_session.TF_DeleteBuffer(buffer)


class _FixedNode(NamedTuple):
    """A node that is kept from step to step."""

    definition: Any
    node: AddedNode
    inputs: list[AddedNode]


class _Copy:
    """Of a part that may wait, with the ops of its gate."""

    __slots__ = ("clear", "give", "has_failed", "part")

    def __init__(self, part: Loaded, give: Loaded, clear: Loaded) -> None:
        self.part, self.give, self.clear = part, give, clear
        self.has_failed = False  # its gate may hold what that run left


class WaitingPart:
    """A part that may wait for another step (gate.py). Each run has a copy of it that no other run
    has at that time.

    a run     event                   next
    expected  its thread takes it up  running, with a copy
    expected  give_up()               over: it ends with CancelledError as soon as its thread takes
                                      it up
    running   give_up()               over: its gate ends it
    """

    def __init__(self, runtime: Runtime, part: GraphPart, scope: str) -> None:
        self._runtime, self._part, self._scope = runtime, part, scope
        self._guard = threading.Lock()  # of the copies: several runs of one part at a time
        # now: what is wrong with the graph is to be found when it is loaded
        self._idle = [self._copy()]
        self._runs: dict[object, _Copy | None] = {}  # by owner; None: expected
        self._is_over = False  # for all that come, too

    def _copy(self) -> _Copy:
        gated = with_gate(self._part, f"prpc_gate_{secrets.token_hex(8)}")
        return _Copy(*self._runtime.load_with(gated, self._scope, [GIVE, CLEAR]))

    def expect(self, owner: object) -> None:
        """A run of that owner comes: from now on it can be given up."""
        with self._guard:
            self._runs[owner] = None

    def run(self, feeds: Sequence[Any], owner: object) -> Any:
        """As Loaded.run(), of an owner that was expected."""
        return self._run(owner, lambda part: part.run(feeds))

    def run_checked(
        self, feeds: Sequence[Any], options: bytes, metadata: Any, owner: object
    ) -> Any:
        """As Loaded.run_checked(), of an owner that was expected."""
        return self._run(owner, lambda part: part.run_checked(feeds, options, metadata))

    def _run(self, owner: object, run: Callable[[Loaded], Any]) -> Any:
        with self._guard:
            copy = self._idle.pop() if self._idle else None
        copy = copy or self._copy()
        if copy.has_failed:
            copy.clear.run(())
            copy.has_failed = False
        with self._guard:
            is_expected = owner in self._runs and not self._is_over
            if is_expected:
                self._runs[owner] = copy
            else:
                self._idle.append(copy)
        if not is_expected:
            raise tf_errors.CancelledError(None, None, "the run was given up before it began")
        copy.has_failed = True  # until it has not
        try:
            values = run(copy.part)
            copy.has_failed = False
            return values
        finally:
            with self._guard:
                if self._runs.pop(owner, None) is not None:
                    self._idle.append(copy)

    def give_up(self, owner: object) -> None:
        """End that run with an error, if it is still to come, or waits. Its copy is not used again:
        it may have been told too late."""
        with self._guard:
            copy = self._runs.pop(owner, None)
        if copy is not None:
            copy.give.run(())

    def give_up_all(self) -> None:
        """The same for all runs, and for those of owners that are not expected yet."""
        with self._guard:
            self._is_over = True
            owners = list(self._runs)
        for owner in owners:
            self.give_up(owner)


class Runtime:
    """Runs the parts of graphs that a task has, in one session of TensorFlow's own whose graph only
    grows.

    config  the ConfigProto of the task's server; device filters do not count, and placement is soft

    Owned by a task's server. load(), forget() and reset() may be called from any thread; load()
    raises errors of TensorFlow, and ValueError for a bad graph. What is where in the session's
    graph: the table at the file's head.
    """

    def __init__(self, config: Any) -> None:
        own = config_pb2.ConfigProto()
        own.CopyFrom(config)
        own.allow_soft_placement = True  # devices are gone from the parts
        del own.device_filters[:]
        optimize_less(own.graph_options.rewrite_options)
        self._graph = SessionGraph()
        self.session = tf_sessions.Session("", graph=self._graph.graph, config=own)
        self._lock = threading.Lock()  # of the graph: one thread at a time may add to it
        # by session ("": of all) and definition
        self._fixed: dict[tuple[str, bytes], _FixedNode] = {}
        self._resets: dict[str, int] = {}  # how often, by container

    @property
    def graph_size(self) -> int:
        """How many nodes the session's graph has: what was loaded, whether it is used or not."""
        return self._graph.size

    def load(self, part: GraphPart, scope: str) -> Loaded:
        """Make a part ready to run; `scope` is the user's session. Raises errors of TensorFlow and
        ValueError for a bad graph.
        """
        return self.load_with(part, scope, ())[0]

    def load_with(self, part: GraphPart, scope: str, targets: Sequence[str]) -> list[Loaded]:
        """The same, and more of its ops, each of which can be run by itself."""
        with self._lock:
            added, others = self._add(part, scope, targets)
            return [
                Loaded(self.session, added),
                *(Loaded(self.session, _AddedPart([], [], [one])) for one in others),
            ]

    def _add(
        self, part: GraphPart, scope: str, others: Sequence[str]
    ) -> tuple[_AddedPart, list[AddedNode]]:
        """A part, and other nodes of it."""
        fixed = {name: self._fix(one, part, scope).node for name, one in part.fixed.items()}
        inputs = {
            (name, index): output
            for name, node in fixed.items()
            for index, output in enumerate(node.outputs)
        }
        graph, functions = part.graph, list[Callable[..., Any]]()
        if part.kernels:
            graph = graph_pb2.GraphDef()
            graph.CopyFrom(part.graph)  # a part may be loaded more than once
            for node in graph.node:
                if node.name in part.kernels:
                    kernel = self._kernel(part.kernels[node.name], part, scope)
                    functions.append(kernel)
                    node.attr["token"].s = script_ops._py_funcs.insert(kernel).encode()
        feeds, fetches = ([edge_of(text) for text in texts] for texts in (part.feeds, part.fetches))
        ends = [edge for edge in (*feeds, *fetches) if edge[0] not in fixed]
        wanted = list(dict.fromkeys([*(name for name, _ in ends), *part.targets, *others]))
        nodes = fixed | dict(
            zip(wanted, self._graph.add(graph, "prpc_g", inputs, wanted), strict=True)
        )

        def tensor(edge: Edge) -> tuple[str, Any]:
            node = nodes[edge[0]]
            return f"{node.name}:{edge[1]}", node.output(edge[1])

        return _AddedPart(
            [tensor(edge) for edge in feeds],
            [tensor(edge) for edge in fetches],
            [nodes[name] for name in part.targets],
            functions,
        ), [nodes[name] for name in others]

    def _kernel(self, fixed: Fixed, part: GraphPart, scope: str) -> Callable[..., Any]:
        """A function that runs a node which all parts of a session share."""
        _, node, inputs = self._fix(fixed, part, scope)
        loaded = Loaded(
            self.session,
            _AddedPart(
                [(f"{one.name}:0", one.output(0)) for one in inputs],
                [(f"{node.name}:{index}", output) for index, output in enumerate(node.outputs)],
                [],
            ),
        )
        return lambda *values: loaded.run(values)

    def _fix(self, fixed: Fixed, part: GraphPart, scope: str) -> _FixedNode:
        definitions = fixed.definitions
        key = (
            scope if fixed.is_private else "",
            b"".join(one.SerializeToString(deterministic=True) for one in definitions),
        )
        known = self._fixed.get(key)
        if known is None:
            definitions = [*definitions[:-1], self._contained(definitions[-1])]
            graph = graph_pb2.GraphDef(
                node=definitions, library=part.graph.library, versions=part.graph.versions
            )
            wanted = [definitions[-1].name, *(edge_of(text)[0] for text in definitions[-1].input)]
            node, *inputs = self._graph.add(graph, "prpc_h", {}, wanted)
            known = self._fixed[key] = _FixedNode(definitions[-1], node, inputs)
        return known

    def _contained(self, definition: Any) -> Any:
        container = (
            definition.attr["container"].s.decode() if "container" in definition.attr else ""
        )
        if container not in self._resets:
            return definition
        renamed = type(definition)()
        renamed.CopyFrom(definition)
        if "container" in renamed.attr:
            renamed.attr[
                "container"
            ].s = f"{container or 'localhost'}.prpc{self._resets[container]}".encode()
        return renamed

    def forget(self, scope: str) -> None:
        """What is that session's own."""
        with self._lock:
            for key in [key for key in self._fixed if key[0] == scope]:
                del self._fixed[key]

    def reset(self, containers: Sequence[str]) -> None:
        """Drop what is in these containers. Raises errors of TensorFlow."""
        with self._lock:
            graph, inputs = graph_pb2.GraphDef(), dict[Edge, Any]()
            for key, (definition, node, _) in list(self._fixed.items()):
                if "container" not in definition.attr:
                    continue
                container = definition.attr["container"].s.decode().partition(".prpc")[0]
                if (container if container != "localhost" else "") not in containers:
                    continue
                del self._fixed[key]
                if _add_end(graph, definition.op, node, f"handle_{len(inputs)}"):
                    inputs[f"handle_{len(inputs)}", 0] = node.output(0)
            for one in containers:
                self._resets[one] = self._resets.get(one, 0) + 1
            if inputs:
                ends = [one.name for one in graph.node if one.op in _ENDS]
                nodes = self._graph.add(graph, "prpc_r", inputs, ends)
                Loaded(self.session, _AddedPart([], [], nodes)).run(())

    def close(self) -> None:
        """End what runs, with CancelledError."""
        self.session.close()


def optimize_less(rewrites: Any) -> None:
    """Leave out of Grappler's work, where the user says nothing of it, what takes half of its time
    and does not change the part of a step (docs/decisions/0093-first-step.md).
    """
    if not rewrites.meta_optimizer_iterations:
        rewrites.meta_optimizer_iterations = RewriterConfig.ONE
    if not tf_config.list_physical_devices("GPU"):  # both are for its memory and its layouts
        if not rewrites.memory_optimization:
            rewrites.memory_optimization = RewriterConfig.NO_MEM_OPT
        if not rewrites.layout_optimizer:
            rewrites.layout_optimizer = RewriterConfig.OFF


def _add_end(graph: graph_pb2.GraphDef, op: str, node: AddedNode, handle: str) -> bool:
    """Add to a graph what ends what a node has, whose output is called `handle` there; whether
    there is something.
    """
    kind = int(tf_session.TF_OperationOutputType(node.output(0)))
    if kind == RESOURCE:
        end = graph.node.add(name=f"end_{handle}", op="DestroyResourceOp", input=[handle])
        end.attr["ignore_lookup_error"].b = True
    elif op in ("Variable", "VariableV2"):
        nothing = graph.node.add(name=f"nothing_{handle}", op="Const")
        nothing.attr["dtype"].type = nothing.attr["value"].tensor.dtype = kind % REF
        nothing.attr["value"].tensor.tensor_shape.dim.add(size=0)
        end = graph.node.add(name=f"end_{handle}", op="Assign", input=[handle, nothing.name])
        end.attr["T"].type = kind % REF
        end.attr["validate_shape"].b = False
    else:
        return False
    return True
