"""An RpcService behind a fault proxy, at the address that it advertises: calls are right or end
with a named error in time.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from prpc_engine import Master, RetryPolicy, RpcClient, RpcService, errors, idempotent
from prpc_engine.rpc.message import HEADER
from prpc_engine.settings.config import wildcard_for
from tests.network.caller import HANDSHAKE_BYTES
from tests.network.faults import Action, Fault, Pace, Plan, one_way
from tests.network.proxy import Proxy
from tests.network.server import NAME, SECRET, Serving, checksum, pattern
from tests.network.tally import TALLY
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import entries_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

# Said here, too: what the server has registered is known once it could be asked, and its first
# connections are cut.
IDEMPOTENT = ["where", "checked", "ran", "same"]
STUBBORN = RetryPolicy(attempts_max=12, unsent_max=40)
FAULTS = 12  # connections that go wrong, in one random course
TOLD = (errors.MaybeExecuted, errors.NotSent, errors.DeadlineExceeded)


class World(NamedTuple):
    proxy: Proxy
    service: RpcService
    client: RpcClient
    master: Master


@pytest.fixture
def world() -> Iterator[World]:
    """One server, which clients reach through the proxy alone."""
    with Proxy() as proxy, Master(secret=SECRET) as master:
        limits = {"peer_silent_s": 2.0, "blocks_bytes_max": 4 << 20, "body_bytes_max": 1 << 20}
        with (
            Serving(
                [], 1, master.address, limits, advertise=proxy.address, transports=["tcp"]
            ) as server,
            RpcService(master.address, transports=["tcp"], secret=SECRET) as service,
        ):
            proxy.upstream = server.where
            with service.create_client(
                NAME, 1, PATIENCE_S, retry=STUBBORN, idempotent=IDEMPOTENT
            ) as client:
                yield World(proxy, service, client, master)


def test_clients_come_to_the_address_that_is_advertised(world: World) -> None:
    proxy, service, client, _ = world
    assert client.call("where") == 1
    assert service.transports[f"tcp://{proxy.address}"] == f"tcp to tcp://{proxy.address}"
    assert len(proxy.passages) == 2, "two lanes"


@pytest.mark.parametrize(("advertise", "port"), [("localhost", 0), ("[fd00::1]:7", 7)])
def test_a_node_and_its_shards_are_listed_under_the_host_that_is_advertised(
    advertise: str, port: int
) -> None:
    """Without a port each under its own; a port that is named is the node's, and its shards keep
    theirs.
    """
    host = advertise.removesuffix(f":{port}")
    with Master() as master, RpcService(master.address, advertise=advertise, shards=1) as service:
        service.create_server("inline", {"one": lambda: 1})
        service.create_server("sharded", Plain, sharded=True)
        bound = int(service.address.rpartition(":")[2])
        found = {}
        for name in ("inline", "sharded"):
            (entry,) = entries_of(service, name, 1, PATIENCE_S)
            found[name] = entry.addresses[-1].removeprefix("tcp://").rpartition(":")
        assert found["inline"] == (host, ":", str(port or bound))
        assert found["sharded"][0] == host
        assert int(found["sharded"][2]) not in (0, port, bound)


@pytest.mark.parametrize(
    ("bind", "told"),
    [("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("127.0.0.2:0", "127.0.0.2")],
)
def test_who_binds_every_address_tells_the_one_that_faces_the_master(bind: str, told: str) -> None:
    with (
        Master(secret=SECRET) as master,
        RpcService(master.address, bind=bind, secret=SECRET, transports=["tcp"]) as service,
    ):
        service.create_server("works", {"one": lambda: 1})
        (entry,) = entries_of(service, "works", 1, PATIENCE_S)
        assert entry.addresses[-1] == f"tcp://{told}:{service.address.rpartition(':')[2]}"
        with RpcService(master.address, secret=SECRET, transports=["tcp"]) as other:
            assert other.create_client("works").call("one") == 1


@pytest.mark.parametrize("unknown", [0, 3], ids=["known", "known_later"])
def test_a_name_of_both_families_or_not_known_at_first_is_faced_by_what_listens(
    unknown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6 comes first in what names stand for, and 0.0.0.0 takes none of it."""
    look_up, asked = socket.getaddrinfo, itertools.count()

    def found(host: object, port: Any, family: int = 0, *others: Any, **named: Any) -> list[Any]:
        if host != "both.test":
            return look_up(host, port, family, *others, **named)
        if next(asked) < unknown:
            raise socket.gaierror(socket.EAI_AGAIN, "not known yet")
        return [
            each
            for one in ("::1", "127.0.0.1")
            for each in look_up(one, port, 0, *others, **named)
            if family in (0, each[0])
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with Master(secret=SECRET) as master:
        name = f"both.test:{master.address.rpartition(':')[2]}"
        with RpcService(name, bind="0.0.0.0:0", secret=SECRET, transports=["tcp"]) as service:
            service.create_server("works", {"one": lambda: 1})
            (entry,) = entries_of(service, "works", 1, PATIENCE_S)
            assert entry.addresses[-1] == f"tcp://127.0.0.1:{service.address.rpartition(':')[2]}"


def test_who_binds_every_ipv4_address_under_a_master_of_ipv6_is_told_what_to_bind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Master("[::1]:0", secret=SECRET) as master,
        RpcService(master.address, bind="0.0.0.0:0", secret=SECRET),
    ):
        (line,) = [text for text in caplog.messages if "faces the master" in text]
        assert "bind='[::]:0'" in line


