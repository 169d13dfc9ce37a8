"""Two processes that put each other to sleep and wake each other, as often as they can: what
test_sleep.py runs.

    python -m tests.shard.sleep_peer SOCKET_FD SEGMENT_FD SEED right|broken PATIENCE_S

That is the other one; it prints its report.

Each message is followed by a second one, a random moment later, so that a message meets its
receiver in every phase of falling asleep: the gap covers its waking up (some 30 us), its handling
of the first, and its way back to sleep.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass, field

from shard import DEFAULT_LIMITS, Reactor, Slab
from shard.loop.idle import Park
from shard.memory.segment import Segment
from shard.transport.shm_connection import ShmConnection, connection_over

# its number, and when it was sent: ns of the monotonic clock, which both processes read
MESSAGE = struct.Struct("<QQ")
STOP = 1 << 63  # added to the number of the last one
GAP_NS_MAX = 120_000
LONG_NS = 1_000_000
# A reactor's late_bell_s, where none may be lost: a ringer that lost its core just before it rang
# may be away for long.
LATE_BELL_S = 5.0


@dataclass
class Report:
    """What one side saw."""

    parks: int = 0
    wakeups: int = 0
    late_wakes: int = 0
    messages: int = 0
    out_of_order: int = 0
    # from sending to having it, of a first message: its reader slept
    delays_ns: list[int] = field(default_factory=list)


class LooksTooEarly(Reactor):
    """A broken handshake: it looks for work before it says that it sleeps, and so misses what comes
    in between.
    """

    def _announce_sleep(self, timeout_s: float) -> float:
        self._work_seen = super()._sources_have_work()
        return super()._announce_sleep(timeout_s)

    def _sources_have_work(self) -> bool:
        if self._work_seen is None:
            return super()._sources_have_work()
        seen, self._work_seen = self._work_seen, None  # the look after the sleep is an honest one
        return seen

    _work_seen: bool | None = None


class Side:
    """One of the two. Parks as soon as it finds nothing, until a doorbell rings."""

    def __init__(
        self, sock: socket.socket, segment: Segment, is_first: bool, seed: int, broken: bool
    ) -> None:
        self.reactor: Reactor = LooksTooEarly(time.monotonic) if broken else Reactor(time.monotonic)
        if not broken:
            self.reactor.late_bell_s = LATE_BELL_S
        self.slab = Slab()
        self.connection: ShmConnection = connection_over(
            sock, segment, is_first, "the other side", DEFAULT_LIMITS, self.slab
        )
        self.connection.on_message = lambda body, _=(): self._take(bytes(body))
        self.connection.attach(self.reactor)
        self.report = Report()
        self.stopped = False
        self._random = random.Random(seed)
        self._next = 0  # number of the next message to send
        self._expected = 0

    def _take(self, body: bytes) -> None:
        number, sent_ns = MESSAGE.unpack(body)
        stop = number & STOP
        number &= ~STOP
        self.report.messages += 1
        self.report.out_of_order += number != self._expected
        self._expected += 1
        if number % 2 == 0 and number:  # the very first waited for a process to start
            self.report.delays_ns.append(time.monotonic_ns() - sent_ns)
        self.stopped = self.stopped or bool(stop)

    def send_pair(self, last: bool = False) -> None:
        """Two messages, a random gap apart."""
        stop = STOP if last else 0
        self.connection.send(MESSAGE.pack(self._next, time.monotonic_ns()))
        until = time.monotonic_ns() + self._random.randrange(GAP_NS_MAX)
        while time.monotonic_ns() < until:
            continue
        self.connection.send(MESSAGE.pack((self._next + 1) | stop, time.monotonic_ns()))
        self._next += 2

    def wait_for_pair(self, deadline: float) -> bool:
        """Turn and park until both messages of the other side's next pair are here; False when time
        is over, or it is gone.
        """
        wanted = self._next_pair_ends()
        idle = Park()
        poll, park = self.reactor.poll, self.reactor.park
        while self.report.messages < wanted:
            now = time.monotonic()
            if self.connection.error is not None or now > deadline:
                return False
            if not poll(now):
                park(idle.idle(now))
        return True

    def _next_pair_ends(self) -> int:
        return (self.report.messages // 2 + 1) * 2

    def close(self) -> Report:
        """End, and say what was seen."""
        turned, report = self.reactor, self.report
        report.parks, report.wakeups, report.late_wakes = (
            turned.parks,
            turned.wakeups,
            turned.late_wakes,
        )
        self.connection.close()
        turned.close()
        self.slab.close()
        return report


def main(socket_fd: int, segment_fd: int, seed: int, broken: bool, patience_s: float) -> None:
    """The second process: answers each pair with a pair, until the last."""
    side = Side(socket.socket(fileno=socket_fd), Segment.attach(segment_fd), False, seed, broken)
    deadline = time.monotonic() + patience_s
    while not side.stopped and side.wait_for_pair(deadline):
        if not side.stopped:
            side.send_pair()
    # PYTHONUNBUFFERED: what a pipe did not take is lost
    with open(sys.stdout.fileno(), "w", closefd=False) as out:
        json.dump(asdict(side.close()), out)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4] == "broken",
        float(sys.argv[5]),
    )
