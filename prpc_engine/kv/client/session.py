"""What one worker has seen of each partition of each table, so that it finds out when state went
back.

    version  pushes that a partition of a table has applied, of all workers, from its beginning: it
             grows by one with each, is saved with checkpoints, is the same on every replica, and is
             brought back by a restore
    floor    the highest version that this worker has been answered with: by a push or a versioned
             pull

    an answer's version is      asked with the floor          then
    at least the floor          of now, or of before it grew  the floor is at least that from now on
    below the floor; of a push  the same                      state went back: EpochChanged, and the
      not above it                                            floor is that version
    anything                    of before state went back     it says nothing, and is not seen: the
                                                              worker is told already

Whoever waits for a versioned pull when news of that are there is told, instead of being answered;
else whoever asks next.

    a partition begins again  floors above what it begins with are lost: EpochChanged; the floor is
                              what it begins with

Versions of one partition of one table can be compared, whichever worker and verb they came from.
Those of two partitions or two tables cannot; nor those of before and after a restore, or of another
number of partitions. What went back and has grown again since is found where a partition begins
again (elastic tables, at each new primary and each restore: locator.py), and not else. Tables of
plain servers have epochs (epochs.py): that they began again is found by any request, whatever its
version.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import RpcError
from shard import runtime

Values = npt.NDArray[np.float32]


class Versioned(NamedTuple):
    """What a versioned pull gives. versions: {partition: its version, as of the values}, of the
    partitions that were asked.
    """

    values: Values
    versions: dict[int, int]


class EpochChanged(RpcError):
    """State went back: a partition was lost and is back from a checkpoint, or empty, or from a
    replica that had less; or a checkpoint was restored. Pushes that were acknowledged since are
    gone. Train on from `step`, or restore all of it.

    partition: which, -1: several, or all of a table; step: of the checkpoint, -1: there was none,
    or it is not known; pushes_lost: how many of this worker's had been acknowledged, or of all
    workers', where it is from versions that this one finds out; -1: not known.
    """

    def __init__(self, text: str, partition: int, step: int, pushes_lost: int) -> None:
        super().__init__(text)
        self.partition, self.step, self.pushes_lost = partition, step, pushes_lost

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle, which would call it with the text alone."""
        return type(self), (self.args[0], self.partition, self.step, self.pushes_lost)


class Floor(NamedTuple):
    """Of one partition of one table. rollbacks: how often its state went back."""

    version: int = 0
    rollbacks: int = 0


NOTHING = Floor()
# by partition; never changed, so that who asks can keep those of that moment
Floors = Mapping[int, Floor]


class Session:
    """A session keeps the versions that one worker has seen, and finds out when state went back.

    Owned by one worker; any thread may call. name: of the service, for texts. What it finds is an
    EpochChanged: answered() and began() return it; tell() raises those in `news`, each once. Which
    answers count, and what is compared: the tables at the file's head.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = runtime.Lock()  # answers come in any thread, and any may pull
        self._floors: dict[str, Floors] = {}
        self.news: deque[EpochChanged] = deque()  # to be raised, each once
        # times that state went back, as far as it is known: a cache begins anew then
        self.losses = 0

    def floors(self, table: str) -> Floors:
        """Of now: to be taken before something is asked, for answered()."""
        return self._floors.setdefault(table, {})

    def answered(
        self, table: str, asked: Floors, versions: Mapping[int, int], pushes: int = 0
    ) -> EpochChanged | None:
        """Answers with those versions came, by partition, to a pull, or to one push, that was asked
        with those floors.
        """
        behind: list[tuple[int, int, int]] = []
        with self._lock:
            floors = dict(self._floors[table])
            for partition, version in versions.items():
                then, now = asked.get(partition, NOTHING), floors.get(partition, NOTHING)
                if then.rollbacks != now.rollbacks:
                    continue
                if then.version and version < then.version + pushes:
                    behind.append((partition, then.version, version - pushes))
                    floors[partition] = Floor(version, now.rollbacks + 1)
                elif version > now.version:
                    floors[partition] = Floor(version, now.rollbacks)
            self._floors[table] = floors
        return (
            self._gone_back({each: [(table, floor, version)] for each, floor, version in behind})
            if behind
            else None
        )

    def versioned(
        self,
        table: str,
        asked: Floors,
        partitions: Sequence[int],
        join: Callable[[list[Values]], Values],
        pushes: int = 0,
    ) -> Callable[[list[Any]], Versioned]:
        """What makes one of answers that are [version, values], one from each of the partitions;
        raises EpochChanged.

        pushes: 1 when it pushed, too.
        """

        def assemble(answers: list[Any]) -> Versioned:
            self.tell()
            versions = {
                partition: version
                for partition, (version, _) in zip(partitions, answers, strict=True)
            }
            gone_back = self.answered(table, asked, versions, pushes)
            if gone_back is not None:
                raise gone_back
            return Versioned(join([values for _, values in answers]), versions)

        return assemble

    def tell(self) -> None:
        """Raise the oldest news, if there are any."""
        if self.news:
            try:
                oldest = self.news.popleft()
            except IndexError:  # another thread tells it
                return
            raise oldest

    def withdraw(self, news: Iterable[EpochChanged]) -> None:
        """Do not raise these."""
        for each in news:
            with contextlib.suppress(ValueError):  # another thread has told it
                self.news.remove(each)

    def began(self, partition: int, versions: Mapping[str, int]) -> EpochChanged | None:
        """A partition has begun again, with those versions by table; of a table that is not there,
        with 0.
        """
        behind: list[tuple[str, int, int]] = []
        with self._lock:
            for table, floors in self._floors.copy().items():  # floors() may add to them meanwhile
                floor, version = floors.get(partition, NOTHING), versions.get(table, 0)
                if version < floor.version:
                    behind.append((table, floor.version, version))
                    self._floors[table] = {**floors, partition: Floor(version, floor.rollbacks + 1)}
        return self._gone_back({partition: behind}) if behind else None

    def begin_again(self, partition: int) -> None:
        """This worker knows that state of that partition went back;
        answers under way say nothing.
        """
        with self._lock:
            self.losses += 1
            for table, floors in self._floors.copy().items():
                rollbacks = floors.get(partition, NOTHING).rollbacks
                self._floors[table] = {**floors, partition: Floor(0, rollbacks + 1)}

    def begin_anew(self, table: str, partitions: Iterable[int]) -> None:
        """This worker knows that all of that table began again; answers under way say nothing."""
        with self._lock:
            self.losses += 1
            floors = self._floors.get(table, {})
            self._floors[table] = {
                each: Floor(0, floors.get(each, NOTHING).rollbacks + 1) for each in partitions
            }

    def _gone_back(self, behind: Mapping[int, list[tuple[str, int, int]]]) -> EpochChanged:
        with self._lock:
            self.losses += 1
        tables = [
            f"table {table!r} in partition {partition} is at version {version}, "
            f"this worker has seen {floor}"
            for partition, each in behind.items()
            for table, floor, version in each
        ]
        lost = sum(floor - version for each in behind.values() for _, floor, version in each)
        return EpochChanged(
            f"state of {self._name!r} went back: {'; '.join(tables)}. "
            "Acknowledged pushes are gone, since a checkpoint was "
            "restored, or a server was lost that had them alone (see ack='replicated'); "
            "train on from there, or restore",
            next(iter(behind)) if len(behind) == 1 else -1,
            -1,
            lost,
        )
