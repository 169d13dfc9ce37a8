"""When a silent peer is taken for lost, of what the kernel says;
tests/prpc_engine/test_silent_peers.py cuts real networks.
"""

from __future__ import annotations

import socket

import pytest

from shard import Limits
from shard.transport.silence import LOOKS_PER_BOUND, Silence, keep_alive

BOUND_S = 8.0
STEP_S = BOUND_S / LOOKS_PER_BOUND


def lost_after(unacked: int, probes: int, acks_every_s: float | None) -> float | None:
    """Seconds of looking until the peer is lost, which acknowledged something just before; None: it
    never is.
    """
    silence = Silence(BOUND_S)
    for step in range(1, 10 * LOOKS_PER_BOUND):
        passed = step * STEP_S
        last_ack_s = passed if acks_every_s is None else passed % acks_every_s
        if silence.decide(unacked, probes, int(last_ack_s * 1000), passed):
            return passed
    return None


def test_what_is_sent_and_never_acknowledged_ends_it_within_the_bound() -> None:
    assert lost_after(unacked=3, probes=0, acks_every_s=None) == BOUND_S


def test_a_peer_without_room_that_answers_no_probe_is_lost_and_one_that_answers_is_not() -> None:
    assert lost_after(unacked=0, probes=2, acks_every_s=None) == BOUND_S
    assert lost_after(unacked=0, probes=2, acks_every_s=3.0) is None
    assert lost_after(unacked=0, probes=1, acks_every_s=None) is None, (
        "kernels answer the second of two quick ones not at all"
    )


def test_an_idle_peer_is_left_to_the_keepalive() -> None:
    assert lost_after(unacked=0, probes=0, acks_every_s=None) is None


def test_what_has_just_been_sent_after_a_long_rest_is_given_its_time() -> None:
    silence = Silence(BOUND_S)
    assert not silence.decide(1, 0, 3_600_000, 100.0)
    assert not silence.decide(0, 0, 20, 101.0)
    assert not silence.decide(1, 0, 3_600_000, 200.0)
    assert silence.decide(1, 0, 3_600_000 + 7000, 207.0)


@pytest.mark.parametrize("bound_s", [0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 60.0, 3600.0])
def test_the_keepalive_finds_an_idle_peer_within_the_bound_in_whole_seconds(bound_s: float) -> None:
    with socket.socket() as sock:
        keep_alive(sock, bound_s)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, interval_s, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option) for option in options
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert 0.5 * bound_s <= idle_s + count * interval_s <= max(2.0, bound_s)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peer_silent_s", 0.4, "peer_silent_s = 0.4: 0.5 to 3600.0 is allowed"),
        ("peer_silent_s", 3601, "0.5 to 3600.0"),
        ("connections_per_peer", 10, "connections_per_peer = 10: 1 to 9 is allowed"),
        ("connections_per_peer", 0, "1 to 9"),
        ("handshake_s", 0, "handshake_s = 0: 0.01 to 3600.0 is allowed"),
    ],
)
def test_limits_out_of_their_bounds_are_named(name: str, value: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Limits(**{name: value})
