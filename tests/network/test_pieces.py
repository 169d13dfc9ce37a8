"""Bytes that come in any pieces, at any pace, are the same messages; and those that are not what
was sent do no harm.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import AuthenticationError, PeerLostError, RemoteProtocolError, UnreachableError
from shard.transport.frame import HEADER
from shard.transport.handshake import HELLO, PROOF_BYTES, REFUSED
from tests.certificates import Authority, Files
from tests.network.caller import HANDSHAKE_BYTES, Caller, Message
from tests.network.conftest import IS_NIGHT
from tests.network.echo_server import EchoServer
from tests.network.faults import Action, Fault, Pace, Plan, one_way
from tests.network.proxy import Proxy
from tests.network.stingy import be_stingy
from tests.prpc_engine.processes import PATIENCE_S

# What follows a broken frame: whatever part of it is taken for a header, it has no version that we
# speak.
NO_HEADER = b"\xff" * 900_000


def random_message(chance: random.Random, bytes_max: int) -> tuple[bytes, list[NDArray[np.uint8]]]:
    sizes = [
        chance.choice([0, 1, 7, chance.randrange(bytes_max)]) for _ in range(chance.randrange(4))
    ]
    return chance.randbytes(chance.randrange(300)), [
        np.frombuffer(chance.randbytes(size), np.uint8) for size in sizes
    ]


def received(message: tuple[bytes, list[NDArray[np.uint8]]]) -> Message:
    return message[0], [bytes(block) for block in message[1]]


def test_bytes_that_come_one_by_one_are_the_same_messages(
    proxy: Proxy, caller: Caller, seed: int
) -> None:
    chance = random.Random(seed)
    messages = [random_message(chance, 400) for _ in range(10)]
    proxy.plans.append(Plan(pace=Pace(1)))
    outcome = caller.ask(f"tcp://{proxy.address}", *messages)
    assert outcome.answers == [received(message) for message in messages]


def test_one_byte_a_read_and_a_write_at_both_sides_makes_the_same_messages(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    messages = [random_message(chance, 400) for _ in range(10)]
    with EchoServer(stingy=True) as echo, Caller(bulk_lanes=1) as caller:
        be_stingy(monkeypatch.setattr)
        outcome = caller.ask("tcp://{}:{}".format(*echo.where), *messages)
        monkeypatch.undo()
    assert outcome.answers == [received(message) for message in messages]


@pytest.mark.slow
def test_sockets_with_the_least_buffers_make_the_same_messages_at_both_sides_and_in_between(
    seed: int,
) -> None:
    """Every message of more than a few KiB leaves and comes in many pieces, while as many come the
    other way.
    """
    chance = random.Random(seed)
    messages = [random_message(chance, 50_000) for _ in range(8)]
    with (
        EchoServer(buffer_bytes=1) as echo,
        Proxy(echo.where) as proxy,
        Caller(bulk_lanes=1, buffer_bytes=1) as caller,
    ):
        direct = caller.ask("tcp://{}:{}".format(*echo.where), *messages)
        proxy.plans.extend([Plan(buffer_bytes=1)] * 2)
        between = caller.ask(f"tcp://{proxy.address}", *messages)
    for outcome in (direct, between):
        assert outcome.error is None
        assert sorted(outcome.answers) == sorted(received(message) for message in messages)


@pytest.mark.parametrize("bulk_lanes", [0, 2])
def test_bytes_split_and_joined_at_random_are_the_same_messages(
    echo: EchoServer, bulk_lanes: int, one_seed: int
) -> None:
    chance = random.Random(one_seed)
    pace = Pace(chance.choice([100, 5_000, 60_000]), chance.choice([0.0, 0.000_1]))
    messages = [random_message(chance, min(600_000, 100 * pace.piece_bytes_max)) for _ in range(12)]
    with Proxy(echo.where, seed=one_seed) as proxy, Caller(bulk_lanes) as caller:
        proxy.plans.extend([Plan(pace=pace)] * (1 + bulk_lanes))
        outcome = caller.ask(f"tcp://{proxy.address}", *messages)
    assert outcome.error is None
    assert sorted(outcome.answers) == sorted(received(message) for message in messages)
    if not bulk_lanes:
        assert outcome.answers == [received(message) for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_handshake_with_one_wrong_bit_is_refused(
    hasty: EchoServer, direction: str, lane: int
) -> None:
    """Of the second lane's, which is the same handshake, each byte has another bit wrong."""
    with Proxy(hasty.where) as proxy, Caller(bulk_lanes=lane) as caller:
        for at in range(HANDSHAKE_BYTES[direction]):
            for bit in range(8) if not lane or IS_NIGHT else [at % 8]:
                proxy.plans.extend(
                    [Plan()] * lane + [one_way(direction, Fault(Action.FLIP, at, bit=bit))]
                )
                outcome = caller.ask(f"tcp://{proxy.address}", (b"hello", ()))
                assert isinstance(
                    outcome.error, AuthenticationError | RemoteProtocolError | UnreachableError
                ), (at, bit)
                assert outcome.answers == []


