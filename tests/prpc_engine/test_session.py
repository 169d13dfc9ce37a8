"""A session with the master beside handlers that block, at its end, and when it is tried again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master import session as session_module
from prpc_engine.master.client import MasterClient
from prpc_engine.master.master import master_error
from prpc_engine.master.opening import BACKOFF, CONNECT_TIMEOUT_S, LAST_S, Again, Opening
from prpc_engine.master.session import HEARTBEATS_PER_LEASE
from shard import Future, control_loop
from tests.held import at, held_at
from tests.ports import address_of, hold_port
from tests.prpc_engine.inside import session_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

LEASE_S = 0.5
LONG_S = 3600.0  # a test that waits for it has failed


class Blocking:
    """A handler that keeps its reactor until it is let go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def block(self) -> str:
        self.entered.set()
        return "went on" if self.go_on.wait(PATIENCE_S) else "nobody let it go on"


def test_a_lease_is_kept_while_a_handler_keeps_the_reactor(master: Master) -> None:
    blocking = Blocking()
    with (
        RpcService(master.address, lease_s=LEASE_S) as serving,
        RpcService(master.address) as calling,
    ):
        serving.create_server("test", blocking)
        session = session_of(serving)
        number = session.number
        call = calling.create_client("test").submit("block", timeout_s=2 * PATIENCE_S)
        try:
            assert blocking.entered.wait(PATIENCE_S)
            with at("master.heartbeat", when=lambda session: session == number) as beats:
                beats.wait(3 * HEARTBEATS_PER_LEASE)  # some more leases
        finally:
            blocking.go_on.set()
        assert call.result() == "went on"
        wait_until(lambda: session.connected, "it is up")
        assert session.number == number
        assert serving.master_client.count_up("k", timeout_s=PATIENCE_S) == 0


@pytest.mark.slow
def test_who_asks_hears_in_time_that_a_handler_keeps_the_reactor(master: Master) -> None:
    """And what it had asked for is taken back, should the answer come later."""
    blocking = Blocking()
    with (
        RpcService(master.address, lease_s=LONG_S) as serving,
        RpcService(master.address) as calling,
        MasterClient(master.address) as other,
    ):
        serving.create_server("test", blocking)
        call = calling.create_client("test").submit("block", timeout_s=2 * PATIENCE_S)
        try:
            assert blocking.entered.wait(PATIENCE_S)
            with pytest.raises(errors.DeadlineExceeded, match="a handler of this process"):
                serving.master_client.acquire_lock("l", timeout_s=0.05)
        finally:
            blocking.go_on.set()
        assert call.result() == "went on"
        assert other.acquire_lock("l", timeout_s=PATIENCE_S) > 0


# -- the end ---------------------------------------------------------------------------------------


def closed_soon(close: Callable[[], object]) -> None:
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_session_is_closed_while_it_waits_for_a_master_that_never_came() -> None:
    with hold_port() as held, pytest.raises(errors.MasterUnreachable):
        MasterClient(address_of(held), timeout_s=0.05)


def test_a_session_is_closed_while_the_control_loop_opens_it(master: Master) -> None:
    client = MasterClient(master.address)
    session = session_of(client)
    peer = session.peer
    assert peer is not None
    with held_at("session.asking_to_open", of=session) as opening:
        session.node.reactor.call_soon(peer.connection.close)
        opening.wait()
        asked = session.submit("services", timeout_s=LONG_S)
        closed_soon(client.close)
        assert isinstance(asked.error(), errors.Closed)
    with pytest.raises(errors.Closed, match="but this client was closed before"):
        session.submit("services")


def test_a_session_can_be_closed_in_the_control_loop(master: Master) -> None:
    client = MasterClient(master.address)

    async def close() -> None:
        session_of(client).close()

    control_loop().spawn(close()).result(PATIENCE_S)
    wait_until(lambda: master.statistics().sessions == 0, "the master hears of it")
    client.close()


def test_each_verb_that_threads_ask_as_the_session_is_closed_ends_or_is_refused(
    master: Master,
) -> None:
    client = MasterClient(master.address)
    session, asked = session_of(client), list[Future]()

    def ask() -> None:
        with contextlib.suppress(errors.Closed):
            for _ in range(session_module.REQUESTS_MAX // 8):
                asked.append(session.submit("ranks", timeout_s=LONG_S))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(one.done() for one in asked), "the first answer")
    closed_soon(client.close)
    for thread in threads:
        thread.join(PATIENCE_S)
    ends = {type(one.error(0.0)) for one in asked}
    assert ends <= {type(None), errors.Closed, errors.Backpressure}


