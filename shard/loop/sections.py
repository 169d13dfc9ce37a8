"""Handlers that need not be waited for: what one does in a section may run beside others, if it
takes long. Who has the lead is in driver.py.

    a thread in a section            the lead
    begins it                        is its own, as of any handler
    is in the same one at two looks  is taken from it by the watchdog, and an engine thread is
     of the watchdog                  called
    waits for a future               its own: as every handler that waits; taken: as an
                                      application's thread
    leaves it                        its own: goes on; taken: waits until it has the lead again

So a quick section switches no thread. The looks are some 50 ms apart, while nothing comes 250 ms
(stall.py); where nobody looks for stalls, as in a simulation, no lead is taken.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from shard import runtime
from shard.loop.reactor import Reactor


class Preempted(NamedTuple):
    """What a thread had when the lead was taken from it: when it began to wait, and how it led."""

    waited: tuple[float, float]
    may_serve: bool
    on_duty: bool


class Sections:
    """Of the threads that lead one reactor. Owned by its driver.

    leader      who leads: the ident of a thread, or 0
    take_away   ends the lead of that thread, from another one; whether it was on duty
    lead_again  waits for the lead; what a signal handler raised meanwhile
    """

    def __init__(
        self,
        reactor: Reactor,
        leader: Callable[[], int],
        take_away: Callable[[], bool],
        lead_again: Callable[[bool], BaseException | None],
    ) -> None:
        self._reactor = reactor
        self._leader = leader
        self._take_away = take_away
        self._lead_again = lead_again
        self._next_number = itertools.count(1).__next__
        # Threads that are in one, and its number; threads that the lead was taken from.
        self._inside: dict[int, int] = {}
        self._preempted: dict[int, Preempted] = {}
        # Of both: the watchdog takes the lead, or the thread leaves, whichever is first.
        self._guard = runtime.Lock()
        self._seen = 0  # by the watchdog, when it looked last

    def __contains__(self, thread: int) -> bool:
        return thread in self._inside

    def enter(self) -> None:
        """What this thread does until leave() may run beside other handlers. In a handler;
        elsewhere it changes nothing.
        """
        me = threading.get_ident()
        if self._leader() == me:
            self._inside[me] = self._next_number()

    def leave(self) -> bool:
        """As a handler again; whether others led meanwhile. In a `finally` of who entered."""
        me = threading.get_ident()
        with self._guard:
            self._inside.pop(me, None)
            before = self._preempted.pop(me, None)
        if before is None:
            return False
        interrupt = self._lead_again(before.on_duty)
        self._reactor.end_waiting(*before.waited)
        self._reactor.take_lead(before.may_serve)
        if interrupt is not None:
            raise interrupt
        return True

    def pause(self) -> int | None:
        """From here on nobody takes the lead from this thread, if it has it. For go_on()."""
        with self._guard:
            return self._inside.pop(threading.get_ident(), None)

    def go_on(self, section: int | None) -> None:
        """It is in the section again that it was in, if it was."""
        if section is not None:
            self._inside[threading.get_ident()] = section

    def look(self) -> None:
        """Let others lead, where the leader is in the section that it was in at the last look. In
        the watchdog's thread.
        """
        leader = self._leader()
        seen, self._seen = self._seen, self._inside.get(leader, 0)
        if not seen or seen != self._seen:
            return
        with self._guard:
            if self._leader() != leader or self._inside.get(leader) != seen:
                return
            del self._inside[leader]
            reactor = self._reactor
            self._preempted[leader] = Preempted(
                reactor.begin_waiting(), reactor.may_serve, self._take_away()
            )
