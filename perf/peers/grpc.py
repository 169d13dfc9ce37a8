"""grpcio: a synchronous unary call with bytes in and out (no protobuf), over loopback, size limits
lifted.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent import futures

import grpc
import numpy as np
from numpy.typing import NDArray

from ..child import Announce
from ..harness import Place
from .face import WAIT_S_MAX, Job, Peer, as_item, first_item

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SERVICE, ECHO, FIRST = "perf.Echo", "Echo", "First"


def _echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


def _first(request: bytes, context: grpc.ServicerContext) -> bytes:
    return first_item(request)


def serve(announce: Announce) -> None:
    """Answer until killed."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(function)
        for name, function in ((ECHO, _echo), (FIRST, _first))
    }
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(f"127.0.0.1:{port}")
    threading.Event().wait()


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        address = self.start(serve)
        channel = self.exits.enter_context(grpc.insecure_channel(address, options=OPTIONS))
        self._echo, self._first = (
            channel.unary_unary(f"/{SERVICE}/{name}") for name in (ECHO, FIRST)
        )

    def round_trip(self, payload: bytes) -> bytes:
        answer: bytes = self._echo(payload, timeout=WAIT_S_MAX)
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        # it takes bytes: the copy is part of its price
        return as_item(self._first(array.tobytes(), timeout=WAIT_S_MAX))

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        under_way: deque[grpc.Future] = deque()
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                under_way.append(self._echo.future(payload, timeout=WAIT_S_MAX))
            if window <= sent:
                echoed += len(under_way.popleft().result())
        return echoed
