"""kill -9 anywhere in a connection over shared memory: the other side is told, has whole messages,
and gets its blocks back.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import pytest

from shard import ClosedError, PeerLostError, Slab
from shard.memory.segment import Segment
from shard.transport.rings import make_rings
from tests.faults.party import DEADLINE_S, RING_BYTES, Party, converse
from tests.faults.rounds import ROUNDS, Census, Rounds, points_of
from tests.faults.zygote import Arm, Victim, Zygote

MESSAGES = 30  # each way: every kind of message six times
POINTS = points_of("ring", "slab", "lease", "connection")
ROLES = ("first", "second")


@pytest.fixture(scope="module")
def slab() -> Iterator[Slab]:
    """The survivor's. One for all rounds, so that blocks which the dead kept would be missed."""
    slab = Slab()
    slab.empty(1 << 20)  # its first segment
    yield slab
    slab.close()


def start(
    zygote: Zygote,
    role: str,
    sock: socket.socket,
    segment: Segment,
    seed: int,
    arm: Arm | None = None,
) -> Victim:
    """A party in a process of its own, which alone holds `sock` from now on."""
    with sock:
        return zygote.start(
            converse, role == "first", seed, MESSAGES, fds=[sock.fileno(), segment.fd], arm=arm
        )


def meet(
    zygote: Zygote, role: str, seed: int, slab: Slab, arm: Arm | None = None
) -> tuple[Party, Victim]:
    """A party here, and one to be killed."""
    ours, theirs = socket.socketpair()
    segment = make_rings(RING_BYTES)
    victim = start(zygote, role, theirs, segment, seed, arm)
    return Party(ours, segment, role != "first", seed, MESSAGES, slab), victim


@pytest.fixture(scope="module")
def census(zygote_of_module: Zygote, slab: Slab) -> dict[str, Census]:
    """What each party passes in one undisturbed run."""
    counts = {}
    for role in ROLES:
        party, victim = meet(zygote_of_module, role, 1, slab)
        party.run()
        assert victim.wait(DEADLINE_S) == 0
        counts[role] = victim.life.reported()
    return counts


@pytest.mark.parametrize("name", POINTS)
def test_a_party_passes(name: str, census: dict[str, Census]) -> None:
    assert any(counts[name] for counts in census.values()), (
        "no party gets there: give them a step that does"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        # where the survivor does not get to sleep, nobody dies at its doorbell
        pytest.param(name, marks=pytest.mark.alone) if name.endswith("_doorbell") else name
        for name in POINTS
    ],
)
def test_who_dies_here_is_missed_at_once_and_takes_nothing_along(
    name: str, zygote: Zygote, slab: Slab, census: dict[str, Census], seed: int
) -> None:
    for role in ROLES:
        if not census[role][name]:
            continue
        rounds = Rounds(name, role, census[role], seed)
        for _ in range(ROUNDS):
            party, victim = meet(zygote, role, rounds.next_seed(), slab, rounds.next_arm())
            party.run()
            killed = rounds.ended(victim, DEADLINE_S)
            assert party.wrong == []
            # it is the first, and closed before the victim got to where it dies
            if isinstance(party.error, ClosedError):
                assert role == "second" and party.received == party.sent == MESSAGES
            else:
                assert isinstance(party.error, PeerLostError), repr(party.error)
                assert victim.life.done <= party.received, "messages that were in the ring are lost"
                assert killed or party.received == party.sent == MESSAGES
                if killed:
                    rounds.told_s.append(party.told_at_s - victim.life.last_sign_s)
            used = slab.statistics().blocks_used
            if used:  # an array in a cycle of garbage
                gc.collect()
                used = slab.statistics().blocks_used
            assert used == 0
        print(rounds.report())
        assert rounds.killed, "nobody died: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_when_both_may_die_none_hangs_and_nothing_stays(
    name: str, zygote: Zygote, census: dict[str, Census], seed: int
) -> None:
    books = {
        role: Rounds(name, role, counts, seed) for role, counts in census.items() if counts[name]
    }
    for _ in range(max(1, ROUNDS // 4)):
        first, second = socket.socketpair()
        segment = make_rings(RING_BYTES)
        stream = next(iter(books.values())).next_seed()
        victims = {
            role: start(
                zygote,
                role,
                sock,
                segment,
                stream,
                books[role].next_arm() if role in books else None,
            )
            for role, sock in zip(ROLES, (first, second), strict=True)
        }
        segment.close()
        for role, victim in victims.items():
            if role in books:
                books[role].ended(victim, DEADLINE_S)
            else:
                assert victim.wait(DEADLINE_S) == 0
        assert not [
            entry
            for entry in os.listdir("/dev/shm")
            if any(f".{victim.pid}." in entry for victim in victims.values())
        ]
    for rounds in books.values():
        print(rounds.report())
