"""Connections cut or stalled at every byte: who connects gets an answer or a typed error, and who
accepts keeps nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import PeerLostError, RemoteProtocolError, ShardError, UnreachableError
from shard.transport.frame import HEADER
from tests.network.caller import HANDSHAKE_BYTES, Caller, Message, Outcome
from tests.network.echo_server import EchoServer
from tests.network.faults import Action, Fault, Plan, one_way
from tests.network.proxy import Proxy
from tests.prpc_engine.processes import wait_until

HELLO_THERE = (b"hello", ())
SMALL_BYTES = HEADER.size + len(b"hello")
NUMBER_BYTES = {"to_server": 0, "to_client": 8}  # in front of an answer
CUTS = [Action.RESET, Action.FINISH]
CUT_ERRORS = (UnreachableError, PeerLostError)  # what a cut may come to


def assert_named(outcome: Outcome, *kinds: type[ShardError]) -> None:
    assert isinstance(outcome.error, kinds), repr(outcome.error)
    assert str(outcome.error)


@pytest.fixture(autouse=True)
def no_descriptor_more(echo: EchoServer, hasty: EchoServer) -> Iterator[None]:
    before = echo.descriptors(), hasty.descriptors()
    yield
    wait_until(
        lambda: (echo.descriptors(), hasty.descriptors()) == before,
        "the end of the servers' connections",
    )


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_a_connection_cut_at_any_byte_of_handshake_and_frame(
    echo: EchoServer, proxy: Proxy, caller: Caller, cut: Action, direction: str
) -> None:
    handshake = HANDSHAKE_BYTES[direction]
    whole = handshake + SMALL_BYTES + NUMBER_BYTES[direction]
    there = "tcp://{}:{}".format(*echo.where)
    for at in range(whole + 1):
        proxy.plans.append(one_way(direction, Fault(cut, at)))
        outcome = caller.ask(f"tcp://{proxy.address}", HELLO_THERE)
        if at < whole:
            assert_named(outcome, *CUT_ERRORS)
            assert outcome.answers == [], f"cut at byte {at}"
        else:
            assert outcome.answers in ([], [(b"hello", [])])
            assert outcome.answers or isinstance(outcome.error, PeerLostError)
        assert caller.ask(there, HELLO_THERE).answers == [(b"hello", [])]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_a_second_lane_cut_at_any_byte_of_its_handshake(
    hasty: EchoServer, cut: Action, direction: str
) -> None:
    """The server gives the first one up at its limits.handshake_s."""
    bulk = (b"bulk", [np.arange(400_000, dtype=np.uint32).view(np.uint8)])
    with Proxy(hasty.where) as proxy, Caller(bulk_lanes=1) as caller:

        def answers() -> list[Message]:
            return sorted(caller.ask(f"tcp://{proxy.address}", HELLO_THERE, bulk).answers)

        for at in range(HANDSHAKE_BYTES[direction] + 1):
            proxy.plans.extend([Plan(), one_way(direction, Fault(cut, at))])
            outcome = caller.ask(f"tcp://{proxy.address}", HELLO_THERE, bulk)
            assert_named(outcome, *CUT_ERRORS)
            assert all(body == b"hello" for body, _ in outcome.answers)
            assert len(outcome.answers) <= 1
        wait_until(
            lambda: answers() == [(b"bulk", [bytes(bulk[1][0])]), (b"hello", [])],
            "answers over both lanes",
        )


BLOCKS = [np.arange(3, dtype=np.uint8), (np.arange(300_000) % 251).astype(np.uint8)]
FRAME_EDGES = np.cumsum(
    [HEADER.size, 8 * len(BLOCKS), len(b"hello"), *(block.nbytes for block in BLOCKS)]
)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_a_frame_with_blocks_cut_beside_each_of_its_boundaries(
    proxy: Proxy, caller: Caller, cut: Action, direction: str
) -> None:
    begin, number_bytes = HANDSHAKE_BYTES[direction], NUMBER_BYTES[direction]
    edges = [
        int(edge) + (number_bytes if edge > HEADER.size + 8 * len(BLOCKS) else 0)
        for edge in FRAME_EDGES
    ]
    whole = edges[-1]
    message: tuple[bytes, Sequence[NDArray[np.uint8]]] = (b"hello", BLOCKS)
    for at in sorted(
        {0, 1, 65_536, *(edge + offset for edge in edges for offset in (-1, 0, 1))}
        - {whole, whole + 1}
    ):
        proxy.plans.append(one_way(direction, Fault(cut, begin + at)))
        outcome = caller.ask(f"tcp://{proxy.address}", message)
        assert_named(outcome, *CUT_ERRORS)
        assert outcome.answers == [], f"cut at byte {at}"
    assert caller.ask(f"tcp://{proxy.address}", message).answers == [
        (b"hello", [bytes(block) for block in BLOCKS])
    ]


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_handshake_that_stalls_at_any_byte_ends_at_both_sides(
    hasty: EchoServer, caller: Caller, direction: str
) -> None:
    """All at once: the connector gives up at its own time, the acceptor at limits.handshake_s."""
    offsets = range(HANDSHAKE_BYTES[direction])
    outcomes: list[Outcome] = []
    with Proxy(hasty.where) as proxy:
        proxy.plans.extend(one_way(direction, Fault(Action.STALL, at)) for at in offsets)
        threads = [
            threading.Thread(
                target=lambda: outcomes.append(
                    caller.ask(f"tcp://{proxy.address}", HELLO_THERE, timeout_s=0.5)
                )
            )
            for _ in offsets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == len(offsets)
        for outcome in outcomes:
            assert_named(outcome, UnreachableError)
        proxy.plans.clear()  # of those whose time was over before the proxy had seen them
        wait_until(
            lambda: caller.ask(f"tcp://{proxy.address}", HELLO_THERE).answers == [(b"hello", [])],
            "an answer",
        )


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_frame_that_stalls_goes_on_when_the_network_does(
    proxy: Proxy, caller: Caller, direction: str
) -> None:
    begin = HANDSHAKE_BYTES[direction]
    for at in range(SMALL_BYTES):
        proxy.plans.append(one_way(direction, Fault(Action.STALL, begin + at)))
        with caller.talk(f"tcp://{proxy.address}") as talk:
            talk.connection.send(b"hello")
            flow = getattr(proxy.passages[-1], direction)
            wait_until(lambda flow=flow, at=at: len(flow.course.recorded) > begin + at, "the stall")  # type: ignore[misc]
            assert talk.answers == []
            proxy.release()
            talk.turn_until(1)
            assert talk.answers == [(b"hello", [])]


def test_a_server_that_is_not_there_is_unreachable_behind_a_proxy_too(caller: Caller) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # so that nobody else is there
        with Proxy(gone.getsockname()) as proxy:
            outcome = caller.ask(f"tcp://{proxy.address}", HELLO_THERE)
    assert_named(outcome, UnreachableError)
    assert not isinstance(outcome.error, RemoteProtocolError)
