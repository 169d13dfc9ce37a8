"""What a peer, or a bug, could grow has a bound; at the bound who asks is told, and what is there
goes on.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prpc_engine import Deferred, Master, MasterClient, RpcService, TreeEvent, errors
from prpc_engine.master import session
from prpc_engine.master.methods import WATCHES_PER_SESSION_MAX
from prpc_engine.master.namespace import RegistryError, TreeBounds
from prpc_engine.master.protocol import MASTER_ROUTE, WATCH_TARGET
from prpc_engine.master.registry import Registry
from prpc_engine.master.session import ASK, HEARTBEAT, OPEN
from prpc_engine.master.tree import ANSWERS_MAX, SessionRecord
from prpc_engine.master.watch import EVENTS_MAX
from prpc_engine.node.node_info import ABOUT_TARGET
from prpc_engine.rpc.message import HEADER, REQUEST, method_key
from prpc_engine.rpc.server import Bounds, ServedObject
from shard import CancelledError, Future, Limits
from tests.held import at
from tests.ports import address_of, hold_port
from tests.prpc_engine.inside import node_of, session_of, watches_of
from tests.prpc_engine.master_processes import MasterProcess
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_until

CALLS_MAX = 3
WATCH = method_key("watch")


class Handlers:
    def __init__(self) -> None:
        self.gate = Future()
        self.deferred: list[Deferred] = []

    async def wait(self) -> str:
        return str(await self.gate)

    def later(self) -> Deferred:
        self.deferred.append(Deferred())
        return self.deferred[-1]

    def echo(self, value: Any) -> Any:
        return value

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)


class World(Pair):
    def __init__(self) -> None:
        self.handlers = Handlers()
        super().__init__(
            ServedObject("test", 0, TARGET, self.handlers),
            limits=Limits(calls_in_flight_max=CALLS_MAX),
        )


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


# -- calls and jobs --------------------------------------------------------------------------------


def test_calls_and_streams_in_flight_on_one_connection_have_a_bound(world: World) -> None:
    calls = [world.ask("wait") for _ in range(CALLS_MAX - 1)]
    stream = world.client.open(Route(), "count", method_key("count"), (100,), None)
    said = (
        "was not sent to server 0 of 'test' over memory: 3 calls to memory://acceptor wait for "
        "answers, 3 may "
    )
    with pytest.raises(
        errors.Backpressure, match=f"'echo' {said}.*calls_in_flight_max.*; wait for some first"
    ):
        world.ask("echo", 1)
    with pytest.raises(errors.Backpressure, match=f"'count' {said}"):
        world.client.open(Route(), "count", method_key("count"), (1,), None)
    with pytest.raises(errors.Backpressure, match=f"'wait' {said}"):
        world.client.resend(calls[0], Route(), None)
    assert world.client.statistics().in_flight == CALLS_MAX
    stream.cancel()
    one_more = world.ask("echo", 1)
    world.handlers.gate.set_result("open")
    world.turn()
    assert [call.result() for call in (*calls, one_more)] == ["open", "open", 1]


def test_answers_that_plain_functions_owe_have_a_bound(world: World) -> None:
    world.server.bounds = Bounds(tasks_max=1, queue_calls_max=1)
    first, second, third = (world.ask("later") for _ in range(3))
    world.turn()
    with pytest.raises(errors.Cancelled, match="2 calls of 'test' are to be answered later"):
        third.result()  # not refused: its function has run
    assert world.handlers.deferred[2].done(), "whoever has it is told that nobody waits"
    for answer in world.handlers.deferred[:2]:
        assert answer.reply("in the end")
    world.turn()
    assert (first.result(), second.result()) == ("in the end", "in the end")
    assert world.server.statistics().tasks == 0
    fourth = world.ask("later")
    world.turn()
    assert not fourth.done()


def test_a_deferred_answer_that_its_caller_gives_up_is_done_for_whoever_holds_it(
    world: World,
) -> None:
    call = world.ask("later")
    world.turn()
    call.cancel()
    world.ask("later", timeout_s=0.01)

    def is_late() -> bool:
        world.turn()
        return len(world.handlers.deferred) == 2 and world.handlers.deferred[1].done()

    wait_until(is_late, "the deadline")
    cancelled, late = world.handlers.deferred
    assert isinstance(cancelled.error(), CancelledError)
    assert isinstance(late.error(), errors.DeadlineExceeded)
    assert not cancelled.reply("too late")


@pytest.mark.parametrize("method", ["wait", "later"])
def test_a_number_that_is_used_again_before_its_answer_ends_the_connection(
    world: World, method: str
) -> None:
    """Else the first of two jobs would never be found again, and its place never free."""
    call = world.ask(method, timeout_s=None)
    world.turn()
    request = HEADER.pack(REQUEST, TARGET, call.call_id, method_key(method), 0) + b"\x90"
    world.client.connection.send(request)
    world.turn()
    assert world.served.lost
    assert isinstance(call.error(), errors.MaybeExecuted)
    world.handlers.gate.set_result("open")
    for answer in world.handlers.deferred:
        answer.reply("late")
    world.turn()
    assert world.server.statistics().tasks == 0
    assert world.server.jobs.inside == 0


# -- the master ------------------------------------------------------------------------------------


def opened(registry: Registry, root: str = "root") -> int:
    return registry.open(SessionRecord("token", 5.0, root, "", ""), 0.0)


def test_ids_have_a_bound_and_one_that_is_reset_makes_room() -> None:
    registry = Registry(bounds=TreeBounds(counters=made_by_one_session()[1] + 1))
    asker = opened(registry)
    assert registry.generate_id(asker, "a") == 0
    with pytest.raises(RegistryError, match="reset some of those ids"):
        registry.generate_id(asker, "b")
    with pytest.raises(RegistryError):
        registry.tree_node_gen(asker, "/_context_", "", False)
    assert registry.tree_node_sub(asker, "/_context_") == []
    assert registry.generate_id(asker, "a") == 1
    registry.reset_generate_id(asker, "b")
    registry.reset_generate_id(asker, "a")
    assert registry.generate_id(asker, "b") == 0
    opened(registry)  # what the master itself counts goes on


def made_by_one_session() -> tuple[int, int]:
    """How many nodes and counters there are once it was opened."""
    registry = Registry()
    opened(registry)
    return len(registry.tree.nodes), len(registry.tree.counters)


def test_roots_have_a_bound() -> None:
    registry = Registry(bounds=TreeBounds(nodes=made_by_one_session()[0]))
    opened(registry)
    with pytest.raises(RegistryError, match="no room for another root, 'second'"):
        opened(registry, "second")
    opened(registry)


def test_sessions_nodes_and_what_a_session_owns_have_a_bound() -> None:
    bounds = TreeBounds(nodes=made_by_one_session()[0] + 2, owned=1, sessions=2)
    registry = Registry(bounds=bounds)
    asker = opened(registry)
    registry.tree_node_add(asker, "/mine", "", True)
    with pytest.raises(RegistryError, match=f"session {asker} has 1 ephemeral nodes: delete some"):
        registry.tree_node_add(asker, "/more", "", True)
    registry.tree_node_add(asker, "/stays", "", False)
    with pytest.raises(RegistryError, match=r"the tree has [0-9]+ nodes: delete some"):
        registry.tree_node_add(asker, "/more", "", False)
    opened(registry)
    with pytest.raises(RegistryError, match="2 sessions are open: end some"):
        opened(registry)
    registry.end(asker)
    opened(registry)


def test_watches_of_a_session_have_a_bound() -> None:
    with (
        Master() as master,
        MasterClient(master.address) as client,
        MasterClient(master.address) as other,
    ):
        handle = client.tree_watch("/b", print)
        peer = session_of(client).peer
        assert peer is not None
        asked = [
            peer.request(MASTER_ROUTE, "watch", WATCH, (f"/a/{number}", -1), PATIENCE_S, False)
            for number in range(WATCHES_PER_SESSION_MAX - 1)
        ]
        for one in asked:
            one.result(PATIENCE_S)
        refused = f"watches {WATCHES_PER_SESSION_MAX} nodes: watch one above them instead"
        with pytest.raises(errors.Rejected, match=refused):
            client.tree_watch("/c", print)
        other.tree_watch("/c", print)
        client.cancel_watch(handle)
        wait_until(
            lambda: master.statistics().watches == WATCHES_PER_SESSION_MAX, "the end of a watch"
        )
        client.tree_watch("/c", print)


def test_a_verb_whose_answer_is_not_kept_any_more_is_not_served_twice() -> None:
    with Master() as master, MasterClient(master.address) as client:
        client.tree_node_add("/q")
        peer = session_of(client).peer
        assert peer is not None

        def ask(request: int, verb: str, *arguments: Any) -> Any:
            asked = request, verb, list(arguments), PATIENCE_S
            return peer.request(MASTER_ROUTE, "ask", ASK, asked, PATIENCE_S, False).result()

        last = 1001 + ANSWERS_MAX
        made = {n: ask(n, "tree_node_gen", "/q", "", False) for n in range(1000, last + 1)}
        assert ask(last, "tree_node_gen", "/q", "", False) == made[last]
        with pytest.raises(errors.RemoteError, match="done under request 1001") as refused:
            ask(1001, "tree_node_gen", "/q", "", False)
        assert refused.value.type_name.endswith("AnswerForgotten")
        assert len(ask(1001, "tree_node_sub", "/q")) == len(made), "to look does no harm"
        # its numbers are below those
        with pytest.raises(errors.MaybeExecuted, match="look before you ask again"):
            client.tree_node_add("/new")
        assert len(client.tree_node_sub("/q")) == len(made)


def test_a_connection_has_one_session() -> None:
    with Master() as master, MasterClient(master.address) as client:
        own: session.MasterSession = session_of(client)
        peer = own.peer
        assert peer is not None
        arguments = (0, "", 5.0, "root", "", "")
        second = peer.request(MASTER_ROUTE, "open_session", OPEN, arguments, PATIENCE_S, False)
        with pytest.raises(
            errors.RemoteError, match=f"this connection has session {own.number} already"
        ):
            second.result()
        assert master.statistics().sessions == 1
        peer.request(MASTER_ROUTE, "heartbeat", HEARTBEAT, (), PATIENCE_S, False).result()


def test_a_server_that_is_registered_again_and_again_has_two_targets() -> None:
    master = MasterProcess()
    try:
        with RpcService(master=master.address) as service:
            server = service.create_server("test", {"echo": lambda value: value})
            served = node_of(service).servers
            for _ in range(3):
                before = {*served}
                master.kill()
                master = master.again()
                wait_until(lambda before=before: {*served} - before, "another registration")
                client = service.create_client("test", timeout_s=PATIENCE_S)
                assert client.call("echo", 1) == 1
            wait_until(
                lambda: len({*served} - {WATCH_TARGET, ABOUT_TARGET}) == 2,
                "the end of the one before",
            )
            server.close()
            assert {*served} <= {WATCH_TARGET, ABOUT_TARGET}
    finally:
        master.end(signal.SIGTERM)


def test_verbs_that_wait_for_the_master_have_a_bound() -> None:
    with hold_port() as held:
        master = Master(address_of(held))
        with MasterClient(master.address) as client:
            own: session.MasterSession = session_of(client)
            master.close()
            wait_until(lambda: not own.connected, "the loss of the connection")
            waits = [own.submit("ranks", timeout_s=PATIENCE_S) for _ in range(session.REQUESTS_MAX)]
            with pytest.raises(
                errors.Backpressure,
                match=r"'services' was not asked of the master at .*: 65536 verbs wait",
            ):
                own.ask("services")
            own.submit(session.GIVING_UP, 1)  # makes room, and so is always possible
    assert {type(one.error()) for one in waits} == {errors.Closed}


# -- watches ---------------------------------------------------------------------------------------


class Slow:
    """A callback that waits for a node of the tree, and notes what it was called with."""

    def __init__(self, client: MasterClient) -> None:
        self._client = client
        self.events: queue.SimpleQueue[TreeEvent] = queue.SimpleQueue()
        self.entered = threading.Event()

    def __call__(self, event: TreeEvent) -> None:
        self.entered.set()
        self._client.tree_wait("/go_on", timeout_s=PATIENCE_S)
        self.events.put(event)


@pytest.mark.slow
def test_events_that_a_slow_callback_keeps_waiting_are_dropped_and_read_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = 2 * EVENTS_MAX
    with (
        Master() as master,
        MasterClient(master.address) as other,
        MasterClient(master.address, lease_s=60.0, heartbeat_s=0.05) as client,
    ):
        slow = Slow(client)
        client.tree_watch("/_context_", slow)
        other.add_context(0, "x")
        assert slow.entered.wait(PATIENCE_S)
        with at("watches.queued", of=watches_of(client)) as queued:
            for number in range(1, many):
                other.add_context(number, "x")
            behind = f"are {EVENTS_MAX} events behind: a callback takes too long"
            wait_until(lambda: behind in caplog.text, "an event that is dropped")
            assert queued.count == EVENTS_MAX
        with pytest.raises(
            errors.Backpressure, match=f"{EVENTS_MAX} events wait for callbacks of other watches"
        ):
            client.tree_watch("/_model_", slow)
        other.tree_node_add("/go_on")
        # those that were dropped are read anew, in the order of their names
        assert {slow.events.get(timeout=PATIENCE_S).path for _ in range(many)} == {
            f"/_context_/{n}" for n in range(many)
        }
        other.add_context(many, "x")
        assert slow.events.get(timeout=PATIENCE_S).path == f"/_context_/{many}"
        assert slow.events.empty()


@pytest.mark.usefixtures("patient_sessions")  # with such heartbeats nobody would look again
def test_connections_that_come_while_a_callback_waits_are_taken_up_meanwhile() -> None:
    with (
        Master() as master,
        MasterClient(master.address) as other,
        MasterClient(master.address, lease_s=1200.0, heartbeat_s=600.0) as client,
    ):
        slow = Slow(client)
        client.tree_watch("/_context_", slow)
        own: session.MasterSession = session_of(client)
        other.add_context(0, "x")
        assert slow.entered.wait(PATIENCE_S)
        for _ in range(3):
            wait_until(lambda: own.peer is not None, "a connection")
            before = own.peer
            assert before is not None
            with at("session.looking", of=own) as looked:
                own.node.reactor.call_soon(before.connection.close)
                looked.wait()  # the watch over another one
        with at("watches.queued", of=watches_of(client)) as queued:
            other.add_context(1, "y")
            queued.wait()
        other.tree_node_add("/go_on")
        assert [slow.events.get(timeout=PATIENCE_S).path for _ in range(2)] == [
            "/_context_/0",
            "/_context_/1",
        ]
