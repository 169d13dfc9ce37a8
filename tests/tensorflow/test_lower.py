"""Which functional ops stay one op, and what becomes of the others: on graphs alone, without a
session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.tensorflow.test_cut import PS0, PS1, WORKER

DEVICES = {PS0: "/job:ps/task:0", PS1: "/job:ps/task:1", WORKER: "/job:worker/task:0"}


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, by its old face, with control flow of version 2."""
    found = pytest.importorskip(
        "tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'"
    ).compat.v1
    before = found.control_flow_v2_enabled()
    found.enable_control_flow_v2()
    yield found
    if not before:
        found.disable_control_flow_v2()


def lowered_of(tf: Any, build: Callable[[], Any], feeds: Sequence[tuple[str, int]] = ()) -> Any:
    """The graph of a step that fetches what `build` returns, and its plan."""
    from prpc_engine.tensorflow.lower import lowered
    from prpc_engine.tensorflow.nodes import Graph
    from prpc_engine.tensorflow.partition import cut
    from prpc_engine.tensorflow.place import Placer
    from prpc_engine.tensorflow.star import signature_of

    graph = tf.Graph()
    with graph.as_default():
        edges = [(one.op.name, one.value_index) for one in build()]
    placer = Placer([PS0, PS1, WORKER], WORKER)
    plain, fetches, targets = lowered(
        Graph(graph.as_graph_def(), signature_of), placer, WORKER, edges, [], feeds
    )
    return plain, cut(plain, placer, WORKER, fetches, targets, feeds)


def ops(graph: Any) -> set[str]:
    return {node.op for node in graph.nodes.values()}


def loop(tf: Any, *homes: Any) -> Any:
    """Over a variable of each task."""
    variables = []
    for number, home in enumerate(homes):
        with tf.device(DEVICES[home]):
            variables.append(tf.get_variable(f"v{number}", [], use_resource=True))
    total = tf.while_loop(
        lambda x: x < 9.0, lambda x: x * tf.add_n([one.read_value() for one in variables]), [1.0]
    )
    return total, variables


@pytest.mark.parametrize("home", [PS0, WORKER])
def test_a_loop_over_variables_of_one_task_stays_one_op_that_runs_there(tf: Any, home: Any) -> None:
    graph, plan = lowered_of(tf, lambda: [loop(tf, home, home)[0]])
    (name,) = [node.name for node in graph.nodes.values() if node.op == "While"]
    assert (plan.stage_of[name].task if home == PS0 else WORKER) == home
    assert (name in plan.local) == (home == WORKER)


def test_a_loop_over_variables_of_two_tasks_is_lowered(tf: Any) -> None:
    graph, plan = lowered_of(tf, lambda: [loop(tf, PS0, PS1)[0]])
    assert ops(graph).isdisjoint({"While", "StatelessWhile"})
    assert {stage.task for stage in plan.stages if stage.frame} == {PS0, PS1}


def test_a_loop_with_a_gradient_is_lowered_and_its_lists_stay_at_the_own_task(tf: Any) -> None:
    def build() -> Any:
        total, variables = loop(tf, PS0)
        return tf.gradients(total, variables)

    graph, plan = lowered_of(tf, build)
    assert "While" not in ops(graph)
    lists = {name for name, node in graph.nodes.items() if node.op.startswith("TensorList")}
    assert lists
    assert lists.isdisjoint(plan.stage_of)
    # it has no handles
    assert {node.name for node in graph.nodes.values() if node.op == "StatelessWhile"} <= set(
        plan.local
    )


def test_what_a_function_does_besides_its_values_is_done_when_another_one_is_lowered(
    tf: Any,
) -> None:
    def build() -> Any:
        total, variables = loop(tf, PS0, PS1)

        @tensorflow.function
        def count(x: Any) -> Any:
            variables[0].assign_add(1.0)
            return x + 1.0

        return [count(total)]

    tensorflow = pytest.importorskip("tensorflow")
    _, plan = lowered_of(tf, build)
    assert any("AssignAddVariableOp" in member for stage in plan.stages for member in stage.members)


def test_what_is_fed_cannot_be_lowered_and_is_named(tf: Any) -> None:
    from prpc_engine.tensorflow.partition import Unsupported

    def build() -> Any:
        total, _ = loop(tf, PS0, PS1)
        with tf.variable_scope("other"):
            return [loop(tf, PS0, PS1)[0] + total]

    with pytest.raises(Unsupported, match="'while', a function, is fed"):
        lowered_of(tf, build, [("while", 2)])
    graph, _ = lowered_of(tf, build, [("while/Identity_2", 0)])
    assert "while" in graph.nodes  # it is not needed


def test_a_dataset_cannot_go_to_another_task_and_is_named(tf: Any) -> None:
    from prpc_engine.tensorflow.partition import Unsupported

    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            made = tf.raw_ops.RangeDataset(
                start=0, stop=1, step=1, output_types=[tf.int64], output_shapes=[[]]
            )
            return [tf.identity(made, "passed")]

    with pytest.raises(
        Unsupported,
        match="'passed' is a dataset of /job:ps/task:0: make it at the task that uses it",
    ):
        lowered_of(tf, build)
