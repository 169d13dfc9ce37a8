"""What the machine itself allows two processes: flags, slots and sockets, with nothing of ours
around them.

    flag ping-pong  one word each, one process counts up and the other follows: what a cache line's
                    way costs
    np.copyto       one copy by one core, in its cache or through memory as large as a ring's
    two slots       records handed over through two slots and two flags: a ring without a ring
    blocked recv    a process that sleeps on a Unix socket until a byte comes: what waking costs

The memory of flags and slots is a memfd, opened by the other process through /proc: it has no name
that could be left.

    offset  size  field       written by
         0     8  ping, or    the measuring process: it counts up
                  slot 0 full the writer puts 1, the reader 0
       128     8  pong, or    the following process
                  slot 1 full the writer puts 1, the reader 0
       256     8  received    the reader: bytes in all, before it frees their slot
      4096   ...  slot 0, slot 1
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from .child import Announce
from .harness import Place
from .timing import Effort, Sample, summary, time_each, time_many

PING_WORD, PONG_WORD = SLOT_WORDS = 0, 16  # two cache lines apart: processors fetch them in pairs
RECEIVED_WORD = 32
SLOTS_OFFSET = 4096
PING_PONGS_PER_CALL = 100  # too short to be timed one by one
SLOTS_FIRST = 200  # hand-overs by which the rate is guessed

# Between one wake-up and the next: long enough that the core has gone to sleep, too, as it has in a
# service that idles.
GAP_S = 0.001
# For a process that has nothing to do to go to sleep; ours spin for 0.1 ms before they do.
ASLEEP_WAIT_S_MAX = 5.0
STAMP_BYTES = 8  # a time in nanoseconds, little-endian


def _share(size_bytes: int) -> tuple[mmap.mmap, str]:
    """New memory, and the path by which a child opens it while we live."""
    fd = os.memfd_create("prpc-bench")
    os.ftruncate(fd, size_bytes)
    return mmap.mmap(fd, size_bytes), f"/proc/{os.getpid()}/fd/{fd}"


def _open(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def measure_ping_pong(place: Place, effort: Effort) -> Sample:
    """One process counts up in one word, the other follows in another."""
    memory, path = _share(SLOTS_OFFSET)
    with place.serve(_follow, path):
        words = memoryview(memory).cast("Q")
        turns = 0

        def operate() -> None:
            nonlocal turns
            for turn in range(turns + 1, turns + 1 + PING_PONGS_PER_CALL):
                words[PING_WORD] = turn
                while words[PONG_WORD] != turn:
                    pass
            turns += PING_PONGS_PER_CALL

        return time_each(operate, effort, PING_PONGS_PER_CALL).with_work(
            turns=turns, seen=words[PONG_WORD]
        )


def _follow(announce: Announce, path: str) -> None:
    """Copy the one word to the other, until killed."""
    words = memoryview(_open(path)).cast("Q")
    announce("ready")
    while True:
        words[PONG_WORD] = words[PING_WORD]


def measure_copy(place: Place, effort: Effort, size_bytes: int, through_bytes: int = 0) -> Sample:
    """One copy of `size_bytes` by one core, to one place, or to the next of the places in
    `through_bytes`.
    """
    source = np.ones(size_bytes, np.uint8)
    targets = list(np.zeros((max(1, through_bytes // size_bytes), size_bytes), np.uint8))
    if len(targets) == 1:
        return time_each(partial(np.copyto, targets[0], source), effort).with_work(
            bytes_received=int(targets[0].sum())
        )
    turn = 0

    def operate() -> None:
        nonlocal turn
        np.copyto(targets[turn], source)
        turn += 1
        if turn == len(targets):
            turn = 0

    return time_each(operate, effort).with_work(bytes_received=int(targets[0].sum()))


def measure_slots(place: Place, effort: Effort, payload: bytes, copied_out: bool) -> Sample:
    """Records through two slots; the reader copies each out to one warm place, or looks at its
    first and last byte.
    """
    size_bytes = len(payload)
    memory, path = _share(SLOTS_OFFSET + 2 * size_bytes)
    with place.serve(_take_slots, path, size_bytes, copied_out):
        view = memoryview(memory)
        words = view.cast("Q")
        slots = [view[SLOTS_OFFSET + index * size_bytes :][:size_bytes] for index in range(2)]
        sent = 0

        def hand_over(count: int) -> int:
            nonlocal sent
            before = words[RECEIVED_WORD]
            for _ in range(count):
                index = sent & 1
                flag = SLOT_WORDS[index]
                while words[flag]:
                    pass
                slots[index][:] = payload
                words[flag] = 1
                sent += 1
            while words[SLOT_WORDS[0]] or words[SLOT_WORDS[1]]:
                pass
            received: int = words[RECEIVED_WORD] - before
            return received

        sample, received = time_many(hand_over, effort, SLOTS_FIRST, effort.ops_max)
        return sample.with_work(records=sample.ops, bytes_received=received)


def _take_slots(announce: Announce, path: str, size_bytes: int, copied_out: bool) -> None:
    """Take what is in the slots in turn, until killed."""
    view = memoryview(_open(path))
    words = view.cast("Q")
    slots = [view[SLOTS_OFFSET + index * size_bytes :][:size_bytes] for index in range(2)]
    target = memoryview(bytearray(size_bytes))
    announce("ready")
    while True:
        for slot, flag in zip(slots, SLOT_WORDS, strict=True):
            while not words[flag]:
                pass
            if copied_out:
                target[:] = slot
                words[RECEIVED_WORD] += size_bytes
            elif slot[0] == 0 and slot[-1] == (size_bytes - 1) & 0xFF:
                # as pattern() has them: two lines are fetched
                words[RECEIVED_WORD] += size_bytes
            words[flag] = 0


def pattern(size_bytes: int) -> bytes:
    """A payload that shows what is missing: byte n is n, modulo 256."""
    return bytes(index & 0xFF for index in range(size_bytes))


def measure_blocked_recv(place: Place, effort: Effort) -> Sample:
    """A byte to a process that is blocked in recv(); it answers with the time at which it ran
    again.
    """
    path = str(Path(place.folder, "wake"))
    with (
        place.serve(_answer_when_woken, path) as (server, _),
        socket.socket(socket.AF_UNIX) as line,
    ):
        line.connect(path)

        def wake() -> int:
            line.send(b"\0")
            return int.from_bytes(line.recv(STAMP_BYTES), "little")

        return time_wake_ups(wake, lambda: wait_until_asleep(server.pid), effort)


def _answer_when_woken(announce: Announce, path: str) -> None:
    """One connection, until it closes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        announce("ready")
        connection = listener.accept()[0]
    with connection:
        while connection.recv(1):
            connection.send(time.perf_counter_ns().to_bytes(STAMP_BYTES, "little"))


