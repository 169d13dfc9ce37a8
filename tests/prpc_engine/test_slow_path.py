"""Calls that cannot be sent at once: nobody who makes one waits for a connection, the master, or
another call's server.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService, errors, incoming
from prpc_engine.client import directory, dispatcher
from prpc_engine.client.retry import AT_ONCE, RetryPolicy
from prpc_engine.master.registry import ServerEntry
from prpc_engine.rpc.call import Call
from prpc_engine.service.serving import RpcServer
from shard import Future, Limits, control_loop
from tests.held import Held, at, held_at
from tests.prpc_engine.blackhole import Blackhole
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import (
    dispatcher_of,
    entries_of,
    looks_up,
    node_of,
    peers_by_address,
    routes_of,
)
from tests.prpc_engine.processes import PATIENCE_S, wait_until

LONG_S = 3600.0  # a test that waits for it has failed
SHORT_S = 0.05


@dataclass
class World:
    """A server, a server that cannot be connected to, and who calls them."""

    master: Master
    serving: RpcService
    calling: RpcService
    served: Plain
    hole: Blackhole

    def entry(self, server_id: int = 0) -> ServerEntry:
        """Of the server that works."""
        (entry,) = entries_of(self.calling, "test", 1, PATIENCE_S)
        return replace(entry, server_id=server_id)

    def client(
        self,
        *entries: ServerEntry,
        balance: str = "least_outstanding",
        retry: RetryPolicy | None = None,
    ) -> RpcClient:
        """Of those servers, and no others."""
        return RpcClient(
            "test",
            node_of(self.calling),
            list(entries),
            looks_up(lambda: list(entries)),
            balance,
            retry,
        )

    def disconnect(self) -> None:
        """Hang up on the server that works."""
        peer = peers_by_address(node_of(self.calling))[self.entry().addresses[0]]
        self.calling.driver.reactor.call_soon(peer.connection.close)
        wait_until(lambda: peer.lost, "the end of the connection")

    def hung(self) -> RpcClient:
        """Of a server that cannot be connected to."""
        return self.client(self.hole.entry("test", 0))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # who connects to the hole is at it until that is closed
    monkeypatch.setattr(dispatcher, "CONNECT_TIMEOUT_S", PATIENCE_S)
    with (
        Master() as master,
        RpcService(master.address, transports=["tcp"]) as serving,
        RpcService(master.address, transports=["tcp"]) as calling,
        Blackhole() as hole,
    ):
        served = Plain()
        serving.create_server("test", served)
        yield World(master, serving, calling, served, hole)


def connectors(client: RpcClient) -> int:
    return dispatcher_of(client).connectors


def test_a_call_has_its_future_while_its_server_is_connected_to(world: World) -> None:
    with world.hung() as client:
        calls = [
            client.submit("echo", 1, timeout_s=LONG_S),
            client.submit_to(0, "echo", 1, timeout_s=None),
        ]
        wait_until(lambda: connectors(client) == 1, "one connects for both")
        assert not any(call.done() for call in calls)
        assert client.statistics().waiting == 2


def test_a_call_ends_at_its_deadline_although_its_server_is_still_connected_to(
    world: World,
) -> None:
    with world.hung() as client:
        with pytest.raises(
            errors.DeadlineExceeded,
            match=r"'echo' was not sent to server 0 of 'test' \(rank 99\) within \d+\.\d+ s",
        ):
            client.call("echo", 1, timeout_s=SHORT_S)
        with pytest.raises(errors.DeadlineExceeded, match="not connected yet"):
            client.submit_to(0, "echo", 1, timeout_s=SHORT_S).result(PATIENCE_S)
        assert connectors(client) == 1
        wait_until(
            lambda: client.statistics().waiting == len(routes_of(client)[0].in_flight) == 0,
            "neither of them kept",
        )


def test_a_call_that_waits_for_a_connection_can_be_cancelled(world: World) -> None:
    with world.hung() as client:
        call = client.submit("echo", 1, timeout_s=LONG_S)
        assert call.cancel()
        with pytest.raises(errors.Cancelled, match="'echo' was cancelled by its caller"):
            call.result()


def test_close_ends_what_waits_for_a_connection(world: World) -> None:
    client = world.hung()
    call = client.submit("echo", 1, timeout_s=None)
    ends: list[errors.RpcError] = []

    def ask() -> None:
        try:
            client.call("echo", 2)
        except errors.RpcError as error:
            ends.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    wait_until(lambda: client.statistics().waiting == 2)
    client.close()
    with pytest.raises(errors.Closed, match="the client of 'test' was closed here"):
        call.result(PATIENCE_S)
    waiting.join(PATIENCE_S)
    assert [type(error) for error in ends] == [errors.Closed]


def test_a_server_that_cannot_be_connected_to_holds_up_no_call_of_another(world: World) -> None:
    with world.client(world.hole.entry("test", 0), world.entry(1)) as client:
        hung = client.submit_to(0, "echo", 0, timeout_s=LONG_S)
        assert client.call_to(1, "echo", 1, timeout_s=PATIENCE_S) == 1
        assert not hung.done()
        fine = [client.submit("echo", number, timeout_s=PATIENCE_S) for number in range(2)]
        world.hole.close()
        assert [call.result(PATIENCE_S) for call in fine] == [0, 1], (
            "those that met the other go on to this one"
        )
        with pytest.raises(TimeoutError):
            hung.result(SHORT_S)  # it was to go nowhere else, and has a deadline far away


def test_a_call_of_a_named_server_ends_with_the_first_failure_where_its_policy_says_so(
    world: World,
) -> None:
    with world.client(world.hole.entry("test", 0), world.entry(1), retry=AT_ONCE) as client:
        hung = client.submit_to(0, "echo", 0, timeout_s=LONG_S)
        world.hole.close()
        with pytest.raises(
            errors.NotSent, match=r"server 0 of 'test' \(rank 99\) cannot be reached: .*tried for"
        ):
            hung.result(PATIENCE_S)


def test_a_handler_that_calls_a_server_that_cannot_be_connected_to_holds_up_no_request(
    world: World,
) -> None:
    pending = []
    hung = RpcClient("test", node_of(world.serving), [world.hole.entry("test", 0)], looks_up(list))

    def begin() -> None:
        pending.append(hung.submit("echo", 1, timeout_s=LONG_S))

    world.serving.create_server("asking", {"begin": begin, "one": lambda: 1})
    with world.calling.create_client("asking") as client, hung:
        client.call("begin", timeout_s=PATIENCE_S)
        assert client.call("one", timeout_s=PATIENCE_S) == 1
        (call,) = pending
        assert not call.done()
        assert call.overall - call.sent <= PATIENCE_S + 1.0, "it inherits the deadline of who asked"


def test_so_many_servers_are_connected_to_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CONNECTORS_MAX", 1)
    with (
        Blackhole() as second,
        world.client(
            world.hole.entry("test", 0), second.entry("test", 1), world.entry(2), retry=AT_ONCE
        ) as client,
    ):
        calls = [
            client.submit_to(server_id, "echo", server_id, timeout_s=LONG_S)
            for server_id in range(3)
        ]
        wait_until(lambda: connectors(client) == 1)
        assert not any(call.done() for call in calls)
        for hole in (world.hole, second):
            hole.close()
        assert calls[2].result(PATIENCE_S) == 2
        assert [type(call.error(PATIENCE_S)) for call in calls[:2]] == [errors.NotSent] * 2


def test_a_client_of_another_service_is_not_held_up_either(world: World) -> None:
    with world.hung() as client, world.client(world.entry()) as other:
        hung = client.submit("echo", 0, timeout_s=LONG_S)
        wait_until(lambda: connectors(client) == 1)
        assert other.call("echo", 1, timeout_s=PATIENCE_S) == 1
        assert not hung.done()


def test_calls_leave_in_the_order_they_were_made(world: World) -> None:
    for _ in range(20):
        world.served.heard.clear()
        with world.client(world.entry()) as client:
            client.notify("hear", 0)
            client.submit("hear", 1)
            for number in range(2, 20):
                client.call("hear", number, timeout_s=PATIENCE_S)
            assert world.served.heard == list(range(20))
        world.disconnect()


@pytest.mark.parametrize("is_there", [True, False])
def test_what_follows_a_call_is_not_run_by_who_connected(world: World, is_there: bool) -> None:
    """An application's callback may block; the control loop must not."""
    ended, here = threading.Event(), list[bool]()

    def follow(_: Future) -> None:
        here.append(control_loop().is_here())
        ended.set()

    if not is_there:
        world.hole.close()
    entry = world.entry() if is_there else world.hole.entry("test", 0)
    with world.client(entry, retry=AT_ONCE) as client:
        call = client.submit("echo", 1, timeout_s=PATIENCE_S)
        call.add_done_callback(follow)
        assert ended.wait(PATIENCE_S)
    assert here == [False]


