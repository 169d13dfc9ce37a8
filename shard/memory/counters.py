"""Figures of a group of processes in shared memory: each process writes its own row, anybody reads,
nobody is stopped for it.

    offset             size  field        written by  meaning
         0                8  magic        creator     MAGIC
         8                8  rows         creator     number of shards, and one for the application
                                                      (the last)
    1024 + 2048*row       8  incarnation  shard       which start of this shard writes here
                   +8     8  up_ns        shard       since then
                  +16     8  idle_ns      shard       of that, how long it was parked, or looked for
                                                      work in vain
                  +24     8  turns        shard       of its reactor
                  +32     8  busy_turns   shard       turns that found work
                  +40     8  parks        shard       times it slept
                  +48     8  wakeups      shard       of those, how many a doorbell, descriptor or
                                                      timer ended
                  +56     8  late_wakes   shard       parks that time ended though work was there:
                                                      lost wake-ups, must be 0
                  +64     8  stalls       shard       handlers that ran over their budget
                  +72     8  stall_ns_max shard       the longest of them
                  +80     8  calls        shard       functions it ran for others
                  +88     8  failures     shard       of those, how many raised
                  +96     8  tasks        shard       of those, how many were coroutines
                 +104     8  cancelled    shard       of those, how many their callers cancelled
                 +112     8  records      shard       ring records it read, on all its lanes
                 +120     8  bytes_in     shard       bytes it read, arrays borrowed counted
                 +128     8  bytes_out    shard       bytes it wrote, arrays lent counted
                 +136     8  full_waits   shard       records that found their ring full and had to
                                                      wait
                 +144     8  leases_lent  shard       blocks of its slab that others hold now
                 +152     8  slab_bytes   shard       bytes of its slab in blocks that somebody
                                                      uses, here or elsewhere
                 +160     8  leases_held  shard       blocks of others that it holds now
                 +256  32*8  call_ns      shard       sampled calls to others by log2: bucket b has
                                                      those of 2**(b-1) to 2**b ns
                 +512  32*8  run_ns       shard       the same for sampled plain functions it ran,
                                                      from found to answered
                +1024 16*64  classes      shard       of work, LATENCY first, 64 bytes each:
                                                      name (24, UTF-8, zeros behind it), shares,
                                                      steps, busy_ns, longest_ns, waiting

A row has cache lines of its own. Each field is one aligned 8-byte store through `cast("Q")`, so a
reader sees whole values; two fields may be of different moments, up to COUNTERS_PERIOD_S
(process.py) apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shard.errors import RemoteProtocolError

MAGIC = 0x33544E4343505250  # "PRPCCNT3", little-endian
ROW_WORDS = 256
FIRST_ROW_WORD = 128
CALL_NS_WORD, RUN_NS_WORD, CLASSES_WORD = 32, 64, 128
CLASS_WORDS, CLASS_NAME_WORDS = 8, 3
NAME = struct.Struct(f"<{CLASS_NAME_WORDS}Q")
# Classes of work that a reactor takes. It looks at every class for every timed step, 0.1 us each:
# few classes is what makes that cheap.
CLASSES_MAX = 16
LATENCY_BUCKETS = 32  # the last one also holds what is longer than 2 s


class CounterRow(NamedTuple):
    """One process's figures in the shared table of counters: a snapshot, all zero before the
    process wrote any. Fields that end in _ns are nanoseconds, in bytes or _bytes bytes, all
    others counts since the incarnation began, but for the three last ones of leases and slab,
    which are of now.
    """

    incarnation: int = 0
    up_ns: int = 0
    idle_ns: int = 0
    turns: int = 0
    busy_turns: int = 0
    parks: int = 0
    wakeups: int = 0
    late_wakes: int = 0
    stalls: int = 0
    stall_ns_max: int = 0
    calls: int = 0
    failures: int = 0
    tasks: int = 0
    cancelled: int = 0
    records: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    full_waits: int = 0
    leases_lent: int = 0
    slab_bytes: int = 0
    leases_held: int = 0

    @property
    def busy_ratio(self) -> float:
        """Share of its time in which it worked, or had worked some microseconds before:
        0.0 to 1.0.
        """
        # the two may be of different moments
        return max(0.0, 1.0 - self.idle_ns / self.up_ns) if self.up_ns else 0.0


class ClassStatistics(NamedTuple):
    """What one class of work did in a reactor since that began. Fields that end in _ns are
    nanoseconds.

    name, shares  the class
    steps         that ended; of LATENCY pieces of work: messages, steps, timers
    busy_ns       what they took
    longest_ns    the longest of them; of LATENCY the longest turn
    waiting       steps in its queue now

    Of LATENCY, steps, busy_ns and longest_ns are of the turns in which another class waited: while
    it is alone nothing is timed.
    """

    name: str
    shares: int
    steps: int
    busy_ns: int
    longest_ns: int
    waiting: int


# the table above
assert len(CounterRow._fields) <= CALL_NS_WORD and RUN_NS_WORD + LATENCY_BUCKETS <= CLASSES_WORD
assert CLASSES_WORD + CLASSES_MAX * CLASS_WORDS <= ROW_WORDS
assert len(ClassStatistics._fields) - 1 + CLASS_NAME_WORDS == CLASS_WORDS


def bucket(duration_ns: int) -> int:
    """The bucket of a duration: b where 2**(b-1) <= duration_ns < 2**b."""
    return min(duration_ns.bit_length(), LATENCY_BUCKETS - 1)


def quantile_ns(buckets: Sequence[int], share: float) -> int:
    """An upper bound of the quantile (share 0.5: the median) of what the buckets hold; 0 when they
    are empty.
    """
    wanted = share * sum(buckets)
    seen = 0
    for number, count in enumerate(buckets):
        seen += count
        if count and seen >= wanted:
            return 1 << number
    return 0


def size_for(rows: int) -> int:
    """Bytes of memory for so many processes."""
    return (FIRST_ROW_WORD + ROW_WORDS * rows) * 8


class Counters:
    """The table of counters of a group in shared memory: one row for each shard, the last for the
    application. Each process writes its own row with write() and may read all; nobody waits for
    another.

    memory: the mapped table, as format() laid it out. RemoteProtocolError when it is none.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        if (
            self._words[0] != MAGIC
            or len(self._words) < FIRST_ROW_WORD + ROW_WORDS * self._words[1]
        ):
            raise RemoteProtocolError(
                f"no counters here: magic {self._words[0]:#x}, {self._words[1]} rows"
            )
        self.rows = int(self._words[1])

    @classmethod
    def format(cls, memory: memoryview, rows: int) -> Counters:
        """Lay the table out in zeroed memory."""
        words = memory.cast("Q")
        words[1] = rows
        words[0] = MAGIC
        return cls(memory)

    def write(
        self,
        row: int,
        values: CounterRow,
        call_ns: Sequence[int] = (),
        run_ns: Sequence[int] = (),
        classes: Sequence[ClassStatistics] = (),
    ) -> None:
        """Store a process's figures; of `classes` the first CLASSES_MAX. By that process alone."""
        start = FIRST_ROW_WORD + ROW_WORDS * row
        words = self._words
        for first, figures in (
            (start, values),
            (start + CALL_NS_WORD, call_ns),
            (start + RUN_NS_WORD, run_ns),
        ):
            for word, value in enumerate(figures, first):
                words[word] = value
        for at in range(CLASSES_MAX):
            first = start + CLASSES_WORD + CLASS_WORDS * at
            if at < len(classes):
                name = classes[at].name.encode(errors="replace")[: NAME.size]
                figures = (*NAME.unpack(name.ljust(NAME.size, b"\0")), *classes[at][1:])
                for word, value in enumerate(figures, first):
                    words[word] = value
            else:  # an earlier incarnation may have had more
                words[first + CLASS_NAME_WORDS] = 0

    def read(self, row: int) -> CounterRow:
        """A process's figures as they stand."""
        start = FIRST_ROW_WORD + ROW_WORDS * row
        return CounterRow(*self._words[start : start + len(CounterRow._fields)])

    def call_ns(self, row: int) -> tuple[int, ...]:
        """Sampled calls that this process made, by log2 of their round trip."""
        return self._buckets(row, CALL_NS_WORD)

    def run_ns(self, row: int) -> tuple[int, ...]:
        """Sampled plain functions that this process ran, by log2 of the time until they were
        answered.
        """
        return self._buckets(row, RUN_NS_WORD)

    def classes(self, row: int) -> tuple[ClassStatistics, ...]:
        """What each class of work did there, LATENCY first. A long name is cut."""
        first = FIRST_ROW_WORD + ROW_WORDS * row + CLASSES_WORD
        found = []
        for at in range(first, first + CLASSES_MAX * CLASS_WORDS, CLASS_WORDS):
            # the name last, as write() has it first: where there are shares, there is a name
            figures = self._words[at + CLASS_NAME_WORDS : at + CLASS_WORDS].tolist()
            if figures[0]:  # its shares
                name = NAME.pack(*self._words[at : at + CLASS_NAME_WORDS])
                text = name.rstrip(b"\0").decode(errors="ignore")
                found.append(ClassStatistics(text, *figures))
        return tuple(found)

    def _buckets(self, row: int, first: int) -> tuple[int, ...]:
        start = FIRST_ROW_WORD + ROW_WORDS * row + first
        return tuple(self._words[start : start + LATENCY_BUCKETS])
