"""What to say of a group that did not become complete: who is there, who has come and left, and who
has come with another world_size. No I/O here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Attendant(NamedTuple):
    """A worker that has come; world_size: its own, or None where it has none."""

    name: str
    rank: int
    world_size: int | None
    is_there: bool


def missing_text(came: Sequence[Attendant], world_size: int, where: str) -> tuple[str, str]:
    """Who of a group of that size is there, and what to do; `where`: the group's."""
    came = sorted(came)
    there = [f"{one.name!r} (rank {one.rank})" for one in came if one.is_there]
    text = f"{len(there)} of {world_size} workers are in the group at {where}: {', '.join(there)}"
    left = [f"{one.name!r} (rank {one.rank})" for one in came if not one.is_there]
    if left:
        text += f"; came and left: {', '.join(left)}"
    others = [
        f"{one.name!r} with {'none' if one.world_size is None else one.world_size}"
        for one in came
        if one.world_size != world_size
    ]
    if not others:
        return text, "Start the others within Options.init_timeout_s"
    text += f"; not with the world_size {world_size} came {', '.join(others)}"
    return text, "Give all workers of a group the same world_size"
