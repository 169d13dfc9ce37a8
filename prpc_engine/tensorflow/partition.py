"""Cuts a step into stages: which nodes run at the own task, and which leave for another, with whom
and when. No I/O here.

    a node of another task   is
    Const                    copied wherever it is needed; not when it has control inputs:
                             those carry order, or a dead branch
    handle                   (variable, queue, table, iterator) there once; a stage that uses
                             it has it by name
    alias of a handle        (Switch, Enter, Identity on one) not run: who uses it gets the
                             handle, waits for the branch, and for what the alias comes after
    read of a reference      copied into each stage that uses it: it is the variable itself,
                             read when it is used
    control flow of values,  run at the own task, where the executor knows frames, dead
      stacks, TensorArrays   branches and what lives for a step
    anything else            an op of a stage: one RunGraph for all ops with one task, round,
                             frame and set of branches

    round   first all ops of the own task that are ready; then of every other task, those that are
            ready and what of it follows. An op of another task that only a later stage there needs
            runs in that one (postpone.py)
    branch  (predicate, side) of each Switch above: ops of one stage are all dead or all alive. Read
            off the graph, as copies of a conditional (in initial values) have lost its context
    frame   of a while loop; what comes after it waits until everything in it has its place

A value between two other tasks, or two stages, goes through the own task.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prpc_engine.cluster.names import device
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.nodes import REF, RESOURCE, VARIANT, Edge, Graph, GraphNode, text_of
from prpc_engine.tensorflow.place import Places
from prpc_engine.tensorflow.postpone import postpone

SWITCHES = frozenset({"Switch", "RefSwitch", "_SwitchN"})  # the last one is of a Case
ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
NEXTS = frozenset({"NextIteration", "RefNextIteration"})
MERGES = frozenset({"Merge", "RefMerge"})
BORDERS = ENTERS | EXITS | NEXTS  # of a frame, or of one turn in it
ALIASES = SWITCHES | ENTERS | EXITS | NEXTS | {"Identity", "RefIdentity"}
OWN_OPS = SWITCHES | ENTERS | EXITS | NEXTS | MERGES | {"LoopCond", "ControlTrigger"}
# What may wait for another step, for as long as it takes: alone in its stage, so that giving it up
# undoes nothing else.
BLOCKING = frozenset(
    {
        "AccumulatorTakeGradient",
        "BarrierTakeMany",
        "QueueDequeue",
        "QueueDequeueMany",
        "QueueDequeueManyV2",
        "QueueDequeueUpTo",
        "QueueDequeueUpToV2",
        "QueueDequeueV2",
        "QueueEnqueue",
        "QueueEnqueueMany",
        "QueueEnqueueManyV2",
        "QueueEnqueueV2",
        "ReaderRead",
        "ReaderReadUpTo",
        "ReaderReadUpToV2",
        "ReaderReadV2",
        "ResourceAccumulatorTakeGradient",
        "SparseAccumulatorTakeGradient",
    }
)
Frame = tuple[str, ...]


class Branch(NamedTuple):
    """One side of a conditional: what runs when a Switch passes its input to that output."""

    predicate: Edge
    side: int  # of two: 1 where it is true
    sides: int


NO_BRANCHES: frozenset[Branch] = frozenset()


class OpKind(enum.Enum):
    """What a node is to the cut of a step: its kind says where it runs, and whether it is copied.

    What is done with which kind: the table at the file's head.
    """

    CONSTANT = "constant"
    HANDLE = "handle"
    VALUED_HANDLE = "handle of a reference whose value is needed elsewhere"
    ALIAS = "alias"
    READ = "read"
    VALUED_READ = "read whose value is needed elsewhere"
    OWN = "of the own task"
    OTHER = "of another task"


REMOTE = frozenset({OpKind.OTHER, OpKind.VALUED_READ, OpKind.VALUED_HANDLE})  # members of stages
RUN = REMOTE | {OpKind.OWN}
READS = frozenset({OpKind.READ, OpKind.VALUED_READ})


class Unsupported(ValueError):
    """A graph cannot be cut, because of an op that its text names."""


@dataclass
class Stage:
    """A part of a step that one other task runs at once (one RunGraph): its nodes, what it is fed
    and what it fetches.
    """

    number: int
    task: Task
    round: int
    branches: frozenset[Branch]
    frame: Frame
    members: list[str] = field(default_factory=list)  # in an order in which they can run
    feeds: list[Edge] = field(default_factory=list)  # values from elsewhere
    fetches: list[Edge] = field(default_factory=list)  # values for elsewhere
    # nodes elsewhere that it waits for, without a value
    after: list[str] = field(default_factory=list)
    gates: list[Branch] = field(default_factory=list)  # branches that no value tells it of
    may_wait: bool = False  # for another step

    @property
    def key(self) -> object:
        """Equal for stages of one task that are dead or alive together."""
        return self.task, self.frame, self.branches


@dataclass
class Plan:
    """A step that has been cut: which nodes run at the own task, which stages at others, and which
    values they exchange.
    """

    graph: Graph
    own: Task
    kinds: Mapping[str, OpKind]  # of the nodes that the step needs
    controls: Mapping[str, Sequence[str]]  # what each of them waits for without a value
    branches: Mapping[str, frozenset[Branch]]
    frames: Mapping[str, Frame]
    fetches: Sequence[Edge]
    targets: Sequence[str]
    feeds: Sequence[Edge]
    local: Sequence[str]  # nodes of the own task
    stages: Sequence[Stage]
    stage_of: Mapping[str, Stage]  # by member
    roots: Mapping[Edge, str]  # the handle behind an edge of another task
    may_be_dead: bool  # a fetch is within a branch


def cut(
    graph: Graph,
    placer: Places,
    own: Task,
    fetches: Sequence[Edge],
    targets: Sequence[str],
    feeds: Sequence[Edge],
) -> Plan:
    """The plan of a step. Raises Misplaced, Unsupported."""
    return _Cutter(graph, placer, own, fetches, targets, feeds).plan()


def is_constant(node: GraphNode) -> bool:
    """It may be copied to wherever it is needed."""
    return node.op == "Const" and not node.controls


def of_frame(branches: Iterable[Branch], frame: Frame, frames: Mapping[str, Frame]) -> list[Branch]:
    """Those that are decided in that frame: what is around it tells the whole frame. One that is
    fed is decided outside.
    """
    return sorted(one for one in branches if frames.get(one.predicate[0], ()) == frame)


class _Cutter:
    def __init__(
        self,
        graph: Graph,
        placer: Places,
        own: Task,
        fetches: Sequence[Edge],
        targets: Sequence[str],
        feeds: Sequence[Edge],
    ) -> None:
        self.graph, self.nodes, self.own = graph, graph.nodes, own
        self.fetches, self.targets, self.feeds = fetches, targets, feeds
        self.fed = frozenset(feeds)
        self.given = graph.given(feeds)
        self.passed: dict[str, list[str]] = {}  # by alias: what it would wait for
        self.order = self._sorted(graph.needed(fetches, targets, feeds))
        self.tasks = placer.place(graph, self.order)
        self.roots: dict[Edge, str] = {}
        self.kinds: dict[str, OpKind] = {name: self._kind(self.nodes[name]) for name in self.order}
        self.controls = {name: self._controls(self.nodes[name]) for name in self.order}
        self.branches: dict[str, frozenset[Branch]] = {}
        self.frames: dict[str, Frame] = {}
        self._follow_branches()
        self._demand_values()
        self.local: list[str] = []
        self.stages: list[Stage] = []
        self.stage_of: dict[str, Stage] = {}

    def plan(self) -> Plan:
        """Cut the step into stages, and connect them; the plan. Raises Misplaced, Unsupported."""
        self._schedule()
        self._postpone()
        for stage in self.stages:
            self._connect(stage)
            stage.may_wait = any(self.nodes[name].op in BLOCKING for name in stage.members)
        for name in self.local:
            for edge in self.nodes[name].inputs:
                self._use(edge)
        for edge in self.fetches:
            self._use(edge)
        dead = any(self._branches_of(edge) for edge in self.fetches)
        return Plan(
            self.graph, self.own, self.kinds, self.controls, self.branches, self.frames,
            self.fetches, self.targets, self.feeds, self.local, self.stages, self.stage_of,
            self.roots, dead,
        )  # fmt: skip

    # -- what there is -----------------------------------------------------------------------------

    def _controls(self, node: GraphNode) -> list[str]:
        """What it waits for, without the placeholders that are fed; what the aliases that it uses
        wait for, which do not run.
        """
        own = [name for name in node.controls if name not in self.given]
        passed = (
            name
            for source in (*(name for name, _ in node.inputs), *own)
            for name in self.passed.get(source, ())
        )
        return list(dict.fromkeys((*own, *passed)))

    def _forward(self, node: GraphNode) -> list[Edge]:
        """Its inputs that nodes make, but for the back edges of loops."""
        is_back = node.op in MERGES
        return [
            edge
            for edge in node.inputs
            if edge not in self.fed and not (is_back and self.nodes[edge[0]].op in NEXTS)
        ]

    def _sorted(self, needed: set[str]) -> list[str]:
        """What comes first stands first; else as the graph has it, so that every worker makes the
        same stages.
        """
        after: dict[str, list[str]] = {name: [] for name in needed}
        before: dict[str, int] = {}
        ready: deque[str] = deque()
        for name, node in self.nodes.items():
            if name in needed:
                sources = {edge[0] for edge in self._forward(node)}.union(self._controls(node))
                before[name] = len(sources)
                for source in sources:
                    after[source].append(name)
                if not sources:
                    ready.append(name)
        found = []
        while ready:
            name = ready.popleft()
            found.append(name)
            for other in after[name]:
                before[other] -= 1
                if not before[other]:
                    ready.append(other)
        if len(found) < len(needed):
            raise Unsupported(f"the graph has a cycle through {min(needed - set(found))!r}")
        return found

    def _kind(self, node: GraphNode) -> OpKind:
        """And, of another task's nodes, the handles behind their outputs."""
        name, task = node.name, self.tasks[node.name]
        if is_constant(node):
            return OpKind.CONSTANT
        root = (
            self.roots.get(node.inputs[0])
            if node.inputs and node.inputs[0] not in self.fed
            else None
        )
        if root is not None and node.op == "Identity" and node.out_types[0] != RESOURCE:
            self.tasks[name] = self.tasks[root]  # wherever it should be: the variable is read there
            return OpKind.OTHER if node.controls else OpKind.READ
        if node.is_handle and node.inputs:
            edge = self.graph.varying_source(node, self.feeds)
            if edge is not None:
                raise Unsupported(
                    f"{node.op} {name!r} lives longer than a step, and {text_of(edge)!r}, "
                    "which it is made of, may change from step to step: make it of constants"
                )
        if task == self.own:
            return OpKind.OWN
        if node.is_handle:
            self.roots.update({(name, index): name for index in range(len(node.out_types))})
            return OpKind.HANDLE
        if root is not None:
            # An op on a reference (Assign, RefSwitch) yields that reference, too.
            handles = [
                i
                for i, kind in enumerate(node.out_types)
                if kind >= REF or (kind == RESOURCE and node.op in ALIASES)
            ]
            self.roots.update({(name, index): root for index in handles})
            if handles and node.op in ALIASES:
                if node.op not in BORDERS:
                    self.passed[name] = self._controls(node)
                return OpKind.ALIAS
        if node.op in MERGES and (RESOURCE in node.out_types or node.op == "RefMerge"):
            raise Unsupported(
                f"{node.op} {name!r} chooses between handles of {device(task)}, "
                f"which {device(self.own)} cannot do"
            )
        return OpKind.OWN if node.op in OWN_OPS or node.is_of_step else OpKind.OTHER

    def _branches_of(self, edge: Edge) -> frozenset[Branch]:
        if edge in self.fed:
            return NO_BRANCHES
        node, above = self.nodes[edge[0]], self.branches[edge[0]]
        return (
            above | {Branch(node.inputs[1], edge[1], len(node.out_types))}
            if node.op in SWITCHES
            else above
        )

    def _follow_branches(self) -> None:
        entries: dict[str, frozenset[Branch]] = {}  # into each frame
        for name in self.order:
            node = self.nodes[name]
            forward = self._forward(node)
            sets = [self._branches_of(edge) for edge in forward]
            found = (
                frozenset.intersection(*sets)
                if node.op in MERGES and sets
                else NO_BRANCHES.union(*sets)
            )
            frame = max(
                (
                    self.frames[source]
                    for source in [*(edge[0] for edge in forward), *self.controls[node.name]]
                ),
                key=len,
                default=(),
            )
            if node.op in ENTERS:
                inner = node.definition.attr["frame_name"].s.decode()
                frame = (*frame, inner)
                entries[inner] = entries.get(inner, NO_BRANCHES) | found
            elif node.op in EXITS and frame:
                found, frame = entries[frame[-1]], frame[:-1]
            self.branches[name] = found.union(
                *(self.branches[source] for source in self.controls[name])
            )
            self.frames[name] = frame

    def _demand_values(self) -> None:
        """Find the handles, aliases and reads of other tasks whose values are needed elsewhere."""
        wanted = list(self.fetches)
        for name in self.order:
            kind, node = self.kinds[name], self.nodes[name]
            if kind is OpKind.OWN:
                wanted.extend(node.inputs)
            elif kind is OpKind.OTHER:
                wanted.extend(edge for edge in node.inputs if self._crosses(edge, name))
            if kind in (OpKind.OTHER, OpKind.READ):
                wanted.extend(one.predicate for one in self.branches[name])
        while wanted:
            edge = wanted.pop()
            if edge in self.fed:
                continue
            name, kind = edge[0], self.kinds[edge[0]]
            if edge in self.roots and self.nodes[name].out_types[edge[1]] == RESOURCE:
                raise Unsupported(
                    f"{text_of(edge)!r} is a handle at {device(self.tasks[name])}: "
                    "it cannot be a value elsewhere"
                )
            if kind is OpKind.ALIAS:  # a Switch of the value then, at the own task
                self.kinds[name] = OpKind.OWN
                wanted.extend(self.nodes[name].inputs)
            elif kind is OpKind.READ:
                self.kinds[name] = OpKind.VALUED_READ
            elif kind is OpKind.HANDLE:
                self.kinds[name] = OpKind.VALUED_HANDLE

    def _crosses(self, edge: Edge, user: str) -> bool:
        return edge not in self.fed and self.tasks[edge[0]] != self.tasks[user]

    # -- in which order ----------------------------------------------------------------------------

    def _waits_for(self, name: str) -> set[str]:
        """What must have run before this can: nodes of the own task and of stages."""
        node, kinds, remote = self.nodes[name], self.kinds, self.kinds[name] in REMOTE
        found = {source for source in self.controls[name] if kinds[source] in RUN}
        for edge in self._forward(node):
            kind = kinds[edge[0]]
            is_here = remote and self.tasks[edge[0]] == self.tasks[name]
            if kind in RUN and not (is_here and kind in (OpKind.VALUED_READ, OpKind.VALUED_HANDLE)):
                found.add(edge[0])
        if remote:
            predicates = [
                one.predicate for one in self.branches[name] if one.predicate not in self.fed
            ]
            found.update(source for source, _ in predicates if kinds[source] in RUN)
        if node.op in EXITS and kinds[name] is OpKind.OWN:
            found |= self._within(self.frames[node.inputs[0][0]])
        return found

    def _within(self, frame: Frame) -> set[str]:
        """What runs in a frame; of it and of the frames in it."""
        depth = len(frame)
        return {
            name
            for name, other in self.frames.items()
            if other[:depth] == frame and self.kinds[name] in RUN
        }

    def _schedule(self) -> None:
        """In rounds, as the table's end says."""
        waits = {name: self._waits_for(name) for name in self.order if self.kinds[name] in RUN}
        after: dict[str, list[str]] = {name: [] for name in waits}
        for name, sources in waits.items():
            for source in sources:
                after[source].append(name)
        missing = {name: len(sources) for name, sources in waits.items()}
        own: deque[str] = deque()
        others: list[str] = []

        def free(name: str) -> None:
            (own if self.kinds[name] is OpKind.OWN else others).append(name)

        for name, count in missing.items():
            if not count:
                free(name)
        number = placed = 0
        while own or others:
            while own:
                name = own.popleft()
                self.local.append(name)
                placed += 1
                for follower in after[name]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        free(follower)
            now, others = deque(others), []
            opened: dict[object, Stage] = {}
            while now:
                name = now.popleft()
                recent = {
                    self.stage_of[one].number
                    for one in waits[name]
                    if one in self.stage_of and self.stage_of[one].round == number
                }
                key = self._key(name)
                stage = opened.get(key)
                if recent and (stage is None or recent != {stage.number}):
                    others.append(name)  # it needs what another stage of this round makes
                    continue
                if stage is None:
                    stage = opened[key] = Stage(
                        len(self.stages),
                        self.tasks[name],
                        number,
                        self.branches[name],
                        self.frames[name],
                    )
                    self.stages.append(stage)
                stage.members.append(name)
                self.stage_of[name] = stage
                placed += 1
                for follower in after[name]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        if self.kinds[follower] is OpKind.OWN:
                            own.append(follower)
                        else:
                            now.append(follower)
            number += 1
        if placed < len(waits):
            stuck = next(name for name in waits if missing[name])
            raise Unsupported(
                f"{self.nodes[stuck].op} {stuck!r} waits for what comes after it once the graph "
                "is cut by tasks"
            )

    def _postpone(self) -> None:
        """Have ops run in the stage that needs them, where they could run in an earlier one."""
        wanted = {source for source, _ in self.fetches} | set(self.targets)
        for branches in set(self.branches.values()):
            wanted.update(one.predicate[0] for one in branches)
        postpone(
            self.order,
            self.stage_of,
            {
                name: [source for source, _ in self._forward(self.nodes[name])]
                for name in self.order
            },
            self.controls,
            {name for name in self.stage_of if name not in wanted and self._may_run_later(name)},
        )
        self.stages = [stage for stage in self.stages if stage.members]

    def _may_run_later(self, name: str) -> bool:
        """Its values are the same whenever it runs: it has no state, and reads no variable."""
        node = self.nodes[name]
        return (
            self.kinds[name] is OpKind.OTHER
            and not node.is_stateful
            and not any(
                edge in self.roots or self.kinds[edge[0]] in READS
                for edge in node.inputs
                if edge not in self.fed
            )
            and not any(
                edge in self.roots for edge in ((name, at) for at in range(len(node.out_types)))
            )
        )

    def _key(self, name: str) -> object:
        """Nodes with one of these may be in one stage."""
        key = (self.tasks[name], self.frames[name], self.branches[name])
        return (*key, name) if self.nodes[name].op in BLOCKING else key

    # -- what goes over ----------------------------------------------------------------------------

    def _use(self, edge: Edge) -> None:
        """A value is needed outside of the stage that makes it."""
        stage = self.stage_of.get(edge[0]) if edge not in self.fed else None
        if stage is not None and edge not in stage.fetches:
            kind = self.nodes[edge[0]].out_types[edge[1]]
            if kind == RESOURCE:
                raise Unsupported(
                    f"{text_of(edge)!r} lives at {device(stage.task)} for one step: "
                    "it cannot be a value elsewhere"
                )
            if kind == VARIANT and self.graph.is_dataset(edge[0]):
                raise Unsupported(
                    f"{text_of(edge)!r} is a dataset of {device(stage.task)}: "
                    "make it at the task that uses it"
                )
            stage.fetches.append(edge)

    def _connect(self, stage: Stage) -> None:
        members = set(stage.members)
        feeds: dict[Edge, None] = {}
        after: dict[str, None] = {}
        for name in stage.members:
            node = self.nodes[name]
            for edge in node.inputs:
                source = edge[0]
                if edge in self.fed:
                    feeds[edge] = None
                elif source in members or self.kinds[source] is OpKind.CONSTANT:
                    continue
                elif self.tasks[source] == stage.task and (
                    edge in self.roots or self.kinds[source] in READS
                ):
                    if self.kinds[source] is OpKind.OTHER:
                        after[source] = None
                else:
                    feeds[edge] = None
                    self._use(edge)
            after.update(
                {
                    source: None
                    for source in self.controls[name]
                    if source not in members and self.kinds[source] in RUN
                }
            )
        told = NO_BRANCHES.union(
            *map(self._branches_of, feeds), *(self.branches[source] for source in after)
        )
        inside = not stage.frame or any(
            self.frames[source] == stage.frame
            for source in [*(edge[0] for edge in feeds if edge not in self.fed), *after]
        )
        stage.feeds, stage.after = list(feeds), list(after)
        untold = stage.branches - told if inside else stage.branches
        stage.gates = of_frame(untold, stage.frame, self.frames)
        if not inside and not stage.gates:
            raise Unsupported(
                f"{stage.members[0]!r} is in a loop of {device(self.own)}, "
                f"and no value tells {device(stage.task)} when it iterates"
            )
        for gate in stage.gates:
            self._use(gate.predicate)
