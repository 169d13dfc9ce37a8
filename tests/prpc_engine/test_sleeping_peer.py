"""A request to a peer that sleeps: it is woken first, and only then is the request made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prpc_engine import errors
from prpc_engine.rpc.server import ServedObject
from tests.prpc_engine.peers import TARGET, Pair


class Echo:
    def echo(self, value: object) -> object:
        return value


class Sleeper:
    """What the connection knows of its peer, which sleeps until it is woken."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asleep, self.woken = [1], 0
        monkeypatch.setattr(pair.client.connection, "asleep", self.asleep)
        monkeypatch.setattr(pair.client.connection, "wake_peer", self.wake)

    def wake(self) -> None:
        self.asleep[0], self.woken = 0, self.woken + 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(ServedObject("test", 0, TARGET, Echo()))
    yield made
    made.close()


def test_a_sleeping_peer_is_woken_before_the_arguments_are_looked_at(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(pair, monkeypatch)
    with pytest.raises(errors.BadArguments):
        pair.ask("echo", (value for value in "cannot be sent"))
    assert sleeper.woken == 1


def test_a_peer_is_woken_once_for_many_requests(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(pair, monkeypatch)
    calls = [pair.ask("echo", number) for number in range(3)]
    pair.turn()
    assert [call.result() for call in calls] == [0, 1, 2]
    assert sleeper.woken == 1
