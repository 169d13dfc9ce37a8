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
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as tf_session
from tensorflow.python.client import session as tf_sessions
from tensorflow.python.framework import constant_op, dtypes, importer, ops
from tensorflow.python.framework import errors_impl as tf_errors
from tensorflow.python.ops import gen_resource_variable_ops as resources
from tensorflow.python.ops import gen_state_ops as states
from tensorflow.python.ops import script_ops

from prpc_engine.tensorflow.gate import CLEAR, GIVE, with_gate
from prpc_engine.tensorflow.rewrite import Fixed, GraphPart

IN_CALLERS_THREAD = -1  # RunOptions.inter_op_thread_pool


class Loaded:
    """A part of a graph that is loaded into TensorFlow and can be run by several threads at a time.
    run() raises errors of TensorFlow.
    """

    def __init__(
        self, session: Any, options: Any, functions: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self._python_session, self._options = session, options
        self._functions = functions  # that its ops call: TensorFlow has weak references to them
        self._callable = session._make_callable_from_options(options)  # its end releases the handle
        self._session, self._handle = session._session, self._callable._handle

    def run(self, feeds: Sequence[Any]) -> Any:
        """What it fetches, for what it is fed. Raises errors of TensorFlow; of a fetch within a
        branch that was not taken it returns an empty array."""
        return tf_session.TF_SessionRunCallable(self._session, self._handle, feeds, None)

    def run_checked(self, feeds: Sequence[Any], options: bytes, metadata: Any) -> Any:
        """The same with RunOptions as bytes, and a buffer for RunMetadata or None; a fetch of a
        branch that was not taken is an error. It takes longer."""
        graph, options_of = self._python_session.graph, self._options
        outputs = [
            [graph.get_tensor_by_name(name)._as_tf_output() for name in names]
            for names in (options_of.feed, options_of.fetch)
        ]
        targets = [graph.get_operation_by_name(name)._c_op for name in options_of.target]
        fed = dict(zip(outputs[0], feeds, strict=True))
        said = config_pb2.RunOptions.FromString(options)
        said.inter_op_thread_pool = IN_CALLERS_THREAD
        buffer = tf_session.TF_NewBufferFromString(said.SerializeToString())
        try:
            return self._python_session._call_tf_sessionrun(
                buffer, fed, outputs[1], targets, metadata
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
        self.graph = ops.Graph()
        self.session = tf_sessions.Session("", graph=self.graph, config=own)
        self._lock = threading.Lock()  # of the graph: one thread at a time may add to it
        self._numbers = 0
        # the operation, by session ("": of all) and definition
        self._fixed: dict[tuple[str, bytes], Any] = {}
        self._resets: dict[str, int] = {}  # how often, by container

    def load(self, part: GraphPart, scope: str) -> Loaded:
        """Make a part ready to run; `scope` is the user's session. Raises errors of TensorFlow and
        ValueError for a bad graph.
        """
        with self._lock:
            options, _, functions = self._add(part, scope)
            return Loaded(self.session, options, functions)

    def load_with(self, part: GraphPart, scope: str, targets: Sequence[str]) -> list[Loaded]:
        """The same, and more of its ops, each of which can be run by itself."""
        with self._lock:
            options, prefix, functions = self._add(part, scope)
            others = [
                config_pb2.CallableOptions(
                    target=[f"{prefix}/{one}"], run_options=options.run_options
                )
                for one in targets
            ]
            return [Loaded(self.session, one, functions) for one in (options, *others)]

    def _add(self, part: GraphPart, scope: str) -> tuple[Any, str, list[Callable[..., Any]]]:
        fixed = {name: self._fix(one, part, scope) for name, one in part.fixed.items()}
        wanted = {text for node in part.graph.node for text in node.input}
        inputs = {}
        for name, operation in fixed.items():
            for index, output in enumerate(operation.outputs):
                for text in (f"{name}:{index}", name) if index == 0 else (f"{name}:{index}",):
                    if text in wanted:
                        inputs[text] = output
        graph, functions = part.graph, list[Callable[..., Any]]()
        if part.kernels:
            graph = graph_pb2.GraphDef()
            graph.CopyFrom(part.graph)  # a part may be loaded more than once
            for node in graph.node:
                if node.name in part.kernels:
                    kernel = self._kernel(part.kernels[node.name], part, scope)
                    functions.append(kernel)
                    node.attr["token"].s = script_ops._py_funcs.insert(kernel).encode()
        prefix = self._import(graph, "prpc_g", inputs)
        options = config_pb2.CallableOptions()
        options.feed.extend(f"{prefix}/{name}" for name in part.feeds)
        options.fetch.extend(_placed(name, fixed, prefix) for name in part.fetches)
        options.target.extend(f"{prefix}/{name}" for name in part.targets)
        options.run_options.inter_op_thread_pool = IN_CALLERS_THREAD
        return options, prefix, functions

    def _kernel(self, fixed: Fixed, part: GraphPart, scope: str) -> Callable[..., Any]:
        """A function that runs a node which all parts of a session share."""
        operation = self._fix(fixed, part, scope)
        options = config_pb2.CallableOptions()
        options.feed.extend(one.name for one in operation.inputs)
        options.fetch.extend(one.name for one in operation.outputs)
        options.run_options.inter_op_thread_pool = IN_CALLERS_THREAD
        loaded = Loaded(self.session, options)
        return lambda *values: loaded.run(values)

    def _fix(self, fixed: Fixed, part: GraphPart, scope: str) -> Any:
        definitions = fixed.definitions
        key = (
            scope if fixed.is_private else "",
            b"".join(one.SerializeToString(deterministic=True) for one in definitions),
        )
        operation = self._fixed.get(key)
        if operation is None:
            definitions = [*definitions[:-1], self._contained(definitions[-1])]
            graph = graph_pb2.GraphDef(
                node=definitions, library=part.graph.library, versions=part.graph.versions
            )
            prefix = self._import(graph, "prpc_h", {})
            operation = self._fixed[key] = self.graph.get_operation_by_name(
                f"{prefix}/{definitions[-1].name}"
            )
        return operation

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
        with self._lock, self.graph.as_default(), ops.device(None):
            ends = []
            for key, operation in list(self._fixed.items()):
                container = operation.node_def.attr["container"].s.decode().partition(".prpc")[0]
                if container == "localhost":
                    container = ""
                if "container" not in operation.node_def.attr or container not in containers:
                    continue
                del self._fixed[key]
                if operation.outputs[0].dtype == dtypes.resource:
                    ends.append(
                        resources.destroy_resource_op(
                            operation.outputs[0], ignore_lookup_error=True
                        )
                    )
                elif operation.type in ("Variable", "VariableV2"):
                    nothing = constant_op.constant([], operation.outputs[0].dtype.base_dtype)
                    ends.append(states.assign(operation.outputs[0], nothing, validate_shape=False))
            for one in containers:
                self._resets[one] = self._resets.get(one, 0) + 1
            if ends:
                self.session.run([one.op if hasattr(one, "op") else one for one in ends])

    def _import(self, graph: Any, kind: str, inputs: dict[str, Any]) -> str:
        self._numbers += 1
        prefix = f"{kind}{self._numbers}"
        with self.graph.as_default():
            importer.import_graph_def(graph, input_map=inputs, name=prefix)
        return prefix

    def close(self) -> None:
        """End what runs, with CancelledError."""
        self.session.close()


def _placed(text: str, fixed: dict[str, Any], prefix: str) -> str:
    name, _, index = text.partition(":")
    return fixed[name].outputs[int(index)].name if name in fixed else f"{prefix}/{text}"
