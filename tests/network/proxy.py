"""A fault proxy: a TCP client connects to it instead of its server, and it passes on what faults.py
makes of their bytes.

    client ── socket ── Flow to the server ──> socket ── server
                   <──── Flow to the client ────

One thread does it all. Each connection takes the next of `plans`, in the order they are accepted;
those beyond are passed on as they are. How bytes are cut into pieces, and how long the pauses are,
follows from the seed.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from types import TracebackType

from tests.network.faults import Action, Course, Fault, Pace, Plan, Step
from tests.program import PATIENCE_S

CHUNK_BYTES = 1 << 16
QUEUED_BYTES_MAX = 1 << 20  # held for a side that does not read, before the other is made to wait
CONNECT_TIMEOUT_S = 5.0
_HANG_UP_BY_RESET = struct.pack("ii", 1, 0)  # SO_LINGER, 0 s


def set_buffers(sock: socket.socket, nbytes: int) -> None:
    """What the kernel holds of it in each direction; it takes what it has as its least."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)


class Flow:
    """One direction of one connection."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        faults: tuple[Fault, ...],
        pace: Pace | None,
    ) -> None:
        self.source, self.target = source, target
        self.course = Course(faults)
        self.finished = False  # FIN was passed on
        self._pace = pace
        self._steps: deque[Step] = deque(self.course.feed(b""))
        self._due = 0.0  # nothing leaves before
        self._source_ended = False

    def wants_in(self) -> bool:
        return (
            not self._source_ended
            and sum(len(step) for step in self._steps if isinstance(step, bytes)) < QUEUED_BYTES_MAX
        )

    def due(self) -> float | None:
        """When something may leave next; None: there is nothing."""
        return (
            self._due
            if self._steps and self._steps[0] is not Action.STALL and not self.finished
            else None
        )

    def read(self) -> None:
        """Raises OSError."""
        data = self.source.recv(CHUNK_BYTES)
        if data:
            self._steps += self.course.feed(data)
        else:
            self._source_ended = True
            self._steps.append(Action.FINISH)
        if self.finished:
            self._steps.clear()

    def write(self, now: float, chance: random.Random) -> None:
        """As much as may leave now. Raises OSError, ConnectionResetError where a reset is what is
        wanted.
        """
        while (due := self.due()) is not None and due <= now:
            step = self._steps[0]
            if step is Action.RESET:
                raise ConnectionResetError
            if step is Action.FINISH:
                self.target.shutdown(socket.SHUT_WR)
                self.finished = True
                self._steps.clear()
                return
            assert isinstance(step, bytes)
            size = (
                len(step) if self._pace is None else chance.randint(1, self._pace.piece_bytes_max)
            )
            try:
                sent = self.target.send(step[:size])
            except BlockingIOError:
                return
            self._steps.popleft()
            if sent < len(step):
                self._steps.appendleft(step[sent:])
            if self._pace is not None:
                self._due = now + chance.random() * self._pace.pause_s_max

    def release(self) -> None:
        """Let go on what stalls."""
        if self._steps and self._steps[0] is Action.STALL:
            self._steps.popleft()


class Passage:
    """A connection of a client, and ours to the server."""

    def __init__(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if plan.buffer_bytes:
                set_buffers(sock, plan.buffer_bytes)
        self.to_server = Flow(client, server, tuple(plan.to_server), plan.pace)
        self.to_client = Flow(server, client, tuple(plan.to_client), plan.pace)
        self.flows = (self.to_server, self.to_client)
        self.socks = (client, server)
        self.ended = False

    def events(self, flow: Flow, other: Flow, now: float) -> int:
        """What to wait for at the socket that `flow` reads from and `other` writes to."""
        due = other.due()
        return (select.POLLIN if flow.wants_in() else 0) | (
            select.POLLOUT if due is not None and due <= now else 0
        )

    def move(self, now: float, events: dict[int, int], chance: random.Random) -> None:
        """Read and write what is possible."""
        try:
            for flow in self.flows:
                if events.get(flow.source.fileno(), 0) & ~select.POLLOUT and flow.wants_in():
                    flow.read()
            for flow in self.flows:
                flow.write(now, chance)
        except OSError:
            self.end(by_reset=True)
            return
        if all(flow.finished for flow in self.flows):
            self.end()

    def end(self, by_reset: bool = False) -> None:
        """Hang up on both."""
        for sock in self.socks:
            if by_reset and not self.ended:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP_BY_RESET)
            sock.close()
        self.ended = True


class Proxy:
    """To the server at `upstream`, which may be said later. A context manager; at its end it hangs
    up on everybody.
    """

    def __init__(self, upstream: tuple[str, int] = ("127.0.0.1", 0), seed: int = 0) -> None:
        self.plans: deque[Plan] = deque()
        self.passages: list[Passage] = []  # all there were, in order
        self.upstream = upstream
        self._chance = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._orders: deque[tuple[str, threading.Event]] = deque()
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._order("end")
        self._thread.join(PATIENCE_S)
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def release(self) -> None:
        """Let all go on that stalls."""
        self._order("release")

    def cut_all(self) -> None:
        """RST to both ends of every connection."""
        self._order("cut")

    def _order(self, order: str) -> None:
        done = threading.Event()
        self._orders.append((order, done))
        self._wake.send(b"!")
        assert done.wait(PATIENCE_S), "the proxy is stuck"

    def _run(self) -> None:
        living: list[Passage] = []
        while True:
            now = time.monotonic()
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            next_due = now + 3600.0
            for passage in living:
                for flow, other in (passage.flows, passage.flows[::-1]):
                    events = passage.events(flow, other, now)
                    if events:
                        poll.register(flow.source, events)
                    due = flow.due()
                    if due is not None and due > now:
                        next_due = min(next_due, due)
            events_at = dict(poll.poll((next_due - now) * 1000))
            if self._woken.fileno() in events_at:
                self._woken.recv(4096)
                while self._orders:
                    order, done = self._orders.popleft()
                    if order == "end":
                        for passage in living:
                            passage.end(by_reset=True)
                        done.set()
                        return
                    for passage in living:
                        if order == "cut":
                            passage.end(by_reset=True)
                        else:
                            for flow in passage.flows:
                                flow.release()
                    if order == "cut":
                        # a socket that is accepted next may have the number of one that was closed
                        events_at.clear()
                    done.set()
            if self._listener.fileno() in events_at:
                living += self._accept()
            now = time.monotonic()
            for passage in living:
                if not passage.ended:
                    passage.move(now, events_at, self._chance)
            living = [passage for passage in living if not passage.ended]

    def _accept(self) -> list[Passage]:
        found: list[Passage] = []
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return found
            try:
                server = socket.create_connection(self.upstream, CONNECT_TIMEOUT_S)
            except OSError:
                client.close()
                continue
            plan = self.plans.popleft() if self.plans else Plan()
            found.append(Passage(client, server, plan))
            self.passages.append(found[-1])
