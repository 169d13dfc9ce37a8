"""Sessions and watches where a thread is held between two steps: then a connection is lost, a
caller goes, a session ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master import session as session_module
from prpc_engine.master.client import MasterClient, TreeEvent
from prpc_engine.master.registration import Registration
from prpc_engine.master.session import MasterSession
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.service import service, serving
from shard import Future, PeerLostError, ShardError
from tests.ports import address_of, hold_port
from tests.prpc_engine.inside import backend_of, node_of, session_of, watches_of
from tests.prpc_engine.master_processes import MasterProcess
from tests.prpc_engine.processes import PATIENCE_S, wait_until

HEARTBEAT_S = 0.05
LONG_S = 3600.0  # a test that waits for it has failed


def cut(peer: Peer, error: ShardError | None = None) -> None:
    peer.reactor.call_soon(lambda: peer.connection.close(error or PeerLostError("it was cut")))


def once_slow(session: MasterSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The master does not answer the next look of a watch in time, over a connection that stays;
    it, and those answered.
    """
    asked: list[str] = []

    async def direct(peer: Peer | None, method: str, *arguments: Any) -> Any:
        if not asked:
            asked.append(method)
            raise errors.DeadlineExceeded("it is slow")
        answer = await MasterSession.direct(session, peer, method, *arguments)
        asked.append(method)
        return answer

    monkeypatch.setattr(session, "direct", direct)
    return asked


# -- watches ---------------------------------------------------------------------------------------


def test_a_watch_begins_although_the_master_was_too_slow_to_answer_it(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: queue.Queue[TreeEvent] = queue.Queue()
    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
    ):
        asked = once_slow(session_of(client), monkeypatch)
        client.tree_watch("/a", heard.put)
        wait_until(lambda: len(asked) > 1, "another look")
        other.tree_node_add("/a", "1")
        assert heard.get(timeout=PATIENCE_S).value == "1"


def test_watches_go_on_over_a_new_connection_although_the_master_was_slow_to_answer(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: queue.Queue[str] = queue.Queue()
    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
    ):
        for path in ("/a", "/b"):
            client.tree_watch(path, lambda event: heard.put(event.path))
        session = session_of(client)
        asked = once_slow(session, monkeypatch)
        assert session._peer is not None
        cut(session._peer)
        wait_until(lambda: asked, "the watches over the new connection")
        for path in ("/a", "/b"):
            other.tree_node_add(path)
        assert {heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)} == {"/a", "/b"}


def test_what_a_watch_missed_is_not_passed_over_while_the_master_is_too_slow_to_say_it(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: queue.Queue[str | None] = queue.Queue()
    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
    ):
        watches = watches_of(client)
        client.tree_watch("/a", lambda event: heard.put(event.value))
        apply = watches._apply

        async def drop(*_: object) -> None:
            """It does not arrive."""

        monkeypatch.setattr(watches, "_apply", drop)
        other.tree_node_add("/a", "1")
        once_slow(session_of(client), monkeypatch)
        wait_until(lambda: watches._heard == 1, "a heartbeat that says that something was missed")
        monkeypatch.setattr(watches, "_apply", apply)
        other.tree_node_set("/a", "2")
        assert [heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)] == ["1", "2"]


def test_a_watch_that_was_given_up_before_it_began_never_calls(master: Master) -> None:
    go_on = threading.Event()
    called: list[TreeEvent] = []
    heard: queue.Queue[TreeEvent] = queue.Queue()
    with MasterClient(master.address) as client, MasterClient(master.address) as other:
        entered = threading.Event()

        def block(_: TreeEvent) -> None:
            entered.set()
            go_on.wait(PATIENCE_S)

        client.tree_watch("/slow", block)
        other.tree_node_add("/slow")
        assert entered.wait(PATIENCE_S)
        with pytest.raises(
            errors.DeadlineExceeded,
            match=r"watching '/a' .* a callback of another watch may still be running",
        ):
            client.tree_watch("/a", called.append, timeout_s=0.05)
        go_on.set()
        client.tree_watch("/a", heard.put)
        client.tree_node_add("/a")
        assert heard.get(timeout=PATIENCE_S).path == "/a"
        assert not called
        assert len(watches_of(client)._watches) == 2


