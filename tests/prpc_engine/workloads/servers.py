"""What the workloads' server processes serve, and how such a process lives: until SIGTERM, which it
obeys cleanly.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine
from prpc_engine import Deferred, RpcService, idempotent
from tests.faults.zygote import Life
from tests.prpc_engine.inside import accepted_by, nap, node_of, socket_of
from tests.prpc_engine.workloads.pattern import mixed, piece

# for leases of killed borrowers to come back; what is missing then is reported as it is
SETTLE_TIMEOUT_S = 20.0


class Works:
    """Handlers whose right answers every caller knows."""

    def __init__(self, service: RpcService) -> None:
        self._service = service
        self._held: list[Deferred] = []

    def mix(self, number: int) -> int:
        return mixed(number)

    @idempotent
    def mix_again(self, number: int) -> int:
        """As mix(), and a client may repeat it."""
        return mixed(number)

    async def mix_later(self, number: int) -> int:
        await nap(self._service, 0.001)
        return mixed(number)

    def echo(self, *values: Any) -> tuple[Any, ...]:
        return values

    def is_piece(self, start: int, array: NDArray[np.uint8]) -> bool:
        return np.array_equal(array, piece(start, len(array)))

    def give(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """An array of this process's slab, lent to the caller."""
        array: NDArray[np.uint8] = prpc_engine.empty((nbytes,), np.uint8)
        array[:] = piece(start, nbytes)
        return array

    def hold(self) -> Deferred:
        """Answered never."""
        answer = Deferred()
        self._held.append(answer)
        return answer

    @idempotent
    def held_or_mixed(self, hold_pid: int, number: int) -> Any:
        """Held in the process of that pid, answered in all others."""
        return self.hold() if os.getpid() == hold_pid else mixed(number)

    async def count(self) -> AsyncIterator[int]:
        """A stream of 0, 1, 2, ... that its caller has to end."""
        for number in itertools.count():
            yield number

    def cut(self) -> None:
        """Shut the sockets of all who are connected, behind everybody's back: a reset."""
        for peer in list(accepted_by(node_of(self._service))):
            cut_socket(peer)


def cut_socket(peer: Any) -> None:
    """Shut a connection's socket as if the network had: neither side is asked. Through a second
    descriptor of it. One that the other side has shut already stays so."""
    connection = peer.connection
    fd = (connection.notes if connection.transport == "shm" else socket_of(connection)).fileno()
    with socket.socket(fileno=os.dup(fd)) as sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise


def figures(service: RpcService) -> dict[str, int]:
    """What is under way: all of it is 0 once nobody calls."""
    now = service.statistics()
    return {
        "tasks": sum(server.tasks + server.queued for server in now.servers.values()),
        "callers": len(accepted_by(node_of(service))),
        "blocks lent or used": now.slab.blocks_used,
        "calls in flight": sum(peer.in_flight for peer in now.peers),
        "messages unsent": sum(peer.outbox_messages for peer in now.peers),
    }


def serve(life: Life, master: str, name: str, transport: str, server_id: int) -> dict[str, int]:
    """One server until SIGTERM; then its figures, once they settled. life.done:
    it is registered.
    """
    # before there are threads, which then block it, too
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=[transport]) as service:
        service.create_server(name, Works(service), server_id=server_id)
        life.done = 1
        signal.sigwait({signal.SIGTERM})
        return figures(service)


def serve_to_the_last(
    life: Life,
    master: str,
    name: str,
    transport: str,
    server_id: int,
    awaited: tuple[str, ...] = (),
    works: type[Works] = Works,
) -> dict[str, int]:
    """As serve(), but its figures are those after all callers have gone: once the `awaited` ones
    are 0, by default all.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=[transport]) as service:
        service.create_server(name, works(service), server_id=server_id)
        life.done = 1
        signal.sigwait({signal.SIGTERM})
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            now = figures(service)
            if not any(now[key] for key in awaited or now) or time.monotonic() >= deadline:
                # and none that are taken later: a heartbeat to the master is a call in flight, too
                return now
            service.serve_forever(timeout_s=0.01)