def test_many_calls_that_wait_for_one_connection_leave_in_their_order(world: World) -> None:
    count = 3 * dispatcher.DELIVERED_MAX
    with world.client(world.entry()) as client:
        calls = [client.submit("hear", number, timeout_s=PATIENCE_S) for number in range(count)]
        for call in calls:
            call.result()
        assert world.served.heard == list(range(count))


def test_an_array_may_be_changed_once_the_call_waits_for_a_connection(world: World) -> None:
    with world.client(world.entry()) as client:
        array = np.ones(100_000)
        call = client.submit("first_and_last", array, timeout_s=PATIENCE_S)
        array[:] = 2
        assert call.result(PATIENCE_S) == (1, 1)


def test_calls_that_failed_are_garbage_at_once(world: World) -> None:
    world.hole.close()
    with world.hung() as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                with contextlib.suppress(errors.NotSent, errors.DeadlineExceeded):
                    client.call("echo", 1, timeout_s=0.05)
            wait_until(lambda: sum(isinstance(each, Call) for each in gc.get_objects()) == 0)
        finally:
            gc.enable()


def test_what_waits_for_a_connection_is_bounded(world: World) -> None:
    limits = Limits(outbox_messages_max=2)
    entries = [world.hole.entry("test", 0)]
    with (
        RpcService(world.master.address, transports=["tcp"], limits=limits) as narrow,
        RpcClient("test", node_of(narrow), entries, looks_up(lambda: entries)) as client,
    ):
        calls = [client.submit("echo", number, timeout_s=LONG_S) for number in range(2)]
        with pytest.raises(
            errors.Backpressure,
            match=r"2 calls of \d+ bytes wait for a connection already, 2 calls or",
        ):
            client.submit("echo", 3)
        assert calls[0].cancel()
        client.submit("echo", 4, timeout_s=LONG_S)


