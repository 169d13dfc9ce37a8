"""Where nodes go, and how a step is cut into stages: on graphs alone, without a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prpc_engine.settings.cluster_spec import Task

PS0, PS1, WORKER = Task("ps", 0), Task("ps", 1), Task("worker", 0)


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, by its old face."""
    found = pytest.importorskip(
        "tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'"
    ).compat.v1
    with found.Graph().as_default():  # what folds constants opens the process's command line
        count = found.shape(found.unique(found.placeholder("int32", [1]))[0])[0]
        found.unsorted_segment_sum([1.0], [0], count)
    return found


def cut_of(tf: Any, build: Callable[[], Any], fetch: bool = True, soft: bool = False) -> Any:
    """The plan of a step that fetches, or runs, what `build` returns."""
    from prpc_engine.tensorflow.nodes import Graph
    from prpc_engine.tensorflow.partition import cut
    from prpc_engine.tensorflow.place import Placer
    from prpc_engine.tensorflow.star import signature_of

    graph = tf.Graph()
    with graph.as_default():
        wanted = build()
    wanted = wanted if isinstance(wanted, list) else [wanted]
    names = [one.op.name if hasattr(one, "op") else one.name for one in wanted]
    placer = Placer([PS0, PS1, WORKER], WORKER, soft)
    edges = [(name, 0) for name in names] if fetch else []
    return cut(
        Graph(graph.as_graph_def(), signature_of), placer, WORKER, edges, [] if fetch else names, []
    )


