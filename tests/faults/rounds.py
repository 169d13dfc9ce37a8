"""The books of many rounds at one failpoint: who died, who did not get there, and how soon the
other side knew.
"""

from __future__ import annotations

import os
import random
import signal
import statistics

from shard import failpoints
from tests.faults.zygote import Arm, Victim

# Each failpoint gets so many rounds with each role that passes it; a round takes some 10 ms. At
# night there are 100. With fewer than 10 it could happen that nobody gets to where it dies.
ROUNDS = max(10, int(os.environ.get("PRPC_TEST_FAULT_ROUNDS", "12")))
HIT_MAX = 100  # a round need not be long for the ring to have wrapped many times

Census = dict[str, int]  # failpoint -> how often one whole run of a role passes it


def points_of(*concepts: str) -> list[str]:
    """The failpoints of these concepts, whoever placed them."""
    return [name for name in failpoints.names() if name.partition(".")[0] in concepts]


class Rounds:
    """What happened at one failpoint; report() is the line to print."""

    def __init__(self, name: str, role: str, census: Census, seed: int) -> None:
        self.name = name
        self.role = role
        self.killed = self.finished = 0
        # from the victim's last sign of life to the survivor's knowing
        self.told_s: list[float] = []
        self._hits = census[name]
        self._random = random.Random(f"{seed}{name}{role}")

    def next_seed(self) -> int:
        """Of this round's stream."""
        return self._random.getrandbits(32)

    def next_arm(self) -> Arm:
        """Where the victim of this round dies. While none has died, ever earlier: how often it is
        passed may be chance.
        """
        last = self._hits if self.killed else max(1, self._hits >> self.finished)
        return self.name, "kill9", self._random.randint(1, min(last, HIT_MAX))

    def ended(self, victim: Victim, timeout_s: float) -> bool:
        """Wait for it; whether it was killed. Raises AssertionError when it found something wrong,
        or hangs.
        """
        exit_code = victim.wait(timeout_s)
        assert exit_code in (0, -signal.SIGKILL), (
            f"{self.role} at {self.name} ended with {exit_code}; see its traceback"
        )
        if exit_code:
            self.killed += 1
        else:
            self.finished += 1
        return exit_code != 0

    def report(self) -> str:
        """Times are upper bounds: the victim's last sign of life comes a little before its
        death.
        """
        line = f"{self.name}, {self.role}: {self.killed} killed, {self.finished} finished"
        if self.told_s:
            line += (
                f", told after {statistics.median(self.told_s) * 1e3:.2f} ms (p50), "
                f"{max(self.told_s) * 1e3:.1f} ms (max)"
            )
        return line
