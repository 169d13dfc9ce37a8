"""What a publisher holds for its readers, and what becomes of an item when one is slow. No I/O and
no clock here.

    mode    slow         an item comes, and a reader has as many items or bytes waiting as it may
    latest  -            it takes the place of the one before, which is counted as skipped: a reader
                         has the newest waiting, or nothing; who joins gets the newest at once
    queue   block        publish() waits until there is room, and gives up by its own time
    queue   drop_oldest  the publisher drops the oldest that wait until there is room, counts them,
                         and tells the reader how many with its next item
    queue   disconnect   the reader is taken off, and told so when it asks

What waits for a reader are the last items that were published. So all that wait for whatever
readers are at most the items and bytes that may wait for one, beside what each was given last.

What a reader was given is kept until it has confirmed it, with its next question: an answer that
was lost is given again, and versions say what came twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from prpc_engine.errors import ConfigError
from shard import is_count

Mode = Literal["latest", "queue"]
Slow = Literal["block", "drop_oldest", "disconnect"]
MODES, SLOW = ("latest", "queue"), ("block", "drop_oldest", "disconnect")
CAPACITY = 64  # items that wait for one reader
CAPACITY_MAX = 1 << 20
# Of one answer: enough to hide the way there and back, little enough to be read in a turn.
ANSWER_ITEMS_MAX, ANSWER_BYTES_MAX = 64, 64 << 20


class Sized(Protocol):
    """An item."""

    @property
    def nbytes(self) -> int:
        """Of all that it holds."""


class PublishedItem(NamedTuple):
    """An item of one publisher. nbytes: as it was published."""

    version: int
    item: Any
    nbytes: int


class Disconnected(Exception):
    """The reader was taken off: it was too slow."""


@dataclass
class TopicReader:
    """One that has asked for items.

    waiting    published, and not given yet; `waiting_bytes` in all
    given      given, and not confirmed yet
    confirmed  the last version that it has
    skipped    items that it never gets, in all; `untold` of these it has not been told of
    is_far     it asks over a network
    """

    name: str
    confirmed: int = 0
    waiting: deque[PublishedItem] = field(default_factory=deque)
    waiting_bytes: int = 0
    given: list[PublishedItem] = field(default_factory=list)
    skipped: int = 0
    untold: int = 0
    is_disconnected: bool = False
    is_far: bool = False

    @property
    def behind(self) -> int:
        """Items that it does not have yet."""
        return len(self.waiting) + len(self.given)

    def add(self, entry: PublishedItem) -> None:
        """One more waits."""
        self.waiting.append(entry)
        self.waiting_bytes += entry.nbytes

    def remove_first(self) -> PublishedItem:
        """The oldest that waits waits no more."""
        entry = self.waiting.popleft()
        self.waiting_bytes -= entry.nbytes
        return entry

    @property
    def next_version(self) -> int | None:
        """Of the first of these; None: it has all."""
        first = self.given or self.waiting
        return first[0].version if first else None


class Given(NamedTuple):
    """What a reader gets: items in order, and how many it has missed before them."""

    entries: list[PublishedItem]
    skipped: int


class Backlog:
    """The readers of one publisher, by their ids. Its owner holds the lock.

    capacity, bytes_max  what may wait for one reader of a queue
    """

    def __init__(self, mode: Mode, capacity: int, slow: Slow, bytes_max: int) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r:.100}: {' and '.join(map(repr, MODES))} are allowed")
        if slow not in SLOW:
            raise ConfigError(f"slow={slow!r:.100}: {', '.join(map(repr, SLOW))} are allowed")
        if not is_count(capacity, 1) or capacity > CAPACITY_MAX:
            raise ConfigError(
                f"capacity={capacity!r:.100}: a whole number from 1 to {CAPACITY_MAX} is allowed"
            )
        if not is_count(bytes_max, 1):
            raise ConfigError(f"bytes_max={bytes_max!r:.100}: a whole number from 1 is allowed")
        self.mode, self.slow = mode, slow
        self.bytes_max = None if mode == "latest" else bytes_max
        self.capacity = 1 if mode == "latest" else capacity
        self.version = 0  # of the last item
        self.newest: PublishedItem | None = None  # where who joins gets it
        self.readers: dict[int, TopicReader] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether an item of that size may wait at all."""
        return self.bytes_max is None or nbytes <= self.bytes_max

    def full(self, nbytes: int) -> list[TopicReader]:
        """Whom publish() has to wait for with an item of that size, which fits()."""
        if self.mode == "latest" or self.slow != "block":
            return []
        return [one for one in self.readers.values() if not self._has_room(one, nbytes)]

    def _has_room(self, reader: TopicReader, nbytes: int) -> bool:
        if len(reader.waiting) >= self.capacity:
            return False
        return self.bytes_max is None or reader.waiting_bytes + nbytes <= self.bytes_max

    def publish(self, item: Sized) -> int:
        """One more for each reader; its version. It fits(), and full() is empty."""
        self.version += 1
        nbytes = item.nbytes
        entry = PublishedItem(self.version, item, nbytes)
        if self.mode == "latest":
            self.newest = entry
        for reader in self.readers.values():
            if reader.is_disconnected:
                reader.skipped += 1
                continue
            while not self._has_room(reader, nbytes):
                if self.mode == "queue" and self.slow == "disconnect":
                    reader.is_disconnected = True
                    reader.skipped += len(reader.waiting) + 1
                    reader.waiting.clear()
                    reader.waiting_bytes = 0
                    break
                reader.remove_first()
                reader.skipped += 1
                reader.untold += 1
            else:
                reader.add(entry)
        return self.version

    def join(self, reader_id: int, name: str) -> TopicReader:
        """A reader asks for the first time, or after it was taken off."""
        reader = self.readers[reader_id] = TopicReader(name)
        if self.newest is not None:
            reader.add(self.newest)
        return reader

    def take(self, reader_id: int, confirmed: int) -> Given:
        """What is next for a reader that has all up to `confirmed`; no entries: it has to wait.
        Raises Disconnected, once.
        """
        reader = self.readers[reader_id]
        if reader.is_disconnected:
            del self.readers[reader_id]
            raise Disconnected(
                f"{reader.name} was taken off: as many items ({self.capacity}) or bytes "
                f"({self.bytes_max}) waited for it as may; it has missed {reader.skipped}"
            )
        reader.confirmed = confirmed
        lost = [entry for entry in reader.given if entry.version > confirmed]
        if self.mode == "latest" and reader.waiting:
            lost.clear()  # there is a newer one
        reader.given = lost
        nbytes = sum(entry.item.nbytes for entry in lost)
        while reader.waiting and len(reader.given) < ANSWER_ITEMS_MAX:
            nbytes += reader.waiting[0].item.nbytes
            if reader.given and nbytes > ANSWER_BYTES_MAX:
                break
            reader.given.append(reader.remove_first())
        untold = reader.untold
        if reader.given:
            reader.untold = 0
        return Given(list(reader.given), untold)

    def leave(self, reader_id: int) -> bool:
        """A reader wants no more, or has died; whether there was one."""
        return self.readers.pop(reader_id, None) is not None

    def needed_from(self, reader_ids: Iterable[int]) -> int:
        """The oldest version that one of these does not have yet, or that who joins gets."""
        versions = [
            version
            for reader_id in reader_ids
            if (reader := self.readers.get(reader_id)) and (version := reader.next_version)
        ]
        if self.newest is not None:
            versions.append(self.newest.version)
        return min(versions, default=self.version + 1)
