"""Where callbacks of watches run, and what goes on while one of them waits or blocks."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Iterator

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master.client import MasterClient, TreeEvent
from prpc_engine.master.session import HEARTBEATS_PER_LEASE
from shard import control_loop
from tests.held import at
from tests.prpc_engine.inside import session_of, watches_of
from tests.prpc_engine.processes import PATIENCE_S

LEASE_S = 0.5
LONG_S = 3600.0  # a test that waits for it has failed


@pytest.fixture
def client(master: Master) -> Iterator[MasterClient]:
    with MasterClient(master.address, lease_s=LEASE_S) as made:
        yield made


@pytest.fixture
def other(master: Master) -> Iterator[MasterClient]:
    with MasterClient(master.address) as made:
        yield made


class Waiting:
    """A callback that waits until there is a node "/go_on"."""

    def __init__(self, client: MasterClient) -> None:
        self._client = client
        self.entered = threading.Event()
        self.heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, event: TreeEvent) -> None:
        self.entered.set()
        self._client.tree_wait("/go_on", timeout_s=PATIENCE_S)
        self.heard.put(event.path)


def test_a_callback_runs_as_handlers_do_in_the_thread_that_has_the_lead(
    master: Master, other: MasterClient
) -> None:
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with RpcService(master.address) as service:
        service.master_client.tree_watch("/a", lambda _: heard.put(service.driver.leads_here()))
        other.tree_node_add("/a")
        assert heard.get(timeout=PATIENCE_S)


def test_a_callback_never_runs_in_the_control_loop_and_has_a_context_of_its_own(
    client: MasterClient, other: MasterClient
) -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("of who watches")
    heard: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()

    def note(_: TreeEvent) -> None:
        heard.put((control_loop().is_here(), variable.get()))
        variable.set("of a callback")

    client.tree_watch("/a", note)
    other.tree_node_add("/a")
    other.tree_node_set("/a", "1")
    assert [heard.get(timeout=PATIENCE_S) for _ in range(2)] == 2 * [(False, "none")]


def test_other_watches_go_on_while_a_callback_waits_and_are_called_in_order(
    client: MasterClient, other: MasterClient
) -> None:
    waiting = Waiting(client)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.tree_watch("/a", waiting)
    client.tree_watch("/b", lambda event: heard.put(event.path))
    other.tree_node_add("/a")
    assert waiting.entered.wait(PATIENCE_S)
    with at("watches.queued", of=watches_of(client)) as queued:
        for number in range(5):
            other.tree_node_add("/b" if not number else f"/b/{number}")
        queued.wait(5)  # what is heard meanwhile
    assert heard.empty()  # one callback at a time
    # A watch can be added meanwhile, where nothing is to be called first.
    late = client.tree_watch("/c", lambda event: heard.put(event.path), timeout_s=PATIENCE_S)
    assert late > 0
    other.tree_node_add("/go_on")
    assert waiting.heard.get(timeout=PATIENCE_S) == "/a"
    assert [heard.get(timeout=PATIENCE_S) for _ in range(5)] == [
        "/b",
        *(f"/b/{number}" for number in range(1, 5)),
    ]


def test_a_session_lives_on_while_a_callback_blocks(
    client: MasterClient,
    other: MasterClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def block(event: TreeEvent) -> None:
        entered.set()
        go_on.wait(PATIENCE_S)
        heard.put(event.value)

    session = session_of(client)
    number = session.number
    client.tree_watch("/a", block)
    try:
        other.tree_node_add("/a", "0")
        assert entered.wait(PATIENCE_S)
        with at("master.heartbeat", when=lambda session: session == number) as beats:
            beats.wait(3 * HEARTBEATS_PER_LEASE)  # some more leases
        other.tree_node_set("/a", "1")
    finally:
        go_on.set()
    assert [heard.get(timeout=PATIENCE_S) for _ in range(2)] == ["0", "1"]
    assert session.number == number
    assert "block (" in caplog.text  # who blocks is named


def test_a_watch_that_begins_with_what_is_there_has_told_it_when_it_is_added(
    client: MasterClient, other: MasterClient
) -> None:
    other.tree_node_add("/a")
    for number in range(20):
        other.tree_node_add(f"/a/{number:02}")
    for _ in range(20):
        heard: list[str] = []
        handle = client.tree_watch("/a", lambda event, heard=heard: heard.append(event.path), True)
        assert heard == ["/a", *(f"/a/{number:02}" for number in range(20))]
        assert client.cancel_watch(handle)


def test_no_callback_begins_after_its_watch_was_cancelled(
    client: MasterClient, other: MasterClient
) -> None:
    waiting = Waiting(client)
    called: list[TreeEvent] = []
    client.tree_watch("/a", waiting)
    cancelled = client.tree_watch("/b", called.append)
    other.tree_node_add("/a")
    assert waiting.entered.wait(PATIENCE_S)
    with at("watches.queued", of=watches_of(client)) as queued:
        other.tree_node_add("/b")
        queued.wait()  # a callback that is to run next
    assert client.cancel_watch(cancelled)
    other.tree_node_add("/go_on")
    assert waiting.heard.get(timeout=PATIENCE_S) == "/a"
    other.tree_node_set("/a", "1")  # which is called after it
    assert waiting.heard.get(timeout=PATIENCE_S) == "/a"
    assert not called


def test_a_callback_may_close_its_client(master: Master, other: MasterClient) -> None:
    closed = threading.Event()
    client = MasterClient(master.address)

    def close(_: TreeEvent) -> None:
        client.close()
        closed.set()

    client.tree_watch("/a", close)
    other.tree_node_add("/a")
    assert closed.wait(PATIENCE_S)
    with pytest.raises(errors.Closed):
        client.tree_watch("/a", print)


def test_a_callback_that_blocks_holds_up_close_for_one_bound_in_all(
    master: Master, other: MasterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("watch", "session", "backend"):
        monkeypatch.setattr(f"prpc_engine.master.{bound}.CLOSE_TIMEOUT_S", 0.05)
    for another in ("prpc_engine.master.master", "shard.loop.driver"):
        monkeypatch.setattr(f"{another}.CLOSE_TIMEOUT_S", LONG_S)
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def block(_: TreeEvent) -> None:
        entered.set()
        go_on.wait(PATIENCE_S)
        ended.set()

    client = MasterClient(master.address)
    client.tree_watch("/a", block)
    other.tree_node_add("/a")
    assert entered.wait(PATIENCE_S)
    client.close()
    assert not ended.is_set()
    with pytest.raises(errors.Closed):
        client.tree_node_add("/b")
    go_on.set()
    assert ended.wait(PATIENCE_S)


def test_a_watch_in_a_fork_is_refused_and_cancelling_one_disturbs_nobody(
    client: MasterClient, other: MasterClient
) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    handle = client.tree_watch("/a", lambda event: heard.put(event.path))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        try:
            client.cancel_watch(handle)
            client.tree_watch("/b", print, timeout_s=0.1)
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"ForkedError"
    os.close(reading)
    os.waitpid(pid, 0)
    other.tree_node_add("/a")
    assert heard.get(timeout=PATIENCE_S) == "/a"
