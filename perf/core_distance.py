"""How far apart two cores are: one cache line there and back between two processes pinned to them.

Every message through a socket moves some dozens of cache lines from core to core, so this decides
its time more than the program does. On a virtual machine it changes by itself, within seconds, when
the host moves its virtual processors. Measured by loops in C, on 2 cores of a VM: a line takes 0.2,
0.5 or 1.6 us there and back, and 64 bytes over a bare spinning socket 2.8, 10 or 30 us with it. Two
figures can be compared only where this one is alike. Python's own loop is in it: some 0.2 us more.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from .child import Announce
from .harness import Place

ASKED_WORD, ANSWERED_WORD = 0, 32  # 256 bytes apart: processors fetch lines in pairs
FILE_BYTES = 4096
ROUNDS, BATCH = 4_000, 200  # the fastest batch counts: the others were interrupted
LOOKS_MAX = 1 << 28  # some 15 s: then the other side is gone


def round_trip_ns(place: Place) -> float:
    """Between the measuring core, where this runs, and the server's, where nothing else must be
    running; 0.0 where they are one.

    Raises TimeoutError, ChildFailed."""
    if place.cores and place.cores == place.server_cores:
        return 0.0  # one core: each would wait for the other's time slice
    path = Path(place.folder, "core-distance")
    path.write_bytes(bytes(FILE_BYTES))
    with (
        place.serve(_answer, str(path)),
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), FILE_BYTES) as memory,
        memoryview(memory).cast("Q") as words,
    ):
        best_ns = float("inf")
        for first in range(1, ROUNDS + 1, BATCH):
            start_ns = time.perf_counter_ns()
            for number in range(first, first + BATCH):
                words[ASKED_WORD] = number
                _wait_for(words, ANSWERED_WORD, number)
            best_ns = min(best_ns, (time.perf_counter_ns() - start_ns) / BATCH)
    return best_ns


def _answer(announce: Announce, path: str) -> None:
    with (
        Path(path).open("r+b") as file,
        mmap.mmap(file.fileno(), FILE_BYTES) as memory,
        memoryview(memory).cast("Q") as words,
    ):
        announce(None)
        for number in range(1, ROUNDS + 1):
            _wait_for(words, ASKED_WORD, number)
            words[ANSWERED_WORD] = number


def _wait_for(words: memoryview, at: int, number: int) -> None:
    for _ in range(LOOKS_MAX):
        if words[at] == number:
            return
    raise TimeoutError(
        f"the other core said {words[at]}, and not {number}, within {LOOKS_MAX} looks"
    )
