"""What every peer can be asked to do: echo a payload, take an array. Its client blocks, or lives in
an asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..child import NotOffered
from ..harness import Place

ITEM = np.dtype(np.float32)  # of every array that is sent
WAIT_S_MAX = 20.0  # for one answer, where the library can bound it; the harness bounds the rest
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Job:
    """What a connection is for. Raw peers rely on the length being known to both sides; those with
    methods serve both kinds.
    """

    kind: Literal["echo", "array"]
    nbytes: int  # of one payload, or of one array


class Server(Protocol):
    """The process that serves: a Child, or one that a peer's library started."""

    @property
    def pid(self) -> int:
        """Its process id."""


class Peer(ABC):
    """A server process and a connection to it. Owned by whoever made it: close() it, or use it as a
    context manager.
    """

    def __init__(self, place: Place, job: Job) -> None:
        self.place = place
        self.job = job
        self.exits = contextlib.ExitStack()  # what close() ends, last opened first
        self.server: Server | None = None

    def start(self, serve: Callable[..., None], *args: object) -> Any:
        """Run serve(announce, *args) in the server process; gives what it announced first: its
        address.
        """
        self.server, address = self.exits.enter_context(self.place.serve(serve, *args))
        return address

    def new_array(self, items: int) -> NDArray[np.float32]:
        """Memory as this peer likes its arrays best; not initialised."""
        return np.empty(items, ITEM)

    @abstractmethod
    def round_trip(self, payload: bytes) -> bytes:
        """Send the payload, wait for its echo."""

    @abstractmethod
    def send_array(self, array: NDArray[np.float32]) -> float:
        """Hand the array to the peer; its first element, as the peer saw it."""

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        """`count` round trips, up to `window` of them under way at a time; bytes echoed."""
        raise NotOffered("no way to have several requests under way")

    def close(self) -> None:
        """Close the connection, end the server."""
        self.exits.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AwaitedPeer(Peer):
    """A peer whose client lives in an asyncio loop, which it owns: begin() a round trip there and
    await it.
    """

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        self._loop = asyncio.new_event_loop()
        self.exits.callback(self._loop.close)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine in the loop to its end."""
        return self._loop.run_until_complete(work)

    @abstractmethod
    def begin(self, payload: bytes) -> Awaitable[bytes]:
        """Send the payload; what is returned is awaited for its echo. In the loop."""

    def round_trip(self, payload: bytes) -> bytes:
        async def go() -> bytes:
            return await self.begin(payload)

        return self.run(go())

    def send_array(self, array: NDArray[np.float32]) -> float:
        raise NotOffered("arrays are measured with the blocking client of the same library")

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        async def go() -> int:
            under_way: deque[Awaitable[bytes]] = deque()
            echoed = 0
            for sent in range(count + window):
                if sent < count:
                    under_way.append(self.begin(payload))
                if window <= sent:
                    echoed += len(await under_way.popleft())
            return echoed

        return self.run(go())


def first_item(data: Any) -> bytes:
    """The bytes of the first element of an array's bytes: what a server of arrays answers."""
    return bytes(memoryview(data).cast("B")[: ITEM.itemsize])


def as_item(answer: Any) -> float:
    """first_item() back into a number."""
    return float(np.frombuffer(answer, ITEM, 1)[0])


def as_bytes(array: NDArray[np.float32]) -> memoryview:
    """The array's memory as bytes, without a copy."""
    return array.data.cast("B")
