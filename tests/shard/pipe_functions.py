"""What the tests of pipes, hooks and keyword arguments run in shards: spawned children import it
from here."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections import deque
from typing import Any

from shard import BackpressureError, ClosedError, Future, PeerLostError, Pipe, this_shard, yield_now

noted: dict[str, Any] = {}  # in this shard


def add(first: int, *, second: int = 0, third: int = 0) -> tuple[int, int, int]:
    return first, second, third


async def add_later(first: int, *, second: int) -> int:
    await yield_now()
    return first + second


def add_elsewhere(index: int, first: int, second: int) -> Future:
    return this_shard().submit_to(index, add, first, second=second)


async def send_all(pipe: Pipe, first: int, count: int, close: bool) -> int:
    noted["sent"] = 0
    for item in range(first, first + count):
        await pipe.send(item)
        noted["sent"] += 1
    if close:
        await pipe.close()
    return count


def sent() -> int:
    return int(noted.get("sent", 0))


async def read(pipe: Pipe, count: int) -> list[Any]:
    return [await pipe.receive() for _ in range(count)]


async def read_to_the_end(pipe: Pipe) -> list[Any]:
    return [item async for item in pipe]


async def read_and_hear(pipe: Pipe) -> list[Any]:
    """All items to the end, and in their places what receive() raises for shards that are lost."""
    found: list[Any] = []
    while True:
        try:
            found.append(await pipe.receive())
        except PeerLostError as error:
            found.append(str(error))
        except ClosedError:
            return found


async def send_until_told(pipe: Pipe) -> str:
    """What the sends end with."""
    try:
        for item in range(1 << 30):
            await pipe.send(item)
    except (ClosedError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "never"


async def settle(pipe: Pipe) -> None:
    """Come after all that this shard has sent there, and its answers."""
    await this_shard().submit_to(pipe.to, os.getpid)


async def close_pipe(pipe: Pipe) -> None:
    await pipe.close()


def die() -> None:
    os._exit(7)


class Hooked:
    """Says in its shard what was called."""

    def __init__(self, name: str, *, size: int) -> None:
        self.calls = ["made"]
        self.name, self.size = name, size
        noted[name] = self.calls

    async def start(self) -> None:
        await yield_now()
        self.calls.append("started")
        if self.size < 0:
            raise ValueError("it does not start")

    def get(self, *, more: int) -> list[Any]:
        return [*self.calls, self.size + more]

    async def stop(self) -> None:
        await yield_now()
        self.calls.append("stopped")

    def close(self) -> None:
        self.calls.append("closed")


def calls_of(name: str) -> list[str]:
    return list(noted.get(name, []))


held: deque[Future] = deque()


def hold() -> Future:
    """Answered by let_go()."""
    held.append(Future())
    return held[-1]


def let_go() -> int:
    count = len(held)
    while held:
        held.popleft().set_result(None)
    return count


async def flood(index: int, pid: int, size: int) -> tuple[int, int]:
    """Calls to a shard that stands still until one is refused, and then as many again that wait for
    room: how many were made, and how many bytes were counted there."""
    payload, futures = b"x" * size, []
    os.kill(pid, signal.SIGSTOP)
    try:
        with contextlib.suppress(BackpressureError):
            while True:
                futures.append(this_shard().submit_to(index, len, payload))
        waiting = this_shard().reactor.spawn(this_shard().submit_when_room(index, len, payload))
        await yield_now()
        assert not waiting.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    futures.append(await waiting)
    for _ in range(len(futures)):
        futures.append(await this_shard().submit_when_room(index, len, payload))
        await yield_now()  # answers are read as well
    return len(futures), sum([await each for each in futures])


async def use_pipes(count: int) -> None:
    """From shard 0 and 2 to 1, one after the other: read to their end, or closed by who reads."""
    here = this_shard()
    for number in range(count):
        pipe = Pipe(to=1, capacity=2)
        reading = here.submit_to(1, read_to_the_end if number % 2 else read_and_close, pipe)
        await here.submit_to(2, send_one, pipe)
        with contextlib.suppress(ClosedError):
            await pipe.send(number)
            await pipe.send(number)
            await pipe.close()
        await reading


async def read_and_close(pipe: Pipe) -> None:
    await pipe.receive()
    await pipe.close()


async def send_one(pipe: Pipe) -> None:
    await pipe.send(0)
    await settle(pipe)


async def send_too_late(count: int) -> int:
    """One item to each pipe that has ended: nobody asks what became of it. How many outlets are
    kept."""
    for _ in range(count):
        pipe = Pipe(to=1)
        await this_shard().submit_to(1, close_pipe, pipe)
        await send_one(pipe)
        await settle(pipe)
    return len(this_shard().outlets)


def blocks() -> int:
    """Pieces of memory that Python objects have."""
    gc.collect()
    return sys.getallocatedblocks()
