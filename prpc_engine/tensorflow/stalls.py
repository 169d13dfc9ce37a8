"""Tasks that do not answer steps: one line in the log names them, as a step waits in silence
otherwise until the task goes on, or its connection is found to be dead.

    a call of a stage                              is told of
    that has no answer after STALL_S               once, by its task
    of a stage that may wait for another step      never: it waits for as long as that takes
    a task that was told of and answers again      once
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from shard import Future, runtime, sleep

STALL_S = 10.0
LOOK_S = 2.0

logger = logging.getLogger("prpc")


class StepCalls(Protocol):
    """A session's plane."""

    @property
    def calls_under_way(self) -> dict[Future, str]:
        """Its calls, and whom each is waited for; "": it may take as long as it likes."""


async def watch(planes: Callable[[], Iterable[StepCalls]]) -> None:
    """Look now and then, until this is cancelled. A coroutine of the control loop."""
    since: dict[Future, float] = {}  # when a call was seen first
    told: set[str] = set()
    while True:
        await sleep(LOOK_S)
        now = runtime.monotonic()
        calls = {
            call: task for plane in planes() for call, task in plane.calls_under_way.copy().items()
        }
        since = {call: since.get(call, now) for call, task in calls.items() if task}
        stalled: dict[str, float] = {}
        for call, began in since.items():
            if now - began >= STALL_S:
                task = calls[call]
                stalled[task] = max(stalled.get(task, 0.0), now - began)
        for task, waited_s in sorted(stalled.items()):
            if task not in told:
                logger.warning(
                    "%s has not answered for %.0f s: steps wait for it; it is stopped, or busy "
                    "with one op",
                    task,
                    waited_s,
                )
        for task in sorted(told - stalled.keys()):
            logger.warning("%s answers again", task)
        told = set(stalled)
