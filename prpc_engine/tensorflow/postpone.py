"""Moves ops of another task from the stage in which they could run first to the one that needs
them. No I/O here.

A ps has ops that depend on the step's data alone: which rows of a gradient are the same (Unique),
how many they are (Shape, StridedSlice). They could run in the stage that reads the variables, and
their values would go to the session's task and come back with the gradients. In the stage that uses
them they cost nothing on the way.

    an op moves from its stage to a later one where
    nothing but that stage uses it or waits for it     nor does a fetch, a target or a branch
    it has no state, and reads no variable             those are read, and random numbers drawn,
                                                       when they were
    both stages are dead or alive together
    what it uses of its own stage moves there, too     else that would go over in its place, and may
                                                       be larger

An op may move with what uses it, so whole chains do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar


class KeyedStage(Protocol):
    """A stage."""

    members: list[str]

    @property
    def key(self) -> object:
        """Equal for stages of one task that are dead or alive together."""


P = TypeVar("P", bound=KeyedStage)


def postpone(
    order: Sequence[str],
    stage_of: dict[str, P],
    sources: Mapping[str, Collection[str]],
    waits: Mapping[str, Collection[str]],
    movable: Collection[str],
) -> None:
    """Change `stage_of` and the stages' members.

    order    the nodes of a step; what a node uses or waits for stands before it
    sources  by node, whose values it uses
    waits    by node, what it waits for without a value
    movable  the nodes that may move: they have no state, and no fetch needs them
    """
    users: dict[str, list[str]] = {name: [] for name in movable}
    for name in order:
        for source in {*sources[name], *waits[name]}:
            if source in users:
                users[source].append(name)
    backwards = [name for name in reversed(order) if name in users]
    stays: set[str] = set()
    while True:
        moved = _moves(backwards, stage_of, users, stays)
        # what one of these uses of its own stage would have to go over now
        held = {
            name
            for name, to in moved.items()
            for source in sources[name]
            if stage_of.get(source) is stage_of[name] and moved.get(source) is not to
        }
        if not held:
            break
        stays |= held
    changed = {id(stage): stage for name, to in moved.items() for stage in (stage_of[name], to)}
    for stage in changed.values():
        stage.members[:] = [name for name in stage.members if name not in moved]
    for name in moved:  # backwards: each in front of those that use it
        moved[name].members.insert(0, name)
    stage_of.update(moved)


def _moves(
    backwards: Sequence[str],
    stage_of: Mapping[str, P],
    users: Mapping[str, Sequence[str]],
    stays: Collection[str],
) -> dict[str, P]:
    """Where each one goes, if those in `stays` do not move."""
    moved: dict[str, P] = {}
    for name in backwards:
        if name in stays or not users[name]:
            continue
        places = {id(moved.get(one, stage_of.get(one))) for one in users[name]}
        to = moved.get(users[name][0], stage_of.get(users[name][0]))
        now = stage_of[name]
        if len(places) == 1 and to is not None and to is not now and to.key == now.key:
            moved[name] = to
    return moved
