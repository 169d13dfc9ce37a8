"""How far each reader of a queue has got, and whom the writer waits for. No I/O, no clock, no lock
in this file: the writing end has them.

    taken <= sent <= enqueued <= taken + max_chunks        of each reader that the writer waits for
    numbers: 1 for the first item of the queue

    rank            belongs to
    of the local    the reader of that rank, once
     ranks
    any other       the next place that is left for readers of other hosts; one from 0 on is taken
                    once, below 0 it is no name: vLLM gives -1 to such readers
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from prpc_engine.errors import ConfigError
from shard import StateTable


class QueueReaderState(Enum):
    AWAITED = "it has not joined"
    UP = "it has joined"
    LEFT = "it has shut down"
    LOST = "it died, hung up or was dropped"


class QueueReaderEvent(Enum):
    JOINED = "it connected, with the queue's token"
    LEFT = "it said that it shuts down"
    LOST = "its connection ended, or it said that it was dropped"


class QueueReaderAction(Enum):
    SEND = "the items that it lacks leave"
    FORGET = "no item is sent to it any more, and enqueue() does not wait for it"
    REFUSE = "nothing is enqueued from now on"


QUEUE_READERS = StateTable(
    "A reader of a queue with vLLM's face",
    QueueReaderState.AWAITED,
    {
        (QueueReaderState.AWAITED, QueueReaderEvent.JOINED): (
            QueueReaderState.UP,
            (QueueReaderAction.SEND,),
        ),
        (QueueReaderState.UP, QueueReaderEvent.LEFT): (
            QueueReaderState.LEFT,
            (QueueReaderAction.FORGET,),
        ),
        (QueueReaderState.UP, QueueReaderEvent.LOST): (
            QueueReaderState.LOST,
            (QueueReaderAction.FORGET, QueueReaderAction.REFUSE),
        ),
    },
)


class QueueReader:
    """One reader, as the writer knows it. Changed by its QueueReaders.

    sent, taken  the last item that has left for it; the last that its program has dequeued
    why          why it was lost
    """

    __slots__ = ("host", "pid", "rank", "sent", "state", "taken", "why")

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.state = QUEUE_READERS.initial
        self.pid, self.host, self.why = 0, "", ""
        self.sent = self.taken = 0

    def __str__(self) -> str:
        name = "a reader of another host" if self.rank is None else f"reader {self.rank}"
        if self.state is QueueReaderState.AWAITED:
            return f"{name} (has not joined)"
        return f"{name} (process {self.pid} on {self.host})"


class QueueReaders:
    """The readers of one queue, and the number of its last item.

    Raises ConfigError for numbers and ranks that make no sense.
    """

    def __init__(self, n_reader: int, local_ranks: Iterable[int], max_chunks: int) -> None:
        local = list(local_ranks)
        self.max_chunks, self.n_reader = max_chunks, n_reader
        self.enqueued = 0
        if len(set(local)) < len(local):
            raise ConfigError(f"local_reader_ranks={local}: each rank is allowed once")
        others = n_reader - len(local)
        if others < 0:
            raise ConfigError(
                f"n_reader={n_reader} readers, {len(local)} of them local: at most {n_reader} are "
                "allowed"
            )
        self._local = {rank: QueueReader(rank) for rank in local}
        self._others = [QueueReader(None) for _ in range(others)]
        self.all = [*self._local.values(), *self._others]

    def join(self, rank: int, pid: int, host: str) -> QueueReader:
        """A reader connects. Raises ConfigError for a rank that has none here, or is taken."""
        reader = self._local.get(rank) or self._place_for(rank)
        if reader.state is not QueueReaderState.AWAITED:
            raise ConfigError(
                f"rank {rank} is taken by {reader}, which "
                f"{'reads' if reader.state is QueueReaderState.UP else 'is gone'}: give each "
                "reader its own, and make another queue for one that is started again"
            )
        reader.rank, reader.pid, reader.host = rank, pid, host
        self._follow(reader, QueueReaderEvent.JOINED)
        return reader

    def _place_for(self, rank: int) -> QueueReader:
        for reader in self._others:
            if rank >= 0 and reader.rank == rank:
                return reader
        for reader in self._others:
            if reader.state is QueueReaderState.AWAITED:
                return reader
        ranks = sorted(self._local)
        if not self._others:
            raise ConfigError(f"rank {rank} is no reader of this queue: {ranks} are allowed")
        raise ConfigError(
            f"rank {rank} is one too many: the queue has local readers {ranks} and "
            f"{len(self._others)} others, which have joined"
        )

    def follow(self, reader: QueueReader, event: QueueReaderEvent) -> bool:
        """It left, or was lost; whether that is news."""
        if reader.state is not QueueReaderState.UP:
            return False
        self._follow(reader, event)
        return True

    def _follow(self, reader: QueueReader, event: QueueReaderEvent) -> None:
        reader.state, _ = QUEUE_READERS.after(reader.state, event)

    @staticmethod
    def take(reader: QueueReader, count: int) -> None:
        """It has dequeued so many items in all; news that come late change nothing."""
        if reader.taken < count <= reader.sent:
            reader.taken = count

    # -- what the writer asks ----------------------------------------------------------------------

    def in_state(self, *states: QueueReaderState) -> list[QueueReader]:
        """Those in one of these states."""
        return [reader for reader in self.all if reader.state in states]

    def behind(self) -> list[QueueReader]:
        """Those for whom there is no room for another item."""
        full = self.enqueued - self.max_chunks
        return [
            reader
            for reader in self.all
            if reader.taken <= full
            and reader.state in (QueueReaderState.UP, QueueReaderState.AWAITED)
        ]

    def kept_from(self) -> int:
        """The first item that some reader has yet to be sent."""
        waited_for = self.in_state(QueueReaderState.UP, QueueReaderState.AWAITED)
        return min((reader.sent for reader in waited_for), default=self.enqueued) + 1

    @property
    def local_ranks(self) -> list[int]:
        """Of readers of the writer's host."""
        return list(self._local)

    @property
    def lost(self) -> QueueReader | None:
        """One that was lost; None: none was."""
        found = self.in_state(QueueReaderState.LOST)
        return found[0] if found else None

    @property
    def all_have_left(self) -> bool:
        """Whether there were readers, and each has shut down."""
        return bool(self.all) and all(reader.state is QueueReaderState.LEFT for reader in self.all)
