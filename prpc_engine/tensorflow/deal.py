"""Which shard of its task each node runs at, where a task is several processes. No I/O here.

    a node of a task with shards                    its shard
    handle (variable, queue, table, iterator), and  the one that the task's Deal says: of all
      what uses it or is colocated with it           workers the same, as it is known by name
    any other, that one of those takes a value of,  the first of theirs, so that it goes there by
      or waits for                                  itself
    any other, that takes a value of one of those,  the first of theirs
      or waits for it
    else                                            0, which is the task's own process

A group is what shares handles: a variable, its slots and their updates, by colocation and by the
ops that take several. It is found in the whole graph, as a step may have parts of it only. A
function runs where its variables are, and is lowered where they are apart.

    Deal: a group                       its shard
    none of whose handles is known      the one with the fewest bytes; the largest group first
    some of whose handles are known     theirs: the rest of the group joins them
    whose handles are at several        refused: no op takes handles of two processes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorflow.python.framework import dtypes, tensor_shape

from prpc_engine.cluster.names import device
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.lower import FUNCTIONAL
from prpc_engine.tensorflow.nodes import RESOURCE, Graph, GraphNode
from prpc_engine.tensorflow.place import Misplaced, Placer, tied


@dataclass(frozen=True, order=True)
class TaskShard(Task):
    """A process of a task, beside the task's own, which is number 0 and is the Task itself."""

    shard: int


def device_of(task: Task) -> str:
    """By which a process is asked: "/job:ps/task:0", "/job:ps/task:0/shard:1"."""
    number = task.shard if isinstance(task, TaskShard) else 0
    return f"{device(task)}/shard:{number}" if number else device(task)


class HandleGroup(NamedTuple):
    """Handles that must be in one process: what each is known by, and how many bytes they have."""

    keys: list[str]
    nbytes: int


class Deal:
    """Says which of a task's `count` shards has which handle. Owned by the task's server; the rule:
    the second table at the file's head.
    """

    def __init__(self, count: int) -> None:
        self._shards: dict[str, int] = {}
        self.nbytes = [0] * count  # dealt out to each

    def assign(self, groups: Sequence[HandleGroup]) -> list[int]:
        """The shard of each group, in their order; who asks again gets the same. Raises
        Misplaced.
        """
        chosen = {}
        for index in sorted(range(len(groups)), key=lambda index: _largest_first(groups[index])):
            keys, nbytes = groups[index]
            known = {self._shards[key] for key in keys if key in self._shards}
            if len(known) > 1:
                raise _apart(keys, known)
            if known:
                shard = known.pop()
            else:
                shard = self.nbytes.index(min(self.nbytes))
                self.nbytes[shard] += nbytes
            self._shards.update(dict.fromkeys(keys, shard))
            chosen[index] = shard
        return [chosen[index] for index in range(len(groups))]


def _apart(keys: Iterable[str], shards: Iterable[int]) -> Misplaced:
    return Misplaced(
        f"{', '.join(sorted(keys)[:3])}: these are used together, and were dealt out to the "
        f"shards {', '.join(map(str, sorted(shards)))} before they were. Build the whole graph "
        "before its first step, or unset NETWORK_PS_CORE_NUMBER"
    )


def _largest_first(group: HandleGroup) -> tuple[int, list[str]]:
    return -group.nbytes, sorted(group.keys)