def test_a_client_that_is_closed_while_a_watch_is_added_keeps_nobody_waiting(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), Future()
    client = MasterClient(master.address)

    async def hang(*_: object) -> Any:
        asked.set()
        await answered
        raise errors.NotSent("the connection was closed")

    def add() -> None:
        with pytest.raises(errors.Closed, match=r"watching '/a' .* was closed meanwhile"):
            client.tree_watch("/a", lambda _: None, timeout_s=LONG_S)

    monkeypatch.setattr(session_of(client), "direct", hang)
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        assert asked.wait(PATIENCE_S)
        client.close()
        adding.result(PATIENCE_S)
    answered.set_result(None)
    with pytest.raises(errors.Closed, match="'/a' cannot be watched: this client was closed"):
        client.tree_watch("/a", lambda _: None)


def test_a_handler_may_add_a_watch(master: Master) -> None:
    heard: queue.Queue[TreeEvent] = queue.Queue()
    with RpcService(master.address) as serving, RpcService(master.address) as calling:
        serving.create_server(
            "test",
            {
                "watch": lambda: serving.master_client.tree_watch(
                    "/a", heard.put, timeout_s=PATIENCE_S
                )
            },
        )
        assert calling.create_client("test").call("watch", timeout_s=2 * PATIENCE_S) > 0
        calling.master_client.tree_node_add("/a")
        assert heard.get(timeout=PATIENCE_S).path == "/a"


def test_threads_that_ask_for_a_services_master_client_at_once_get_the_same(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking: list[int] = []
    found: list[MasterClient] = []

    def make(**settings: Any) -> MasterClient:
        wait_until(lambda: len(asking) == 2, "both ask")
        return MasterClient(**settings)

    with RpcService(master.address) as one:

        def ask() -> None:
            asking.append(1)
            found.append(one.master_client)

        monkeypatch.setattr(service, "MasterClient", make)
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(found) == 2
        assert found[0] is found[1] is one.master_client


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PeerLostError("it was cut"), None], ids=["lost", "closed here"])
def test_a_verb_that_meets_a_connection_that_is_lost_meanwhile_goes_over_the_next_one(
    master: Master, monkeypatch: pytest.MonkeyPatch, error: ShardError | None
) -> None:
    # no heartbeat, which would meet it, too
    with MasterClient(master.address, lease_s=LONG_S) as client:
        before = session_of(client)._peer
        assert before is not None
        request = before.request

        def late(*arguments: Any) -> Any:
            before.connection.close(error)
            return request(*arguments)

        monkeypatch.setattr(before, "request", late)
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0
        assert session_of(client)._peer is not before


