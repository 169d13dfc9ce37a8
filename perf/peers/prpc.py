"""This engine itself, behind the face of its peers: inline client, inline server in
serve_forever(), a master aside.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine

from ..child import STOP_LOOK_S, Announce, StopRequest
from ..harness import Place
from .face import ITEM, WAIT_S_MAX, Job, Peer

SERVICE = "perf"


def _echo(payload: bytes) -> bytes:
    return payload


async def _echo_in_task(payload: bytes) -> bytes:
    return payload


def _first(array: NDArray[np.float32]) -> float:
    return float(array[0])


def serve_master(announce: Announce) -> None:
    """A master on any port, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.Master("127.0.0.1:0") as master:
        announce(master.address)
        while not stop.asked:
            time.sleep(STOP_LOOK_S)


def serve(announce: Announce, master: str, transport: str, polling: bool) -> None:
    """Answer until SIGTERM, then close all in order."""
    stop = StopRequest()
    with prpc_engine.RpcService(
        master=master, polling=polling, transports=[transport], pin=only_core()
    ) as service:
        service.create_server(
            SERVICE, {"echo": _echo, "echo in a task": _echo_in_task, "first": _first}
        )
        announce(service.rank)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


def only_core() -> int | None:
    """The core that this process is pinned to; None when it has several."""
    cores = os.sched_getaffinity(0)
    return min(cores) if len(cores) == 1 else None


class Connected(Peer):
    """The client's side.

    `in_slab`: new_array() gives arrays that are sent by reference; `is_async`: the server's echo is
    an `async def`."""

    def __init__(
        self,
        place: Place,
        job: Job,
        transport: str,
        polling: bool,
        in_slab: bool = False,
        is_async: bool = False,
    ) -> None:
        super().__init__(place, job)
        self._in_slab = in_slab
        self._echo = "echo in a task" if is_async else "echo"
        _, master = self.exits.enter_context(place.serve_aside(serve_master))
        self.start(serve, master, transport, polling)
        service = self.exits.enter_context(
            prpc_engine.RpcService(
                master=master, polling=polling, transports=[transport], pin=only_core()
            )
        )
        self.client: Any = service.create_client(SERVICE, expected_servers=1, timeout_s=WAIT_S_MAX)

    def new_array(self, items: int) -> NDArray[np.float32]:
        return prpc_engine.empty((items,), ITEM) if self._in_slab else super().new_array(items)

    def round_trip(self, payload: bytes) -> bytes:
        answer: bytes = self.client.call(self._echo, payload)
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        first: float = self.client.call("first", array)
        return first

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        submit, echo = self.client.submit, self._echo
        under_way: deque[Any] = deque()
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                under_way.append(submit(echo, payload))
            if window <= sent:
                echoed += len(under_way.popleft().result(WAIT_S_MAX))
        return echoed