def test_what_a_ps_can_do_at_once_is_one_stage(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            values = [
                tf.get_variable(f"v{number}", [2], use_resource=True) * 2.0 for number in range(5)
            ]
        return tf.add_n(values)

    plan = cut_of(tf, build)
    assert [stage.task for stage in plan.stages] == [PS0]
    assert len(plan.stages[0].fetches) == 5


def test_reading_and_updating_are_two_rounds_of_each_ps(tf: Any) -> None:
    def build() -> Any:
        updates = []
        for task in ("/job:ps/task:0", "/job:ps/task:1"):
            with tf.device(task):
                v = tf.get_variable(task[-1], [2], use_resource=True)
            with tf.device("/job:worker/task:0"):
                gradient = tf.sin(v.read_value())
            updates.append(v.assign_sub(gradient, read_value=False))
        return tf.group(*updates)

    plan = cut_of(tf, build, fetch=False)
    assert sorted((stage.round, stage.task) for stage in plan.stages) == [
        (0, PS0),
        (0, PS1),
        (1, PS0),
        (1, PS1),
    ]


def test_ops_of_two_branches_are_not_in_one_stage(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable("v", [2], use_resource=True) * 1.0
            found = []
            for number in range(2):
                switch = tf.raw_ops.Switch(
                    data=v, pred=tf.placeholder_with_default(True, [], f"p{number}")
                )
                found.append(switch.output_true * 3.0)
        return found

    plan = cut_of(tf, build)
    gated = [stage for stage in plan.stages if stage.branches]
    assert len(gated) == 2
    assert gated[0].branches != gated[1].branches
    assert plan.may_be_dead


def test_what_may_wait_is_alone_in_its_stage(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            queue = tf.FIFOQueue(1, [tf.float32], [[]])
            return [queue.dequeue() + 1.0, tf.get_variable("v", [], use_resource=True) + 1.0]

    plan = cut_of(tf, build)
    assert [
        len(stage.members)
        for stage in plan.stages
        if any("Dequeue" in name for name in stage.members)
    ] == [1]


def test_a_read_of_a_reference_is_copied_to_where_it_is_used(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable("v", [], use_resource=False)
            read = tf.identity(v)
            with tf.control_dependencies(
                [tf.assign(v, tf.sin(tf.placeholder_with_default(1.0, [])))]
            ):
                return read + 1.0

    plan = cut_of(tf, build)
    from prpc_engine.tensorflow.partition import OpKind

    assert OpKind.READ in plan.kinds.values()
    assert len(plan.stages) == 1


@pytest.mark.parametrize(
    "device", ["/job:ps/task:7", "/job:nobody/task:0", "/job:ps/task:0/device:GPU:0"]
)
def test_a_device_that_is_not_there_is_refused_by_name(tf: Any, device: str) -> None:
    from prpc_engine.tensorflow.place import Misplaced

    def build() -> Any:
        with tf.device(device):
            return tf.sin(tf.constant(1.0), name="lost")

    with pytest.raises(Misplaced, match="explicitly assigned"):
        cut_of(tf, build)


def test_the_device_of_a_handle_wins_over_that_of_its_users(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:1"):
            v = tf.get_variable("v", [], use_resource=True)
        with tf.device("/job:ps/task:0"):
            return tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32)

    assert [stage.task for stage in cut_of(tf, build).stages] == [PS1]


def test_who_uses_an_alias_of_a_handle_waits_for_what_the_alias_comes_after(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable("v", [], use_resource=True)
            update = v.assign_add(tf.sin(tf.placeholder_with_default(1.0, [])), read_value=False)
            with tf.control_dependencies([update]):
                later = tf.identity(v.handle)
            return tf.raw_ops.ReadVariableOp(resource=later, dtype=tf.float32, name="read")

    plan = cut_of(tf, build)
    assert [one for one in plan.controls["read"] if "AssignAdd" in one]
    (stage,) = [one for one in plan.stages if "read" in one.members]
    assert [name for name in stage.members if "AssignAdd" in name or name == "read"][-1] == "read"


def test_a_stage_in_an_inner_loop_is_told_by_that_loop_alone(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable("v", [], use_resource=True)

        def inner(x: Any) -> Any:
            return tf.cond(x > 4.0, lambda: x - v, lambda: x + v)

        return tf.while_loop(
            lambda x: x < 9.0, lambda x: tf.while_loop(lambda y: y < 8.0, inner, [x]) + 1.0, [0.0]
        )

    tf.disable_control_flow_v2()
    plan = cut_of(tf, build)
    stages = [stage for stage in plan.stages if stage.frame]
    assert {len(stage.frame) for stage in stages} == {2}
    for stage in stages:
        assert {plan.frames[gate.predicate[0]] for gate in stage.gates} <= {stage.frame}


def test_what_a_sparse_update_makes_of_its_rows_runs_in_the_stage_of_the_update(tf: Any) -> None:
    def build() -> Any:  # as optimizers of sparse gradients do
        ids = tf.placeholder_with_default([1, 1, 7], [3])
        with tf.device("/job:ps/task:0"):
            table = tf.get_variable("table", [100, 4], use_resource=True)
            rows = table.sparse_read(ids)
        with tf.device("/job:worker/task:0"):
            gradient = tf.sin(rows)
        with tf.device("/job:ps/task:0"):
            different, places = tf.unique(ids)
            summed = tf.unsorted_segment_sum(gradient, places, tf.shape(different)[0])
            return table.scatter_sub(tf.IndexedSlices(summed, different))

    plan = cut_of(tf, build, fetch=False)
    read, update = plan.stages
    assert len(read.fetches) == 1, "the rows alone"
    assert not update.fetches
    ops = [plan.graph.nodes[name].op for name in update.members]
    assert {"Unique", "UnsortedSegmentSum"} <= set(ops)


def test_what_is_read_and_what_is_random_is_made_when_it_was(tf: Any) -> None:
    def build() -> Any:
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable("v", [4], use_resource=True)
            read = tf.square(v.read_value(), name="of_read")
            drawn = tf.square(tf.random.uniform([4], seed=1), name="of_drawn")
        with tf.device("/job:worker/task:0"):
            gradient = tf.sin(v.read_value())
        with tf.device("/job:ps/task:0"):
            return v.assign_sub(gradient * read * drawn, read_value=False)

    plan = cut_of(tf, build, fetch=False)
    (first, _) = plan.stages
    assert {"of_read", "of_drawn"} <= set(first.members)
