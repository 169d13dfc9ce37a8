"""A session with the master beside handlers that block, at its end, and when it is tried again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master import session as session_module
from prpc_engine.master.client import MasterClient
from prpc_engine.master.opening import BACKOFF_S_MAX, BACKOFF_S_MIN, CONNECT_TIMEOUT_S, Opening
from prpc_engine.master.session import MasterSession
from shard import Future, control_loop
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


def lease_end(master: Master, session: MasterSession) -> float:
    """When the master takes the session for dead."""
    return master._methods._registry._lease_ends[session.number]


def test_a_lease_is_kept_while_a_handler_keeps_the_reactor(master: Master) -> None:
    blocking = Blocking()
    with (
        RpcService(master.address, lease_s=LEASE_S) as serving,
        RpcService(master.address) as calling,
    ):
        serving.create_server("test", blocking)
        session = session_of(serving)
        number, first_end = session.number, lease_end(master, session)
        call = calling.create_client("test").submit("block", timeout_s=2 * PATIENCE_S)
        try:
            assert blocking.entered.wait(PATIENCE_S)
            wait_until(
                lambda: lease_end(master, session) > first_end + 3 * LEASE_S, "some more leases"
            )
        finally:
            blocking.go_on.set()
        assert call.result() == "went on"
        wait_until(lambda: session.connected, "it is up")
        assert session.number == number
        assert serving.master_client.count_up("k", timeout_s=PATIENCE_S) == 0


def test_who_asks_hears_in_time_that_a_handler_keeps_the_reactor(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it had asked for is taken back, should the answer come later."""
    monkeypatch.setattr(session_module, "ANSWER_S", 0.0)
    monkeypatch.setattr(session_module, "LATE_S", 0.0)
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
            with pytest.raises(errors.DeadlineExceeded, match="a handler of this process keeps"):
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


def test_a_session_is_closed_while_the_control_loop_opens_it(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session, opening, go_on = MasterSession._open_session, threading.Event(), Future()

    async def hang(session: MasterSession, *rest: object) -> None:
        opening.set()
        await go_on
        await open_session(session, *rest)  # type: ignore[arg-type]

    client = MasterClient(master.address)
    session = session_of(client)
    monkeypatch.setattr(MasterSession, "_open_session", hang)
    peer = session._peer
    assert peer is not None
    session.node.reactor.call_soon(peer.connection.close)
    assert opening.wait(PATIENCE_S)
    asked = session.submit("services", timeout_s=LONG_S)
    closed_soon(client.close)
    assert isinstance(asked.error(), errors.Closed)
    assert session._keeper.done()
    with pytest.raises(errors.Closed, match="but this client was closed before"):
        session.submit("services")


def test_a_session_can_be_closed_in_the_control_loop(master: Master) -> None:
    client = MasterClient(master.address)

    async def close() -> None:
        session_of(client).close()

    control_loop().spawn(close()).result(PATIENCE_S)
    wait_until(lambda: master.statistics().sessions == 0, "the master hears of it")
    client.close()


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
    first = opening.failed(MAY_COME, 101.0, 1.0)
    assert first is not None
    assert first.is_first
    assert first.delay_s == BACKOFF_S_MIN
    assert opening.attempt_s == pytest.approx(9.0 - BACKOFF_S_MIN)
    second = opening.failed(MAY_COME, 102.0, 1.0)
    assert second is not None
    assert not second.is_first
    assert second.delay_s == 2 * BACKOFF_S_MIN
    assert opening.failed(MAY_COME, 110.0, 0.0) is None


@pytest.mark.parametrize(
    "error", [errors.AuthenticationFailed("no"), errors.NotAPeer("gRPC"), errors.Closed("closed")]
)
def test_what_waiting_cannot_mend_ends_the_first_opening(error: Exception) -> None:
    assert Opening(0.0, 10.0).failed(error, 0.0, 0.0) is None


def test_a_session_that_was_open_is_tried_again_for_ever() -> None:
    opening = Opening(0.0, 10.0)
    opening.opened()
    delays = []
    for attempt in range(20):
        again = opening.failed(errors.AuthenticationFailed("for now"), attempt * 1e3, 1.0)
        assert again is not None
        assert not again.is_first
        assert opening.attempt_s == CONNECT_TIMEOUT_S
        delays.append(again.delay_s)
    assert delays[0] == BACKOFF_S_MIN
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF_S_MAX
    opening.opened()
    shortest = opening.failed(MAY_COME, time.monotonic(), 0.5)
    assert shortest is not None
    assert shortest.delay_s == BACKOFF_S_MIN / 2
