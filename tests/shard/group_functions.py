"""Functions that tests send to shards: spawned children import them from here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard import ShardGroup, this_shard


class OddError(Exception):
    """Raised in a shard; loads where it is caught because it is found by name."""

    def __init__(self, one: int, two: str) -> None:
        super().__init__(one, two)
        self.one = one


class WontLoadError(Exception):
    """Pickles, and does not load: its constructor wants more than pickle gives it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def index() -> int:
    return this_shard().index


def index_and_core() -> tuple[int, set[int]]:
    return this_shard().index, os.sched_getaffinity(0)


def double(value: Any) -> Any:
    return value * 2


async def double_async(value: int) -> int:
    return value * 2


async def ask(other: int, value: int) -> tuple[int, int]:
    """(who asks, what the other shard makes of the value)."""
    return this_shard().index, await this_shard().submit_to(other, double, value)


async def around(hops: int) -> list[int]:
    """The way of a call that goes from shard to shard."""
    here = this_shard()
    if not hops:
        return [here.index]
    return [here.index, *await here.submit_to((here.index + 1) % here.size, around, hops - 1)]


async def ask_and_catch(other: int) -> str:
    try:
        await this_shard().submit_to(other, raise_odd, 1)
    except OddError as error:
        return f"caught {error.one}"
    return "nothing raised"


async def wait_for_call(other: int, path: str) -> str:
    """What becomes of a call to a shard that is killed meanwhile."""
    try:
        await this_shard().submit_to(other, read_fifo, path)
    except Exception as error:
        return type(error).__name__
    return "nothing raised"


def raise_odd(one: int) -> None:
    raise OddError(one, "two")


def raise_wont_load() -> None:
    raise WontLoadError(1, 2)


def give_unpicklable() -> Any:
    return iter([]), (each for each in [1])


def read_fifo(path: str) -> str:
    """Blocks the shard until somebody has written the named pipe."""
    return Path(path).read_text()


def mean(array: NDArray[Any]) -> float:
    return float(array.mean())


def is_writable(array: NDArray[Any]) -> bool:
    return bool(array.flags.writeable)


def ramp(count: int) -> NDArray[np.float64]:
    return np.arange(count, dtype=np.float64)


def ramp_in_slab(count: int) -> NDArray[np.float64]:
    array = this_shard().slab.empty((count,), np.float64)
    array[:] = np.arange(count)
    return array


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_the_end(path: str) -> None:
    """The shard writes the file when it stops."""

    def note() -> None:
        Path(path).write_text("stopped")

    this_shard().at_stop(note)


def main() -> None:
    """A parent to be killed: makes a group, tells the pids of its shards, keeps one of them busy, and waits."""
    with ShardGroup(2) as group:
        print(*group.map(os.getpid), flush=True)
        group.submit_to(1, signal.pause)
        signal.pause()


if __name__ == "__main__":
    main()
