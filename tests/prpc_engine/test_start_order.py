"""Processes of a job start in any order: each waits for what it needs until its deadline, and says
for what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from prpc_engine import Master, MasterClient, RetryPolicy, RpcClient, RpcService, errors
from prpc_engine.master.registry import ServerEntry
from prpc_engine.master.session import MasterSession
from prpc_engine.rpc.message import Status
from tests.held import at
from tests.ports import address_of, hold_port
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import entries_of, looks_up, node_of, routes_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

Starts = Callable[[str], Any]


class Streaming(Plain):
    """With a method that yields."""

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)


def waiting_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("waiting for ")
    ]


@pytest.mark.parametrize(
    "start",
    [
        lambda address: RpcService(address, timeout_s=PATIENCE_S),
        lambda address: MasterClient(address, timeout_s=PATIENCE_S),
    ],
    ids=["RpcService", "MasterClient"],
)
def test_who_starts_before_its_master_waits_for_it_and_says_so_once(
    start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_port() as held, ThreadPoolExecutor() as pool:
        address = address_of(held)
        started = pool.submit(start, address)
        wait_until(lambda: waiting_lines(caplog), "the line that says for what it waits")
        assert not started.done()
        with Master(address), started.result(PATIENCE_S):
            (line,) = waiting_lines(caplog)
            assert line.startswith(f"waiting for the master at {address}, for up to 30 s: ")


def test_a_master_that_comes_too_late_is_told_with_what_kept_it_away() -> None:
    with hold_port() as held:
        address = address_of(held)
        with pytest.raises(
            errors.MasterUnreachable,
            match=rf"no master answers at {address} \(\d+\.\d s\): .*refused",
        ) as told:
            # it ends when the pause before the next attempt, which is drawn, would pass that
            RpcService(address, timeout_s=0.5)
        assert f"{address} (0.0 s)" not in str(told.value)


def test_what_waiting_cannot_mend_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Master(secret="the right secret, of many letters") as master:
        with pytest.raises(errors.AuthenticationFailed):
            RpcService(master.address, secret="the wrong secret, of many letters", timeout_s=3600.0)
        with pytest.raises(errors.ConfigError):
            RpcService("nowhere", timeout_s=3600.0)
    assert waiting_lines(caplog) == []


def test_a_client_that_is_closed_while_it_waits_for_its_master_waits_no_longer() -> None:
    with (
        hold_port() as held,
        ThreadPoolExecutor() as pool,
        sessions_in_the_making() as session_of_number,
    ):
        started = pool.submit(RpcService, address_of(held), timeout_s=PATIENCE_S)
        session_of_number(0).close()
        with pytest.raises(errors.RpcError, match="closed"):
            started.result(PATIENCE_S)


@contextlib.contextmanager
def sessions_in_the_making() -> Iterator[Callable[[int], MasterSession]]:
    """Finds the sessions that are made while it is entered, by their number."""
    made: list[MasterSession] = []

    def find(number: int) -> MasterSession:
        wait_until(lambda: len(made) > number, "the session")
        return made[number]

    with at("session.made", lambda self: made.append(self)):
        yield find


# -- calls -----------------------------------------------------------------------------------------


def test_a_call_whose_server_is_away_waits_for_it_until_its_deadline(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_port() as held, RpcService(master.address) as caller:
        before = RpcService(master.address, transports=["tcp"], bind=address_of(held))
        before.create_server("test", Plain())
        client = caller.create_client("test", timeout_s=PATIENCE_S)
        assert client.call("echo", 1, timeout_s=PATIENCE_S) == 1
        before.close()
        wait_until(
            lambda: not any(route.is_connected for route in routes_of(client).values()), "the loss"
        )
        calls = [client.submit("echo", number, timeout_s=PATIENCE_S) for number in range(20)]
        sums = [client.submit("add", number, timeout_s=PATIENCE_S) for number in range(20)]
        wait_until(lambda: waiting_lines(caplog), "the line that says for what they wait")
        assert not any(call.done() for call in calls + sums)
        with RpcService(master.address, transports=["tcp"], bind=address_of(held)) as after:
            after.create_server("test", Plain())
            assert [call.result(PATIENCE_S) for call in calls] == list(range(20))
            assert [call.result(PATIENCE_S) for call in sums] == list(range(10, 30))
        (line,) = waiting_lines(caplog)
        assert line.startswith("waiting for a server of 'test', until the deadlines of its calls: ")


def test_a_call_that_found_no_server_by_its_deadline_was_not_sent(master: Master) -> None:
    with RpcService(master.address) as caller, caller.create_client("test", 0) as client:
        with pytest.raises(
            errors.NotSent,
            match=r"'test' has no live server .* the deadline comes before the next attempt",
        ):
            client.call("echo", 1, timeout_s=1.0)
        assert client.statistics().waiting == 0


class Nobody:
    """An address where nobody listens yet, which the master's entries name."""

    def __init__(self, address: str) -> None:
        self.entry = ServerEntry("test", 0, 99, 16, (f"tcp://{address}",))

    def client(self, caller: RpcService, **settings: Any) -> RpcClient:
        """Of a service whose only server is there, until the master lists another one."""
        return RpcClient(
            "test",
            node_of(caller),
            [self.entry],
            looks_up(lambda: entries_of(caller, "test", 0, 1.0) or [self.entry]),
            **settings,
        )


