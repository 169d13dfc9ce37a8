"""multiprocessing.Pipe: two Unix sockets' ends, blocking, a length before each message."""

from __future__ import annotations

from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..child import Announce
from ..harness import Place
from .face import Job, Peer, as_bytes, as_item, first_item


def serve(announce: Announce, path: str, job: Job) -> None:
    """One connection. Listener makes the same Connection over a Unix socket that Pipe() makes over
    a pair of them.
    """
    with Listener(path, "AF_UNIX") as listener:
        announce(path)
        connection: Any = listener.accept()
    memory = bytearray(job.nbytes)
    while True:
        if job.kind == "echo":
            connection.send_bytes(connection.recv_bytes())
        else:
            connection.recv_bytes_into(memory)
            connection.send_bytes(first_item(memory))


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        path = self.start(serve, str(Path(place.folder, "pipe")), job)
        self._connection: Connection[Any, Any] = self.exits.enter_context(Client(path, "AF_UNIX"))

    def round_trip(self, payload: bytes) -> bytes:
        self._connection.send_bytes(payload)
        return self._connection.recv_bytes()

    def send_array(self, array: NDArray[np.float32]) -> float:
        self._connection.send_bytes(as_bytes(array))
        return as_item(self._connection.recv_bytes())

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        send, receive = self._connection.send_bytes, self._connection.recv_bytes
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                send(payload)
            if window <= sent:
                echoed += len(receive())
        return echoed
