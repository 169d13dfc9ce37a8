"""Which process of a task has what: the rule of the task, and what a plan makes of it; on graphs
alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.settings.cluster_spec import Task

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)
PS, WORKER = Task("ps", 0), Task("worker", 0)


def dealt(count: int, *asked: list[tuple[str, int]]) -> list[list[int]]:
    """The shards that a task of so many tells: of each request its groups, "ab" of the keys a and
    b.
    """
    from prpc_engine.tensorflow.deal import Deal, HandleGroup

    deal = Deal(count)
    return [
        deal.assign([HandleGroup(list(keys), nbytes) for keys, nbytes in groups])
        for groups in asked
    ]


def test_the_largest_are_dealt_out_first_each_to_who_has_least() -> None:
    assert dealt(2, [("a", 1), ("b", 10), ("c", 6), ("d", 5)]) == [[0, 0, 1, 1]]


def test_what_is_known_stays_where_it_is_and_others_join_it() -> None:
    assert dealt(3, [("a", 9), ("b", 9)], [("b", 9), ("ca", 1), ("d", 1)]) == [[0, 1], [1, 0, 2]]


def test_what_was_dealt_out_apart_is_not_used_together() -> None:
    from prpc_engine.tensorflow.place import Misplaced

    with pytest.raises(Misplaced, match=r"a, b: these are used together.*the shards 0, 1 before"):
        dealt(2, [("a", 1), ("b", 1)], [("ab", 1)])


@given(
    st.integers(1, 8),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 100), min_size=1),
    st.randoms(),
)
def test_a_restart_repeats_it_whatever_the_order_and_no_shard_has_much_more_than_others(
    count: int, sizes: dict[str, int], random: Any
) -> None:
    from prpc_engine.tensorflow.deal import Deal, HandleGroup

    groups = [HandleGroup([name], nbytes) for name, nbytes in sizes.items()]
    first, second = Deal(count), Deal(count)
    before = dict(zip(sizes, first.assign(groups), strict=True))
    random.shuffle(groups)
    after = second.assign(groups)
    assert before == {group.keys[0]: shard for group, shard in zip(groups, after, strict=True)}
    assert max(first.nbytes) - min(first.nbytes) <= max(sizes.values())


class Placing:
    """A graph that is built by `build`, and where its nodes go with a ps of so many processes."""

    def __init__(self, build: Callable[[Any], Any], count: int = 2) -> None:
        import tensorflow as tf

        from prpc_engine.tensorflow.deal import Deal, ShardPlacer
        from prpc_engine.tensorflow.nodes import Graph
        from prpc_engine.tensorflow.place import Placer
        from prpc_engine.tensorflow.star import signature_of

        graph = tf.Graph()
        with graph.as_default():
            self.wanted = build(tf.compat.v1)
        self.graph = Graph(graph.as_graph_def(), signature_of)
        self.placer = ShardPlacer(Placer([PS, WORKER], WORKER), [WORKER])
        self.count, self.deal = count, Deal(count)
        self.asked: list[list[str]] = []  # the keys of each group

    def learn(self, names: list[str]) -> None:
        for task, groups in self.placer.missing(self.graph, names).items():
            self.asked.extend(sorted(group.keys) for group in groups)
            assert task == PS
            self.placer.learn(task, self.count, groups, self.deal.assign(groups))

    def place(self, names: list[str] | None = None) -> dict[str, int]:
        """The shard of each node of the ps."""
        names = list(self.graph.nodes) if names is None else names
        self.learn(names)
        places = self.placer.place(self.graph, names)
        return {
            name: getattr(task, "shard", 0) for name, task in places.items() if task.job == "ps"
        }


def two_variables(tf: Any) -> Any:
    with tf.device("/job:ps/task:0"):
        made = [tf.get_variable(name, [8], use_resource=True) for name in "ab"]
        loss = tf.add_n([tf.reduce_sum(one * one) for one in made])
    return tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def test_a_variable_its_slots_and_their_updates_are_in_one_process() -> None:
    placing = Placing(two_variables)
    shards = placing.place()
    for name in "ab":
        of_one = {shard for node, shard in shards.items() if node.split("/")[0] == name}
        assert len(of_one) == 1
        assert shards[f"{name}/Momentum"] == shards[name]
        assert shards[f"Momentum/update_{name}/ResourceApplyMomentum"] == shards[name]
    assert {shards["a"], shards["b"]} == {0, 1}
    assert ["/a", "/a/Momentum"] in placing.asked


def test_a_part_of_the_graph_knows_what_belongs_together_in_the_whole() -> None:
    placing = Placing(two_variables)
    slot = placing.place(["b/Momentum"])
    assert ["/b", "/b/Momentum"] in placing.asked
    assert placing.place(["b"])["b"] == slot["b/Momentum"]


def test_what_makes_a_value_for_a_variable_is_made_beside_it() -> None:
    def build(tf: Any) -> Any:
        with tf.device("/job:ps/task:0"):
            tf.get_variable("large", [100], use_resource=True)
            small = tf.get_variable("small", [8], use_resource=True)
            value = tf.reshape(tf.placeholder(tf.float32, name="fed"), [8], name="value")
            tf.identity(small.read_value() * 2.0, name="twice")
            added = small.assign_add(value)
            tf.group(added.op, name="added")
            return added

    shards = Placing(build).place()
    assert shards["small"] == 1
    assert {shards[name] for name in ("value", "fed", "twice", "added")} == {1}


def test_what_is_known_is_not_asked_for_again_until_it_is_forgotten() -> None:
    placing = Placing(two_variables)
    names = list(placing.graph.nodes)
    placing.learn(names)
    assert placing.placer.missing(placing.graph, names) == {}
    placing.placer.forget()
    assert set(placing.placer.missing(placing.graph, names)) == {PS}


def test_a_task_of_one_process_is_asked_once_and_has_all() -> None:
    placing = Placing(two_variables, count=1)
    assert set(placing.place().values()) == {0}
    assert placing.placer.missing(placing.graph, list(placing.graph.nodes)) == {}