def test_bad_arguments_are_refused_before_anything_is_connected_to(world: World) -> None:
    with world.hung() as client:
        for verb in (client.call, client.submit, client.notify):
            with pytest.raises(errors.BadArguments, match="argument 0 is of type"):
                verb("echo", object())
        with pytest.raises(errors.BadArguments, match="timeout_s=-1"):
            client.submit("echo", 1, timeout_s=-1)
        assert connectors(client) == 0


def test_an_unknown_server_is_looked_up_by_another_thread(world: World) -> None:
    go_on, lookers = threading.Event(), []

    def lookup() -> list[ServerEntry]:
        lookers.append(threading.current_thread())
        assert go_on.wait(PATIENCE_S)
        return [world.entry(7)]

    with RpcClient("test", node_of(world.calling), [], looks_up(lookup)) as client:
        calls = [
            client.submit_to(7, "echo", "known then", timeout_s=PATIENCE_S),
            client.submit_to(8, "echo", "unknown", timeout_s=PATIENCE_S),
        ]
        wait_until(lambda: lookers)
        assert not any(call.done() for call in calls)
        go_on.set()
        assert calls[0].result(PATIENCE_S) == "known then"
        with pytest.raises(errors.NoServer, match=r"'test' has no server 8; it has: \[7\]"):
            calls[1].result(PATIENCE_S)
        assert threading.current_thread() not in lookers


def test_a_notification_that_could_not_leave_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.client(world.hole.entry("test", 0), retry=AT_ONCE) as client:
        client.notify_to(0, "hear", 1)
        world.hole.close()
        wait_until(lambda: "a notification was lost" in caplog.text)
        assert "server 0 of 'test' (rank 99) cannot be reached" in caplog.text


def test_of_many_notifications_that_could_not_leave_few_are_logged_and_all_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.client(world.hole.entry("test", 0), retry=AT_ONCE) as client:
        for _ in range(25):
            client.notify_to(0, "hear", 1)
        world.hole.close()
        wait_until(lambda: sum(client.statistics().errors.values()) == 25)
        wait_until(lambda: "number 10 of this client" in caplog.text)
        lines = [line for line in caplog.text.splitlines() if "a notification was lost" in line]
        assert len(lines) == 2


def test_a_stream_waits_for_its_connection(world: World) -> None:
    with world.client(world.entry()) as client, client.stream("echo", 1) as stream:
        assert stream.result(PATIENCE_S) == 1


@pytest.fixture
def no_looks_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REFRESH_S_MIN", float("inf"))


@pytest.mark.usefixtures("no_looks_without_need")
def test_a_server_that_was_registered_anew_is_found_by_one_look_for_all_that_ask_meanwhile(
    world: World,
) -> None:
    served = Plain()
    server = world.serving.create_server("again", served)
    looking, go_on, looks = threading.Event(), threading.Event(), []

    def lookup() -> list[ServerEntry]:
        looks.append(1)
        looking.set()
        assert go_on.wait(PATIENCE_S)
        return entries_of(world.calling, "again", 1, PATIENCE_S)

    client = RpcClient(
        "again",
        node_of(world.calling),
        entries_of(world.calling, "again", 1, PATIENCE_S),
        looks_up(lookup),
    )
    with client:
        assert client.call("echo", 0) == 0
        server.close()
        world.serving.create_server("again", served)
        calls = [client.submit("echo", number, timeout_s=PATIENCE_S) for number in range(10)]
        assert looking.wait(PATIENCE_S)
        go_on.set()
        assert [call.result(PATIENCE_S) for call in calls] == list(range(10))
        assert len(looks) == 1


