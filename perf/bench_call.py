"""What one call of 64 B takes of a processor: client and server by turns in one thread, over rings
and over a socket; and what it takes where a service calls a server of its own.

No core waits for another one here and nothing is parked, so a figure depends on what is executed
and little on what else the machine does: what is put into the path of a small call, or taken out of
it, shows, be it 0.05 us. It is no time of a call between two cores: cache lines that change cores
are missing, and what follows a send is in it, which there is done while the other works.

Expected, from its pieces timed alone (Python 3.11, 2 cores of a VM):
    shm  client.call() and Peer.request() up to the send 1.2 us; a record sent, found and taken out
         1.1, twice; Server.request() and Peer.reply() 1.1; the answer understood 0.3; spins and the
         unwinding of both sides 0.8: some 5.6 us.
    tcp  the same, with a send, a poll(2) and a receive, each a system call, in place of the ring:
         some 9.5 us.
Expected within one process, where a service calls its own server:
    inline  no message and no other thread (prpc_engine/rpc/local_peer.py): client.call() 0.5 us,
            the lead taken and given back 0.5, arguments and answer encoded and decoded 0.6, Call
            and its table 0.6, ServedObject.request() 0.6, and a whole turn after 64 calls: 3 us.
    plain   two switches of threads, some 41 us, and two messages.

    python -m perf.bench_call [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import Master, RpcService
from prpc_engine.client.client import RpcClient
from prpc_engine.master.registry import ServerEntry
from prpc_engine.node.node import Node
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import NO_SECRET
from shard import DEFAULT_LIMITS, Connection, Future, Reactor, Slab
from shard import Node as Identity
from shard.memory.segment import Segment
from shard.transport.rings import make_rings
from shard.transport.shm_connection import connection_over
from shard.transport.tcp_connection import TcpConnection

from .harness import Candidate, Place, Result, compare
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each

NAME = "call"
CALLS_PER_SAMPLE = 20  # timed together: to read the clock costs some 1 % of a call
SERVICE, METHOD, TARGET = "perf", "echo", 16
LOOKS_MAX = 10_000  # of either side for one call; more means that something is broken

Ends = tuple[Connection[Any], Connection[Any]]


@dataclass(frozen=True, slots=True)
class InOneThread:
    """client.call(), the handler, the answer."""

    size_bytes: int

    def __str__(self) -> str:
        return f"call in one thread, {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class WithinOneProcess:
    """client.call() of a service's own server, from the main thread."""

    size_bytes: int

    def __str__(self) -> str:
        return f"call within one process, {self.size_bytes} B"


Case = InOneThread | WithinOneProcess
CASES: list[Case] = [InOneThread(64), WithinOneProcess(64)]
INLINE, PLAIN = "inline handler", "plain handler"
TARGETS = [Target(str(WithinOneProcess(64)), INLINE, "p50_ns", "at most", 4_000)]


def over_shm(ours: Slab, theirs: Slab) -> Ends:
    """Two ends of two rings."""
    segment = make_rings(DEFAULT_LIMITS.ring_bytes)
    same = Segment.attach(os.dup(segment.fd))
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return (
        connection_over(one, segment, True, "shm://server", DEFAULT_LIMITS, ours),
        connection_over(two, same, False, "shm://client", DEFAULT_LIMITS, theirs),
    )