FRAMES = {"body": (b"hello", []), "block": (b"hello", [np.frombuffer(b"block", np.uint8)])}


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("kind", FRAMES)
def test_a_wrong_bit_in_a_frame_stays_within_its_payload_or_ends_the_connection(
    proxy: Proxy, caller: Caller, kind: str, direction: str
) -> None:
    """Frames have no checksum (TLS has): a wrong length is found with what follows it, as soon as
    that comes.
    """
    body, blocks = FRAMES[kind]
    number_bytes = 8 if direction == "to_client" else 0
    begin = HANDSHAKE_BYTES[direction]
    lengths_bytes = HEADER.size + 8 * len(blocks)
    payload_bytes = number_bytes + len(body) + sum(block.nbytes for block in blocks)
    right = received((body, blocks))
    for bit in range(8 * (lengths_bytes + payload_bytes)):
        proxy.plans.append(one_way(direction, Fault(Action.FLIP, begin + bit // 8, bit=bit % 8)))
        # a wrong length waits for more, a wrong payload for nothing
        after = [(NO_HEADER if bit < 8 * lengths_bytes else NO_HEADER[:1000], ())] * 3
        outcome = caller.ask(f"tcp://{proxy.address}", (body, blocks), *after, may_be_wrong=True)
        if bit < 8 * lengths_bytes:
            assert isinstance(outcome.error, PeerLostError | RemoteProtocolError), bit
            assert all(body != NO_HEADER for body, _ in outcome.answers)
        else:
            assert outcome.error is None
            answer = outcome.answers[0]
            wrong = sum(
                (a ^ b).bit_count() for a, b in zip(joined(answer), joined(right), strict=True)
            )
            assert wrong == (0 if bit < 8 * (lengths_bytes + number_bytes) else 1)
            assert outcome.answers[1:] == [(NO_HEADER[:1000], [])] * 3


def joined(message: Message) -> bytes:
    return message[0] + b"".join(message[1])


# -- what was said before --------------------------------------------------------------------------


def test_a_recorded_session_that_is_sent_again_is_refused_and_nothing_of_it_runs(
    echo: EchoServer, proxy: Proxy, caller: Caller
) -> None:
    """The acceptor's nonce is another one, so the proof is wrong."""
    before = caller.ask(f"tcp://{proxy.address}", (b"pay", ())).numbers[0]
    recorded = bytes(proxy.passages[-1].to_server.course.recorded)
    assert recorded.endswith(b"pay")
    for _ in range(3):
        with socket.create_connection(echo.where, PATIENCE_S) as sock:
            sock.sendall(recorded)
            sock.settimeout(PATIENCE_S)
            answer = b""
            while len(answer) < HANDSHAKE_BYTES["to_client"]:
                data = sock.recv(4096)
                if not data:
                    break
                answer += data
        assert answer[-1:] == REFUSED
    assert caller.ask(f"tcp://{proxy.address}", (b"pay", ())).numbers[0] == before + 1


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_parts_of_a_handshake_that_come_twice_end_the_connection_by_name(
    proxy: Proxy, caller: Caller, direction: str
) -> None:
    """Within the handshake, and behind it, where they are no frame. What was answered before may be
    there.
    """
    end = HANDSHAKE_BYTES[direction]
    parts = {
        (HELLO.size, HELLO.size),
        (HELLO.size + PROOF_BYTES, PROOF_BYTES),
        (end, end),
        (end, 1),
    }
    for at, count in sorted(parts):
        proxy.plans.append(one_way(direction, Fault(Action.REPEAT, at, count=count)))
        outcome = caller.ask(f"tcp://{proxy.address}", (b"hello", ()), (NO_HEADER, ()))
        assert isinstance(
            outcome.error,
            AuthenticationError | RemoteProtocolError | UnreachableError | PeerLostError,
        ), (
            at,
            count,
        )
        assert outcome.answers == []


def test_a_recorded_answer_of_the_server_is_refused_by_who_connects(
    proxy: Proxy, caller: Caller
) -> None:
    caller.ask(f"tcp://{proxy.address}", (b"pay", ()))
    recorded = bytes(proxy.passages[-1].to_client.course.recorded)
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, Proxy(listening.getsockname()[:2]) as impostor:
        impostor.plans.append(Plan(to_client=[Fault(Action.INSERT, 0, extra=recorded)]))
        outcome = caller.ask(f"tcp://{impostor.address}", (b"pay", ()))
    assert isinstance(outcome.error, AuthenticationError)
    assert outcome.answers == []


@pytest.fixture
def tls_echo(tmp_path: Path) -> Iterator[tuple[EchoServer, Files]]:
    files = Authority(tmp_path).issue("node")
    with EchoServer(tls=files) as server:
        yield server, files


@pytest.mark.slow
def test_with_tls_repeated_and_late_and_wrong_bytes_end_the_connection_and_run_nothing(
    tls_echo: tuple[EchoServer, Files], seed: int
) -> None:
    """Without, a peer in the middle could have them run: a connection is authenticated, its frames
    are not. TCP does not.
    """
    server, files = tls_echo
    chance = random.Random(seed)
    with Proxy(server.where) as proxy, Caller(tls=files) as caller:
        number = caller.ask(f"tcp://{proxy.address}", (b"pay", ())).numbers[0]
        recorded = bytes(proxy.passages[-1].to_server.course.recorded)
        # of TLS 1.3: what it carries, type, tag, and header
        record_bytes = len(b"pay") + HEADER.size + 1 + 16 + 5
        late = recorded[-record_bytes:]
        whole = len(recorded)
        faults = [
            Fault(Action.REPEAT, whole, count=record_bytes),
            Fault(Action.INSERT, whole, extra=late),
            Fault(Action.INSERT, whole - record_bytes, extra=late),
            *(
                Fault(
                    Action.FLIP, whole - 1 - chance.randrange(record_bytes), bit=chance.randrange(8)
                )
                for _ in range(8)
            ),
        ]
        for fault in faults:
            proxy.plans.append(Plan(to_server=[fault]))
            outcome = caller.ask(f"tcp://{proxy.address}", (b"pay", ()), (NO_HEADER, ()))
            assert outcome.error is not None
            assert [body for body, _ in outcome.answers] in ([], [b"pay"])
        numbers = caller.ask(f"tcp://{proxy.address}", (b"pay", ())).numbers
        assert numbers[0] <= number + len(faults) + 1, "at most once in each"
