"""Sessions and watches where a thread is held between two steps: then a connection is lost, a
caller goes, a session ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master.client import MasterClient, TreeEvent
from prpc_engine.master.session import MasterSession
from prpc_engine.rpc.peer import Peer
from shard import Future, PeerLostError, ShardError
from tests.held import Action, Passed, at, held_at
from tests.ports import address_of, hold_port
from tests.prpc_engine.inside import node_of, session_of, watches_of
from tests.prpc_engine.master_processes import MasterProcess
from tests.prpc_engine.processes import PATIENCE_S, wait_until

HEARTBEAT_S = 0.05
LONG_S = 3600.0  # a test that waits for it has failed


def break_off(peer: Peer) -> None:
    peer.connection.close(PeerLostError("it was cut"))


def cut(peer: Peer) -> None:
    peer.reactor.call_soon(lambda: break_off(peer))


def once_slow(session: MasterSession) -> AbstractContextManager[Passed]:
    """The master does not answer the next look of a watch in time, over a connection that stays."""

    def be_slow() -> None:
        raise errors.DeadlineExceeded("it is slow")

    return at("session.looking", be_slow, of=session, times=1)


# -- watches ---------------------------------------------------------------------------------------


def test_a_watch_begins_although_the_master_was_too_slow_to_answer_it(master: Master) -> None:
    heard: queue.Queue[TreeEvent] = queue.Queue()
    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
        once_slow(session_of(client)) as slow,
    ):
        client.tree_watch("/a", heard.put, existing=True)
        slow.wait()
        other.tree_node_add("/a", "1")
        assert heard.get(timeout=PATIENCE_S).value == "1"


def test_watches_go_on_over_a_new_connection_although_the_master_was_slow_to_answer(
    master: Master,
) -> None:
    heard: queue.Queue[str] = queue.Queue()
    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
    ):
        for path in ("/a", "/b"):
            client.tree_watch(path, lambda event: heard.put(event.path))
        session = session_of(client)
        with once_slow(session) as slow:
            assert session.peer is not None
            cut(session.peer)
            slow.wait()  # the watches over the new connection
            for path in ("/a", "/b"):
                other.tree_node_add(path)
            assert {heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)} == {"/a", "/b"}


def test_what_a_watch_missed_is_not_passed_over_while_the_master_is_too_slow_to_say_it(
    master: Master,
) -> None:
    heard: queue.Queue[str | None] = queue.Queue()

    def drop() -> None:
        raise errors.NotSent("it does not arrive")

    with (
        MasterClient(master.address, heartbeat_s=HEARTBEAT_S) as client,
        MasterClient(master.address) as other,
    ):
        client.tree_watch("/a", lambda event: heard.put(event.value))
        with (
            at("watches.changed", drop, of=watches_of(client)),
            once_slow(session_of(client)) as slow,
        ):
            other.tree_node_add("/a", "1")
            slow.wait()  # after a heartbeat that says that something was missed
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
        client.tree_node_set("/a", "2")
        assert heard.get(timeout=PATIENCE_S).value == "2"
        assert not called


def test_a_client_that_is_closed_while_a_watch_is_added_keeps_nobody_waiting(
    master: Master,
) -> None:
    client = MasterClient(master.address)

    def add() -> None:
        with pytest.raises(errors.Closed, match=r"watching '/a' .* was closed meanwhile"):
            client.tree_watch("/a", lambda _: None, timeout_s=LONG_S)

    with (
        held_at("session.looking", of=session_of(client)) as held,
        ThreadPoolExecutor(1) as pool,
    ):
        adding = pool.submit(add)
        held.wait()
        client.close()
        adding.result(PATIENCE_S)
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
    master: Master,
) -> None:
    asking: list[int] = []
    found: list[MasterClient] = []
    with RpcService(master.address) as one:

        def ask() -> None:
            asking.append(1)
            found.append(one.master_client)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        with held_at("service.making_master_client") as held:
            for thread in threads:
                thread.start()
            held.wait()
            wait_until(lambda: len(asking) == 2, "both ask")
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(found) == 2
        assert found[0] is found[1] is one.master_client


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PeerLostError("it was cut"), None], ids=["lost", "closed here"])
def test_a_verb_that_meets_a_connection_that_is_lost_meanwhile_goes_over_the_next_one(
    master: Master, error: ShardError | None
) -> None:
    # no heartbeat, which would meet it, too
    with MasterClient(master.address, lease_s=LONG_S) as client:
        before = session_of(client).peer
        assert before is not None
        with at("session.asking", lambda peer: peer.connection.close(error), times=1):
            assert client.count_up("k", timeout_s=PATIENCE_S) == 0
        assert session_of(client).peer is not before


def test_what_waits_as_a_connection_is_lost_with_the_first_of_it_goes_over_the_next_one(
    place: str,
) -> None:
    first = Master(place)
    with MasterClient(place, lease_s=LONG_S) as client:
        session = session_of(client)
        first.close()
        wait_until(lambda: not session.connected, "the loss of the connection")
        waiting = [session.submit("ranks", timeout_s=PATIENCE_S) for _ in range(3)]
        with at("session.asking", break_off, times=1) as broken, Master(place):
            assert [asked.result(PATIENCE_S) for asked in waiting] == [[], [], []]
    assert broken.count == 1


def test_what_waits_ends_with_closed_when_another_thread_closes_as_the_first_of_it_is_sent(
    place: str,
) -> None:
    first = Master(place)
    client = MasterClient(place, lease_s=LONG_S)
    session = session_of(client)
    closer = threading.Thread(target=client.close)

    def close_first() -> None:
        closer.start()
        wait_until(lambda: not session.connected, "its beginning")

    first.close()
    wait_until(lambda: not session.connected, "the loss of the connection")
    waiting = [session.submit("ranks", timeout_s=LONG_S) for _ in range(3)]
    with at("session.asking", close_first, times=1), Master(place):
        for asked in waiting[1:]:
            assert isinstance(asked.error(PATIENCE_S), errors.Closed)
        closer.join(PATIENCE_S)
        assert not closer.is_alive()


def test_a_connection_that_is_lost_as_its_session_is_taken_up_is_made_again_at_once(
    master: Master,
) -> None:
    with MasterClient(master.address, lease_s=LONG_S) as client:
        before = session_of(client).peer
        assert before is not None
        with (
            at("session.taking_up", break_off, times=1) as first,
            at("session.taken_up", break_off, times=1) as second,
            at("session.taken_up") as third,
        ):
            cut(before)
            third.wait(2)
        assert (first.count, second.count) == (1, 1)
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0


def test_a_session_is_kept_although_its_connection_is_lost_before_it_is_known_to_be_open(
    master: Master,
) -> None:
    def be_away() -> None:
        if 1 < attempts.count < 4:
            raise errors.NotSent("the master is away")

    with (
        at("session.opening", be_away) as attempts,
        at("session.opened", cut, times=1),
        MasterClient(master.address) as client,
    ):
        assert client.count_up("k", timeout_s=PATIENCE_S) == 0
        attempts.wait(4)
        assert master.statistics().sessions == 1


@pytest.fixture
def place() -> Iterator[str]:
    """An address that nobody else takes between one master and the next."""
    with hold_port() as held:
        yield address_of(held)


def test_who_has_joined_has_its_rank_although_another_thread_hears_the_answer(
    master: Master,
) -> None:
    with RpcService(master.address) as node:
        node.driver.take_over()  # the progress thread hears it
        with held_at("session.joined") as held:
            joining = session_of(node).join(node_of(node).addresses)
            held.wait()
            assert not joining.done()
        assert joining.result(PATIENCE_S) == node.rank == 0


def replaced(master: Master) -> Master:
    """Another one in its place, that knows nothing: all sessions are opened anew."""
    address = master.address
    master.close()
    return Master(address)


def at_registration_anew(then: Action) -> AbstractContextManager[Passed]:
    """then(...) as the master is asked to register a server over a new session, for the first
    time.
    """
    return at(
        "session.registering_anew", then, when=lambda asked: "register_server" in asked, times=1
    )


def target_of(service: RpcService) -> int:
    """Of its only server, as the master was first told."""
    (target,) = (at for at, one in node_of(service).servers.items() if one.service == "test")
    return target


def test_a_server_is_registered_again_although_the_connection_is_lost_before_the_answer(
    place: str,
) -> None:
    first = Master(place)
    with RpcService(first.address) as node:
        node.create_server("test", {"who": lambda: "me"})
        with (
            at_registration_anew(break_off) as was,
            replaced(first) as second,
            RpcService(second.address) as other,
        ):
            was.wait()
            wait_until(lambda: session_of(node).connected, "the new session")
            assert (
                other.create_client("test", timeout_s=PATIENCE_S).call("who", timeout_s=PATIENCE_S)
                == "me"
            )


def test_a_server_that_is_taken_back_while_it_is_registered_again_is_taken_back(
    place: str,
) -> None:
    first = Master(place)
    with RpcService(first.address) as node:
        node.create_server("test", {"who": lambda: "me"})
        session, target = session_of(node), target_of(node)
        with (
            at_registration_anew(lambda: session.deregister_server(target)) as was,
            replaced(first) as second,
        ):
            was.wait()
            wait_until(lambda: session.connected, "the new session")
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


def test_a_server_that_is_taken_back_as_a_connection_is_taken_up_is_taken_back(
    place: str,
) -> None:
    first, answers = Master(place), list[Future]()
    with RpcService(first.address) as node:
        node.create_server("test", {"who": lambda: "me"})
        session, target = session_of(node), target_of(node)
        with at("session.taken_up", of=session) as taken_up:
            second = replaced(first)
            taken_up.wait()
        with second:

            def take_back() -> None:
                answers.append(session.deregister_server(target))

            wait_until(lambda: session.connected, "the new session")
            with at("session.taking_up", take_back, of=session):
                assert session.peer is not None
                cut(session.peer)
                wait_until(lambda: answers, "another connection")
                assert answers[0].result(PATIENCE_S) is True, "it was known"
            with MasterClient(second.address) as client:
                (known,) = client.get_rpc_service_info("RpcService")
                assert known.servers == ()


def test_a_server_whose_registration_was_answered_too_late_stays_with_nobody(
    master: Master,
) -> None:
    def be_late(request: Any) -> None:
        request.future.set_error(errors.DeadlineExceeded("the answer came too late"))

    with RpcService(master.address) as node, MasterClient(master.address) as client:
        with (
            at("session.answered", be_late, when=lambda request: request.verb == "register_server"),
            pytest.raises(errors.DeadlineExceeded, match="too late"),
        ):
            node.create_server("test", {"who": lambda: "me"})
        wait_until(
            lambda: [known.servers for known in client.get_rpc_service_info("RpcService")] == [()],
            "its end",
        )
        node.create_server("test", {"who": lambda: "me"}, server_id=0)


def test_a_server_that_is_made_while_the_session_is_replaced_is_found(place: str) -> None:
    masters = [Master(place)]
    with RpcService(masters[0].address) as node:
        session = session_of(node)

        def replace() -> None:
            with at("session.taken_up", of=session) as taken_up:
                masters.append(replaced(masters[0]))
                taken_up.wait()

        with at("serving.prepared", replace, times=1):
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
    sent, late = list[Any](), set[str]()
    with (
        at("session.asking", lambda request: sent.append(request)),
        at("session.overdue", lambda request: late.add(request.verb)),
        MasterProcess(tmp_path) as first,
        MasterClient(first.address, lease_s=60.0) as holder,
        MasterClient(first.address, lease_s=60.0) as waiter,
    ):
        session = session_of(waiter)
        holder.acquire_lock("l")
        sent.clear()
        waiting = session.submit("acquire_lock", "l", timeout_s=LONG_S)
        session.ask("ranks", timeout_s=PATIENCE_S)  # and answered after that: it waits
        claim = sent[0]
        first.kill()
        wait_until(lambda: not session.connected, "the loss of the connection")
        # over now, and not before it was asked
        session.node.reactor.call_soon(lambda: session._overdue(claim))
        assert isinstance(waiting.error(PATIENCE_S), errors.MaybeExecuted)
        wait_until(lambda: "forget" in late, "the time of giving up is over")
        with first.again(), MasterClient(first.address) as third:
            holder.release_lock("l", timeout_s=PATIENCE_S)
            assert third.acquire_lock("l", timeout_s=PATIENCE_S) > 0


def test_a_lock_whose_release_was_not_heard_can_be_released_again(master: Master) -> None:
    def be_unheard() -> None:
        raise errors.MasterUnreachable("nobody answers")

    with MasterClient(master.address) as client, MasterClient(master.address) as other:
        client.acquire_lock("l")
        with at("session.submitting", be_unheard), pytest.raises(errors.MasterUnreachable):
            client.release_lock("l")
        client.release_lock("l")
        assert other.acquire_lock("l", timeout_s=PATIENCE_S) > 0


def test_a_server_goes_although_the_master_does_not_say_in_time_that_it_has_heard(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    def be_late(request: Any) -> None:
        request.future.set_error(errors.DeadlineExceeded("no answer"))

    with RpcService(master.address) as node:
        server = node.create_server("test", {"who": lambda: "me"})
        closing = threading.Thread(target=server.close, daemon=True)
        with at(
            "session.asking", be_late, when=lambda request: request.verb == "deregister_server"
        ):
            closing.start()
            closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert "server 0 of 'test' is closed without the master: no answer" in caplog.text
