"""What a group tells of itself: one row for each shard, and one for the application."""

from __future__ import annotations

from dataclasses import dataclass

from shard.memory.counters import ClassStatistics, CounterRow


@dataclass(frozen=True)
class ShardStatistics:
    """A snapshot of one shard of a group, from ShardGroup.statistics(): its process, its state and
    the figures that it wrote last. It needs no answer of the shard, so it is there for one that
    stalls or has died, too.
    """

    index: int
    pid: int  # of the present incarnation, or the last
    core: int | None  # None: it may run on any
    alive: bool
    state: str  # "starting", "up", "waiting" for its restart, "gone"
    incarnation: int  # how often it was started
    # of the last that ended, as multiprocessing has it: -9 is SIGKILL; None when none has
    exit_code: int | None
    counters: CounterRow  # of the present incarnation, or the last
    classes: tuple[ClassStatistics, ...]  # of work, LATENCY first; likewise


@dataclass(frozen=True)
class GroupStatistics:
    """A snapshot of a whole group, from ShardGroup.statistics(): one ShardStatistics a shard in
    order of index, and the application's own row. calls_in_flight counts calls of the
    application that have no answer yet.
    """

    shards: tuple[ShardStatistics, ...]
    application: CounterRow  # its side of the lanes
    calls_in_flight: int
