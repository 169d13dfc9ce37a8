"""torch.distributed.rpc over TensorPipe, as it comes: it chooses its transports and channels
itself.

Two workers that meet through a file in the benchmark's folder. init_rpc() returns when both are
there, so the server announces itself before it.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..child import Announce, NotOffered
from ..harness import Place
from .face import WAIT_S_MAX, Job, Peer

# Not by `import`: mypy would want its types where it is not installed.
torch: Any = importlib.import_module("torch")
rpc: Any = importlib.import_module("torch.distributed.rpc")

CLIENT, SERVER = "client", "server"


def _echo(payload: bytes) -> bytes:
    return payload


def _first(tensor: Any) -> float:
    return float(tensor[0])


def _join(name: str, meeting: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=WAIT_S_MAX
    )
    rpc.init_rpc(name, rank=int(name == SERVER), world_size=2, rpc_backend_options=options)


def serve(announce: Announce, meeting: str) -> None:
    """Answer until killed."""
    announce(meeting)
    _join(SERVER, meeting)
    threading.Event().wait()


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        if not rpc.is_available():
            raise NotOffered("this build of torch has no torch.distributed.rpc")
        meeting: str = self.start(serve, str(Path(place.folder, "torch_rpc")))
        _join(CLIENT, meeting)
        # graceful would wait for the server to shut down as well
        self.exits.callback(rpc.shutdown, graceful=False)

    def round_trip(self, payload: bytes) -> bytes:
        answer: bytes = rpc.rpc_sync(SERVER, _echo, args=(payload,))
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        first: float = rpc.rpc_sync(SERVER, _first, args=(torch.from_numpy(array),))
        return first

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        under_way: deque[Any] = deque()
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                under_way.append(rpc.rpc_async(SERVER, _echo, args=(payload,)))
            if window <= sent:
                echoed += len(under_way.popleft().wait())
        return echoed
