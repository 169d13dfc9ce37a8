"""prpc_engine.remote: the same program as torch_rpc.py has, with the other import."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine
from prpc_engine import remote as rpc

from ..child import Announce
from ..harness import Place
from .face import ITEM, WAIT_S_MAX, Job, Peer

CLIENT, SERVER = "client", "server"


def _echo(payload: bytes) -> bytes:
    return payload


def _first(array: Any) -> float:
    return float(array[0])


def _join(name: str, meeting: str, transport: str, polling: bool) -> None:
    config = prpc_engine.NodeConfig.load(transports=["tcp"] if transport == "tcp" else None)
    options = rpc.Options(rpc_timeout=WAIT_S_MAX, polling=polling, config=config)
    rpc.init_rpc(name, int(name == SERVER), 2, f"file://{meeting}", options)


def serve(announce: Announce, meeting: str, transport: str, polling: bool) -> None:
    """Answer until killed."""
    announce(meeting)
    _join(SERVER, meeting, transport, polling)
    rpc.shutdown()


class Connected(Peer):
    """The client's side."""

    def __init__(
        self, place: Place, job: Job, transport: str, polling: bool, is_slab: bool = False
    ) -> None:
        super().__init__(place, job)
        self._is_slab = is_slab
        meeting: str = self.start(serve, str(Path(place.folder, "prpc_remote")), transport, polling)
        _join(CLIENT, meeting, transport, polling)
        self.exits.callback(rpc.shutdown, graceful=False)

    def new_array(self, items: int) -> NDArray[np.float32]:
        return prpc_engine.empty(items, ITEM) if self._is_slab else super().new_array(items)

    def round_trip(self, payload: bytes) -> bytes:
        answer: bytes = rpc.rpc_sync(SERVER, _echo, args=(payload,))
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        first: float = rpc.rpc_sync(SERVER, _first, args=(array,))
        return first

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        under_way: deque[rpc.Future] = deque()
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                under_way.append(rpc.rpc_async(SERVER, _echo, args=(payload,)))
            if window <= sent:
                echoed += len(under_way.popleft().wait())
        return echoed
