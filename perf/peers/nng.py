"""pynng: req/rep over a Unix socket or TCP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pynng
from numpy.typing import NDArray

from ..child import Announce
from ..harness import Place
from .face import WAIT_S_MAX, Job, Peer, as_bytes, as_item, first_item

WAIT_MS_MAX = int(WAIT_S_MAX * 1e3)
ANY_SIZE = 0  # recv_max_size: no limit


def serve(announce: Announce, address: str, job: Job) -> None:
    """Answer until killed."""
    with pynng.Rep0(listen=address, recv_max_size=ANY_SIZE) as replier:
        announce(replier.listeners[0].url)  # with the port that was chosen
        while True:
            if job.kind == "echo":
                replier.send(replier.recv())
            else:
                replier.send(first_item(replier.recv()))


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job, scheme: str) -> None:
        super().__init__(place, job)
        wanted = f"ipc://{Path(place.folder, 'nng')}" if scheme == "ipc" else "tcp://127.0.0.1:0"
        address = self.start(serve, wanted, job)
        self._requester = self.exits.enter_context(
            pynng.Req0(
                dial=address,
                send_timeout=WAIT_MS_MAX,
                recv_timeout=WAIT_MS_MAX,
                resend_time=WAIT_MS_MAX,
            )
        )

    def round_trip(self, payload: bytes) -> bytes:
        self._requester.send(payload)
        answer: bytes = self._requester.recv()
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        # send() takes bytes: the copy is part of its price
        self._requester.send(bytes(as_bytes(array)))
        return as_item(self._requester.recv())
