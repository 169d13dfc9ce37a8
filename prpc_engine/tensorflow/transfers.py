"""Which values of a cut step go from task to task, under which keys and in which requests. No I/O
here.

    a stage of another task (partition.py)      belongs to
    that is dead or alive as a branch is, in a  those that are called, as in the plane "star": only
      loop, or waits for another step           the own task's executor knows whether, and how often
    any other                                   the program of its task: its stages in the order of
                                                their rounds, of which each has one at most

    a value that a stage of a program is fed            comes
    made by the own task, or by a stage that is called  from the own task, once for all stages of
                                                        the program
    made by a program of another task                   from that task, not by way of the own one
    made by the same program                            from there; nothing is sent

    what is waited for without a value  a token: a dead tensor; none where a value of the same
                                        source tells it

Fused, all that one source has for one stage is asked for by one request; else each value by one of
its own.

At the own task an op sends and an op receives for each request. The executor may have one thread,
which an op that receives holds. So those of one round come after all that is sent up to that round:
what they wait for depends on nothing that is still to be sent. A send depends on what was received
in earlier rounds, and a program has all it needs for a round once these are done: there is no
cycle, and nobody waits for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.nodes import Argument, Edge, Graph, GraphNode, Signature
from prpc_engine.tensorflow.partition import NO_BRANCHES, RUN, OpKind, Plan, Stage

STEP: Edge = ("prpc_step", 0)  # fed last to the own part: the number of the step
_STEP_SIGNATURE = Signature((), (Argument(9, "", "", "", False),), False)  # DT_INT64
# Types that the rendezvous takes as another array: those that numpy lacks, by name.
_NAMED = {7: "string", 21: "string", 14: "bfloat16", 24: "float8_e5m2", 25: "float8_e4m3fn"}


class TransferRequest(NamedTuple):
    """Tensors that one task asks of another together. `kinds`: of each, "" for what an array is,
    else its type's name.
    """

    source: Task
    keys: list[str]
    kinds: list[str]


class Sent(NamedTuple):
    """A tensor that a stage has ready for another task once it has run; a token has no value and
    only says that.
    """

    destination: Task
    key: str
    is_token: bool


@dataclass
class StageBlock:
    """One stage of a program, with the requests that bring its inputs and the values that others
    fetch from it, all by key.
    """

    stage: Stage
    receives: list[TransferRequest] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)  # in the stage's order
    fetches: list[str] = field(default_factory=list)  # the same
    sends: list[Sent] = field(default_factory=list)


@dataclass(frozen=True)
class Op:
    """One of the own part that sends, or receives, with another task: `stage` is it for the
    rewriter.
    """

    stage: Stage
    peer: Task
    keys: list[str]
    kinds: list[str]


@dataclass(frozen=True)
class Transfers:
    """Says what each task does in a step of the plane "sendrecv": what it runs, sends, and asks
    for. Made by transfers().

    `called` are stages that the own task calls, as in the plane "star". Which are: the table at the
    file's head.
    """

    own: Plan  # what the own task runs, with the ops below, and the step's number as its last feed
    called: list[Stage]
    sends: list[Op]
    receives: list[Op]
    programs: dict[Task, list[StageBlock]]


def transfers(plan: Plan, fuse: bool) -> Transfers:
    """Of a plan."""
    return _Arranger(plan, fuse).arranged()


class _Arranger:
    def __init__(self, plan: Plan, fuse: bool) -> None:
        self._plan, self._fuse = plan, fuse
        self._nodes = plan.graph.nodes
        self._fed = frozenset(plan.feeds)
        self._called = {
            one.number: one for one in plan.stages if one.branches or one.frame or one.may_wait
        }
        self._blocks = {
            one.number: StageBlock(one) for one in plan.stages if one.number not in self._called
        }
        self._keys: dict[Edge, str] = {}
        self._had: dict[Task, set[str]] = {}  # keys of what a program has at some stage
        self._wanted, self._awaited = self._of_own()
        self._sends: list[Op] = []
        self._receives: list[Op] = []
        self._numbers = len(plan.stages)
        self._unheard: list[str] = []  # sends that no receive comes after yet
        self._barrier: list[str] = []  # the receive that comes after all others
        self._stage_of: dict[str, Stage] = {}

    def arranged(self) -> Transfers:
        """The transfers of the plan, made round by round: who sends what to whom, and who runs
        what.
        """
        called = []
        for _, together in groupby(self._plan.stages, key=lambda one: one.round):
            stages = list(together)
            blocks = [self._blocks[one.number] for one in stages if one.number in self._blocks]
            for block in blocks:
                self._feed(block)
            for stage in stages:
                if stage.number in self._called:
                    # What it waits for may be what this step sends.
                    first = (
                        [*self._barrier, *self._unheard]
                        if stage.may_wait and not stage.frame
                        else []
                    )
                    called.append(replace(stage, after=[*stage.after, *first]))
                    self._stage_of.update(dict.fromkeys(stage.members, called[-1]))
            barrier: list[str] = []
            for block in blocks:
                barrier = self._fetch(block, barrier)
            if barrier:
                self._barrier, self._unheard = barrier, []
        programs: dict[Task, list[StageBlock]] = {}
        for block in self._blocks.values():
            programs.setdefault(block.stage.task, []).append(block)
        return Transfers(self._own(called), called, self._sends, self._receives, programs)

    def _program(self, name: str) -> StageBlock | None:
        """That a node is a member of."""
        stage = self._plan.stage_of.get(name)
        return None if stage is None else self._blocks.get(stage.number)

    def _of_own(self) -> tuple[set[Edge], set[str]]:
        """Values that the own part needs, and nodes that it waits for."""
        plan = self._plan
        wanted = {edge for name in plan.local for edge in self._nodes[name].inputs}.union(
            plan.fetches
        )
        awaited = {control for name in plan.local for control in plan.controls[name]}
        for stage in self._called.values():
            wanted.update(stage.feeds, (one.predicate for one in stage.gates))
            awaited.update(stage.after)
        for name in awaited.union(plan.targets):
            if plan.kinds[name] not in RUN:
                wanted.update(one.predicate for one in plan.branches[name])
        return wanted - self._fed, awaited

    # -- to a program ------------------------------------------------------------------------------

    def _feed(self, block: StageBlock) -> None:
        stage = block.stage
        had = self._had.setdefault(stage.task, set())
        of_own: list[Edge] = []
        of_others: dict[Task, TransferRequest] = {}
        for edge in stage.feeds:
            key = self._key(edge)
            block.feeds.append(key)
            if key in had:
                continue
            had.add(key)
            source = None if edge in self._fed else self._program(edge[0])
            if source is None:
                of_own.append(edge)
            else:
                self._pass(source, stage.task, key, self._kind(edge), of_others)
        after = []
        for name in stage.after:
            source = self._program(name)
            if source is None:
                after.append(name)
            elif source.stage.task != stage.task and had.isdisjoint(
                [*source.fetches, _done(source)]
            ):
                had.add(_done(source))
                self._pass(source, stage.task, _done(source), "", of_others)
        self._send(block, of_own, after)
        for request in of_others.values():
            block.receives.extend(self._requests(request))
        block.fetches = [self._key(edge) for edge in stage.fetches]
        had.update(block.fetches)

    @staticmethod
    def _pass(
        source: StageBlock, to: Task, key: str, kind: str, requests: dict[Task, TransferRequest]
    ) -> None:
        """From one program to another."""
        source.sends.append(Sent(to, key, key == _done(source)))
        request = requests.setdefault(source.stage.task, TransferRequest(source.stage.task, [], []))
        request.keys.append(key)
        request.kinds.append(kind)

    def _send(self, block: StageBlock, edges: list[Edge], after: list[str]) -> None:
        """From the own task."""
        stage, own = block.stage, self._plan.own
        keys = [self._key(edge) for edge in edges]
        kinds = [self._kind(edge) for edge in edges]
        if after and not (self._fuse and edges):
            keys.append(f"after {stage.number}")
            kinds.append("")
        for index, request in enumerate(self._requests(TransferRequest(own, keys, kinds))):
            sent = edges if self._fuse else edges[index : index + 1]
            waits = after if self._fuse or not sent else []
            op = Op(
                self._op(stage, [STEP, *sent], [], waits), stage.task, request.keys, request.kinds
            )
            self._sends.append(op)
            self._unheard.append(op.stage.members[0])
            block.receives.append(request)

    # -- from a program ----------------------------------------------------------------------------

    def _fetch(self, block: StageBlock, barrier: list[str]) -> list[str]:
        """What the own task receives; what later receives of the round come after."""
        stage, own = block.stage, self._plan.own
        edges = [edge for edge in stage.fetches if edge in self._wanted]
        keys = [self._key(edge) for edge in edges]
        kinds = [self._kind(edge) for edge in edges]
        if not edges and not self._awaited.isdisjoint(stage.members):
            keys, kinds = [_done(block)], [""]
        block.sends.extend(Sent(own, key, not edges) for key in keys)
        for index, request in enumerate(self._requests(TransferRequest(stage.task, keys, kinds))):
            fetched = edges if self._fuse else edges[index : index + 1]
            op = Op(
                self._op(stage, [STEP], fetched, barrier or [*self._barrier, *self._unheard]),
                *request,
            )
            self._receives.append(op)
            barrier = barrier or [op.stage.members[0]]
            for name in stage.members:
                self._stage_of.setdefault(name, op.stage)
        return barrier

    # -- of both -----------------------------------------------------------------------------------

    def _requests(self, whole: TransferRequest) -> list[TransferRequest]:
        if self._fuse:
            return [whole] if whole.keys else []
        return [
            TransferRequest(whole.source, [key], [kind])
            for key, kind in zip(whole.keys, whole.kinds, strict=True)
        ]

    def _key(self, edge: Edge) -> str:
        return self._keys.setdefault(edge, str(len(self._keys)))

    def _kind(self, edge: Edge) -> str:
        return _NAMED.get(self._nodes[edge[0]].out_types[edge[1]] % 100, "")

    def _op(
        self, stage: Stage, feeds: list[Edge], fetches: Sequence[Edge], after: list[str]
    ) -> Stage:
        number = self._numbers
        self._numbers += 1
        name = f"prpc_op_{number}"
        made = Stage(
            number, stage.task, stage.round, NO_BRANCHES, (), [name], feeds, list(fetches), after
        )
        self._stage_of[name] = made
        return made

    def _own(self, called: list[Stage]) -> Plan:
        plan = self._plan
        ops = [op.stage for op in (*self._sends, *self._receives)]
        graph: Graph = copy.copy(plan.graph)
        definition = type(graph.definition)().node.add(name=STEP[0], op="Placeholder")
        graph.nodes = {**graph.nodes, STEP[0]: GraphNode(definition, _STEP_SIGNATURE)}
        kinds = {**plan.kinds, **{op.members[0]: OpKind.OTHER for op in ops}}
        # Those of programs have run when their tasks say so, at the step's end.
        targets = [name for name in plan.targets if self._program(name) is None]
        targets.extend(op.stage.members[0] for op in self._sends)
        return replace(
            plan,
            graph=graph,
            kinds=kinds,
            feeds=[*plan.feeds, STEP],
            targets=targets,
            stages=[*called, *ops],
            stage_of=self._stage_of,
        )


def _done(block: StageBlock) -> str:
    return f"done {block.stage.number}"
