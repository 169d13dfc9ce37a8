"""When the sessions of a process that is gone are closed: decided from who connects and what time
it is.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from prpc_engine.tensorflow.session_owners import GONE_S, SessionOwners
from shard.loop.timers import Timers


class Host:
    """A task, with connections of processes 1 and 2; `now` goes on when a test says so."""

    def __init__(self) -> None:
        self.timers, self.now = Timers(), 0.0
        self.connected: set[int] = set()
        self.closed: list[str] = []
        self.owners = SessionOwners(self.connected.__contains__, self.end)

    def end(self, session: str) -> None:
        self.closed.append(session)
        self.owners.remove(session)

    def peer(self, owner: int) -> Any:
        self.connected.add(owner)
        return SimpleNamespace(
            connection=SimpleNamespace(peer_incarnation=owner),
            reactor=SimpleNamespace(
                call_later=lambda s, call: self.timers.call_at(self.now + s, call)
            ),
        )

    def lose(self, peer: Any) -> None:
        self.connected.discard(peer.connection.peer_incarnation)
        self.owners.lost(peer)

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        self.timers.fire(self.now)


def test_the_sessions_of_a_process_that_stays_away_are_closed_and_no_others() -> None:
    host = Host()
    one, other = host.peer(1), host.peer(2)
    for session, peer in (("a", one), ("b", one), ("c", other), ("d", None)):
        host.owners.add(session, peer)
    host.lose(one)
    host.go_on(GONE_S - 1)
    assert host.closed == []
    host.go_on(2)
    assert host.closed == ["a", "b"]


def test_a_process_that_connects_again_in_time_keeps_them() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.lose(one)
    again = host.peer(1)
    host.go_on(2 * GONE_S)
    assert host.closed == []
    host.lose(again)  # it is looked at again
    host.go_on(2 * GONE_S)
    assert host.closed == ["a"]


def test_what_its_process_closed_is_not_closed_again() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.owners.add("b", one)
    host.owners.remove("a")
    host.lose(one)
    host.go_on(2 * GONE_S)
    assert host.closed == ["b"]


def test_a_process_without_sessions_is_not_looked_at_again() -> None:
    host = Host()
    host.lose(host.peer(1))
    assert len(host.timers) == 0


def test_a_task_that_is_closed_is_not_kept_by_a_look_to_come() -> None:
    host = Host()
    one = host.peer(1)
    host.owners.add("a", one)
    host.lose(one)
    timers, host = host.timers, Host()
    gc.collect()
    timers.fire(2 * GONE_S)
    assert len(timers) == 0
