"""Other threads of the process get the interpreter's lock (the GIL) beside a loop that never waits.

CPython has a thread give the lock up once another has waited for it a whole switch interval, 5 ms.
But each time that the lock is released, for a system call say, the waiting thread begins its 5 ms
anew: it was woken, found the lock taken again, and has seen no release since. A reactor looks at
epoll every 0.2 ms, and each look releases the lock for a microsecond, where waking a thread takes
50. So a thread that calls its own process's server in a loop kept all others from running for up to
860 ms (perf/RESULTS.md). A wait that is long enough for one of them to be woken ends that.

    since the last look         LockShare.offer()
      this thread lost time     others ran: its pause begins anew
      its pause is over         sleeps for a wake-up; what follows depends on what that shows:
        another thread ran      the next pause is PAUSE_S_MIN
        none did                twice as long as before, PAUSE_S_MAX at most: 0.06 % of the time
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from shard import runtime

WAKE_UP_S = 60e-6  # that a thread which was told of a free lock takes to have it
# A thread that took the lock keeps it for a switch interval, or until it waits: where we lost less
# than this, none did, or one that needed little.
TAKEN_S = 500e-6
PAUSE_S_MIN = sys.getswitchinterval()
PAUSE_S_MAX = 0.1


class LockShare:
    """When one loop last let other threads run. Times in seconds.

    clock, used  the time; how much of a core the calling thread has used
    sleep        lets others run
    """

    __slots__ = ("_at", "_clock", "_pause_s", "_sleep", "_used", "_used_s")

    def __init__(
        self,
        clock: Callable[[], float] = runtime.now,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = runtime.sleep,
    ) -> None:
        self._clock, self._used, self._sleep = clock, used, sleep
        self._at = 0.0  # by the clock, when others could run
        self._used_s = 0.0  # by this thread, up to then
        self._pause_s = PAUSE_S_MIN

    def offer(self) -> None:
        """Let other threads run if they had no chance for long."""
        now, used_s = self._clock(), self._used()
        passed_s = now - self._at
        # another thread's time is another one: it says nothing, and the pause begins anew, too
        if abs(passed_s - (used_s - self._used_s)) >= TAKEN_S:
            self._at, self._used_s = now, used_s
        elif passed_s >= self._pause_s and not runtime.shares_process:
            self._sleep(WAKE_UP_S)
            self._at, self._used_s = self._clock(), self._used()
            was_taken = self._at - now >= WAKE_UP_S + TAKEN_S
            self._pause_s = PAUSE_S_MIN if was_taken else min(PAUSE_S_MAX, 2 * self._pause_s)
