"""When the sessions of a process that is gone are closed: decided from who connects and what time
it is.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prpc_engine.tensorflow.session_owners import GONE_S, SessionOwners
from shard.loop.timers import Timers


class Loop:
    """A reactor of which there are timers alone; `now` goes on when a test says so."""

    def __init__(self) -> None:
        self.timers, self.now = Timers(), 0.0

    def clock(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        self.timers.call_at(self.now + seconds, call)

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        self.timers.fire(self.now)


class Host:
    """A task, with connections of processes 1 and 2."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.connected: set[int] = set()
        self.closed: list[str] = []
        self.owners = SessionOwners(self.connected.__contains__, self.end)

    def end(self, session: str) -> None:
        self.closed.append(session)
        self.owners.remove(session)

    def peer(self, owner: int) -> Any:
        self.connected.add(owner)
        return SimpleNamespace(
            connection=SimpleNamespace(peer_incarnation=owner), reactor=self.loop
        )

    def lose(self, peer: Any) -> None:
        self.connected.discard(peer.connection.peer_incarnation)
        self.owners.lost(peer)


def test_the_sessions_of_a_process_that_stays_away_are_closed_and_no_others() -> None:
    host = Host()
    one, other = host.peer(1), host.peer(2)
    for session, peer in (("a", one), ("b", one), ("c", other), ("d", None)):
        host.owners.add(session, peer)
    host.lose(one)
    host.loop.go_on(GONE_S - 1)
    assert host.closed == []
    host.loop.go_on(2)
    assert host.closed == ["a", "b"]


def test_a_process_that_connects_again_in_time_keeps_them() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.lose(one)
    again = host.peer(1)
    host.loop.go_on(2 * GONE_S)
    assert host.closed == []
    host.lose(again)  # it is looked at again
    host.loop.go_on(2 * GONE_S)
    assert host.closed == ["a"]


def test_a_process_that_comes_and_goes_has_all_of_the_time_after_its_last_connection() -> None:
    host = Host()
    host.owners.add("a", host.peer(1))
    host.lose(host.peer(1))
    host.loop.go_on(GONE_S - 1)
    host.lose(host.peer(1))
    host.loop.go_on(GONE_S - 1)
    assert host.closed == []
    host.loop.go_on(2)
    assert host.closed == ["a"]
    assert len(host.loop.timers) == 0


def test_what_its_process_closed_is_not_closed_again() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.owners.add("b", one)
    host.owners.remove("a")
    host.lose(one)
    host.loop.go_on(2 * GONE_S)
    assert host.closed == ["b"]


def test_a_process_without_sessions_is_not_looked_at_again() -> None:
    host = Host()
    host.lose(host.peer(1))
    assert len(host.loop.timers) == 0


def test_a_task_that_is_closed_is_not_kept_by_a_look_to_come() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.lose(one)
    loop, owners = host.loop, weakref.ref(host.owners)
    del host, one
    gc.collect()
    assert owners() is None
    loop.go_on(2 * GONE_S)
    assert len(loop.timers) == 0
