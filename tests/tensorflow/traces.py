"""Scenarios about RunMetadata, for tests: as those of scenarios.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import timeline

from tests.tensorflow.scenarios import Task

v1 = tf.compat.v1


def traced(task: Task) -> Any:
    """The value of a step that was traced, where it ran which of its ops, and those that the
    timeline shows.
    """
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:1"):
            squared = tf.square(
                v1.get_variable("v", [2], initializer=v1.ones_initializer()), name="squared"
            )
        total = tf.reduce_sum(
            squared + v1.placeholder_with_default(np.ones(2, np.float32), [2]), name="total"
        )
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            options, metadata = (
                v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE),
                v1.RunMetadata(),
            )
            value = session.run(total, options=options, run_metadata=metadata)
        ran = [
            [stats.device, node.node_name.rpartition("/")[2]]
            for stats in metadata.step_stats.dev_stats
            for node in stats.node_stats
            if node.node_name.endswith(("squared", "total"))
        ]
        drawn = json.loads(
            timeline.Timeline(metadata.step_stats).generate_chrome_trace_format(show_memory=True)
        )
        events = {
            event["args"]["name"].rpartition("/")[2]
            for event in drawn["traceEvents"]
            if "op" in event.get("args", ())
        }
        return [float(value), sorted(ran), sorted(events & {"squared", "total"})]


def partitioned(task: Task) -> Any:
    """The graphs of a step's tasks, when they are asked for: where each op of the script is; and
    that nothing is told unasked.
    """
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:1"):
            squared = tf.square(
                v1.get_variable("v", [], initializer=v1.ones_initializer()), name="squared"
            )
        total = tf.add(squared, v1.placeholder_with_default(1.0, []), name="total")
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            options, metadata = v1.RunOptions(output_partition_graphs=True), v1.RunMetadata()
            value = session.run(total, options=options, run_metadata=metadata)
            unasked = v1.RunMetadata()
            session.run(total, run_metadata=unasked)
        placed = [
            [node.device, node.name.rpartition("/")[2]]
            for graph in metadata.partition_graphs
            for node in graph.node
            if node.name.endswith(("squared", "total"))
        ]
        return [
            float(value),
            sorted(placed),
            len(unasked.step_stats.dev_stats),
            len(unasked.partition_graphs),
        ]