class Streams:
    """What streams in both directions."""

    def count(self, items: int) -> Iterator[int]:
        yield from range(items)

    async def total(self, ballast: object = None) -> int:
        return sum([item async for item in incoming()])

    def one(self) -> int:
        return 1


@pytest.fixture
def streams(world: World) -> RpcServer:
    return world.serving.create_server("streams", Streams())


@pytest.fixture
def gate(world: World, streams: RpcServer) -> Iterator[Held]:
    """The first that connects waits for it to be opened."""
    with held_at("node.reaching", of=node_of(world.calling)) as held:
        yield held


def test_a_stream_is_there_while_its_server_is_connected_to_and_ends_at_its_deadline(
    world: World,
) -> None:
    with world.hung() as client:
        stream = client.stream("count", 1, timeout_s=LONG_S)
        assert client.statistics().waiting == 1
        assert not stream.done()
        for begin in (client.stream, partial(client.stream_to, 0)):
            with pytest.raises(
                errors.DeadlineExceeded,
                match=r"'count' was not sent to server 0 of 'test' .* not connected yet",
            ):
                next(begin("count", 1, timeout_s=SHORT_S))
        with pytest.raises(errors.DeadlineExceeded):
            client.stream("total", timeout_s=SHORT_S).send(1)
        assert stream.cancel()
        with pytest.raises(errors.Cancelled, match="'count' was cancelled by its caller"):
            next(stream)
        wait_until(
            lambda: client.statistics().waiting == len(routes_of(client)[0].in_flight) == 0,
            "none of them kept",
        )


def test_close_ends_a_stream_that_waits_for_its_connection(world: World) -> None:
    client = world.hung()
    stream = client.stream("count", 1)
    client.close()
    for use in (stream.next_item, partial(stream.send, 1), stream.result):
        with pytest.raises(errors.Closed, match="the client of 'test' was closed here"):
            use(timeout_s=PATIENCE_S)


@pytest.mark.usefixtures("streams")
def test_a_stream_that_reaches_nobody_goes_to_another_server_or_says_so(world: World) -> None:
    (entry,) = entries_of(world.calling, "streams", 1, PATIENCE_S)
    world.hole.close()
    with world.client(world.hole.entry("streams", 0), replace(entry, server_id=1)) as client:
        assert [list(client.stream("count", 3)) for _ in range(10)] == [[0, 1, 2]] * 10
    with world.client(
        world.hole.entry("streams", 0), replace(entry, server_id=1), retry=AT_ONCE
    ) as client:
        with pytest.raises(
            errors.NotSent, match=r"server 0 of 'streams' \(rank 99\) cannot be reached"
        ):
            next(client.stream_to(0, "count", 3))
        with pytest.raises(errors.NoServer, match="no server 7"):
            client.stream_to(7, "count", 3).result(PATIENCE_S)


def test_what_a_stream_sends_waits_until_it_is_open_and_so_does_its_end(
    world: World, gate: Held
) -> None:
    with world.calling.create_client("streams") as client:
        empty, stream, array = (
            client.stream("total"),
            client.stream("total", np.ones(1 << 20)),
            np.ones(1 << 20),
        )
        bulk = client.stream("total", array)
        array[:] = np.nan
        gate.wait()
        empty.end()
        with pytest.raises(TimeoutError):
            stream.send(1, timeout_s=SHORT_S)
        gate.release()
        for one in (stream, bulk):
            for number in range(20):
                one.send(number, PATIENCE_S)
            one.end()
        assert [one.result(PATIENCE_S) for one in (empty, stream, bulk)] == [0, 190, 190]


def test_a_stream_that_is_given_up_while_it_is_sent_ends_at_the_server(
    world: World, gate: Held, streams: RpcServer
) -> None:
    """Its CANCEL leaves before its OPEN."""
    with world.calling.create_client("streams") as client:
        stream = client.stream("count", 1_000_000)
        gate.wait()
        with at("peer.sending", stream.cancel, when=lambda call: call is stream.call) as sent:
            gate.release()
            wait_until(lambda: streams.statistics().cancelled == 1, "the end of the handler")
        assert sent.count == 1


def test_a_handler_that_opens_a_stream_to_a_server_out_of_reach_holds_up_no_request(
    world: World,
) -> None:
    hung = RpcClient("test", node_of(world.serving), [world.hole.entry("test", 0)], looks_up(list))
    begun = []

    def begin() -> None:
        begun.append(hung.stream("count", 1))

    world.serving.create_server("asking", {"begin": begin, "one": lambda: 1})
    with world.calling.create_client("asking") as client, hung:
        client.call("begin", timeout_s=PATIENCE_S)
        assert client.call("one", timeout_s=PATIENCE_S) == 1
        assert not begun[0].done()
