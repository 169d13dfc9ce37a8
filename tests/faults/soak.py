"""A soak: two groups of shards under every kind of load at once, one of them losing a shard to kill
-9 every few seconds.

    steady  2 shards, nobody dies: each call must end as its kind says, and the counts of a Sharded
            must add up
    mortal  2 shards that are restarted, one of them killed every few seconds: a call may also end
            with PeerLostError

Each group has a thread that keeps up to IN_FLIGHT_MAX calls under way, of kinds drawn from a seed,
and checks every byte of every result. Meanwhile memory, descriptors, threads, mappings, leases and
slab blocks are sampled (flatness.py): they must not grow. At the end every lease must be back,
every block free, every task ended; after close() no process, descriptor or thread may be left.

    python -m tests.faults.soak --seconds 60 --seed 1  prints a table; the exit code is 1 when
                                                       something did not hold
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import secrets
import signal
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard import (
    CancelledError,
    Future,
    PeerLostError,
    RestartPolicy,
    Sharded,
    ShardGroup,
    this_shard,
)
from tests.faults.flatness import Samples
from tests.leaks import holdings, wait_until_clean

SHARDS = 2
KILL_EVERY_S_MAX = 4.0
KILLS_MIN = 15  # about so many, however short the soak is
SAMPLES = 60  # twenty a third: one that caught an unlucky moment has company
IN_FLIGHT_MAX = 32
# received arrays that are kept for a while, so that leases return late and in another order
KEPT_MAX = 8
ARRAY_BYTES_MAX = 1 << 20
CALL_TIMEOUT_S = 60.0  # a call that takes longer hangs
SETTLE_TIMEOUT_S = 30.0  # for leases and restarts after the load has ended
LOOK_S = 0.02  # between two looks whether they are back
RESTART = RestartPolicy("on-failure", restarts_max=500, backoff_s=0.05, backoff_s_max=0.1)
PATTERN = np.frombuffer(random.Random(0).randbytes(2 * ARRAY_BYTES_MAX), np.uint8)


# -- what runs in the shards -----------------------------------------------------------------------


def pattern(start: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that both sides know."""
    return PATTERN[start : start + nbytes]


def double(value: int) -> int:
    return value * 2


async def double_async(value: int) -> int:
    return value * 2


async def double_there(other: int, value: int) -> Any:
    return await this_shard().submit_to(other, double, value)


async def wait_for_ever() -> None:
    await Future()


def fail(value: int) -> None:
    raise KeyError(value)


def checksum(array: NDArray[np.uint8]) -> int:
    return zlib.crc32(array)


def give_ordinary(start: int, nbytes: int) -> NDArray[np.uint8]:
    return pattern(start, nbytes).copy()


def give_from_slab(start: int, nbytes: int) -> NDArray[np.uint8]:
    array = this_shard().slab.empty(nbytes, np.uint8)
    array[:] = pattern(start, nbytes)
    return array


async def lend_there(other: int, start: int, nbytes: int) -> Any:
    """An array of this shard's slab, read by the other one; its checksum over there."""
    return await this_shard().submit_to(other, checksum, give_from_slab(start, nbytes))


async def borrow_there(other: int, start: int, nbytes: int) -> int:
    """An array of the other shard's slab, read by this one."""
    return checksum(await this_shard().submit_to(other, give_from_slab, start, nbytes))


def echo(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return array


def left_over() -> tuple[int, int]:
    """(slab blocks in use, tasks of others) once garbage is collected: a failed call's traceback
    holds its arrays till then.
    """
    gc.collect()
    return this_shard().slab.statistics().blocks_used, this_shard().tasks.inside


class Count:
    """The state that a Sharded has in each shard."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    def get(self) -> int:
        return self.total


# -- the load --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the calls of one load."""

    submitted: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)  # as their kind should end
    # with a PeerLostError, where a shard was killed
    lost: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # everything else

    def complaints(self) -> list[str]:
        """What did not hold, a line each."""
        ended = self.completed + self.lost
        missing = [
            f"{name}: {self.submitted[name] - ended[name]} calls unaccounted"
            for name in self.submitted - ended
        ]
        return [*self.wrong[:20], *missing]


