"""Which task each node of a graph runs at. No I/O here.

what the node has                         where it goes
a reference or resource input, a dataset  with what that comes from: a handle never leaves its task
`_class` loc:@other                       with the other
a stack or a TensorArray, which live for  the session's own task, whatever else they say
  one step
a device that names job and task          there
a device that names a job only            the session's own task if it is of that job, else task 0
none of these                             the session's own task
two of these that disagree: a handle's    wins over its users', that of a stack over all but a
  own device                              handle's
two of these that disagree, otherwise,    the first in the graph's order
  with allow_soft_placement
otherwise                                 InvalidArgument
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from prpc_engine.cluster.names import device as text_of
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.nodes import REF, RESOURCE, VARIANT, Graph, GraphNode


def cpu_of(task: Task) -> str:
    """The device that a task has, as TensorFlow writes it."""
    return f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"


def filtered(tasks: Iterable[Task], own: Task, filters: Iterable[str]) -> frozenset[Task]:
    """Those that a session with these device filters knows: the ones that any of them names, and
    its own; without filters, all.
    """
    named = [Device.parse(text) for text in filters]
    if not named:
        return frozenset(tasks)
    return frozenset(
        task
        for task in tasks
        if task == own
        or any(one.job in (None, task.job) and one.task in (None, task.index) for one in named)
    )


class Misplaced(ValueError):
    """A node names a task or device that is not there, or is tied to nodes that name different
    ones.
    """


_PART = re.compile(r"/(job|replica|task|device|cpu|gpu|xla_cpu|xla_gpu):([^/]*)", re.IGNORECASE)


class Device(NamedTuple):
    """The job, task and kind that a device string names; None for what it leaves open."""

    job: str | None
    task: int | None
    kind: str | None

    @classmethod
    def parse(cls, text: str) -> Device:
        """Of "/job:ps/task:0/device:CPU:0", "/cpu:0", "" and the like."""
        job, task, kind = None, None, None
        for key, value in _PART.findall(text):
            key = key.lower()
            if key == "job":
                job = value
            elif key == "task":
                task = int(value) if value.isdigit() else None
            elif key == "device":
                kind = value.partition(":")[0].upper()
            elif key != "replica":
                kind = key.upper()
        return cls(job, task, kind)


class Places(Protocol):
    """Says where the nodes of a graph run: a Placer, and one that knows the processes of tasks."""

    def place(self, graph: Graph, names: Iterable[str]) -> dict[str, Task]:
        """The task of each of these nodes. Raises Misplaced."""


class Placer:
    """Decides which task each node of a session's graph runs at.

    tasks: of the cluster. own: the session's task. soft: as allow_soft_placement: another place,
    where one can be had, instead of Misplaced.
    """

    def __init__(self, tasks: Iterable[Task], own: Task, soft: bool = False) -> None:
        self._tasks = frozenset(tasks)
        self._own = own
        self._soft = soft
        self._parsed: dict[str, Device] = {}

    def place(self, graph: Graph, names: Iterable[str]) -> dict[str, Task]:
        """The task of each of these nodes. Raises Misplaced."""
        nodes = [graph.nodes[name] for name in names]
        root = tied(graph, [node.name for node in nodes])
        chosen: dict[str, tuple[GraphNode, Task]] = {}
        for node in nodes:
            task = self._wanted(node)
            if task is None:
                continue
            group = root(node.name)
            before = chosen.get(group)
            if before is None or (before[1] != task and self._wins(node, task, *before)):
                chosen[group] = node, task
        return {
            node.name: chosen[root(node.name)][1] if root(node.name) in chosen else self._own
            for node in nodes
        }

    def _wins(self, node: GraphNode, task: Task, other: GraphNode, other_task: Task) -> bool:
        """Whether the node, and not the other one before it, says where their group goes."""
        if _rank(node) != _rank(other):
            return _rank(node) > _rank(other)
        if self._soft and not node.is_handle:
            return False
        raise Misplaced(
            f"Cannot colocate nodes {other.name!r} and {node.name!r}: they must run at one task, "
            f"and are assigned to {text_of(other_task)} and {text_of(task)}"
        )

    def _wanted(self, node: GraphNode) -> Task | None:
        if node.is_of_step:
            return self._own
        device = self._parsed.get(node.device)
        if device is None:
            device = self._parsed[node.device] = Device.parse(node.device)
        if device.kind not in (None, "CPU", "*") and not self._soft:
            raise self._unknown(node)
        if device.job is None:
            if device.task is None:
                return None
            task = Task(self._own.job, device.task)
        elif device.task is None:
            indices = [task.index for task in self._tasks if task.job == device.job]
            if device.job == self._own.job:
                return self._own
            task = Task(device.job, min(indices, default=0))
        else:
            task = Task(device.job, device.task)
        if task not in self._tasks:
            raise self._unknown(node)
        return task

    def _unknown(self, node: GraphNode) -> Misplaced:
        there = ", ".join(cpu_of(task) for task in sorted(self._tasks))
        return Misplaced(
            f"Cannot assign a device for operation {node.name}: {{{{node {node.name}}}}} was "
            f"explicitly assigned to {node.device} but available devices are [ {there} ]. "
            "Make sure the device specification refers to a valid device."
        )


def tied(graph: Graph, names: Iterable[str]) -> Callable[[str], str]:
    """What must be in one place: tells of each of these nodes a name that is one for all that it is
    tied to.
    """
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for name in parent:
        node = graph.nodes[name]
        for (source, _), kind in zip(node.inputs, node.in_types, strict=True):
            if source in parent and (
                kind == RESOURCE or kind >= REF or (kind == VARIANT and graph.is_dataset(source))
            ):
                parent[root(name)] = root(source)
        for other in () if node.is_of_step else node.colocated():
            if other in parent:
                parent[root(name)] = root(other)
    return root


def _rank(node: GraphNode) -> int:
    return 2 if node.is_handle else int(node.is_of_step)