def test_a_connection_that_is_lost_as_its_session_is_taken_up_is_made_again_at_once(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_up, taken = MasterSession._take_up, list[Peer]()
    with MasterClient(master.address, lease_s=LONG_S) as client:

        def losing(session: MasterSession, peer: Peer, *rest: Any) -> None:
            taken.append(peer)
            if len(taken) == 1:
                peer.connection.close(PeerLostError("it was cut"))
            take_up(session, peer, *rest)
            if len(taken) == 2:
                peer.connection.close(PeerLostError("it was cut"))

        monkeypatch.setattr(MasterSession, "_take_up", losing)
        before = session_of(client)._peer
        assert before is not None
        cut(before)
        wait_until(lambda: len(taken) == 3, "the third connection")
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0


def test_a_session_is_kept_although_its_connection_is_lost_before_it_is_known_to_be_open(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_once, attempts = MasterSession._open, list[MasterSession]()

    async def lose(session: MasterSession, attempt_s: float) -> Any:
        attempts.append(session)
        if 1 < len(attempts) < 4:
            raise errors.NotSent("the master is away")
        peer, lost = await open_once(session, attempt_s)
        if len(attempts) == 1:
            cut(peer)
        return peer, lost

    monkeypatch.setattr(MasterSession, "_open", lose)
    with MasterClient(master.address) as client:
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0
        wait_until(lambda: len(attempts) == 4, "another attempt")
        assert master.statistics().sessions == 1


@pytest.fixture
def place() -> Iterator[str]:
    """An address that nobody else takes between one master and the next."""
    with hold_port() as held:
        yield address_of(held)


def test_who_has_joined_has_its_rank_although_another_thread_hears_the_answer(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()

    class Late(Registration):
        def __init__(self, *settings: Any) -> None:
            held.set()
            assert go_on.wait(PATIENCE_S)
            super().__init__(*settings)

    with RpcService(master.address) as node:
        node.driver.take_over()  # the progress thread hears it
        monkeypatch.setattr(session_module, "Registration", Late)
        monkeypatch.setattr(session_of(node), "_joined", None)
        joining = session_of(node).join(node_of(node).addresses)
        assert held.wait(PATIENCE_S)
        assert not joining.done()
        go_on.set()
        assert joining.result(PATIENCE_S) == node.rank == 0


def replaced(master: Master) -> Master:
    """Another one in its place, that knows nothing: all sessions are opened anew."""
    address = master.address
    master.close()
    return Master(address)


def at_registration_anew(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[MasterSession], object]
) -> threading.Event:
    """Once the master has registered a server again, then(session) before the session hears of it,
    which may raise what it hears; set when that was.
    """
    now, was = MasterSession._now, threading.Event()

    def after(session: MasterSession, peer: Peer, *asked: Any) -> Future:
        answer = now(session, peer, *asked)
        if "register_server" not in asked or was.is_set():
            return answer
        heard = Future(answer.waiter)

        def tell(answered: Future) -> None:
            try:
                then(session)
                heard.set_result(answered.result())
            except errors.RpcError as error:
                heard.set_error(error)
            was.set()

        answer.add_done_callback(tell)
        return heard

    monkeypatch.setattr(MasterSession, "_now", after)
    return was


def test_a_server_is_registered_again_although_the_connection_is_lost_before_the_answer(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(session: MasterSession) -> None:
        raise errors.NotSent("the answer was lost")

    first = Master(place)
    with RpcService(first.address) as node:
        node.create_server("test", {"who": lambda: "me"})
        was = at_registration_anew(monkeypatch, lose)
        with replaced(first) as second, RpcService(second.address) as other:
            assert was.wait(PATIENCE_S)
            wait_until(lambda: session_of(node).connected, "the new session")
            assert (
                other.create_client("test", timeout_s=PATIENCE_S).call("who", timeout_s=PATIENCE_S)
                == "me"
            )


def test_a_server_that_is_taken_back_while_it_is_registered_again_is_taken_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Master(place)
    with RpcService(first.address) as node:
        target = node.create_server("test", {"who": lambda: "me"})._target
        was = at_registration_anew(monkeypatch, lambda session: session.deregister_server(target))
        with replaced(first) as second:
            assert was.wait(PATIENCE_S)
            wait_until(lambda: session_of(node).connected, "the new session")
            with MasterClient(second.address) as client:
                # By another connection: what the session sends when it is there may still be on its
                # way.
                wait_until(
                    lambda: (
                        [known.servers for known in client.get_rpc_service_info("RpcService")]
                        == [()]
                    ),
                    "its end",
                )


def test_a_server_that_is_taken_back_as_a_connection_is_taken_up_is_taken_back(place: str) -> None:
    first = Master(place)
    with RpcService(first.address) as node:
        target = node.create_server("test", {"who": lambda: "me"})._target
        session, before = session_of(node), session_of(node).number
        with replaced(first) as second:
            wait_until(lambda: session.number != before and session.connected, "the new session")
            answers = Future(node.driver)

            def take_up_meanwhile() -> None:
                asked = session.deregister_server(target)
                peer, session._peer = session._peer, None
                assert peer is not None
                session._take_up(peer, Future(), False, Future())
                asked.add_done_callback(lambda _: answers.set_result(asked.result()))

            node.driver.reactor.call_soon(take_up_meanwhile)
            assert answers.result(PATIENCE_S) is True, "it was known"
            with MasterClient(second.address) as client:
                (known,) = client.get_rpc_service_info("RpcService")
                assert known.servers == ()


def test_a_server_whose_registration_was_answered_too_late_stays_with_nobody(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = MasterSession._finish

    def late(
        session: MasterSession, request: Any, error: BaseException | None, answer: Any = None
    ) -> None:
        if request.verb == "register_server":
            error = errors.DeadlineExceeded("the answer came too late")
        finish(session, request, error, answer)

    with RpcService(master.address) as node, MasterClient(master.address) as client:
        monkeypatch.setattr(MasterSession, "_finish", late)
        with pytest.raises(errors.DeadlineExceeded, match="too late"):
            node.create_server("test", {"who": lambda: "me"})
        wait_until(
            lambda: [known.servers for known in client.get_rpc_service_info("RpcService")] == [()],
            "its end",
        )
        monkeypatch.setattr(MasterSession, "_finish", finish)
        node.create_server("test", {"who": lambda: "me"}, server_id=0)


def test_a_server_that_is_made_while_the_session_is_replaced_is_found(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, masters = ServedObject, [Master(place)]
    with RpcService(masters[0].address) as node:

        def late(name: str, server_id: int, target: int, *rest: Any) -> Any:
            if target:
                session, before = session_of(node), session_of(node)._token
                masters.append(replaced(masters[0]))
                wait_until(
                    lambda: session._token != before and session.connected, "the new session"
                )
            return make(name, server_id, target, *rest)

        monkeypatch.setattr(serving, "ServedObject", late)
        node.create_server("test", {"who": lambda: "me"})
        with masters[1] as second, RpcService(second.address) as other:
            assert (
                other.create_client("test", timeout_s=PATIENCE_S).call("who", timeout_s=PATIENCE_S)
                == "me"
            )


def test_a_place_in_the_queue_of_a_lock_is_given_up_however_long_the_master_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MasterSession.submit.__kwdefaults__ is not None
    monkeypatch.setitem(MasterSession.submit.__kwdefaults__, "timeout_s", 0.05)  # of the giving up
    with (
        MasterProcess(tmp_path) as first,
        MasterClient(first.address, lease_s=60.0) as holder,
        MasterClient(first.address, lease_s=60.0) as waiter,
    ):
        session = session_of(waiter)
        holder.acquire_lock("l")

        def wait_in_vain() -> None:
            with pytest.raises(errors.RpcError):
                waiter.acquire_lock("l", timeout_s=LONG_S)

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        wait_until(
            lambda: any(one.peer is not None for one in list(session._requests.values())),
            "it is asked",
        )
        session.ask("ranks", timeout_s=PATIENCE_S)  # and answered after that: it waits
        first.kill()
        (claim,) = session._requests.values()
        claim.timeout_s = 0.0  # over now, and not before it was asked
        session.node.reactor.call_soon(lambda: session._expire(claim))
        waiting.join(PATIENCE_S)
        given_up = time.monotonic()
        wait_until(
            lambda: all(one.asked > given_up for one in list(session._requests.values())),
            "its time is over",
        )
        with first.again(), MasterClient(first.address) as third:
            holder.release_lock("l", timeout_s=PATIENCE_S)
            assert third.acquire_lock("l", timeout_s=PATIENCE_S) > 0


def test_a_lock_whose_release_was_not_heard_can_be_released_again(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MasterClient(master.address) as client, MasterClient(master.address) as other:
        client.acquire_lock("l")

        def unheard(*asked: Any, **options: Any) -> Any:
            monkeypatch.undo()
            raise errors.MasterUnreachable("nobody answers")

        monkeypatch.setattr(backend_of(client), "ask", unheard)
        with pytest.raises(errors.MasterUnreachable):
            client.release_lock("l")
        client.release_lock("l")
        assert other.acquire_lock("l", timeout_s=PATIENCE_S) > 0


def test_a_server_goes_although_the_master_does_not_say_in_time_that_it_has_heard(
    master: Master, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RpcService(master.address) as node:
        server = node.create_server("test", {"who": lambda: "me"})
        unheard = Future(node.driver)
        unheard.set_error(errors.DeadlineExceeded("no answer"))
        monkeypatch.setattr(session_of(node), "deregister_server", lambda target: unheard)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert "server 0 of 'test' is closed without the master: no answer" in caplog.text