def test_calls_of_a_named_server_wait_for_it_while_it_is_listed_and_refuses(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    served = Streaming()
    with (
        hold_port() as held,
        RpcService(master.address) as caller,
        Nobody(address_of(held)).client(caller) as client,
    ):
        calls = [
            client.submit_to(0, "echo", 0, timeout_s=PATIENCE_S),
            client.submit_by("a key", "echo", 1, timeout_s=PATIENCE_S),
            client.submit_to(0, "echo", 2, timeout_s=None),
        ]
        stream = client.stream_to(0, "count", 3, timeout_s=PATIENCE_S)
        client.notify_to(0, "hear", "a notification")
        wait_until(lambda: waiting_lines(caplog), "the line that says for what they wait")
        assert not any(call.done() for call in [*calls, stream])
        with RpcService(master.address, transports=["tcp"], bind=address_of(held)) as after:
            after.create_server("test", served, server_id=0)
            assert [call.result(PATIENCE_S) for call in calls] == [0, 1, 2]
            # A stream and a notification leave with the connection, which may be there before the
            # server: they are not sent again.
            with contextlib.suppress(errors.UnknownService):
                assert list(stream) == [0, 1, 2]
            refused = f"failed: {Status.UNKNOWN_SERVICE.name}"
            wait_until(lambda: served.heard == ["a notification"] or refused in caplog.text)
        (line,) = waiting_lines(caplog)
        assert line.startswith(
            "waiting for a server of 'test', until the deadlines of its calls: server 0 of 'test'"
        )


def test_a_call_of_a_named_server_that_stays_away_says_so_by_its_deadline(master: Master) -> None:
    with (
        hold_port() as held,
        RpcService(master.address) as caller,
        Nobody(address_of(held)).client(caller) as client,
    ):
        for ask in (partial(client.call_to, 0), partial(client.call_by, "a key")):
            with pytest.raises(
                (errors.NotSent, errors.DeadlineExceeded),
                match=r"server 0 of 'test'.*refused.*tried \d+ times",
            ):
                ask("echo", 1, timeout_s=0.5)


def test_a_call_of_a_named_server_that_is_not_listed_ends_at_once(master: Master) -> None:
    with hold_port() as held, RpcService(master.address) as caller:
        entry = Nobody(address_of(held)).entry
        with (
            RpcClient("test", node_of(caller), [entry], looks_up(list)) as client,
            pytest.raises(errors.NoServer, match="no server 0"),
        ):
            client.call_to(0, "echo", 1, timeout_s=3600.0)


def test_a_call_by_a_key_goes_to_the_next_owner_when_the_first_is_not_listed_any_more(
    master: Master,
) -> None:
    with (
        hold_port() as held,
        RpcService(master.address) as caller,
        RpcService(master.address) as service,
    ):
        service.create_server("test", Plain(), server_id=1)
        away = Nobody(address_of(held)).entry
        (living,) = entries_of(caller, "test", 1, PATIENCE_S)
        listed = [away, living]
        with RpcClient("test", node_of(caller), [away, living], looks_up(lambda: listed)) as client:
            # 0 of two owners: the one that is away
            waiting = client.submit_by(0, "echo", 1, timeout_s=PATIENCE_S)
            assert not waiting.done()
            listed.remove(away)
            assert waiting.result(PATIENCE_S) == 1


def test_a_policy_may_say_that_a_named_server_is_not_waited_for(master: Master) -> None:
    once = RetryPolicy(unsent_max=1)
    with (
        hold_port() as held,
        RpcService(master.address) as caller,
        Nobody(address_of(held)).client(caller, retry=once) as client,
    ):
        for ask in (
            client.submit_to(0, "echo", 1),
            client.submit_by("a key", "echo", 1),
            client.stream_to(0, "count", 1),
        ):
            with pytest.raises(errors.NotSent, match="refused"):
                ask.result(PATIENCE_S)


def test_a_policy_may_say_how_often_nobody_is_tried(master: Master) -> None:
    with (
        RpcService(master.address) as caller,
        caller.create_client("test", 0, retry=RetryPolicy(unsent_max=2)) as client,
        pytest.raises(
            errors.NoServer, match="given up after unsent_max=2 attempts that reached nobody"
        ),
    ):
        client.call("echo", 1, timeout_s=PATIENCE_S)
