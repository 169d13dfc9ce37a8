"""What a group runs in its shards for itself."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Sequence
from typing import Any

from shard.group import process
from shard.group.mesh import is_answered_later
from shard.group.payload import call_pickled, pickle_function
from shard.loop.future import Future

Setup = tuple[bytes, tuple[Any, ...]]  # a function, pickled, and its arguments


def set_up(setups: Sequence[Setup]) -> int | Coroutine[Any, Any, int]:
    """What a shard runs before it counts as up, one after the other; its pid. A task only where one
    of them is answered later.
    """
    for number, (pickled, args) in enumerate(setups, 1):
        value = call_pickled(pickled, args)
        if is_answered_later(value):
            return _go_on(value, setups[number:])
    return os.getpid()


async def _go_on(value: Any, setups: Sequence[Setup]) -> int:
    await value
    pid = set_up(setups)
    return pid if isinstance(pid, int) else await pid


def nothing() -> None:
    """What takes the place of a setup that was taken back; and a shard never tells the application
    to stop.
    """


NOTHING_TO_SET_UP: Setup = (pickle_function(nothing), ())


def take_handovers() -> None:
    """Connect the lanes that were handed over by now."""
    process.this_shard().take_handovers()


def wait_empty() -> Future:
    """Done when no other process waits for a task of this shard."""
    return process.this_shard().tasks.wait_empty()


def cancel_tasks(why: str) -> Future:
    """Cancel those that other processes have begun in this shard; done when they have ended."""
    return process.this_shard().cancel_tasks(why)


def tasks_left() -> list[str]:
    """Those that have not, for the log."""
    return process.this_shard().tasks_left()
