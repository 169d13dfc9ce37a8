"""What becomes of the bytes of one direction of one TCP connection on their way through a fault
proxy. No I/O in this file.

    action  when `at` bytes have come
    RESET   they are passed on, then both ends get RST
    FINISH  they are passed on, then FIN follows; what comes later is swallowed, the other direction
            goes on
    STALL   they are passed on, the rest waits until the proxy is told to release it; the other
            direction goes on
    REPEAT  the last `count` of them are passed on once more
    INSERT  `extra` follows them
    FLIP    bit `bit` of the next byte is passed on inverted

There is no action that reorders: TCP delivers the bytes of a connection in order, whatever their
packets do on the way. A frame that comes late is one of an earlier connection, recorded there and
inserted here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


class Action(enum.Enum):
    """See the file's head."""

    RESET = enum.auto()
    FINISH = enum.auto()
    STALL = enum.auto()
    REPEAT = enum.auto()
    INSERT = enum.auto()
    FLIP = enum.auto()


@dataclass(frozen=True)
class Fault:
    """One of them, at a byte offset counted from the begin of the connection."""

    action: Action
    at: int
    count: int = 0
    extra: bytes = b""
    bit: int = 0


@dataclass(frozen=True)
class Pace:
    """Bytes leave in pieces of 1 to `piece_bytes_max`, with up to `pause_s_max` seconds after each:
    it splits what was sent together, and joins what comes during a pause. The proxy waits in whole
    milliseconds."""

    piece_bytes_max: int
    pause_s_max: float = 0.0


@dataclass(frozen=True)
class Plan:
    """For one connection."""

    to_server: Sequence[Fault] = ()
    to_client: Sequence[Fault] = ()
    pace: Pace | None = None
    # of the proxy's sockets, each way; the kernel takes what it has as its least. 0: as they are
    buffer_bytes: int = 0


def one_way(direction: str, *faults: Fault) -> Plan:
    """A plan whose faults are all in that direction, "to_server" or "to_client"."""
    return Plan(to_server=faults) if direction == "to_server" else Plan(to_client=faults)


Step = bytes | Action  # bytes to pass on; RESET, FINISH and STALL


class Course:
    """One direction. feed() it what comes, in pieces of any size; first of all nothing, for faults
    at byte 0.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = deque(sorted(faults, key=lambda fault: fault.at))
        self.recorded = bytearray()  # all that came, as it came

    def feed(self, data: bytes) -> list[Step]:
        """What to do now, in this order."""
        steps: list[Step] = []
        seen = len(self.recorded)
        self.recorded += data
        while self._faults and self._faults[0].at <= len(self.recorded):
            fault = self._faults[0]
            if fault.action is Action.FLIP and fault.at == len(self.recorded):
                break  # that byte is still to come
            self._faults.popleft()
            if fault.at > seen:
                steps.append(bytes(self.recorded[seen : fault.at]))
                seen = fault.at
            if fault.action is Action.FLIP:
                steps.append(bytes([self.recorded[seen] ^ 1 << fault.bit]))
                seen += 1
            elif fault.action is Action.REPEAT:
                steps.append(bytes(self.recorded[seen - fault.count : seen]))
            elif fault.action is Action.INSERT:
                steps.append(fault.extra)
            else:
                steps.append(fault.action)
        if seen < len(self.recorded):
            steps.append(bytes(self.recorded[seen:]))
        return steps
