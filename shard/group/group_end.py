"""How the work of a group ends when it is closed: first by itself, then cancelled, and by name in
the log where neither helps.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from shard.errors import ClosedError, ShardError
from shard.group.group_calls import cancel_tasks, tasks_left, wait_empty
from shard.group.process import STOP_S_MIN
from shard.group.supervisor import Life
from shard.loop.future import Future

# submit(function, args) to one shard
Submit = Callable[[Callable[..., Any], tuple[Any, ...]], Future]
SILENT = (
    "it does not answer: a function there that does not await holds its reactor, or it was stopped "
    "(SIGSTOP)"
)

logger = logging.getLogger("shard")


def end_tasks(submits: Mapping[int, Submit], drain_s: float, clean_up_s: float) -> dict[int, str]:
    """Wait `drain_s` seconds until no shard has tasks of another process, cancel those that are
    left, and wait `clean_up_s` for these: what is left after that, for each shard that has some.
    """
    busy = _ask(submits, submits.keys(), wait_empty, (), drain_s)
    if busy:
        why = f"its group was closed {drain_s:g} s ago"
        busy = _ask(submits, busy, cancel_tasks, (why,), clean_up_s)
    left = dict.fromkeys(busy, SILENT)

    def note(index: int, named: list[str]) -> None:
        left[index] = f"these go on after they were cancelled: {', '.join(named)}"

    if busy:
        _ask(submits, busy, tasks_left, (), STOP_S_MIN, note)
    return left


def _ask(
    submits: Mapping[int, Submit],
    indices: Collection[int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    note: Callable[[int, Any], None] = lambda index, value: None,
) -> list[int]:
    """Run function(*args) in those shards; the ones that have not answered in time. The values of
    others go to note(index, value).
    """
    deadline = time.monotonic() + timeout_s
    futures = {}
    for index in indices:
        with contextlib.suppress(ShardError):  # that shard is gone already
            futures[index] = submits[index](function, args)
    unanswered = []
    for index, future in futures.items():
        try:
            error = future.error(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            unanswered.append(index)
        except ClosedError:
            break  # whoever owns the driver has closed it
        else:
            if error is None:
                note(index, future.result())
    return unanswered


def tell_of_ends(lives: Iterable[Life], left: Mapping[int, str]) -> None:
    """Say which shards did not end by themselves, and which tasks were left (end_tasks())."""
    for life in lives:
        if life.overdue or life.index in left:
            logger.warning(
                "shard %d (pid %d, incarnation %d) %s at the close of its group: %s",
                life.index,
                life.pid,
                life.incarnation,
                "did not end, and was killed" if life.overdue else "ended",
                left.get(life.index, "it was told to end, and has not"),
            )
