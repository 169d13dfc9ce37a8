"""A bare TCP socket over loopback, NODELAY, lengths known to both sides: what any protocol on TCP
stands on. Or TLS on it.

Spinning: non-blocking, asked again and again. Blocking: left to the kernel. An array goes by
sendall() and is received into memory that is already warm, which is the most that a copy through
the kernel can do.
"""

from __future__ import annotations

import socket
import ssl

import numpy as np
from numpy.typing import NDArray

from ..certificates import tls_context
from ..child import Announce
from ..harness import Place
from .face import ITEM, WAIT_S_MAX, Job, Peer, as_bytes, as_item, first_item

CHUNK_BYTES = 1 << 16  # what an echo server takes in one go when requests come many at a time
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _receive_spinning(connection: socket.socket, memory: memoryview) -> None:
    filled = 0
    receive_into = connection.recv_into
    while filled < len(memory):
        try:
            taken = receive_into(memory[filled:])
        except NOT_YET:
            continue
        if not taken:
            raise ConnectionError(f"{connection.getpeername()} closed")
        filled += taken


def _receive_blocking(connection: socket.socket, memory: memoryview) -> None:
    filled = 0
    while filled < len(memory):
        taken = connection.recv_into(memory[filled:])
        if not taken:
            raise ConnectionError(f"{connection.getpeername()} closed")
        filled += taken


def _receive_some(connection: socket.socket, memory: memoryview) -> int:
    while True:
        try:
            return connection.recv_into(memory)
        except NOT_YET:
            continue


def _send_spinning(connection: socket.socket, data: memoryview | bytes) -> None:
    sent = 0
    data = memoryview(data)
    while sent < len(data):
        try:
            sent += connection.send(data[sent:])
        except NOT_YET:
            continue


def _send_blocking(connection: socket.socket, data: memoryview | bytes) -> None:
    connection.sendall(data)


def _prepared(connection: socket.socket, spin: bool, tls: bool, is_server: bool) -> socket.socket:
    """With TLS on it where that is asked for; takes the plain one over."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        connection = tls_context(is_server).wrap_socket(connection, server_side=is_server)
    connection.setblocking(not spin)
    return connection


def serve(announce: Announce, job: Job, spin: bool, tls: bool) -> None:
    """One connection, until it closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce(listener.getsockname())
        connection = _prepared(listener.accept()[0], spin, tls, is_server=True)
    send = _send_spinning if spin else _send_blocking
    if job.kind == "array":
        receive = _receive_spinning if spin else _receive_blocking
        memory = np.ones(job.nbytes, np.uint8).data
        while True:
            receive(connection, memory)
            send(connection, first_item(memory))
    # Whole messages go back as soon as they are there, several in one send when several are.
    memory = memoryview(bytearray(max(CHUNK_BYTES, job.nbytes)))
    filled = 0
    while taken := _receive_some(connection, memory[filled:]):
        filled += taken
        whole = filled - filled % job.nbytes
        if whole:
            send(connection, memory[:whole])
            memory[: filled - whole] = memory[whole:filled]
            filled -= whole


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job, spin: bool, tls: bool = False) -> None:
        super().__init__(place, job)
        address = self.start(serve, job, spin, tls)
        plain = self.exits.enter_context(socket.create_connection(address, WAIT_S_MAX))
        self._socket = self.exits.enter_context(_prepared(plain, spin, tls, is_server=False))
        self._receive = _receive_spinning if spin else _receive_blocking
        self._send = _send_spinning if spin else _send_blocking
        self._answer = memoryview(bytearray(job.nbytes if job.kind == "echo" else ITEM.itemsize))

    def round_trip(self, payload: bytes) -> bytes:
        self._socket.send(payload)  # small: a socket that is not full takes it whole
        self._receive(self._socket, self._answer)
        return bytes(self._answer)

    def send_array(self, array: NDArray[np.float32]) -> float:
        self._send(self._socket, as_bytes(array))
        self._receive(self._socket, self._answer)
        return as_item(self._answer)

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        answers = memoryview(bytearray(window * len(payload)))
        sent = taken = 0
        while taken < count * len(payload):
            more = min(window - (sent - taken // len(payload)), count - sent)
            if more > 0:
                self._send(self._socket, payload * more)
                sent += more
            taken += _receive_some(self._socket, answers)
        return taken
