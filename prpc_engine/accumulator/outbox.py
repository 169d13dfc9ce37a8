"""What one server is still to be told: a batch on its way, and aggregates that grow meanwhile. No
I/O and no clock.

    pending   name -> aggregate and number of values; grows while a batch is on its way: this is the
              second buffer
    sealed    batches made of what was pending, sent one after the other; the first keeps its
              sequence number and its very content until the server has answered, so that sending it
              again can be recognised there
    sequence  1, 2, 3, ... of the batches that the server answered, or may have seen

A generation is what is sealed at one time. mark() names the one that holds everything added before;
it is settled when is_settled() says so, whatever is added after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from prpc_engine.accumulator.aggregator import Aggregator
from prpc_engine.accumulator.counter import Counter

# In one push: with four arrays each, far below the 4096 that a message may have, and a server is
# busy some ms at most.
ENTRIES_MAX = 256


@dataclass
class WriteEntry:
    """What one counter adds to a batch: an aggregate of so many writes."""

    counter: Counter
    aggregate: Aggregator
    writes: int

    def to_wire(self) -> tuple[str, str, dict[str, Any], Any]:
        """(name, kind, parameters, state)."""
        return (
            self.counter.name,
            self.counter.kind,
            self.counter.parameters,
            self.aggregate.serialize(),
        )


@dataclass
class WriteBatch:
    """What a client pushes to its server at once: an entry for each counter that was written to."""

    entries: list[WriteEntry]
    maybe_applied: bool = False  # it was sent, and no answer came


class WriteOutbox:
    """A write outbox keeps what a server is still to be told, and merges what comes meanwhile.

    Owned by an AccumulatorClient, whose lock guards it. The head is the batch to push now; it stays
    the same, under one number, until it is answered, dropped or split. What an aggregator raises
    while it is merged is noted at its counter, and not raised here.
    """

    def __init__(self) -> None:
        self._pending: dict[str, WriteEntry] = {}
        self._sealed: deque[WriteBatch] = deque()
        self._generation = 1  # of what is pending
        self.sequence = 1  # of the first sealed batch
        self.acknowledged = 0  # values
        self.dropped = 0  # values

    def add(self, counter: Counter, aggregate: Aggregator, writes: int) -> None:
        """`writes` more values of a counter; the aggregate is the outbox's from now on."""
        entry = self._pending.get(counter.name)
        if entry is None:
            self._pending[counter.name] = WriteEntry(counter, aggregate, writes)
            return
        try:
            entry.aggregate.merge_aggregator(aggregate)
        except Exception as error:  # an aggregator may be anybody's; the sender must survive it
            counter.lose(writes, error)
        else:
            entry.writes += writes

    def head(self) -> WriteBatch | None:
        """What to push now: the batch that has no answer yet, else the next; None when there is
        nothing.
        """
        if not self._sealed and self._pending:
            entries = list(self._pending.values())
            self._pending = {}
            self._generation += 1
            self._sealed.extend(
                WriteBatch(entries[at : at + ENTRIES_MAX])
                for at in range(0, len(entries), ENTRIES_MAX)
            )
        return self._sealed[0] if self._sealed else None

    def answered(self, refused: dict[int, str]) -> None:
        """The server has dealt with the head, once and for all; `refused` are the entries it did
        not take, by position.
        """
        for position, entry in enumerate(self._sealed.popleft().entries):
            entry.counter.refusal = refused.get(position)
            if position in refused:
                self.dropped += entry.writes
            else:
                self.acknowledged += entry.writes
        self.sequence += 1

    def drop_head(self, reason: str) -> None:
        """Give the head up."""
        batch = self._sealed.popleft()
        for entry in batch.entries:
            entry.counter.refusal = reason
            self.dropped += entry.writes
        if batch.maybe_applied:
            self.sequence += 1  # the server may know that number

    def split_head(self) -> bool:
        """Make two batches of the head, which was never sent because it is too large; False when it
        is one counter.
        """
        batch = self._sealed[0]
        middle = len(batch.entries) // 2
        if not middle or batch.maybe_applied:
            return False
        self._sealed.popleft()
        self._sealed.appendleft(WriteBatch(batch.entries[middle:]))
        self._sealed.appendleft(WriteBatch(batch.entries[:middle]))
        return True

    def drop_all(self) -> int:
        """Give everything up: how many values that were."""
        entries = [entry for batch in self._sealed for entry in batch.entries] + list(
            self._pending.values()
        )
        self._sealed.clear()
        self._pending.clear()
        lost = sum(entry.writes for entry in entries)
        self.dropped += lost
        return lost

    @property
    def waiting(self) -> int:
        """Values without an answer."""
        sealed = sum(entry.writes for batch in self._sealed for entry in batch.entries)
        return sealed + sum(entry.writes for entry in self._pending.values())

    def mark(self) -> int:
        """The generation that holds everything added so far."""
        return self._generation if self._pending else self._generation - 1

    def is_settled(self, mark: int) -> bool:
        """Whether all of that generation has been answered or given up."""
        return mark < self._generation - (1 if self._sealed else 0)
