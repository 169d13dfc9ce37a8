"""Tasks that do not answer steps: one line in the log names them, as a step waits in silence
otherwise until the task goes on, or its connection is found to be dead.

    a call of a stage                          logged
    that has no answer after STALL_S           once, by its task
    of one that may wait for another step      never: it waits for as long as that takes
    a task that was logged and answers again   once
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shard import runtime, sleep

STALL_S = 10.0
LOOK_S = 2.0

logger = logging.getLogger("prpc")


class Awaited(NamedTuple):
    """A call of a step that has no answer yet. task: "" where it may take as long as it likes;
    since: by the monotonic clock.
    """

    task: str
    since: float


def stalled(calls: Iterable[Awaited], now: float) -> dict[str, float]:
    """Each task that has not answered for STALL_S, and for how many seconds."""
    found: dict[str, float] = {}
    for task, since in calls:
        if task and now - since >= STALL_S:
            found[task] = max(found.get(task, 0.0), now - since)
    return found


async def watch(calls: Callable[[], Iterable[Awaited]]) -> None:
    """Log them, until this is cancelled. A coroutine of the control loop, which keeps no call: what
    it brought would be held until the next look.
    """
    logged: set[str] = set()
    while True:
        await sleep(LOOK_S)
        now = stalled(calls(), runtime.monotonic())
        for task in sorted(now.keys() - logged):
            logger.warning(
                "%s has not answered for %.0f s: steps wait for it; it is stopped, or busy with "
                "one op",
                task,
                now[task],
            )
        for task in sorted(logged - now.keys()):
            logger.warning("%s answers again", task)
        logged = set(now)