def test_close_in_a_fork_does_nothing_and_does_not_wait(master: Master) -> None:
    with MasterClient(master.address) as client:
        pid = os.fork()
        if pid == 0:  # pragma: no cover - another process
            session_of(client).close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0


# -- whether it is tried again ---------------------------------------------------------------------

MAY_COME = errors.NotSent("nobody answers")


def test_a_master_that_may_come_is_waited_for_until_the_time_is_over() -> None:
    opening = Opening(100.0, 10.0)
    first = opening.failed(MAY_COME, 101.0, 1.0, is_new=True)
    assert first is not None
    assert first.is_first
    assert first.delay_s == BACKOFF.first_s
    assert opening.attempt_s == CONNECT_TIMEOUT_S
    second = opening.failed(MAY_COME, 102.0, 1.0, is_new=True)
    assert second is not None
    assert not second.is_first
    assert second.delay_s == 2 * BACKOFF.first_s
    assert opening.failed(MAY_COME, 110.0, 0.0, is_new=True) is None


def test_the_last_attempt_is_as_late_as_may_be() -> None:
    opening, now = Opening(100.0, 10.0), 100.0
    while (again := opening.failed(MAY_COME, now, 1.0, is_new=True)) is not None:
        now += again.delay_s
    assert now == pytest.approx(110.0 - LAST_S)
    assert opening.attempt_s == pytest.approx(LAST_S)


def test_an_attempt_has_a_part_of_the_time_and_twice_as_much_once_that_was_too_little() -> None:
    """One whose peer has vanished hears nothing more: the next one finds the master that is back.
    And one that is slow to answer is given the time.
    """
    opening, now, parts = Opening(0.0, 60.0), 0.0, list[float]()
    again: Again | None = Again(0.0, False)
    while again is not None:
        now += again.delay_s
        parts.append(opening.attempt_s)
        now += opening.attempt_s
        again = opening.failed(MAY_COME, now, 0.0, is_new=True)
    assert parts[:3] == [CONNECT_TIMEOUT_S, 2 * CONNECT_TIMEOUT_S, 4 * CONNECT_TIMEOUT_S]
    assert now == pytest.approx(60.0)
    assert Opening(0.0, 1.0).attempt_s == 1.0
    quick = Opening(0.0, 60.0)
    for number in range(50):
        assert quick.failed(MAY_COME, number / 10, 0.0, is_new=True) is not None
    assert quick.attempt_s == CONNECT_TIMEOUT_S, "none of them had used it up"


def test_a_master_that_is_stopping_is_waited_for_as_one_that_is_not_there() -> None:
    assert Opening(0.0, 10.0).failed(errors.Stopping("it stops"), 0.0, 0.0, is_new=True) is not None
    told = master_error("127.0.0.1:1", errors.Stopping("it stops"), time.monotonic())
    assert isinstance(told, errors.MasterUnreachable)


@pytest.mark.parametrize(
    "error", [errors.AuthenticationFailed("no"), errors.NotAPeer("gRPC"), errors.Closed("closed")]
)
def test_what_waiting_cannot_mend_ends_the_first_opening(error: Exception) -> None:
    assert Opening(0.0, 10.0).failed(error, 0.0, 0.0, is_new=True) is None


def test_a_session_that_was_open_is_tried_again_for_ever() -> None:
    opening = Opening(0.0, 10.0)
    opening.opened()
    delays = []
    for attempt in range(20):
        again = opening.failed(
            errors.AuthenticationFailed("for now"), attempt * 1e3, 1.0, is_new=False
        )
        assert again is not None
        assert not again.is_first
        assert opening.attempt_s == CONNECT_TIMEOUT_S
        delays.append(again.delay_s)
    assert delays[0] == BACKOFF.first_s
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF.max_s
    opening.opened()
    shortest = opening.failed(MAY_COME, time.monotonic(), 0.5, is_new=False)
    assert shortest is not None
    assert shortest.delay_s == BACKOFF.first_s / 2
