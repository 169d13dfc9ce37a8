"""A GraphDef as nodes with their edges and types. No I/O here, and no session: an op's signature is
asked of `signature_of`.

    edge       in a NodeDef      here
    data       "name:1", "name"  inputs: (name, 1), (name, 0)
    control    "^name"           controls: name

A type is TensorFlow's number for it; that of a reference is 100 more, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
REF = 100  # added to a type: the output is the variable itself
STRING, BOOL, RESOURCE, VARIANT = 7, 10, 20, 21
# attributes of random kernels; 0 in all of them: another sequence in each run
SEEDS = ("seed", "seed2", "file_random_seed")
OF_STEP = ("Stack", "TensorArray")  # how ops begin that use what lives for one step of a session
Edge = tuple[str, int]


class Argument(NamedTuple):
    """One argument of an op: how many tensors it stands for, and of which types."""

    type: int
    type_attr: str
    number_attr: str
    type_list_attr: str
    is_ref: bool

    def types(self, attr: Mapping[str, Any]) -> list[int]:
        """Of its tensors in a node with these attributes."""
        if self.type_list_attr:
            return [int(one) for one in attr[self.type_list_attr].list.type]
        kind = self.type or int(attr[self.type_attr].type)
        kind += REF if self.is_ref else 0
        return [kind] * (int(attr[self.number_attr].i) if self.number_attr else 1)


class Signature(NamedTuple):
    """The inputs and outputs of an op's nodes, and whether the op is stateful."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    is_stateful: bool

    @classmethod
    def of(cls, op: Any) -> Signature:
        """From an OpDef."""
        return cls(_arguments(op.input_arg), _arguments(op.output_arg), bool(op.is_stateful))


def _arguments(arguments: Any) -> tuple[Argument, ...]:
    return tuple(
        Argument(one.type, one.type_attr, one.number_attr, one.type_list_attr, one.is_ref)
        for one in arguments
    )


def _is_handle_type(kind: int) -> bool:
    return kind == RESOURCE or kind >= REF


def has_random_state(definition: Any, signature: Signature) -> bool:
    """The kernel of a NodeDef keeps a generator, or a place in its data, that goes on from step to
    step.
    """
    attr = definition.attr
    if not signature.is_stateful or not any(name in attr for name in SEEDS):
        return False
    return not any(
        _is_handle_type(kind) for argument in signature.outputs for kind in argument.types(attr)
    )


def is_seeded(definition: Any) -> bool:
    """Of a random kernel: its values are the same in every run of a script."""
    return any(definition.attr[name].i for name in SEEDS if name in definition.attr)


class GraphNode:
    """One node. `definition` is its NodeDef, which nobody changes."""

    __slots__ = (
        "controls",
        "definition",
        "device",
        "has_random_state",
        "in_types",
        "inputs",
        "is_stateful",
        "name",
        "op",
        "out_types",
    )

    def __init__(self, definition: Any, signature: Signature) -> None:
        self.definition = definition
        self.name: str = definition.name
        self.op: str = definition.op
        self.device: str = definition.device
        self.inputs: list[Edge] = []
        self.controls: list[str] = []
        for text in definition.input:
            if text[0] == "^":
                self.controls.append(text[1:])
            else:
                self.inputs.append(edge_of(text))
        attr = definition.attr
        self.in_types = [kind for argument in signature.inputs for kind in argument.types(attr)]
        self.out_types = [kind for argument in signature.outputs for kind in argument.types(attr)]
        self.is_stateful = signature.is_stateful
        self.has_random_state = has_random_state(definition, signature)

    @property
    def is_handle(self) -> bool:
        """It makes no value, but names what lives at its task: a variable, queue, table, iterator.

        Most have no inputs. A dense hash table takes its empty and deleted keys; like all that
        several nodes may share, it has a `shared_name`, which ops that make something for one step
        (a TensorArray, a stack) have not.
        """
        if not any(_is_handle_type(kind) for kind in self.out_types):
            return False
        if not self.inputs:
            return True
        return "shared_name" in self.definition.attr and not any(
            map(_is_handle_type, self.in_types)
        )

    @property
    def is_of_step(self) -> bool:
        """It is, or uses, what lives for one step of one session."""
        return self.op.startswith(OF_STEP)

    def colocated(self) -> list[str]:
        """The nodes that `_class` wants it together with."""
        attr = self.definition.attr
        if "_class" not in attr:
            return []
        return [text[5:].decode() for text in attr["_class"].list.s if text.startswith(b"loc:@")]


