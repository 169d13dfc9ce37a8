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

from collections.abc import Callable
from threading import get_ident
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

    leads       whether a thread leads, by its ident
    take_away   ends the lead of the thread that has it, from another one; whether it was on duty
    lead_again  waits for the lead; what a signal handler raised meanwhile

    A section is a list with one item, taken out by whoever is first: the thread that leaves, or the
    watchdog. So a quick section costs no lock.
    """

    def __init__(
        self,
        reactor: Reactor,
        leads: Callable[[int], bool],
        take_away: Callable[[], bool],
        lead_again: Callable[[bool], BaseException | None],
    ) -> None:
        self._reactor = reactor
        self._leads = leads
        self._take_away = take_away
        self._lead_again = lead_again
        # by thread: the one that it is in, or was in last
        self._inside: dict[int, list[None]] = {}
        self._preempted: dict[int, Preempted] = {}
        # while the watchdog takes the lead: who it is taken from waits for the end of that
        self._guard = runtime.Lock()
        self._seen: tuple[int, list[None]] | None = None  # by the watchdog, when it looked last

    def __contains__(self, thread: int) -> bool:
        return bool(self._inside.get(thread))

    @property
    def under_way(self) -> int:
        """Handlers in a section, but for those that wait in it."""
        return sum(map(len, tuple(self._inside.values()))) + len(self._preempted)

    def enter(self) -> list[None]:
        """What this thread does until leave() of what this gives may run beside other handlers. In
        a handler; elsewhere it changes nothing.
        """
        me = get_ident()
        section = self._inside[me] = [None] if self._leads(me) else []
        return section

    def leave(self, section: list[None]) -> bool:
        """As a handler again; whether others led meanwhile. In a `finally` of who entered."""
        if section:
            try:
                section.pop()
            except IndexError:  # the watchdog was first
                pass
            else:
                return False
        with self._guard:
            before = self._preempted.pop(get_ident(), None)
        if before is None:
            return False  # it was paused
        interrupt = self._lead_again(before.on_duty)
        self._reactor.end_waiting(*before.waited)
        self._reactor.take_lead(before.may_serve)
        if interrupt is not None:
            raise interrupt
        return True

    def pause(self) -> list[None] | None:
        """From here on nobody takes the lead from this thread, if it has it. For go_on(): the
        section that it was in.
        """
        section = self._inside.get(get_ident())
        if section:
            try:
                section.pop()
            except IndexError:
                pass
            else:
                return section
        with self._guard:  # the watchdog may be about to take it
            return None

    def go_on(self, section: list[None] | None) -> None:
        """It is in the section again that it was in, if it was."""
        if section is not None:
            section.append(None)

    def look(self) -> None:
        """Let others lead, where the leader is in the section that it was in at the last look. In
        the watchdog's thread.
        """
        found = next(
            ((me, one) for me, one in tuple(self._inside.items()) if one and self._leads(me)), None
        )
        seen, self._seen = self._seen, found
        if found is None or seen is None or seen[1] is not found[1]:
            return
        leader, section = found
        with self._guard:
            try:
                section.pop()
            except IndexError:
                return  # it left just now
            reactor = self._reactor
            self._preempted[leader] = Preempted(
                reactor.begin_waiting(), reactor.may_serve, self._take_away()
            )
