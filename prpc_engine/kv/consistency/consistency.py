"""Consistency: how far the workers of one table may run apart. What decides stands here;
barrier_scheduler.py makes them wait.

    name   a push                           a pull                who waits
    async  is applied when it comes         sees what is applied  nobody
    sync   is applied together with one of  sees whole steps      a push, until all others' push
           every other worker, as one                             of that step is there
    ssp    is applied when it comes         misses at most what   a worker's pull or push, while
                                            is under way within   it is more than `bound` pushes
                                            the bound             ahead of the slowest worker

A worker is a node (an RpcService) that pushes to the table; its clock is its pushes. Each partition
of a table counts by itself: so in sync and ssp a push goes to every partition, to some without
keys, and the clocks agree. ssp: Ho and others, "More effective distributed ML via a stale
synchronous parallel parameter server" (NIPS 2013); with bound 0 it is bulk synchronous.

    worker   event                            becomes
    awaited  (`workers` of them at first)     counts as one at clock `base`: nobody leaves it behind
    unknown  pulls                            unknown: who only reads waits for nobody, and nobody
                                              waits for it
    unknown  pushes while some are awaited    present, in the place of one of them
    unknown  pushes when none is awaited      present: it has joined
    present  its last connection is lost      missed: it counts as present for pace.GRACE_S, as its
                                              pushes mostly come again
    present  the same, and its process ended  gone at once, where that can be seen: on the server's
                                              own host
    missed   pushes, or a push comes again    present
    missed   GRACE_S are over                 gone: it holds nobody up
    missed   the same, and it was the last    gone; `workers` are awaited anew, unless the next one
                                              that comes is it again

Whoever comes enters at the slowest clock, so that it neither holds others up for the past nor is
ahead. A push that comes again (ledger.py) is in one step, and ticks once: it is never given to the
table twice.

Tables of elastic servers have no consistency but async. To pace them, four things would have to be
so that are not:
    a push says which step of its table it belongs to  its number in the ledger counts one worker's
                                                       pushes to all tables. When a primary dies
                                                       that has answered one worker of a step, and
                                                       not another, and no copy has the step (ack
                                                       "applied"), its successor gets the next push
                                                       of the one beside the repeated one of the
                                                       other, as one step
    all partitions agree on who is present             one that begins anew from a checkpoint awaits
                                                       `workers` of them, and a worker that the
                                                       others know to be gone never comes
    a step is one change of the stream                 its pushes, their notes in the ledger and the
                                                       clocks: each push is forwarded, and counts,
                                                       by itself (replica.py)
    who waits holds no hand-over up                    a partition goes to its heir once no push is
                                                       held, and in a paced table some push nearly
                                                       always is
So a step's number has to come with the push and the roster of workers from the master before a copy
can be told of either.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from prpc_engine.errors import ConfigError, RpcError
from prpc_engine.kv.table.spec import build, checked_count

WORKERS_MAX = 65536
BOUND_MAX = 2**31 - 1
NAMED_MAX = 8  # workers that one message names


class WorkersBehind(RpcError):
    """A pull or push waited for slower workers until its caller's deadline was near, and has not
    run: the text names them.
    """


class Consistency(ABC):
    """The settings of one model: frozen, comparable, and back and forth to a plain dict."""

    name: ClassVar[str]
    workers: int

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal one."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Sync(Consistency):
    """The pushes of all workers are applied as one. reduce: "mean" divides their sum by how many
    they are, "sum" does not.
    """

    name = "sync"
    workers: int
    reduce: str = "mean"

    def __post_init__(self) -> None:
        checked_count("consistency 'sync': workers", self.workers, at_least=1, at_most=WORKERS_MAX)
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(f"consistency 'sync': reduce is {self.reduce!r}; allowed: mean, sum")


@dataclass(frozen=True)
class Ssp(Consistency):
    """Stale synchronous parallel. bound: pushes that a worker may be ahead of the slowest one when
    it pulls or pushes.
    """

    name = "ssp"
    workers: int
    bound: int

    def __post_init__(self) -> None:
        checked_count("consistency 'ssp': workers", self.workers, at_least=1, at_most=WORKERS_MAX)
        checked_count("consistency 'ssp': bound", self.bound, at_least=0, at_most=BOUND_MAX)


@dataclass(frozen=True)
class _Async:
    """What costs nothing: no object stands for it."""


CONSISTENCIES: dict[str, type[Any]] = {"async": _Async, "sync": Sync, "ssp": Ssp}


def from_spec(spec: object) -> Consistency | None:
    """{"name": "ssp", "workers": 4, "bound": 2} -> Ssp(4, 2); {"name": "async"} or None -> None;
    else ConfigError.
    """
    if spec is None:
        return None
    made: Any = build("consistency", CONSISTENCIES, spec)
    return None if isinstance(made, _Async) else made


class Clocks:
    """Clocks count the pushes of each worker at one partition, and say who is ahead of the slowest.

    workers: how many are awaited at first. `present`: the clocks of those that are, `names` theirs;
    both to be read. `base`: the clock of who is awaited; read and set between generations. States
    of a worker: the second table at the file's head.
    """

    def __init__(self, workers: int) -> None:
        self.base = 0
        self._workers = self._awaited = workers
        self.present: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._left_last: int | None = None

    def __contains__(self, worker: int) -> bool:
        return worker in self.present

    def __len__(self) -> int:
        return len(self.present)

    @property
    def slowest(self) -> int:
        """The clock that nobody is behind."""
        return self.base if self._awaited or not self.present else min(self.present.values())

    def enter(self, worker: int, name: str, ahead: int = 0) -> None:
        """An unknown worker pushes. ahead: pushes of it that are here and not applied, when it was
        here before.
        """
        if not self.present and worker == self._left_last:
            self._awaited = 0  # its connection was lost, and not the job
        clock = self.slowest + ahead
        self._awaited = max(0, self._awaited - 1)
        self.present[worker], self.names[worker] = clock, name

    def leave(self, worker: int) -> None:
        """A present worker is gone."""
        clock = self.present.pop(worker)
        del self.names[worker]
        if not self.present:
            self.base, self._awaited, self._left_last = clock, self._workers, worker

    def tick(self, worker: int, pushes: int = 1) -> None:
        """A present worker has pushed; -1: it has taken a push back."""
        self.present[worker] += pushes

    def lead(self, worker: int) -> int:
        """Pushes that a worker is ahead of the slowest; 0 of one that is not present."""
        return self.present.get(worker, self.slowest) - self.slowest

    def behind(self) -> str:
        """Who is at the slowest clock, in words."""
        slowest = self.slowest
        names = sorted(
            name for worker, name in self.names.items() if self.present[worker] == slowest
        )
        named = names[:NAMED_MAX] + (
            [f"{len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else []
        )
        if self._awaited:
            named.append(f"{self._awaited} of {self._workers} workers that have not pushed yet")
        return ", ".join(named)
