"""A peer has one name at an acceptor over all its connections, and no other member of the job can
use it.
"""

from __future__ import annotations

import secrets

import pytest

from shard.transport.callers import CallerKey, Callers
from shard.transport.handshake import (
    ACCEPTED,
    ANEW,
    CLAIM_BYTES,
    NO_CLAIM,
    ONLY_LANE,
    PROOF_BYTES,
    TOKEN_BYTES,
    Acceptor,
    Connector,
    Lane,
    _proof,
)

SECRET, KIND = b"secret of the job", 1
SERVER = 22  # the acceptor's incarnation


def meet(
    callers: Callers, server: Callers, lane: Lane = ONLY_LANE, acceptor: int = SERVER
) -> tuple[Connector, Acceptor]:
    """One connection of a node that remembers `callers` to one that remembers `server`."""
    one = Connector(SECRET, KIND, 11, secrets.token_bytes(32), lane=lane, callers=callers)
    two = Acceptor(SECRET, KIND, acceptor, secrets.token_bytes(32), lanes_max=9, callers=server)
    two.start()
    assert two.feed(one.feed(two.feed(one.start()))) == b""
    one.feed(two.verdict)
    return one, two


def test_a_node_has_the_same_name_over_all_its_connections_and_both_sides_know_it() -> None:
    node, server = Callers(), Callers()
    met = [meet(node, server) for _ in range(3)]
    assert len({two.caller for _, two in met} | {one.known_as for one, _ in met}) == 1
    assert met[0][1].caller != 0
    assert [two.verdict for _, two in met] == [ACCEPTED] * 3


def test_another_node_that_says_the_same_incarnation_has_another_name() -> None:
    server = Callers()
    assert meet(Callers(), server)[1].caller != meet(Callers(), server)[1].caller


def test_a_member_that_claims_the_name_of_another_gets_one_of_its_own() -> None:
    """It holds the job's secret, and has seen the name."""
    victim, server = Callers(), Callers()
    name = meet(victim, server)[1].caller
    one = Connector(SECRET, KIND, 11, secrets.token_bytes(32))
    two = Acceptor(SECRET, KIND, SERVER, secrets.token_bytes(32), callers=server)
    two.start()
    hello = one.start()
    answer = two.feed(hello)
    one.feed(answer)
    claim = name.to_bytes(8, "little") + secrets.token_bytes(PROOF_BYTES)
    two.feed(_proof(SECRET, b"connector", hello, answer[: len(hello)], b"", claim) + claim)
    assert two.verdict == ANEW
    assert two.caller not in (0, name)
    assert meet(victim, server)[1].caller == name


def test_the_proof_of_a_name_is_good_for_one_exchange_only() -> None:
    victim, server = Callers(), Callers()
    name = meet(victim, server)[1].caller
    heard = Connector(SECRET, KIND, 11, secrets.token_bytes(32), callers=victim)
    # a member that says it is the server
    asking = Acceptor(SECRET, KIND, SERVER, secrets.token_bytes(32), callers=Callers())
    asking.start()
    claim = heard.feed(asking.feed(heard.start()))[PROOF_BYTES:]
    assert len(claim) == CLAIM_BYTES and claim != NO_CLAIM
    one = Connector(SECRET, KIND, 11, secrets.token_bytes(32))
    two = Acceptor(SECRET, KIND, SERVER, secrets.token_bytes(32), callers=server)
    two.start()
    hello = one.start()
    answer = two.feed(hello)
    two.feed(_proof(SECRET, b"connector", hello, answer[: len(hello)], b"", claim) + claim)
    assert two.caller != name


def test_a_node_whose_name_was_forgotten_is_told_and_has_a_new_one_from_then_on() -> None:
    node, server = Callers(), Callers(most=2)
    first = meet(node, server)[0].known_as
    for _ in range(2):
        meet(Callers(), server)
    one, two = meet(node, server)
    assert two.verdict == ANEW
    assert one.known_as == two.caller != first
    again = meet(node, server)
    assert again[0].known_as == again[1].caller == one.known_as


def test_further_lanes_claim_no_name() -> None:
    node, server = Callers(), Callers()
    one, two = meet(node, server, Lane(b"t" * TOKEN_BYTES, 1, 2))
    assert one.known_as == two.caller == 0
    assert meet(node, server)[1].verdict == ACCEPTED


@pytest.mark.parametrize("most", [1, 5])
def test_what_is_remembered_is_bounded(most: int) -> None:
    node, server, claims = Callers(most), Callers(most), list[CallerKey]()
    for acceptor in range(10):
        meet(node, Callers(), acceptor=acceptor)
        other = Callers()
        meet(other, server)
        key = other.own_key(SERVER)
        assert key is not None
        claims.append(key)
    known = [server.recognize(key.name, key.proof(b"hellos"), b"hellos") for key in claims]
    assert known == [False] * (10 - most) + [True] * most
    assert sum(node.own_key(acceptor) is not None for acceptor in range(10)) == most