def over_tcp(ours: Slab, theirs: Slab) -> Ends:
    """Two ends of one socket over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        two, _ = listening.accept()
    identity = Identity(secret=b"", incarnation=1, limits=DEFAULT_LIMITS)
    return TcpConnection([one], "tcp://server", identity, ours), TcpConnection(
        [two], "tcp://client", identity, theirs
    )


class Both:
    """A client and a server, each with a reactor and a slab, and who waits for a call: wait() turns
    them in turn.
    """

    def __init__(self, connect: Callable[[Slab, Slab], Ends]) -> None:
        self._node = Node(
            Reactor(time.monotonic),
            None,
            Slab(),
            NodeConfig.load(secret=NO_SECRET, limits=DEFAULT_LIMITS, transports=["shm", "tcp"]),
        )
        self._node.wait_until = self.wait_until
        self._served = Reactor(time.monotonic), Slab()
        self._ends = connect(self._node.slab, self._served[1])
        for end, reactor in zip(self._ends, (self._node.reactor, self._served[0]), strict=True):
            end.attach(reactor)
        Peer(
            self._ends[1],
            self._served[0],
            None,
            {TARGET: ServedObject(SERVICE, 0, TARGET, {METHOD: _echo})},
            _ignore,
        )
        entry = ServerEntry(SERVICE, 0, TARGET, 0, ())
        self.client = RpcClient(SERVICE, self._node, [entry], _never)
        self.client._routes[0].peer = Peer(self._ends[0], self._node.reactor, None, {}, _ignore)

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        """Let the server answer, then take the answer: as a driver does, without its lead, its
        clock and its idling.
        """
        reactors = (self._served[0], self._node.reactor)
        for _ in range(LOOKS_MAX):
            for reactor in reactors:
                if not reactor.spin(1):
                    reactor.poll(time.monotonic())
            if future.finished:
                return True
        raise AssertionError(f"no answer within {LOOKS_MAX} looks")

    def close(self) -> None:
        """Hang up and let go of everything."""
        self.client.close()
        for end in self._ends:
            end.close()
        self._node.close()
        for reactor in (self._node.reactor, self._served[0]):
            reactor.poll(time.monotonic())
            reactor.close()
        self._node.slab.close()
        self._served[1].close()


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure both transports, or both kinds of handlers."""
    if isinstance(case, InOneThread):
        candidates = [
            Candidate(f"prpc {name}", "ours", partial(measure, case=case, connect=connect))
            for name, connect in (("shm", over_shm), ("tcp", over_tcp))
        ]
    else:
        candidates = [
            Candidate(name, "ours", partial(measure_own, case=case, inline=name == INLINE))
            for name in (INLINE, PLAIN)
        ]
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure(
    place: Place, effort: Effort, case: InOneThread, connect: Callable[[Slab, Slab], Ends]
) -> Sample:
    """Time CALLS_PER_SAMPLE calls at a time."""
    payload = os.urandom(case.size_bytes)
    with contextlib.closing(Both(connect)) as both:
        call = both.client.call

        def operate() -> None:
            for _ in range(CALLS_PER_SAMPLE):
                call(METHOD, payload)

        sample = time_each(operate, effort, CALLS_PER_SAMPLE)
        return sample.with_work(bytes_echoed=len(call(METHOD, payload)))


def measure_own(place: Place, effort: Effort, case: WithinOneProcess, inline: bool) -> Sample:
    """Time calls one by one of a plain handler, CALLS_PER_SAMPLE at a time of an inline one."""
    payload = os.urandom(case.size_bytes)
    with (
        Master(secret=NO_SECRET) as master,
        RpcService(master.address, secret=NO_SECRET) as service,
    ):
        service.create_server(SERVICE, {METHOD: _echo}, inline=inline)
        call = service.create_client(SERVICE).call
        calls = CALLS_PER_SAMPLE if inline else 1

        def operate() -> None:
            for _ in range(calls):
                call(METHOD, payload)

        sample = time_each(operate, effort, calls)
        return sample.with_work(bytes_echoed=len(call(METHOD, payload)))


def _echo(payload: bytes) -> bytes:
    return payload


async def _never() -> list[ServerEntry]:
    """Its only server does not go."""
    raise AssertionError("nobody looks who serves")


def _ignore(peer: Peer) -> None:
    """Its connection ends with the measurement."""


def test_both_transports_echo_every_byte() -> None:
    for result in run(InOneThread(64), TINY):
        assert result.state == "ok", result.note
        assert result.work["bytes_echoed"] == 64


def test_a_service_echoes_every_byte_to_itself() -> None:
    for result in run(WithinOneProcess(64), TINY):
        assert result.state == "ok", result.note
        assert result.work["bytes_echoed"] == 64


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