def time_wake_ups(
    wake: Callable[[], int], wait_until_parked: Callable[[], None], effort: Effort
) -> Sample:
    """Wake another process again and again, each time after GAP_S and once it sleeps.

    `wake` gives the other's time.perf_counter_ns() (one clock for all processes) when it ran again:
    the percentiles are of the way there alone. The figure round_trip_ns is the median until `wake`
    returned.
    """
    wakes = max(effort.ops_min, min(effort.ops_max, int(effort.timed_s / GAP_S)))
    there_ns, back_ns = np.zeros(wakes, np.int64), np.zeros(wakes, np.int64)
    for index in range(-effort.ops_min, wakes):  # the first few to warm up
        time.sleep(GAP_S)
        wait_until_parked()
        before = time.perf_counter_ns()
        ran = wake()
        after = time.perf_counter_ns()
        if index >= 0:
            there_ns[index], back_ns[index] = ran - before, after - before
    sample = summary(there_ns)
    sample.figures["round_trip_ns"] = float(np.median(back_ns))
    return sample.with_work(
        wakes=wakes, in_order=int(((there_ns > 0) & (back_ns >= there_ns)).sum())
    )


def wait_until_asleep(pid: int) -> None:
    """Until the main thread of process `pid` sleeps, as /proc/pid/stat says.
    Raises TimeoutError.
    """
    stat = Path(f"/proc/{pid}/stat")
    give_up = time.monotonic() + ASLEEP_WAIT_S_MAX
    while stat.read_text().rpartition(")")[2].split(maxsplit=1)[0] != "S":
        if time.monotonic() > give_up:
            raise TimeoutError(f"process {pid} did not go to sleep within {ASLEEP_WAIT_S_MAX} s")
