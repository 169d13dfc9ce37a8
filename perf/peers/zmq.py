"""pyzmq: REQ/REP, over a Unix socket or TCP; DEALER where several requests are under way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from ..child import Announce
from ..harness import Place
from .face import WAIT_S_MAX, Job, Peer, as_bytes, as_item, first_item


def serve(announce: Announce, address: str, job: Job) -> None:
    """Answer until killed."""
    with zmq.Context() as context, context.socket(zmq.REP) as replier:
        replier.bind(address)
        announce(replier.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            if job.kind == "echo":
                replier.send(replier.recv())
            else:
                replier.send(first_item(replier.recv(copy=False).buffer))


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job, scheme: str) -> None:
        super().__init__(place, job)
        wanted = f"ipc://{Path(place.folder, 'zmq')}" if scheme == "ipc" else "tcp://127.0.0.1:*"
        self._address: str = self.start(serve, wanted, job)
        self._context = self.exits.enter_context(zmq.Context())
        self._requester = self._connect(zmq.REQ)

    def _connect(self, kind: int) -> zmq.Socket[bytes]:
        connected = self.exits.enter_context(self._context.socket(kind))
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.RCVTIMEO, int(WAIT_S_MAX * 1e3))
        connected.setsockopt(zmq.SNDTIMEO, int(WAIT_S_MAX * 1e3))
        connected.connect(self._address)
        return connected

    def round_trip(self, payload: bytes) -> bytes:
        self._requester.send(payload)
        reply: bytes = self._requester.recv()
        return reply

    def send_array(self, array: NDArray[np.float32]) -> float:
        self._requester.send(as_bytes(array), copy=False)
        return as_item(self._requester.recv())

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        echoed = 0
        with self._connect(zmq.DEALER) as dealer:
            for sent in range(count + window):
                if sent < count:
                    dealer.send_multipart([b"", payload])  # the empty part is what REQ would add
                if window <= sent:
                    echoed += len(dealer.recv_multipart()[1])
        return echoed
