"""RunMetadata of a step: what each of its parts says of itself, as one. No I/O here.

    of the parts      in the whole
    step_stats        a device's nodes of all parts that ran there:
                      "/job:ps/replica:0/task:0/device:CPU:0"
    partition_graphs  those of all parts, one after the other
    cost_graph        nodes of all parts, with numbers of their own
    anything else     of the own part alone

The session of a part knows its task as "/job:localhost/replica:0/task:0", and its nodes by the name
under which the part was added to its task's graph (runtime.py): both are put right here. What calls
another task is the node "prpc_call_<k>" of the own part; it takes as long as that task's part, and
the way there and back. A part that may wait for another step says nothing.
"""

from __future__ import annotations

from typing import Any

from tensorflow.core.framework import step_stats_pb2
from tensorflow.core.protobuf import config_pb2

from prpc_engine.tensorflow.errors import clean

_LOCAL = "/job:localhost/replica:0/task:0"


class Trace:
    """Of one step, which runs in one thread. `options`: RunOptions for the parts, b"" when they are
    asked for nothing.
    """

    def __init__(self, own: Any, options: Any) -> None:
        """`own` is the task that runs the step; `options` the user's RunOptions or None."""
        asked = config_pb2.RunOptions()
        if options is not None:
            # a process has one profiler, for HARDWARE_TRACE and more: the own part may have it, or
            # another session of the task
            asked.trace_level = min(options.trace_level, config_pb2.RunOptions.SOFTWARE_TRACE)
            asked.output_partition_graphs = options.output_partition_graphs
        self._own = f"/job:{own.job}/task:{own.index}"
        self._told: list[tuple[str, bytes]] = []
        self.options: bytes = asked.SerializeToString()

    def add(self, task: str, metadata: bytes) -> None:
        """What a part at "/job:ps/task:0" said of itself."""
        self._told.append((task, metadata))

    def complete(self, metadata: Any) -> None:
        """Make the RunMetadata of the own part that of the step."""
        whole = config_pb2.RunMetadata()
        for task, part in [(self._own, metadata.SerializeToString()), *self._told]:
            _add(whole, config_pb2.RunMetadata.FromString(part), task)
        for name in ("step_stats", "partition_graphs", "cost_graph"):
            metadata.ClearField(name)
        metadata.MergeFrom(whole)


def _add(whole: Any, part: Any, task: str) -> None:
    place = task.replace("/task:", "/replica:0/task:")
    devices = {one.device: one for one in whole.step_stats.dev_stats}
    for stats in part.step_stats.dev_stats:
        name = stats.device.replace(_LOCAL, place)
        device = devices.get(name) or whole.step_stats.dev_stats.add(device=name)
        device.thread_names.update(stats.thread_names)
        for node in stats.node_stats:
            _add_node(device, node)
    for graph in part.partition_graphs:
        added = whole.partition_graphs.add()
        added.CopyFrom(graph)
        for node in added.node:
            node.name, node.device = clean(node.name), node.device.replace(_LOCAL, place)
            node.input[:] = map(clean, node.input)
    first = max((node.id for node in whole.cost_graph.node), default=-1) + 1
    for cost in part.cost_graph.node:
        added = whole.cost_graph.node.add()
        added.CopyFrom(cost)
        added.name, added.device, added.id = (
            clean(cost.name),
            cost.device.replace(_LOCAL, place),
            first + cost.id,
        )
        added.control_input[:] = [first + one for one in cost.control_input]
        for source in added.input_info:
            source.preceding_node += first


def _add_node(device: Any, node: step_stats_pb2.NodeExecStats) -> None:
    added = device.node_stats.add()
    added.CopyFrom(node)
    added.node_name, added.timeline_label = clean(node.node_name), clean(node.timeline_label)
