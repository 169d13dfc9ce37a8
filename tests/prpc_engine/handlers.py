"""What the servers of these tests serve. Imported by their processes and, for in-process servers,
by the tests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine
from prpc_engine import RpcClient, RpcService
from tests.prpc_engine.inside import nap


class Plain:
    """Handlers that need nothing but their arguments; also the factory of sharded servers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def echo(self, value: Any) -> Any:
        return value

    def add(self, one: int, two: int = 10) -> int:
        return one + two

    def describe(self, array: NDArray[Any]) -> tuple[Any, ...]:
        return array.dtype.str, array.shape, array.flags.writeable, array.tobytes()

    def first_and_last(self, array: NDArray[Any]) -> tuple[float, float]:
        return float(array.flat[0]), float(array.flat[-1])

    def double(self, array: NDArray[Any]) -> NDArray[Any]:
        return array * 2

    def hear(self, value: Any) -> None:
        self.heard.append(value)

    def heard_so_far(self) -> list[Any]:
        return self.heard

    def boom(self, text: str) -> None:
        raise KeyError(text)

    def leave(self) -> None:
        sys.exit("enough")

    async def leave_async(self) -> None:
        sys.exit("enough")

    def pid(self) -> int:
        return os.getpid()

    def thread(self) -> str:
        return threading.current_thread().name

    def unsendable(self) -> Any:
        return {"fine": 1, "bad": object()}

    def read_fifo(self, path: str) -> str:
        """Blocks the whole server until somebody has written the named pipe."""
        return Path(path).read_text()


class Reader(Plain):
    """Keeps what it hears, until it is told to forget; or dies of it."""

    def first_heard(self) -> list[float]:
        return [float(array.flat[0]) for array in self.heard]

    def forget(self) -> None:
        self.heard.clear()

    def die_if(self, pid: int, array: NDArray[Any]) -> float:
        if os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)
        return float(array.flat[0])


class Handlers(Plain):
    """Those, and handlers that call others or wait."""

    def __init__(self, service: RpcService) -> None:
        super().__init__()
        self._service = service
        self._clients: dict[str, RpcClient] = {}
        self._kept: NDArray[Any] | None = None
        self.cut: list[str] = []

    def _client(self, name: str) -> RpcClient:
        if name not in self._clients:
            self._clients[name] = self._service.create_client(name)
        return self._clients[name]

    def relay(self, name: str, method: str, *args: Any) -> Any:
        return self._client(name).call(method, *args)

    async def relay_async(self, name: str, method: str, *args: Any) -> Any:
        return await self._client(name).submit(method, *args)

    async def echo_async(self, value: Any) -> Any:
        return value

    async def boom_async(self, text: str) -> None:
        raise OSError(text)

    async def nap(self, seconds: float) -> str:
        """Waits without blocking the server; says so when it was cut."""
        try:
            await nap(self._service, seconds)
        finally:
            self.cut.append("ended")
        return "rested"

    def naps_ended(self) -> int:
        return len(self.cut)

    def rows(self, to: int) -> Iterator[int]:
        try:
            yield from range(to)
        finally:
            self.cut.append("ended")

    async def rows_async(self, to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                yield number
        finally:
            self.cut.append("ended")

    async def count_items(self) -> int:
        try:
            return len([item async for item in prpc_engine.incoming()])
        finally:
            self.cut.append("ended")

    def keep(self, array: NDArray[Any]) -> None:
        self._kept = array

    def peek(self, index: int) -> float:
        assert self._kept is not None
        return float(self._kept[index])

    def drop(self) -> None:
        self._kept = None

    def shared(self, count: int) -> NDArray[np.float32]:
        array: NDArray[np.float32] = prpc_engine.empty((count,), np.float32)
        array[:] = np.arange(count)
        return array


FUNCTIONS: dict[str, Callable[..., Any]] = {"one": lambda: 1, "negate": lambda value: -value}
