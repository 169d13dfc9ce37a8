"""Steps that are run bit by bit: what each bit runs, on names alone and without TensorFlow; and
beside the stock protocol.
"""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.tensorflow.bits import StepInBits
from prpc_engine.tensorflow.nodes import RESOURCE, Argument, Edge, Graph, Signature
from tests.tensorflow.tasks import Job
from tests.tensorflow.test_states import check_in_plane

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)
FLOAT = 1
VALUES, HANDLES = Argument(FLOAT, "", "n", "", False), Argument(RESOURCE, "", "h", "", False)
ONE_VALUE, ONE_HANDLE = Argument(FLOAT, "", "", "", False), Argument(RESOURCE, "", "", "", False)
SIGNATURES = {
    "Placeholder": Signature((), (ONE_VALUE,), False),
    "Const": Signature((), (ONE_VALUE,), False),
    "Handle": Signature((), (ONE_HANDLE,), True),
    "Op": Signature((VALUES, HANDLES), (ONE_VALUE,), True),
}


class Definition:
    """As a GraphDef."""

    def __init__(self) -> None:
        self.node: list[Any] = []
        self.library = SimpleNamespace(function=[])

    def CopyFrom(self, other: Definition) -> None:  # noqa: N802 - as protobuf has it
        self.node = copy.deepcopy(other.node)


class Executor:
    """Runs bits. The value of a node is made of its name and of what it takes."""

    def __init__(self, graph: Graph) -> None:
        self.whole = graph
        self.ran: list[str] = []

    def run(self, graph: Graph, fetches: list[Edge], targets: list[str], feeds: Any) -> list[Any]:
        values: dict[str, Any] = {}

        def value(edge: Edge) -> Any:
            return feeds[edge] if edge in feeds else run(edge[0])

        def run(name: str) -> Any:
            if name not in values:
                node = graph.nodes[name]
                assert node.op != "Placeholder", f"{name} was not fed"
                for one in node.controls:
                    if (one, 0) not in feeds:
                        run(one)
                taken = [value(edge) for edge in node.inputs]
                if node.op == "Op":
                    for one in self.whole.nodes[name].controls:
                        is_fed = self.whole.nodes[one].op == "Placeholder" and (one, 0) in feeds
                        assert is_fed or self.whole.nodes[one].op != "Op" or one in self.ran
                    assert name not in self.ran, f"{name} runs twice"
                    self.ran.append(name)
                values[name] = (name, *taken)
            return values[name]

        for name in targets:
            run(name)
        return [value(edge) for edge in fetches]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Of which each node takes what stands before it."""
    definition, names = Definition(), list[str]()
    for number in range(draw(st.integers(6, 20))):
        op = draw(st.sampled_from(["Placeholder", "Const", "Handle", "Op", "Op", "Op"]))
        inputs: list[str] = []
        controls: list[str] = []
        count = {"Op": 0, "Handle": 0}
        if op == "Op" and names:
            some = draw(st.lists(st.sampled_from(names), max_size=3))
            by_kind = {one: names.index(one) for one in some}
            handles = [one for one in some if definition.node[by_kind[one]].op == "Handle"]
            values = [one for one in some if one not in handles]
            inputs = [*values, *handles]
            controls = draw(st.lists(st.sampled_from(names), max_size=2))
            count = {"Op": len(values), "Handle": len(handles)}
        attr = {
            "n": SimpleNamespace(i=count["Op"]),
            "h": SimpleNamespace(i=count["Handle"]),
        }
        name = f"{op[0].lower()}{number}"
        text = [*inputs, *(f"^{one}" for one in controls)]
        definition.node.append(SimpleNamespace(name=name, op=op, device="", input=text, attr=attr))
        names.append(name)
    return Graph(definition, SIGNATURES.get)


@given(graphs(), st.data())
def test_each_node_runs_once_after_what_it_waits_for_and_values_are_those_of_one_run(
    graph: Graph, data: st.DataObject
) -> None:
    ops = [name for name, node in graph.nodes.items() if node.op == "Op"]
    fed = {(name, 0): name for name, node in graph.nodes.items() if node.op == "Placeholder"}
    if not ops:
        return
    fetches = [(name, 0) for name in data.draw(st.lists(st.sampled_from(ops), unique=True))]
    targets = data.draw(st.lists(st.sampled_from(ops), unique=True))
    expected = Executor(graph).run(graph, fetches, targets, fed)
    step, executor = StepInBits(graph, targets, fetches, fed), Executor(graph)
    found: dict[Edge, Any] = {}
    left = data.draw(st.permutations(list(fed)))
    least = 0  # the first bit may feed nothing
    while not step.is_over:
        count = data.draw(st.integers(min(least, len(left)), len(left)))
        now, left, least = left[:count], left[count:], 1
        asked = [] if left else [edge for edge in fetches if edge not in found]
        bit = step.next_bit(asked, {edge: fed[edge] for edge in now})
        if bit is not None:
            edges = [*bit.results, *bit.kept]
            step.ran(bit, executor.run(step.graph_of(bit), edges, bit.targets, bit.feeds))
        found.update(zip(asked, step.give_out(asked), strict=True))
    assert [found[edge] for edge in fetches] == expected
    needed = graph.needed(fetches, targets, list(fed))
    assert sorted(executor.ran) == sorted(name for name in needed if graph.nodes[name].op == "Op")


@needs_tensorflow
@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_bits_feed_each_other_as_with_stock(job: Job, plane: str) -> None:
    found = check_in_plane(job, plane, "bit_by_bit")
    assert found == [3.0, 153.0, [], {"total": 2.0}, [6.0], 8.0]


@needs_tensorflow
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_each_effect_is_had_once_as_with_stock(job: Job, plane: str, resource: bool) -> None:
    found = check_in_plane(job, plane, "effects_in_bits", resource=resource)
    assert found == [2.0, [6.0, 5.0], 1.0, True, [1.0, 10.0]]


@needs_tensorflow
def test_mistakes_are_errors_of_the_kinds_of_stock_and_say_what_is_wrong(job: Job) -> None:
    (stock, value), (ours, same) = job.both("mistaken_bits")
    assert [kind for kind, _ in ours] == [kind for kind, _ in stock]
    assert value == same == [6.0]
    texts = ["target", "handle", "not specified", "already", "already", "not been fed", "operation"]
    for (_, text), part in zip(ours, [*texts, "handle", "closed"], strict=True):
        assert part in text


@needs_tensorflow
def test_what_cannot_be_kept_for_a_later_bit_is_refused_by_name(job: Job) -> None:
    kind, text = job.worker().do("kept_variant", "prpc")
    assert kind == "UnimplementedError"
    assert "TensorListFromTensor" in text and "fetch both at once" in text