@pytest.mark.parametrize(
    ("host", "addresses", "wildcard"),
    [
        ("fd00::1", [], "::"),
        ("10.0.0.1", ["10.0.0.1"], "0.0.0.0"),
        ("six.test", ["fd00::1"], "::"),
        ("both.test", ["fd00::1", "10.0.0.1"], "0.0.0.0"),
        ("unknown.test", [], "0.0.0.0"),
    ],
)
def test_who_is_reached_by_ipv6_alone_listens_at_every_address_of_it(
    host: str, addresses: list[str], wildcard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def found(asked: str, *others: Any, **named: Any) -> list[Any]:
        assert asked == host
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [each for one in addresses for each in look_up(one, *others, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert wildcard_for(host) == wildcard


@pytest.mark.parametrize(
    ("advertise", "text"),
    [
        ("", "host ''"),
        ("fd00::1", "an IPv6 address without brackets"),
        ("host:65536", "port '65536'"),
        ("host:", "port ''"),
        ("tcp://host:1", "a scheme"),
        ("0.0.0.0", "every address of a host"),
        ("[::]:80", "every address of a host"),
        (2222, "host:port"),
    ],
)
def test_what_cannot_be_advertised_is_named(advertise: str, text: str) -> None:
    with pytest.raises(errors.ConfigError) as raised:
        RpcService("127.0.0.1:1", advertise=advertise)
    assert f"advertise={advertise!r}: " in str(raised.value)
    assert text in str(raised.value)


def test_calls_are_right_at_one_byte_a_time(world: World, seed: int) -> None:
    proxy, _, client, _ = world
    chance = random.Random(seed)
    proxy.plans.extend([Plan(pace=Pace(1))] * 2)
    for number in range(10):
        sent = pattern(number, chance.randrange(500))
        crc, back = client.call("checked", sent, timeout_s=PATIENCE_S)
        assert crc == checksum(sent) == checksum(back)
    assert not proxy.plans, "taken by the two lanes"


def random_plan(chance: random.Random, actions: list[Action], at_max: int) -> Plan:
    fault = Fault(chance.choice(actions), chance.randrange(at_max), bit=chance.randrange(8))
    pace = (
        Pace(chance.choice([1000, 50_000]), chance.choice([0.0, 0.000_2]))
        if chance.random() < 0.3
        else None
    )
    return (
        Plan(to_server=[fault], pace=pace)
        if chance.random() < 0.5
        else Plan(to_client=[fault], pace=pace)
    )


@pytest.mark.slow
def test_while_connections_are_cut_at_random_calls_are_right_and_none_runs_twice(
    world: World, one_seed: int
) -> None:
    proxy, _, client, _ = world
    chance = random.Random(one_seed)
    proxy.plans.extend(
        random_plan(chance, [Action.RESET, Action.FINISH], chance.choice([300, 3000, 400_000]))
        for _ in range(FAULTS)
    )
    answered: set[int] = set()
    unknown: set[int] = set()
    for key in range(4000):
        if key >= 400 and len(proxy.passages) > FAULTS:
            break
        try:
            answered.add(client.call("count", key, timeout_s=PATIENCE_S))
        except (errors.MaybeExecuted, errors.NotSent):  # at once, and not at the deadline
            unknown.add(key)
        if key % 10 == 0:
            sent = pattern(key, chance.choice([100, 400_000]))
            crc, back = client.call("checked", sent, timeout_s=PATIENCE_S)
            assert crc == checksum(sent) == checksum(back)
    ran = client.call("ran", timeout_s=PATIENCE_S)
    assert set(ran.values()) == {1}
    assert answered <= set(ran) <= answered | unknown
    assert len(proxy.passages) > FAULTS


def test_connections_that_stall_at_random_cost_calls_their_deadline_at_most(
    world: World, one_seed: int
) -> None:
    proxy, _, client, _ = world
    chance = random.Random(one_seed)
    client.call("where")
    proxy.plans.extend(random_plan(chance, [Action.STALL], 600) for _ in range(4))
    proxy.cut_all()
    outcomes = []
    for key in range(20):
        try:
            outcomes.append(client.call("count", key, timeout_s=0.1))
        except TOLD as error:
            outcomes.append(type(error).__name__)
    assert len(outcomes) == 20

    def goes_on() -> bool:
        proxy.release()  # each time: another connection may stall by now, or one at a later byte
        return answers(client)

    wait_until(goes_on, "the way back")


def answers(client: RpcClient) -> bool:
    try:
        return bool(client.call("where", timeout_s=0.5) == 1)
    except (*TOLD, errors.AuthenticationFailed):
        # the latter of a handshake with a wrong bit, from before all was cut
        return False


@pytest.mark.slow
def test_a_wrong_bit_ends_in_a_named_error_or_in_this_calls_value_and_spoils_no_other(
    world: World, one_seed: int
) -> None:
    """Over tcp without TLS, which has no checksum but TCP's own: a bit of the archive may make it
    any other value.
    """
    proxy, _, client, _ = world
    chance = random.Random(one_seed)
    sent = pattern(one_seed, 100)
    right = checksum(sent), sent.tobytes()

    def asked_over_a_new_connection() -> bool:
        with contextlib.suppress(errors.RpcError):
            client.call("checked", sent, timeout_s=0.3)
        return not proxy.plans

    for _ in range(25):
        proxy.plans.append(random_plan(chance, [Action.FLIP], 400))
        proxy.cut_all()
        wait_until(asked_over_a_new_connection, "a call over a new connection")
        proxy.cut_all()
        wait_until(lambda: answers(client), "the way back")
        crc, back = client.call("checked", sent, timeout_s=PATIENCE_S)
        assert (crc, back.tobytes()) == right


def test_answers_of_an_earlier_connection_that_come_on_the_next_are_nobodys(world: World) -> None:
    """A late frame: its call has ended, and no call after it has its number."""
    proxy, _, client, _ = world
    for key in range(20):
        assert client.call("count", key, timeout_s=PATIENCE_S) == key
    begin = HANDSHAKE_BYTES["to_client"]
    late = bytes(proxy.passages[0].to_client.course.recorded[begin:])
    assert len(late) > 20 * HEADER.size
    proxy.plans.append(Plan(to_client=[Fault(Action.INSERT, begin, extra=late)]))
    proxy.cut_all()
    wait_until(lambda: answers(client), "the way back")
    assert not proxy.plans
    calls = [client.submit("count", key, timeout_s=PATIENCE_S) for key in range(100, 200)]
    assert [call.result(PATIENCE_S) for call in calls] == list(range(100, 200))
    assert set(client.call("ran", timeout_s=PATIENCE_S).values()) == {1}


FIRST_CALL_BYTES = 60  # of what follows a handshake


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_two_that_connect_to_each_other_while_both_ways_are_cut_at_any_byte(
    world: World, direction: str
) -> None:
    """Each is connector and acceptor at a time, and both connections break at the same byte of
    handshake or first frames.
    """
    proxy, _, client, _ = world
    with (
        Proxy() as back,
        RpcService(
            world.master.address, advertise=back.address, transports=["tcp"], secret=SECRET
        ) as here,
    ):
        back.upstream = "127.0.0.1", int(here.address.rpartition(":")[2])
        here.create_server("here", {"same": idempotent(lambda key: key)})
        for key in range(HANDSHAKE_BYTES[direction] + FIRST_CALL_BYTES):
            for one in (proxy, back):
                one.plans.append(one_way(direction, Fault(Action.RESET, key)))
                one.cut_all()
            there, around = (
                client.submit("same", key, timeout_s=PATIENCE_S),
                client.submit("reach", "here", key, timeout_s=PATIENCE_S),
            )
            for call in (there, around):
                # "reach" is not to be repeated, and both sides' retries have their budgets
                error = call.error(PATIENCE_S)
                TALLY.ended(error, error is not None or call.result(0.0) == key)
                assert error is not None or call.result(0.0) == key
                told = (
                    error.type_name
                    if isinstance(error, errors.RemoteError)
                    else type(error).__name__
                )
                assert told.rpartition(".")[2] in (
                    "NoneType",
                    "MaybeExecuted",
                    "NotSent",
                    "NoPath",
                ), repr(error)
        for one in (proxy, back):
            one.plans.clear()
            one.cut_all()  # those who have a fault still before them, too
        wait_until(lambda: answers(client), "the way there")
        assert client.call("reach", "here", -1, timeout_s=PATIENCE_S) == -1
        assert len(back.passages) > HANDSHAKE_BYTES[direction]
