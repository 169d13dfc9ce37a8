"""What a client of the master goes by and is not so any more: a lock, a session, a watch, an
arrival that went meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prpc_engine import Master, errors
from prpc_engine.master.client import MasterClient, SessionBackend, TreeEvent
from prpc_engine.master.protocol import MASTER_ROUTE
from prpc_engine.master.registration import Registration
from prpc_engine.master.session import END
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from shard import control_loop
from tests.held import at
from tests.prpc_engine.inside import session_of, watches_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

LONG_S = 3600.0  # a test that waits for it has failed


@pytest.fixture
def client(master: Master) -> Iterator[MasterClient]:
    with MasterClient(master.address, lease_s=LONG_S) as made:
        yield made


def expire(client: MasterClient) -> None:
    """Its session ends at the master, and the client has another one."""
    session = session_of(client)
    ended, peer = session.number, session.peer
    assert peer is not None
    peer.request(MASTER_ROUTE, "end_session", END, (), PATIENCE_S, False).result()
    peer.reactor.call_soon(peer.connection.close)
    wait_until(lambda: session.number != ended and session.connected, "another session")


# -- locks and barriers ----------------------------------------------------------------------------


def test_who_lost_a_lock_does_not_release_it_for_another_thread_that_holds_it_since(
    master: Master, client: MasterClient
) -> None:
    with ThreadPoolExecutor(1) as other_thread, MasterClient(master.address) as other:
        with (
            pytest.raises(
                errors.Rejected, match=r"lock 'l' was lost before its release \(token \d+\)"
            ),
            client.lock("l") as token,
        ):
            expire(client)
            assert (
                other_thread.submit(client.acquire_lock, "l", PATIENCE_S).result(PATIENCE_S)
                == token + 1
            )
        assert len(other.tree_node_sub("/_lock_/l")) == 1
        other_thread.submit(client.release_lock, "l").result(PATIENCE_S)
        assert other.acquire_lock("l", timeout_s=PATIENCE_S) == token + 2


def test_who_lost_a_lock_is_told_so_when_it_releases_what_another_thread_holds_since(
    client: MasterClient,
) -> None:
    with ThreadPoolExecutor(1) as other_thread:
        token = client.acquire_lock("l")
        expire(client)
        assert (
            other_thread.submit(client.acquire_lock, "l", PATIENCE_S).result(PATIENCE_S)
            == token + 1
        )
        with pytest.raises(
            errors.Rejected, match=r"lock 'l' was lost before its release \(token \d+\)"
        ):
            client.release_lock("l")
        # for the other one: who holds a lock need not be who gives it back
        client.release_lock("l")


def test_who_waits_at_a_barrier_that_is_cleared_away_is_told_so_at_once(
    master: Master, client: MasterClient
) -> None:
    with ThreadPoolExecutor(1) as pool, MasterClient(master.address) as other:
        waiting = pool.submit(client.barrier, "b", 2, PATIENCE_S)
        wait_until(lambda: other.tree_node_sub("/_barrier_"), "its arrival")
        other.tree_clear_path("/_barrier_/b")
        with pytest.raises(
            errors.Rejected, match=r"barrier 'b': the arrival was deleted meanwhile"
        ):
            waiting.result()


# -- sessions --------------------------------------------------------------------------------------


def test_a_session_that_was_opened_unheard_does_not_keep_its_client_from_another_one(
    client: MasterClient,
) -> None:
    def be_slow(peer: Peer) -> None:
        peer.reactor.call_soon(peer.connection.close)
        raise errors.DeadlineExceeded("the master was slow")

    with at("session.was_opened", be_slow, when=lambda number: number == 0, times=1) as unheard:
        expire(client)
    assert unheard.count == 1
    assert client.count_up("k", timeout_s=PATIENCE_S) == 0


def test_what_was_registered_again_before_the_connection_was_lost_is_not_registered_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[tuple[Any, ...]] = []
    served = {
        target: ServedObject(name, 0, target, {"echo": lambda value: value})
        for target, name in ((1, "a"), (2, "b"))
    }
    joined = Registration(["a:1"], -1, 0, served)
    joined.registered("a", 0, 1, 11)
    joined.registered("b", 0, 2, 12)

    def register_anew(token: str) -> None:
        steps = joined.anew(token)
        _, verb, *arguments = next(steps)
        while True:
            asked.append((verb, *arguments[:1]))
            try:
                if asked.count(("register_server", "b")) == 1 == asked.count(asked[-1]):
                    _, verb, *arguments = steps.throw(errors.NotSent("the connection was lost"))
                else:
                    answer = {"join": 0, "prepare_server": (0, 100 + len(asked))}.get(verb)
                    _, verb, *arguments = steps.send(answer)
            except StopIteration:
                return

    with pytest.raises(errors.NotSent):
        register_anew("token")
    first = len(asked)
    register_anew("token")
    assert asked[first:] == [("join", ["a:1"]), ("register_server", "b")]
    register_anew("another token")
    assert asked[-4:] == [
        (verb, name) for name in "ab" for verb in ("prepare_server", "register_server")
    ]
    assert not caplog.records


# -- watches ---------------------------------------------------------------------------------------


def test_a_watch_that_is_cancelled_while_the_end_of_another_is_looked_at_harms_nobody(
    master: Master, client: MasterClient, caplog: pytest.LogCaptureFixture
) -> None:
    class Cancelling(str):
        """A path that, looked at in the control loop, has another watch cancelled by then."""

        def __eq__(self, other: object) -> bool:
            if control_loop().is_here():
                client.cancel_watch(last)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    watches = watches_of(client)
    first, middle, last = (client.tree_watch(path, lambda _: None) for path in ("/a", "/b", "/c"))
    watches._watches[middle].path = Cancelling("/b")
    client.cancel_watch(first)
    wait_until(lambda: master.statistics().watches == 1, "the master watches what is left")
    assert not caplog.records


def test_a_watch_that_had_not_begun_when_its_client_was_closed_never_calls(
    client: MasterClient,
) -> None:
    user = MasterClient(backend=SessionBackend(session_of(client)))
    held = threading.Event()
    called: list[TreeEvent] = []

    def hold(_: TreeEvent) -> None:
        held.set()
        client.tree_wait("/go_on", timeout_s=PATIENCE_S)

    user.tree_watch("/a", hold)
    client.tree_node_add("/a")
    assert held.wait(PATIENCE_S)
    with (
        at("watches.queued", of=watches_of(user)) as queued,
        ThreadPoolExecutor(1) as pool,
    ):
        late = pool.submit(user.tree_watch, "/a", called.append, True)
        queued.wait(2)  # it waits for the other's callback
        user.close()
        client.tree_node_add("/go_on")
        with pytest.raises(errors.Closed, match=r"watching '/a' .* was closed meanwhile"):
            late.result(PATIENCE_S)
    assert not called
