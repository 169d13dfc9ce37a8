"""Tcp with checksums: whatever becomes of the bytes on their way, nobody gets a wrong one, and the
loss is named at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from prpc_engine import Master, RpcService, errors
from shard import PeerLostError, RemoteProtocolError, UnreachableError
from shard.transport.checked import HEAD, TAIL
from shard.transport.frame import HEADER
from tests.network.caller import HANDSHAKE_BYTES, Caller
from tests.network.echo_server import EchoServer
from tests.network.faults import Action, Fault, Pace, Plan, one_way
from tests.network.proxy import Proxy
from tests.network.server import NAME, SECRET, Serving, checksum, pattern
from tests.network.stingy import be_stingy
from tests.network.tally import TALLY
from tests.network.test_pieces import random_message, received
from tests.network.test_service import IDEMPOTENT, STUBBORN
from tests.prpc_engine.processes import PATIENCE_S

DIRECTIONS = ["to_server", "to_client"]
HELLO_THERE = (b"hello", [np.frombuffer(b"block", np.uint8)])
NUMBER_BYTES = {"to_server": 0, "to_client": 8}  # in front of an answer
RECORD_BYTES = HEAD.size + HEADER.size + 8 + len(b"hello") + len(b"block") + TAIL.size


@pytest.fixture
def checking() -> Iterator[Caller]:
    """It wishes checksums; the server does not, and one side is enough."""
    with Caller(checked=True) as made:
        yield made


def assert_found(error: object) -> None:
    """By this side, or by the other, which hung up."""
    assert isinstance(error, RemoteProtocolError | PeerLostError | UnreachableError), repr(error)
    assert str(error)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_bit_of_a_frame_that_changes_is_found_and_none_of_it_is_delivered(
    proxy: Proxy, checking: Caller, direction: str
) -> None:
    begin, whole = HANDSHAKE_BYTES[direction], RECORD_BYTES + NUMBER_BYTES[direction]
    assert checking.ask(f"tcp://{proxy.address}", HELLO_THERE).answers == [received(HELLO_THERE)]
    assert len(getattr(proxy.passages[-1], direction).course.recorded) == begin + whole, (
        "one record"
    )
    for bit in range(8 * whole):
        proxy.plans.append(one_way(direction, Fault(Action.FLIP, begin + bit // 8, bit=bit % 8)))
        outcome = checking.ask(f"tcp://{proxy.address}", HELLO_THERE)
        assert_found(outcome.error)
        assert outcome.answers == [], bit


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_records_that_come_twice_or_late_are_found_and_run_nothing(
    proxy: Proxy, checking: Caller, direction: str
) -> None:
    begin, whole = HANDSHAKE_BYTES[direction], RECORD_BYTES + NUMBER_BYTES[direction]
    number = checking.ask(f"tcp://{proxy.address}", HELLO_THERE).numbers[0]
    late = bytes(getattr(proxy.passages[-1], direction).course.recorded[begin:])
    faults = [
        Fault(Action.REPEAT, begin + whole, count=whole),
        Fault(Action.INSERT, begin, extra=late),
        Fault(Action.INSERT, begin + whole, extra=late),
    ]
    for fault in faults:
        proxy.plans.append(one_way(direction, fault))
        outcome = checking.ask(f"tcp://{proxy.address}", HELLO_THERE, (b"more", ()))
        assert_found(outcome.error)
        assert outcome.answers in ([], [received(HELLO_THERE)])
    ran = checking.ask(f"tcp://{proxy.address}", HELLO_THERE).numbers[0] - number
    assert ran <= (len(faults) + 1 if direction == "to_server" else 2 * len(faults) + 1), (
        "each at most once"
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_checked_connection_cut_at_any_byte_ends_by_name(
    proxy: Proxy, checking: Caller, direction: str
) -> None:
    begin, whole = HANDSHAKE_BYTES[direction], RECORD_BYTES + NUMBER_BYTES[direction]
    for at in range(begin + whole):
        proxy.plans.append(one_way(direction, Fault(Action.RESET if at % 2 else Action.FINISH, at)))
        outcome = checking.ask(f"tcp://{proxy.address}", HELLO_THERE)
        assert_found(outcome.error)
        assert outcome.answers == []


def test_checked_messages_in_pieces_of_any_size_are_the_same(
    echo: EchoServer, one_seed: int
) -> None:
    chance = random.Random(one_seed)
    messages = [random_message(chance, 300_000) for _ in range(12)]
    with Proxy(echo.where, seed=one_seed) as proxy, Caller(bulk_lanes=1, checked=True) as caller:
        proxy.plans.extend([Plan(pace=Pace(chance.choice([100, 5_000, 60_000])))] * 2)
        outcome = caller.ask(f"tcp://{proxy.address}", *messages)
    assert outcome.error is None
    assert sorted(outcome.answers) == sorted(received(message) for message in messages)


def test_checked_messages_one_byte_a_read_and_a_write_are_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    messages = [random_message(chance, 400) for _ in range(10)]
    with EchoServer(stingy=True) as echo, Caller(checked=True) as caller:
        be_stingy(monkeypatch.setattr)
        outcome = caller.ask("tcp://{}:{}".format(*echo.where), *messages)
        monkeypatch.undo()
    assert outcome.answers == [received(message) for message in messages]


@pytest.mark.slow
def test_calls_whose_bytes_change_at_random_are_right_or_told(
    one_seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the client's wish, in its file. Without checksums one may only ask that no other call is
    spoilt (test_service.py).
    """
    file = tmp_path_factory.mktemp("config") / "own.toml"
    file.write_text("[transport]\ntcp_checksum = true\n")
    chance = random.Random(one_seed)
    with (
        Proxy() as proxy,
        Master(secret=SECRET) as master,
        Serving([], 1, master.address, advertise=proxy.address, transports=["tcp"]) as server,
    ):
        proxy.upstream = server.where
        monkeypatch.setenv("PRPC_CONFIG", str(file))
        with (
            RpcService(master.address, transports=["tcp"], secret=SECRET) as service,
            service.create_client(
                NAME, 1, PATIENCE_S, retry=STUBBORN, idempotent=IDEMPOTENT
            ) as client,
        ):
            for key in range(40):
                direction = chance.choice(DIRECTIONS)
                at = HANDSHAKE_BYTES[direction] + chance.randrange(400)
                proxy.plans.append(
                    one_way(direction, Fault(Action.FLIP, at, bit=chance.randrange(8)))
                )
                proxy.cut_all()
                sent = pattern(key, chance.choice([100, 1000]))
                crc, back = client.call("checked", sent, timeout_s=PATIENCE_S)
                assert crc == checksum(sent) == checksum(back)
                call = client.submit("count", key, timeout_s=PATIENCE_S)
                error = call.error(PATIENCE_S)
                TALLY.ended(error, error is not None or call.result(0.0) == key)
                assert error is None or isinstance(error, errors.MaybeExecuted | errors.NotSent), (
                    repr(error)
                )
                assert error is not None or call.result(0.0) == key
            proxy.plans.clear()
            assert set(client.call("ran", timeout_s=PATIENCE_S).values()) == {1}