class ShardPlacer:
    """Decides which process each node of a session's graph runs at: as a Placer, and of a task with
    shards, which.

    Owned by a session's plane. What it has to know before: missing(), learn(). whole: tasks that
    are one process, as is known without asking.
    """

    def __init__(self, placer: Placer, whole: Iterable[Task] = ()) -> None:
        self._placer = placer
        self._whole = dict.fromkeys(whole, 1)
        self._counts = self._whole.copy()
        self._shards: dict[tuple[Task, str], int] = {}
        self._graph: Graph | None = None  # whose groups these are
        self._root: Callable[[str], str] = str
        self._handles: dict[str, list[GraphNode]] = {}  # by root

    def missing(self, graph: Graph, names: Iterable[str]) -> dict[Task, list[HandleGroup]]:
        """What is to be asked before place(): of each task that is not known to be one process, the
        groups that are not known. Raises Misplaced.
        """
        asked: dict[Task, dict[str, HandleGroup]] = {}
        for name, task in self._placer.place(graph, names).items():
            if self._counts.get(task) == 1:
                continue
            groups = asked.setdefault(task, {})
            root = self._root_in(graph, name)
            keys = [key_of(node) for node in self._handles.get(root, ())]
            if any((task, key) not in self._shards for key in keys):
                nbytes = sum(map(nbytes_of, self._handles[root]))
                groups[root] = HandleGroup(sorted(set(keys)), nbytes)
        return {
            task: list(groups.values())
            for task, groups in asked.items()
            if groups or task not in self._counts
        }

    def learn(
        self, task: Task, count: int, groups: Sequence[HandleGroup], shards: Sequence[int]
    ) -> None:
        """What the task answered: how many processes it is, and the shard of each group."""
        self._counts[task] = count
        for group, shard in zip(groups, shards, strict=True):
            self._shards.update({(task, key): shard for key in group.keys})

    def forget(self) -> None:
        """A task was started again: all is asked for anew."""
        self._counts = self._whole.copy()
        self._shards.clear()

    def place(self, graph: Graph, names: Iterable[str]) -> dict[str, Task]:
        """The process of each of these nodes. Raises Misplaced."""
        places = self._placer.place(graph, names)
        if all(self._counts.get(task, 1) == 1 for task in set(places.values())):
            return places
        shards = self._shards_of(graph, places)
        return {
            name: TaskShard(task.job, task.index, shards[name]) if shards.get(name) else task
            for name, task in places.items()
        }

    def _shards_of(self, graph: Graph, places: Mapping[str, Task]) -> dict[str, int]:
        """Of the nodes of tasks with shards."""
        roots = {
            name: (task, self._root_in(graph, name))
            for name, task in places.items()
            if self._counts.get(task, 1) > 1
        }
        chosen = {
            (task, root): self._shard_of(task, root)
            for task, root in set(roots.values())
            if root in self._handles
        }
        edges = [
            (roots[source], root)
            for name, root in roots.items()
            for source in _sources(graph.nodes[name])
            if source in roots and roots[source][0] == root[0]
        ]
        _spread(chosen, [(taker, giver) for giver, taker in edges])
        _spread(chosen, edges)
        return {name: chosen.get(root, 0) for name, root in roots.items()}

    def _shard_of(self, task: Task, root: str) -> int:
        """Of a group with handles. Raises Misplaced."""
        keys = [key_of(node) for node in self._handles[root]]
        shards = {self._shards[task, key] for key in keys}
        if len(shards) > 1:
            raise _apart(keys, shards)
        return shards.pop()

    def _root_in(self, graph: Graph, name: str) -> str:
        """A name that is one for all of a group."""
        if self._graph is not graph:
            # a function does not tie its variables: it is lowered where they are apart (lower.py)
            plain = [each for each, node in graph.nodes.items() if node.op not in FUNCTIONAL]
            self._graph, self._root, self._handles = graph, tied(graph, plain), {}
            for each in plain:
                node = graph.nodes[each]
                if node.is_handle and not node.is_of_step:
                    self._handles.setdefault(self._root(each), []).append(node)
        node = graph.nodes[name]
        while node.op in FUNCTIONAL:
            edges = zip(node.inputs, node.in_types, strict=True)
            source = next((edge[0] for edge, kind in edges if kind == RESOURCE), None)
            if source is None:
                return node.name
            node = graph.nodes[source]
        return self._root(node.name)


def _sources(node: GraphNode) -> list[str]:
    """What it takes values of first, then what it waits for."""
    return [*(name for name, _ in node.inputs), *node.controls]


def _spread(chosen: dict[Any, int], edges: Sequence[tuple[Any, Any]]) -> None:
    """Along edges, from what has a shard to what has none, the nearest first."""
    after: dict[Any, list[Any]] = {}
    for begin, end in edges:
        after.setdefault(begin, []).append(end)
    reached = list(chosen)
    for begin in reached:  # grows meanwhile
        for end in after.get(begin, ()):
            if end not in chosen:
                chosen[end] = chosen[begin]
                reached.append(end)


def key_of(handle: GraphNode) -> str:
    """By which TensorFlow knows what lives there: its container, and its name in it."""
    attr = handle.definition.attr
    container = attr["container"].s.decode() if "container" in attr else ""
    shared = attr["shared_name"].s.decode() if "shared_name" in attr else ""
    return f"{container}/{shared or handle.name}"


def nbytes_of(handle: GraphNode) -> int:
    """Of what it holds, where its shape says it; else 0."""
    attr = handle.definition.attr
    if "shape" not in attr or "dtype" not in attr:
        return 0
    elements = tensor_shape.TensorShape(attr["shape"].shape).num_elements()
    return int((elements or 0) * dtypes.as_dtype(attr["dtype"].type).size)
