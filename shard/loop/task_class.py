"""Classes of work, each with its shares of a reactor's time (queues.py), and which class a function
is of.

    class      shares   for
    LATENCY      1000   answers, plain functions, requests, the engine itself: what somebody waits
                        for
    BULK          100   what only has to be done: scans, checkpoints, compaction

    a function that runs in a shard        is of
    marked by in_class()                   that class, which may be LATENCY
    submitted or spawned by another task   the class of that task
    any other, and each request            LATENCY: what is called over RPC inherits nothing

RUNNING.value says, in each thread, which class the step under way is of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shard.checks import is_count
from shard.loop.per_thread import PerThread

Function = TypeVar("Function", bound=Callable[..., Any])

SHARES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A class of work. Time is divided by `shares`, 1 to SHARES_MAX; two objects with the same
    values are the same class.
    """

    name: str
    shares: int

    def __post_init__(self) -> None:
        if not is_count(self.shares, 1) or self.shares > SHARES_MAX:
            raise ValueError(
                f"task class {self.name!r} with {self.shares!r} shares: "
                f"1 to {SHARES_MAX} are possible"
            )


# A tenth: bulk work goes on under full load (a second of it takes eleven), and costs latency work a
# tenth of its throughput at most. Seastar divides between its main and its background work so, too.
LATENCY = TaskClass("latency", 1000)
BULK = TaskClass("bulk", 100)

TASK_CLASS_ATTRIBUTE = "_shard_task_class"


def in_class(task_class: TaskClass) -> Callable[[Function], Function]:
    """Decorator: where this function is sent to a shard, it runs there as a task of `task_class`.

    @shard.in_class(shard.BULK)
    async def compact(table): ...
    """

    def mark(function: Function) -> Function:
        setattr(function, TASK_CLASS_ATTRIBUTE, task_class)
        return function

    return mark


def class_of(function: Callable[..., Any]) -> TaskClass:
    """The class that in_class() gave the function; LATENCY without."""
    return marked_class(function) or LATENCY


def marked_class(function: Callable[..., Any]) -> TaskClass | None:
    """The class that in_class() gave the function, which may be LATENCY; None without."""
    found = getattr(function, TASK_CLASS_ATTRIBUTE, None)
    assert found is None or isinstance(found, TaskClass)
    return found


# Set around each step of a class other than LATENCY.
RUNNING = PerThread(LATENCY)