class Graph:
    """The nodes of a GraphDef by name, in its order, and its functions."""

    def __init__(self, definition: Any, signature_of: Callable[[str], Signature | None]) -> None:
        self.definition, self.signature_of = definition, signature_of
        functions = {
            function.signature.name: Signature.of(function.signature)
            for function in definition.library.function
        }
        known: dict[str, Signature] = {}
        self.nodes: dict[str, GraphNode] = {}
        for node in definition.node:
            signature = known.get(node.op)
            if signature is None:
                signature = signature_of(node.op) or functions.get(node.op)
                if signature is None:
                    raise KeyError(f"node {node.name!r} is of the unknown op {node.op!r}")
                known[node.op] = signature
            self.nodes[node.name] = GraphNode(node, signature)

    def needed(
        self, fetches: Sequence[Edge], targets: Iterable[str], feeds: Sequence[Edge]
    ) -> set[str]:
        """Nodes that the fetches and targets need."""
        waiting = [name for name, _ in fetches] + list(targets)
        fed, given = frozenset(feeds), self.given(feeds)
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                node = self.nodes[name]
                waiting.extend(edge[0] for edge in node.inputs if edge not in fed)
                waiting.extend(one for one in node.controls if one not in given)
        return found

    def connected(self, connections: Mapping[Edge, Edge]) -> Graph:
        """A copy in which whatever takes an edge that is a key here takes the edge that it is
        connected to.
        """
        definition = type(self.definition)()
        definition.CopyFrom(self.definition)
        texts = {text_of(to): text_of(source) for to, source in connections.items()}
        texts.update(
            {
                f"{name}:0": text_of(source)
                for (name, index), source in connections.items()
                if not index
            }
        )
        for node in definition.node:
            node.input[:] = [texts.get(text, text) for text in node.input]
        return Graph(definition, self.signature_of)

    def without_waits(self, names: Iterable[str], done: frozenset[str]) -> Graph:
        """A copy in which these nodes wait for none of those that are `done`; where none does, the
        graph itself.
        """
        changed = {name for name in names if not done.isdisjoint(self.nodes[name].controls)}
        if not changed:
            return self
        definition = type(self.definition)()
        definition.CopyFrom(self.definition)
        for node in definition.node:
            if node.name in changed:
                node.input[:] = [
                    text for text in node.input if text[0] != "^" or text[1:] not in done
                ]
        return Graph(definition, self.signature_of)

    def made_of(self, handle: GraphNode) -> list[GraphNode]:
        """The nodes that make a handle's inputs, in an order in which they can run, and last the
        handle itself.
        """
        found: dict[str, GraphNode] = {}

        def visit(node: GraphNode) -> None:
            for name, _ in node.inputs:
                if name not in found:
                    visit(self.nodes[name])
            found[node.name] = node

        visit(handle)
        return list(found.values())

    def varying_source(self, handle: GraphNode, feeds: Iterable[Edge]) -> Edge | None:
        """Of what a handle is made of, an edge whose value may change from step to step, if there
        is one.
        """
        fed = frozenset(feeds)
        for node in self.made_of(handle):
            for edge in node.inputs:
                source = self.nodes[edge[0]]
                if edge in fed or source.is_stateful or source.op in PLACEHOLDERS:
                    return edge
        return None

    def is_dataset(self, name: str) -> bool:
        """Of variants, lists, optional values and the like can be copied to another task: a dataset
        cannot, as it is code.
        """
        node = self.nodes[name]
        while node.op == "Identity":
            node = self.nodes[node.inputs[0][0]]
        return "Dataset" in node.op

    def given(self, feeds: Iterable[Edge]) -> frozenset[str]:
        """The placeholders that are fed: nobody waits for them."""
        return frozenset(name for name, _ in feeds if self.nodes[name].op in PLACEHOLDERS)


def text_of(edge: Edge) -> str:
    """As a NodeDef has it."""
    return edge[0] if edge[1] == 0 else f"{edge[0]}:{edge[1]}"


def edge_of(text: str) -> Edge:
    """The reverse."""
    name, _, index = text.partition(":")
    return name, int(index) if index else 0
