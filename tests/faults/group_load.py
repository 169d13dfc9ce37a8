"""Calls between all processes of a group whose every byte is known beforehand, and what became of
each.

Whoever calls, the application or a shard, does so through ask(); what it may get is the value
expected, byte for byte, or a named error.
A watch() is a call that does not end by itself: its end is how one process of the group is told of
another's death.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard import Future, ShardError, Slab, failpoints, this_shard
from shard.group.mesh import ShardChannel
from shard.memory import slab
from shard.transport.shm_connection import INLINE_BYTES_MAX

# some travel in the record, some are lent
SIZES_BYTES = (0, 100, 3000, INLINE_BYTES_MAX + 1, 70_000)
PATTERN = np.frombuffer(random.Random(0).randbytes(1 << 17), np.uint8)
# of every slab: to reserve the usual 8 MB takes longer than a round
SEGMENT_BYTES_FIRST = 256 << 10
STARTS = len(PATTERN) - max(SIZES_BYTES)

# who was called -> "right", "wrong", or an error's name -> how often
Outcomes = dict[int, Counter[str]]
Asked = tuple[Future, Any]  # the result to come, and what it must be

_token = 0
_held: list[Future] = []
_numbers = itertools.count()


def pattern(start: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that both sides know."""
    return PATTERN[start : start + nbytes]


# -- what is called --------------------------------------------------------------------------------


def echo(value: Any) -> Any:
    return value


def make(start: int, nbytes: int) -> NDArray[np.uint8]:
    return pattern(start, nbytes).copy()


def make_in_slab(start: int, nbytes: int) -> NDArray[np.uint8]:
    return in_slab(this_shard().slab, start, nbytes)


async def make_later(start: int, nbytes: int) -> NDArray[np.uint8]:
    await this_shard().reactor.sleep(0.0)
    return make(start, nbytes)


@dataclass(frozen=True)
class Once:
    """A function like no other: each makes the lane send one more function."""

    number: tuple[int, int]
    is_sent_once = True

    def __call__(self, value: Any) -> Any:
        return value


def in_slab(own_slab: Slab, start: int, nbytes: int) -> NDArray[np.uint8]:
    """The pattern in a block of that slab."""
    array = own_slab.empty(nbytes, np.uint8)
    array[:] = pattern(start, nbytes)
    return array


# -- who calls -------------------------------------------------------------------------------------


def ask(submit: Callable[..., Future], to: int, chance: random.Random, own_slab: Slab) -> Asked:
    """One call to that shard, of a kind drawn by chance. Raises what `submit` raises."""
    nbytes = chance.choice(SIZES_BYTES)
    start = chance.randrange(STARTS)
    kind = chance.randrange(6)
    if kind == 0:
        text = "a few words" * (1 + start % 50)
        return submit(to, echo, text), text
    expected = pattern(start, nbytes)
    if kind == 1:
        return submit(to, make, start, nbytes), expected
    if kind == 2:
        return submit(to, make_in_slab, start, nbytes), expected
    if kind == 3:
        return submit(to, make_later, start, nbytes), expected
    if kind == 4:
        return submit(to, echo, in_slab(own_slab, start, nbytes)), expected
    return submit(to, Once((os.getpid(), next(_numbers))), expected), expected


def is_right(value: Any, expected: Any) -> bool:
    """Whether every byte is as it was asked for."""
    if isinstance(expected, np.ndarray):
        return isinstance(value, np.ndarray) and np.array_equal(value, expected)
    return bool(value == expected)


async def load(seed: int, count: int) -> Outcomes:
    """Calls of this shard to every other, all in flight together."""
    here = this_shard()
    chance = random.Random(f"{seed} {here.index}")
    outcomes: Outcomes = {other: Counter() for other in range(here.size) if other != here.index}
    asked: list[tuple[int, Asked]] = []
    for _ in range(count):
        for other, counter in outcomes.items():
            try:
                asked.append((other, ask(here.submit_to, other, chance, here.slab)))
            except ShardError as error:
                counter[type(error).__name__] += 1
    while asked:
        other, (future, expected) = asked.pop()
        try:
            value = await future
        except Exception as error:
            outcomes[other][type(error).__name__] += 1
        else:
            outcomes[other]["right" if is_right(value, expected) else "wrong"] += 1
    return outcomes


async def hold() -> None:
    """In flight until release()."""
    _held.append(Future())
    await _held[-1]


def release() -> None:
    while _held:
        _held.pop().set_result(None)


async def watch(other: int) -> tuple[str, float]:
    """How a call to that shard ends which does not end by itself, and when, by the monotonic
    clock.
    """
    try:
        await this_shard().submit_to(other, hold)
    except Exception as error:
        return type(error).__name__, time.monotonic()
    return "released", time.monotonic()


# -- what a shard says of itself -------------------------------------------------------------------


def set_up(token: int) -> None:
    """At the start of every incarnation."""
    global _token
    _token = token
    slab.SEGMENT_BYTES_FIRST = SEGMENT_BYTES_FIRST


@dataclass(frozen=True)
class Self:
    """What one shard holds."""

    token: int
    blocks_used: int
    fds: int


def about_me() -> Self:
    gc.collect()  # what ended by an error may lie in a cycle with its traceback
    here = this_shard()
    return Self(
        _token, here.slab.statistics().blocks_used, count_fds(here.slab, here._lanes.values())
    )


def count_fds(own_slab: Slab | None = None, lanes: Iterable[ShardChannel] = ()) -> int:
    """Descriptors of this process but for segments of slabs, its own and those of its peers: how
    many there are, load decides.
    """
    # the descriptor, and that of the mapping
    segments = 2 * own_slab.statistics().segments if own_slab is not None else 0
    segments += sum(len(lane.connection.mapped) for lane in lanes)
    return len(os.listdir("/proc/self/fd")) - 1 - segments  # less that of the listing


def all_hits() -> dict[str, int]:
    """How often this process passed each failpoint."""
    return {name: failpoints.hits(name) for name in failpoints.names()}


# -- how it dies -----------------------------------------------------------------------------------


class DeathClock:
    """Two words that a victim shares with whoever wants to know when and where it died. Owned by
    the latter, which closes it.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("death")
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def died_at_s(self) -> float:
        """When it was last alive, by the monotonic clock."""
        return int.from_bytes(os.pread(self._fd, 8, 0), "little") / 1e9

    def has_struck(self) -> bool:
        """Whether it has come to where it is killed. Its exit code may be that of its next
        incarnation by now.
        """
        return any(os.pread(self._fd, 8, 8))

    def close(self) -> None:
        os.close(self._fd)


def arm_to_die(name: str, nth: int, path: str) -> None:
    """Be killed at a failpoint; each that this process passes before says when that was, the last
    one is where it dies.
    """
    with Path(path).open("r+b", buffering=0) as file:
        words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
    words[0] = time.monotonic_ns()
    hits = 0

    def sign(passed: str) -> None:
        nonlocal hits
        words[0] = time.monotonic_ns()
        hits += passed == name
        words[1] = hits == nth
        failpoints.passed(passed)

    for module in list(sys.modules.values()):
        if failpoints.CALL in vars(module):
            vars(module)[failpoints.CALL] = sign
    failpoints.arm(name, "kill9", nth)