@dataclass
class Call:
    """One under way."""

    future: Future
    is_right: Callable[[Any], bool]
    error: type[Exception] | None = None  # how it must end, when not well
    kind: str = ""  # for the counts


class Load(threading.Thread):
    """Keeps a group busy until told to stop; then waits for every call. Owns what it keeps of
    received arrays.
    """

    def __init__(self, name: str, group: ShardGroup, seed: int, may_lose: bool) -> None:
        super().__init__(name=f"soak-{name}", daemon=True)
        self.tally = Tally()
        self.added = 0  # to the Sharded
        self.counts = Sharded(Count, group=group)
        self._group = group
        self._chance = random.Random(seed)
        self._may_lose = may_lose
        self._in_flight: deque[Call] = deque()
        self._kept: deque[tuple[NDArray[np.uint8], int]] = deque()
        self._told_to_stop = threading.Event()
        self._kinds = [
            self._plain,
            self._plain,
            self._async,
            self._hop,
            self._cancelled,
            self._closure,
            self._error,
        ]
        self._kinds += [self._count, self._body, self._array_there, self._array_back, self._echo]
        self._kinds += [self._slab_array_back, self._slab_lent, self._slab_borrowed]

    def stop(self) -> None:
        """End the load, and wait for the calls under way."""
        self._told_to_stop.set()
        self.join(2 * CALL_TIMEOUT_S)

    def run(self) -> None:
        try:
            while not self._told_to_stop.is_set():
                self._submit(self._chance.choice(self._kinds))
                while len(self._in_flight) >= IN_FLIGHT_MAX:
                    self._settle(self._in_flight.popleft())
            while self._in_flight:
                self._settle(self._in_flight.popleft())
            while self._kept:
                self._let_go()
        except Exception as error:
            self.tally.wrong.append(f"the load ended by {error!r}")

    def _submit(self, kind: Callable[[int], Call]) -> None:
        name = kind.__name__.lstrip("_")
        self.tally.submitted[name] += 1
        try:
            call = kind(self._chance.randrange(SHARDS))
        except PeerLostError as error:  # told at once: that shard is down
            self._lost(name, error)
        else:
            call.kind = name
            self._in_flight.append(call)

    def _settle(self, call: Call) -> None:
        if call.error is CancelledError:
            call.future.cancel()
        try:
            value = call.future.result(CALL_TIMEOUT_S)
        except PeerLostError as error:
            self._lost(call.kind, error)
        except (Exception, CancelledError) as error:
            if call.error is not None and isinstance(error, call.error):
                self.tally.completed[call.kind] += 1
            else:
                self.tally.wrong.append(f"{call.kind}: {error!r}")
        else:
            if call.error is None and call.is_right(value):
                self.tally.completed[call.kind] += 1
            else:
                self.tally.wrong.append(f"{call.kind}: a wrong result")

    def _lost(self, kind: str, error: PeerLostError) -> None:
        if self._may_lose:
            self.tally.lost[kind] += 1
        else:
            self.tally.wrong.append(f"{kind}: {error!r}")

    def _place(self) -> tuple[int, int]:
        """Start and size of a piece of the pattern; sizes of all magnitudes."""
        return self._chance.randrange(ARRAY_BYTES_MAX), int(2 ** self._chance.uniform(0, 20))

    def _keep(self, array: NDArray[np.uint8], start: int, nbytes: int) -> bool:
        """Whether the array is right; it is kept for a while, and then looked at again."""
        self._kept.append((array, start))
        if len(self._kept) > KEPT_MAX:
            self._let_go()
        return bool(np.array_equal(array, pattern(start, nbytes)))

    def _let_go(self) -> None:
        at = self._chance.randrange(len(self._kept))
        array, start = self._kept[at]
        if not np.array_equal(array, pattern(start, len(array))):
            self.tally.wrong.append(f"an array of {len(array)} bytes changed while it was kept")
        del self._kept[at]

    # -- kinds of calls ----------------------------------------------------------------------------

    def _plain(self, index: int) -> Call:
        value = self._chance.randrange(1 << 40)
        return Call(self._group.submit_to(index, double, value), lambda got: got == 2 * value)

    def _async(self, index: int) -> Call:
        value = self._chance.randrange(1 << 40)
        return Call(self._group.submit_to(index, double_async, value), lambda got: got == 2 * value)

    def _hop(self, index: int) -> Call:
        value = self._chance.randrange(1 << 40)
        return Call(
            self._group.submit_to(index, double_there, 1 - index, value),
            lambda got: got == 2 * value,
        )

    def _cancelled(self, index: int) -> Call:
        """Half of them before they can have begun, half once they are the oldest under way."""
        future = self._group.submit_to(index, wait_for_ever)
        if self._chance.random() < 0.5:
            future.cancel()
        return Call(future, lambda got: False, CancelledError)

    def _closure(self, index: int) -> Call:
        one, two = self._chance.random(), self._chance.random()
        return Call(
            self._group.submit_to(index, lambda factor: one * factor, two),
            lambda got: got == one * two,
        )

    def _error(self, index: int) -> Call:
        return Call(self._group.submit_to(index, fail, 7), lambda got: False, KeyError)

    def _count(self, index: int) -> Call:
        amount = self._chance.randrange(100)
        future = self.counts.invoke_on(index, Count.add, amount)
        self.added += amount
        return Call(future, lambda got: got >= amount)

    def _array_there(self, index: int) -> Call:
        array = pattern(*self._place()).copy()
        expected = zlib.crc32(array)
        future = self._group.submit_to(index, checksum, array)
        array[:] = 0  # ours again as soon as it is sent
        return Call(future, lambda got: got == expected)

    def _array_back(self, index: int) -> Call:
        start, nbytes = self._place()
        future = self._group.submit_to(index, give_ordinary, start, nbytes)
        return Call(future, lambda got: self._keep(got, start, nbytes))

    def _slab_array_back(self, index: int) -> Call:
        start, nbytes = self._place()
        future = self._group.submit_to(index, give_from_slab, start, nbytes)
        return Call(future, lambda got: self._keep(got, start, nbytes))

    def _echo(self, index: int) -> Call:
        start, nbytes = self._place()
        future = self._group.submit_to(index, echo, pattern(start, nbytes))
        return Call(future, lambda got: self._keep(got, start, nbytes))

    def _slab_lent(self, index: int) -> Call:
        start, nbytes = self._place()
        expected = zlib.crc32(pattern(start, nbytes))
        return Call(
            self._group.submit_to(index, lend_there, 1 - index, start, nbytes),
            lambda got: got == expected,
        )

    def _slab_borrowed(self, index: int) -> Call:
        start, nbytes = self._place()
        expected = zlib.crc32(pattern(start, nbytes))
        return Call(
            self._group.submit_to(index, borrow_there, 1 - index, start, nbytes),
            lambda got: got == expected,
        )

    def _body(self, index: int) -> Call:
        """Bytes in the message itself; the larger ones fill many records."""
        body = pattern(*self._place()).tobytes()
        return Call(self._group.submit_to(index, echo, body), lambda got: got == body)


