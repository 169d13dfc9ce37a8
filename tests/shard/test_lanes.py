"""Half-made connections: which lane may join which, and what is given up."""

from __future__ import annotations

import pytest

from shard import RemoteProtocolError
from shard.transport.handshake import Lane
from shard.transport.identity import PeerIdentity
from shard.transport.lanes import HalfMade

TOKEN, OTHER = b"t" * 16, b"o" * 16
WHO = PeerIdentity(secret="job"), 7


@pytest.fixture
def made() -> HalfMade[str]:
    return HalfMade(2)


def test_a_connection_of_one_lane_is_whole_at_once(made: HalfMade[str]) -> None:
    assert made.join(Lane(), WHO, "only") == ["only"]
    assert len(made) == 0


def test_a_connection_is_whole_with_its_last_lane_whatever_their_order(made: HalfMade[str]) -> None:
    assert made.join(Lane(TOKEN, 0, 3), WHO, "zero") is None
    assert made.join(Lane(TOKEN, 2, 3), WHO, "two") is None
    assert made.join(Lane(TOKEN, 1, 3), WHO, "one") == ["zero", "one", "two"]
    assert len(made) == 0


@pytest.mark.parametrize(
    ("lane", "who", "text"),
    [
        (Lane(OTHER, 1, 3), WHO, "lane 1 of a connection that is not known here"),
        (Lane(TOKEN, 1, 3), (PeerIdentity(secret="job"), 8), "another peer has opened"),
        (
            Lane(TOKEN, 1, 3),
            (PeerIdentity(secret="job", subjects=("other",)), 7),
            "another peer has opened",
        ),
        (Lane(TOKEN, 1, 2), WHO, "lane 1 of 2 does not fit its connection of 3"),
        (Lane(TOKEN, 2, 3), WHO, "lane 2 of 3 does not fit"),
        (Lane(TOKEN, 0, 3), WHO, "with the token of another one"),
    ],
)
def test_a_lane_that_does_not_belong_is_refused_and_the_others_wait_on(
    made: HalfMade[str], lane: Lane, who: tuple[PeerIdentity, int], text: str
) -> None:
    made.join(Lane(TOKEN, 0, 3), WHO, "zero")
    made.join(Lane(TOKEN, 2, 3), WHO, "two")
    with pytest.raises(RemoteProtocolError, match=text):
        made.join(lane, who, "stranger")
    assert made.join(Lane(TOKEN, 1, 3), WHO, "one") == ["zero", "one", "two"]


def test_what_is_given_up_is_forgotten_and_handed_back(made: HalfMade[str]) -> None:
    made.join(Lane(TOKEN, 0, 3), WHO, "zero")
    made.join(Lane(TOKEN, 2, 3), WHO, "two")
    made.join(Lane(OTHER, 0, 2), WHO, "another")
    assert made.give_up(TOKEN) == ["zero", "two"]
    assert made.give_up(TOKEN) == []
    with pytest.raises(RemoteProtocolError, match="not known here"):
        made.join(Lane(TOKEN, 1, 3), WHO, "late")
    assert made.give_up_all() == ["another"]


def test_more_than_there_may_be_are_refused(made: HalfMade[str]) -> None:
    made.join(Lane(TOKEN, 0, 2), WHO, "one")
    made.join(Lane(OTHER, 0, 2), WHO, "two")
    with pytest.raises(
        RemoteProtocolError, match="2 connections are half made already, at most 2 allowed"
    ):
        made.join(Lane(b"x" * 16, 0, 2), WHO, "three")
