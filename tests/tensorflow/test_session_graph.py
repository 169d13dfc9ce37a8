"""A session's graph that gets nodes without objects of Python's, and how much is optimized."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'"
)


def added(part: str, inputs: dict[Any, Any], wanted: list[str], graph: Any = None) -> Any:
    """What add() returns for a GraphDef as text."""
    from google.protobuf import text_format

    from prpc_engine.tensorflow.session_graph import SessionGraph

    graph = graph or SessionGraph()
    definition = text_format.Parse(part, tf.compat.v1.GraphDef())
    return graph, graph.add(definition, "part", inputs, wanted)


SPLIT = """
node { name: "axis" op: "Const" attr { key: "dtype" value { type: DT_INT32 } }
       attr { key: "value" value { tensor { dtype: DT_INT32 tensor_shape {} int_val: 0 } } } }
node { name: "fed" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
node { name: "halves" op: "Split" input: "axis" input: "fed"
       attr { key: "num_split" value { i: 2 } } attr { key: "T" value { type: DT_FLOAT } } }
"""
NEGATED = """
node { name: "negated" op: "Neg" input: "given:1" attr { key: "T" value { type: DT_FLOAT } } }
"""


def test_a_graph_grows_by_parts_that_take_each_others_tensors() -> None:
    graph, (halves, fed) = added(SPLIT, {}, ["halves", "fed"])
    assert (halves.name, fed.name) == ("part1/halves", "part1/fed")
    assert len(halves.outputs) == 2
    _, (negated,) = added(NEGATED, {("given", 1): halves.output(1)}, ["negated"], graph)
    assert graph.size == 4
    inputs = {node.name: list(node.input) for node in graph.graph.as_graph_def().node}
    assert inputs[negated.name] == ["part1/halves:1"]


@pytest.mark.parametrize(
    ("part", "wanted", "text"),
    [
        (NEGATED, ["negated"], "given"),  # which is nowhere
        ('node { name: "odd" op: "NoSuchOp" }', [], "NoSuchOp"),
        (SPLIT, ["third"], "third"),
    ],
)
def test_a_bad_part_is_refused_and_adds_nothing(part: str, wanted: list[str], text: str) -> None:
    from tensorflow.python.framework import errors_impl as tf_errors

    graph, _ = added(SPLIT, {}, [])
    with pytest.raises((ValueError, tf_errors.NotFoundError), match=text):
        added(part, {}, wanted, graph)
    assert graph.size == 3


def test_grappler_does_what_the_user_says_and_else_less() -> None:
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

    from prpc_engine.tensorflow.runtime import optimize_less

    said = RewriterConfig(
        meta_optimizer_iterations=RewriterConfig.TWO,
        memory_optimization=RewriterConfig.MANUAL,
        layout_optimizer=RewriterConfig.ON,
    )
    kept = RewriterConfig()
    kept.CopyFrom(said)
    optimize_less(kept)
    assert kept == said
    optimize_less(usual := RewriterConfig())
    assert usual.meta_optimizer_iterations == RewriterConfig.ONE
    assert usual.memory_optimization == RewriterConfig.NO_MEM_OPT  # TensorFlow here has no GPU
    assert usual.layout_optimizer == RewriterConfig.OFF


@pytest.mark.parametrize(
    ("op", "keeps"),
    [
        ("AddV2", False),
        ("PyFunc", False),  # calls of stages
        ("RandomUniform", False),  # without a seed: no sequence that has to go on
        ("Assert", False),
        ("TensorArrayV3", False),  # lives for a step
        ("Stage", True),  # what is staged is found by name
        ("EagerPyFunc", True),
        ("NoSuchOp", True),
    ],
)
def test_an_own_part_goes_with_its_session_unless_it_keeps_something(op: str, keeps: bool) -> None:
    from prpc_engine.tensorflow.rewrite import Fixed, GraphPart
    from prpc_engine.tensorflow.star import keeps_state

    part = GraphPart(tf.compat.v1.GraphDef())
    node = part.graph.node.add(name="one", op=op)
    if op == "RandomUniform":
        node.attr["seed"].i = 0
    for attr in ("T", "dtype"):
        node.attr[attr].type = tf.float32.as_datatype_enum
    assert keeps_state(part) is keeps
    part.fixed["v"] = Fixed([], is_private=False)
    assert keeps_state(part)