# -- the whole -------------------------------------------------------------------------------------


def kill_one(group: ShardGroup, chance: random.Random) -> int:
    """kill -9 a shard that is up; how many that were (0: it is still coming back)."""
    one = chance.choice(group.statistics().shards)
    if not one.alive:
        return 0
    os.kill(one.pid, signal.SIGKILL)
    return 1


def not_given_back(groups: dict[str, ShardGroup]) -> list[str]:
    """What is still held when nobody uses anything, after SETTLE_TIMEOUT_S at most."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        gc.collect()
        held = []
        for name, group in groups.items():
            now = group.statistics()
            for whose, row in [
                ("application", now.application),
                *((f"shard {each.index}", each.counters) for each in now.shards),
            ]:
                if row.leases_lent or row.leases_held:
                    held.append(
                        f"{name}: {whose} has {row.leases_lent} leases lent, {row.leases_held} held"
                    )
            for index, (blocks, tasks) in enumerate(group.map(left_over, timeout_s=CALL_TIMEOUT_S)):
                if blocks or tasks:
                    held.append(
                        f"{name}: shard {index} has {blocks} slab blocks in use and {tasks} tasks"
                    )
            if now.calls_in_flight:
                held.append(f"{name}: {now.calls_in_flight} calls in flight")
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(LOOK_S)


def run(duration_s: float, seed: int) -> list[str]:
    """Soak for so long and print the table; what did not hold, a line each."""
    # the first one opens what a process keeps: the tracker of multiprocess
    with ShardGroup(1, pin=False):
        gc.collect()
    before = holdings()
    complaints = under_load(duration_s, seed)
    return [
        *complaints,
        *(f"left after close: {each}" for each in wait_until_clean(before, SETTLE_TIMEOUT_S)),
    ]


def under_load(duration_s: float, seed: int) -> list[str]:
    """Both groups, from their start to their end."""
    chance = random.Random(seed)
    kills = 0
    with (
        ShardGroup(SHARDS, pin=False) as steady,
        ShardGroup(SHARDS, pin=False, restart=RESTART) as mortal,
    ):
        groups = {"steady": steady, "mortal": mortal}
        loads = {
            name: Load(name, group, seed, may_lose=name == "mortal")
            for name, group in groups.items()
        }
        samples = Samples(groups)
        began = time.monotonic()
        for load in loads.values():
            load.start()
        pause = threading.Event()
        kill_every_s = min(KILL_EVERY_S_MAX, duration_s / KILLS_MIN)
        kill_at = began + kill_every_s
        # the last one is up again, or known to be down, when the load ends
        kill_until = began + duration_s - KILL_EVERY_S_MAX
        for number in range(1, SAMPLES + 1):
            pause.wait(max(0.0, began + number * duration_s / SAMPLES - time.monotonic()))
            samples.take()
            if kill_at <= time.monotonic() < kill_until:
                kills += kill_one(mortal, chance)
                kill_at = time.monotonic() + kill_every_s
        for load in loads.values():
            load.stop()
        took_s = time.monotonic() - began
        mortal.wait_up(SETTLE_TIMEOUT_S)
        complaints = not_given_back(groups)
        total = sum(loads["steady"].counts.invoke_on_all(Count.get).result(CALL_TIMEOUT_S))
        if total != loads["steady"].added:
            complaints.append(f"the counters add up to {total}, {loads['steady'].added} was added")
        if not kills:
            complaints.append("no shard was killed: too short a soak says nothing")
        births = sum(each.incarnation for each in mortal.statistics().shards)
        if births != SHARDS + kills:
            complaints.append(f"{kills} kills, {births - SHARDS} restarts")
    samples.print()
    complaints += samples.complaints()
    for name, load in loads.items():
        tally = load.tally
        complaints += [f"{name}: {each}" for each in tally.complaints()]
        print(
            f"{name}: {tally.submitted.total():,} calls in {took_s:.0f} s, "
            f"{tally.completed.total():,} completed, "
            f"{tally.lost.total():,} lost with a killed shard"
        )
    print(f"{kills} kills; seed {seed}")
    return complaints


def main() -> int:
    """The command line; 1 when something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    chosen = parser.parse_args()
    complaints = run(chosen.seconds, chosen.seed)
    for complaint in complaints:
        print(f"DID NOT HOLD: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
