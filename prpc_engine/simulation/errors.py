"""What ends a simulation before its time.

SimulationError
├── Deadlock   nothing will ever happen any more, and the test waits for something
└── Stuck      a thread waits for something that is not simulated
"""

from __future__ import annotations

from collections.abc import Sequence


class SimulationError(Exception):
    """A simulation cannot go on: why."""


class Deadlock(SimulationError):
    """All threads wait, and no timer, message or fault is to come."""

    def __init__(self, waiting: Sequence[str]) -> None:
        super().__init__(f"nothing is to come any more; {len(waiting)} threads wait: {waiting}")


class Stuck(SimulationError):
    """A simulated thread waits for something real (a lock, a socket or a file of its own), and so
    all others do.
    """

    def __init__(self, thread: str, stacks: str) -> None:
        super().__init__(
            f"{thread} has not come back: it waits for something that is not simulated, or "
            "computes without an end. What waits must be of shard.runtime: Lock, Event, sleep()\n"
            f"{stacks}"
        )


class ProcessFailed(SimulationError):
    """A thread of a simulated process ended by an error: its own is the cause."""
