"""A plan's parts as GraphDefs: one of each stage, and one of the own task, in which an op calls
each stage. No I/O here.

    in the plan               in a part
    a fed tensor, a value     a Placeholder "prpc_feed_<k>"
      from a stage elsewhere
    a handle                  not in the graph: it is `fixed`, and made once a task, whoever uses it
    a random op of constants  `fixed` too: its state is the kernel's, and goes on from step to step
    any other seeded random   PyFunc, which runs the one kernel that all parts of a session share
      op                      (`kernels`)
    a stage, at the own task  PyFunc "prpc_call_<k>"; where a round has several, "prpc_send_<k>"
                              before it, so that all are under way before the first is waited for
    a list or an optional     a string: SerializeTensor in the part that makes it, ParseTensor in
      value that goes to      the one that uses it
      another part
    a branch that no input    Switch "prpc_branch_<k>" and its side "prpc_side_<k>", to wait for
      tells of

Devices and colocation are gone: each part runs at one task. Functions come along where they are
called (functions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prpc_engine.tensorflow.functions import Functions
from prpc_engine.tensorflow.nodes import (
    BOOL,
    REF,
    STRING,
    VARIANT,
    Edge,
    GraphNode,
    is_seeded,
    text_of,
)
from prpc_engine.tensorflow.partition import (
    BLOCKING,
    READS,
    REMOTE,
    Branch,
    OpKind,
    Plan,
    Stage,
    of_frame,
)

ITERATORS = frozenset({"IteratorV2", "Iterator", "OneShotIterator"})
# Types that numpy lacks go over as integers of their size: qint8, quint8, qint32, qint16, quint16.
# And variants as strings.
_CARRIED = {11: 6, 12: 4, 13: 3, 15: 5, 16: 17, VARIANT: STRING}
_VALUE_OPS = {
    "RefSwitch": "Switch",
    "RefEnter": "Enter",
    "RefExit": "Exit",
    "RefNextIteration": "NextIteration",
}


@dataclass
class Fixed:
    """A node that is made once and kept from step to step, such as a variable: its NodeDef, behind
    those of its inputs.
    """

    definitions: list[Any]
    is_private: bool  # made once a session of a user, else once a task


@dataclass
class GraphPart:
    """What one task runs. Names are those of the graph, and of `fixed` where they are there."""

    graph: Any  # a GraphDef
    fixed: dict[str, Fixed] = field(default_factory=dict)
    feeds: list[str] = field(default_factory=list)
    fetches: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # its nodes that may wait for another step
    # by the PyFunc in `graph` that runs it; inputs: placeholders
    kernels: dict[str, Fixed] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCall:
    """An op of the own part that calls a stage: its function's token, and that of what sends before
    it, "" when it does both.
    """

    stage: Stage
    token: str
    send_token: str


class Rewriter:
    """Makes the parts of one plan. `new_graph` makes an empty GraphDef."""

    def __init__(self, plan: Plan, new_graph: Callable[[], Any]) -> None:
        self._plan = plan
        self._nodes = plan.graph.nodes
        self._new_graph = new_graph
        self._functions = Functions(plan.graph.definition.library)

    # -- a stage -----------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> GraphPart:
        """What its task is sent once, and runs each step."""
        part = GraphPart(self._new_graph())
        part.graph.versions.CopyFrom(self._plan.graph.definition.versions)
        members, kinds = set(stage.members), self._plan.kinds
        names = {
            edge: self._add_feed(part, number, edge) for number, edge in enumerate(stage.feeds)
        }
        copied: set[str] = set()
        used: set[str] = set()

        def source(edge: Edge) -> str:
            name = edge[0]
            if edge in names:
                return names[edge]
            if name in members and kinds[name] is not OpKind.VALUED_HANDLE:
                used.add(name)
                return text_of(edge)
            if edge in self._plan.roots:
                return self._fix(part, self._nodes[self._plan.roots[edge]])
            if name not in copied:
                copied.add(name)
                node = self._nodes[name]
                if kinds[name] in READS:
                    self._copy(part, node, map(source, node.inputs), ())
                else:
                    self._copy(part, node, (), ())
            return text_of(edge)

        for name in stage.members:
            node = self._nodes[name]
            if kinds[name] is OpKind.VALUED_HANDLE or self._is_private(node):
                self._fix(part, node)
            else:
                controls = [
                    one
                    for one in self._plan.controls[name]
                    if one in members and kinds[one] is not OpKind.VALUED_HANDLE
                ]
                used.update(controls)
                self._copy(
                    part,
                    node,
                    map(source, node.inputs),
                    (one for one in controls if one not in part.fixed),
                )
                if node.op in BLOCKING:
                    part.waiting.append(name)
        part.fetches = [
            _numbered(self._add_bits(part, text_of(edge), self._type(edge), self._carried(edge)))
            for edge in stage.fetches
        ]
        part.targets = [
            name for name in stage.members if name not in used and name not in part.fixed
        ]
        self._add_functions(part)
        return part

    # -- the own task ------------------------------------------------------------------------------

    def own(self, calls: Sequence[StageCall]) -> GraphPart:
        """What the own task runs."""
        plan, kinds = self._plan, self._plan.kinds
        part = GraphPart(self._new_graph())
        part.graph.versions.CopyFrom(plan.graph.definition.versions)
        fed = {
            edge: self._add_placeholder(part, number, self._type(edge))
            for number, edge in enumerate(plan.feeds)
        }
        copied: set[str] = set()
        sides: dict[Branch, str] = {}
        outputs = {
            edge: self._add_bits(
                part,
                text_of((f"prpc_call_{stage.number}", index)),
                self._carried(edge),
                self._type(edge),
            )
            for stage in plan.stages
            for index, edge in enumerate(stage.fetches)
        }

        def source(edge: Edge) -> str:
            name = edge[0]
            if edge in fed:
                return fed[edge]
            if edge in outputs:
                return outputs[edge]
            node = self._nodes[name]
            if kinds[name] is OpKind.CONSTANT and name not in copied:
                copied.add(name)
                self._copy(part, node, (), ())
            elif kinds[name] is OpKind.OWN and (node.is_handle or self._is_private(node)):
                self._fix(part, node)
            return text_of(edge)

        def side(branch: Branch) -> str:
            if branch not in sides:
                number = len(sides)
                predicate, kind = source(branch.predicate), self._type(branch.predicate)
                switch = part.graph.node.add(
                    name=f"prpc_branch_{number}", op="Switch", input=[predicate, predicate]
                )
                switch.attr["T"].type = kind
                if kind != BOOL:
                    switch.op = "_SwitchN"
                    switch.attr["num_outs"].i = branch.sides
                output = text_of((switch.name, branch.side))
                identity = part.graph.node.add(
                    name=f"prpc_side_{number}", op="Identity", input=[output]
                )
                identity.attr["T"].type = kind
                sides[branch] = f"prpc_side_{number}"
            return sides[branch]

        def controls(names: Iterable[str]) -> list[str]:
            found: dict[str, None] = {}
            for name in names:
                kind = kinds.get(name)  # None: a placeholder that is fed
                if kind in REMOTE:
                    found[f"prpc_call_{plan.stage_of[name].number}"] = None
                elif kind is OpKind.OWN:
                    if not self._nodes[name].is_handle and not self._is_private(self._nodes[name]):
                        found[name] = None
                elif kind is not None:
                    found.update(
                        {
                            side(branch): None
                            for branch in of_frame(
                                plan.branches[name], plan.frames[name], plan.frames
                            )
                        }
                    )
            return list(found)

        for name in plan.local:
            node = self._nodes[name]
            if node.is_handle or self._is_private(node):
                self._fix(part, node)
            else:
                copy = self._copy(
                    part,
                    node,
                    [source(edge) for edge in node.inputs],
                    controls(plan.controls[name]),
                )
                if node.op in BLOCKING and not plan.branches[name] and not plan.frames[name]:
                    # elsewhere it may be dead, and nobody could say that it has run
                    part.waiting.append(name)
                # of the value, which comes from another task
                if node.inputs and node.inputs[0] in plan.roots:
                    copy.op = _VALUE_OPS.get(node.op, node.op)
        # of a round, dead or alive together: what one waits for may be what another does
        sends: dict[object, list[str]] = {}
        for call in calls:
            # else what one sends may come of what another has waited for
            if call.send_token and not part.waiting:
                sends.setdefault(_alike(call.stage), []).append(f"^prpc_send_{call.stage.number}")
        for call in calls:
            before = [*controls(call.stage.after), *map(side, call.stage.gates)]
            self._add_call(part, call, source, before, sends.get(_alike(call.stage), ()))
        part.fetches = [_numbered(source(edge)) for edge in plan.fetches]
        part.targets = controls(plan.targets)
        if not part.fetches and not part.targets:
            # constants and handles that are run as ops do nothing here, and TensorFlow runs no part
            # without an end
            part.graph.node.add(name="prpc_nothing", op="NoOp")
            part.targets = ["prpc_nothing"]
        self._add_functions(part)
        return part

    def _add_call(
        self,
        part: GraphPart,
        call: StageCall,
        source: Callable[[Edge], str],
        controls: list[str],
        sends: Sequence[str],
    ) -> None:
        stage = call.stage
        inputs = [
            self._add_bits(part, source(edge), self._type(edge), self._carried(edge))
            for edge in stage.feeds
        ]
        in_types = [self._carried(edge) for edge in stage.feeds]
        if call.send_token:
            send = part.graph.node.add(name=f"prpc_send_{stage.number}", op="PyFunc", input=inputs)
            send.input.extend(f"^{name}" for name in controls)
            send.attr["token"].s = call.send_token.encode()
            send.attr["Tin"].list.type.extend(in_types)
            send.attr["Tout"].list.type.append(9)  # DT_INT64
            inputs, in_types, controls = [send.name], [9], []
        node = part.graph.node.add(name=f"prpc_call_{stage.number}", op="PyFunc", input=inputs)
        node.input.extend(f"^{name}" for name in controls)
        node.input.extend(sends)
        node.attr["token"].s = call.token.encode()
        node.attr["Tin"].list.type.extend(in_types)
        node.attr["Tout"].list.type.extend(self._carried(edge) for edge in stage.fetches)

    # -- of both -----------------------------------------------------------------------------------

    def _type(self, edge: Edge) -> int:
        return self._nodes[edge[0]].out_types[edge[1]] % REF

    def _carried(self, edge: Edge) -> int:
        kind = self._type(edge)
        return _CARRIED.get(kind, kind)

    def _add_placeholder(self, part: GraphPart, number: int, kind: int) -> str:
        name = f"prpc_feed_{number}"
        node = part.graph.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = kind
        node.attr["shape"].shape.unknown_rank = True
        part.feeds.append(f"{name}:0")
        return name

    def _add_feed(self, part: GraphPart, number: int, edge: Edge) -> str:
        return self._add_bits(
            part,
            self._add_placeholder(part, number, self._carried(edge)),
            self._carried(edge),
            self._type(edge),
        )

    def _add_bits(self, part: GraphPart, source: str, kind: int, wanted: int) -> str:
        """The same bits as another type, where that is one."""
        if kind == wanted:
            return source
        node = part.graph.node.add(name=f"prpc_bits_{len(part.graph.node)}", input=[source])
        if kind == VARIANT:
            node.op = "SerializeTensor"
            node.attr["T"].type = kind
        elif wanted == VARIANT:
            node.op = "ParseTensor"
            node.attr["out_type"].type = wanted
        else:
            node.op = "Bitcast"
            node.attr["T"].type, node.attr["type"].type = kind, wanted
        return str(node.name)

    def _copy(
        self, part: GraphPart, node: GraphNode, inputs: Iterable[str], controls: Iterable[str]
    ) -> Any:
        sources = list(inputs)  # first: they add nodes of their own
        copy = part.graph.node.add()
        if node.has_random_state and is_seeded(node.definition):
            self._call_kernel(part, node, copy)
        else:
            copy.CopyFrom(node.definition)
            _strip(copy)
        copy.input.extend(sources)
        copy.input.extend(f"^{name}" for name in controls)
        return copy

    def _call_kernel(self, part: GraphPart, node: GraphNode, call: Any) -> None:
        """Have `call` run the kernel that the session has of this node, whichever part it stands
        in.

        A copy in each part would begin its sequence anew with each set of fetches. TensorFlow's own
        sessions have one a node.
        """
        definition = type(node.definition)()
        definition.CopyFrom(node.definition)
        _strip(definition)
        definitions = []
        for number, kind in enumerate(node.in_types):
            placeholder = type(node.definition)(name=f"prpc_input_{number}", op="Placeholder")
            placeholder.attr["dtype"].type = kind
            placeholder.attr["shape"].shape.unknown_rank = True
            definitions.append(placeholder)
            definition.input.append(placeholder.name)
        part.kernels[node.name] = Fixed([*definitions, definition], is_private=True)
        call.name, call.op = node.name, "PyFunc"
        call.attr["token"].s = b""  # where it is loaded, it gets the function that runs the kernel
        call.attr["Tin"].list.type.extend(node.in_types)
        call.attr["Tout"].list.type.extend(node.out_types)

    def _is_private(self, node: GraphNode) -> bool:
        return (
            node.has_random_state
            and not node.controls
            and all(
                self._plan.kinds.get(name) is OpKind.CONSTANT and (name, 0) not in self._plan.feeds
                for name, _ in node.inputs
            )
        )

    def _fix(self, part: GraphPart, node: GraphNode) -> str:
        """See to it that it is made; its name."""
        if node.name not in part.fixed:
            definitions = []
            for one in self._plan.graph.made_of(node):
                definition = type(one.definition)()
                definition.CopyFrom(one.definition)
                _strip(definition)
                definition.input.extend(map(text_of, one.inputs))
                definitions.append(definition)
            last = definitions[-1]
            is_private = node.has_random_state or node.op in ITERATORS
            if not is_private and "shared_name" in last.attr and not last.attr["shared_name"].s:
                # by default it is that of the node, which is another here
                last.attr["shared_name"].s = node.name.encode()
            part.fixed[node.name] = Fixed(definitions, is_private)
        return node.name

    def _add_functions(self, part: GraphPart) -> None:
        """Those that its nodes call."""
        made_once = [*part.fixed.values(), *part.kernels.values()]
        nodes = [*part.graph.node, *(one for fixed in made_once for one in fixed.definitions)]
        self._functions.bring(nodes, part.graph.library)


def _alike(stage: Stage) -> object:
    return stage.round, stage.branches, stage.frame


def _strip(definition: Any) -> None:
    del definition.input[:]
    definition.device = ""
    definition.attr.pop("_class", None)


def _numbered(text: str) -> str:
    return text if ":" in text else f"{text}:0"
