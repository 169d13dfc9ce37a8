"""Calls of a service's own inline server, which the calling thread answers itself: they keep what
calls between processes promise. tests/prpc_engine/test_rpc.py has more, for each way there is.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prpc_engine import Master, RpcClient, RpcService, empty
from prpc_engine.errors import BadArguments, Closed, DeadlineExceeded, RemoteError
from prpc_engine.rpc.local_peer import NESTED_MAX
from shard import Future, Limits

TIMEOUT_S = 20.0
SHORT_S = 0.05


class Own:
    """What the service serves to itself, and to others."""

    def __init__(self) -> None:
        self.client: RpcClient | None = None
        self.service: RpcService | None = None
        self.kept: list[Any] = []
        self.later = Future()
        self.interrupted = False

    def same(self, value: Any) -> Any:
        return value

    def thread(self) -> str:
        return threading.current_thread().name

    def keep(self, value: Any) -> Any:
        """Keeps what it is given, and changes what it may."""
        self.kept.append(value)
        if isinstance(value, list):
            value.append("changed by the handler")
        return value

    def all_kept(self) -> list[Any]:
        return self.kept

    def outlast(self, seconds: float) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            continue
        return "too late"

    def fail(self) -> None:
        raise ValueError("as asked")

    def interrupt_once(self) -> None:
        """In the main thread, where a signal's handler runs."""
        if not self.interrupted and threading.current_thread() is threading.main_thread():
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)

    def unsendable(self) -> Any:
        return object()

    def answer_later(self) -> Future:
        return self.later

    def depth(self, left: int) -> int:
        assert self.client is not None
        return 1 + int(self.client.call("depth", left - 1)) if left else 0

    def close(self) -> None:
        assert self.client is not None
        self.client.close()


@pytest.fixture
def own(master: Master) -> Iterator[Own]:
    made = Own()
    with RpcService(master=master.address) as service:
        service.create_server("own", made, inline=True)
        made.service, made.client = service, service.create_client("own")
        yield made


@pytest.fixture
def client(own: Own) -> RpcClient:
    assert own.client is not None
    own.client.call("same", 0)  # connected
    return own.client


def test_the_thread_that_waits_runs_the_handler(client: RpcClient) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while client.call("thread") != threading.current_thread().name:
        assert time.monotonic() < deadline  # a thread of the engine that leads runs it as well


def test_what_a_handler_keeps_and_changes_is_not_what_its_caller_has(
    own: Own, client: RpcClient
) -> None:
    given = ["given"]
    back = client.call("keep", given)
    assert given == ["given"]
    assert back == ["given", "changed by the handler"]
    back.append("changed by the caller")
    assert own.kept[-1] == ["given", "changed by the handler"]


@pytest.mark.parametrize("elements", [0, 10, 100_000])
@pytest.mark.parametrize("in_slab", [False, True])
def test_arrays_come_read_only_and_are_nobody_elses(
    own: Own, client: RpcClient, elements: int, in_slab: bool
) -> None:
    given: NDArray[np.int64] = empty((elements,), np.int64) if in_slab else np.zeros(elements, int)
    given[:] = 1
    back = client.call("keep", given)
    assert not back.flags.writeable
    assert not own.kept[-1].flags.writeable
    assert np.array_equal(back, given)
    if not in_slab:
        given[:] = 2
        assert (own.kept[-1] == 1).all()
        assert (back == 1).all()


def test_what_is_larger_than_a_message_may_be_is_refused(master: Master) -> None:
    limits = Limits(body_bytes_max=1 << 16)
    with RpcService(master=master.address, limits=limits) as service:
        service.create_server("own", Own(), inline=True)
        client = service.create_client("own")
        words = ["word"] * (1 << 15)
        with pytest.raises(BadArguments, match="at most 65536 allowed"):
            client.call("same", words)
        assert client.call("same", "word") == "word"


def test_an_answer_after_the_deadline_is_none(client: RpcClient) -> None:
    with pytest.raises(DeadlineExceeded, match="no answer to 'outlast'"):
        while True:  # until this thread runs it: it knows how late it is
            client.call("outlast", 2 * SHORT_S, timeout_s=SHORT_S)
    assert client.call("same", 1) == 1
    assert client.statistics().timeouts == 1


def test_what_a_handler_raises_and_what_cannot_be_sent_is_told(own: Own, client: RpcClient) -> None:
    with pytest.raises(RemoteError, match="ValueError: as asked"):
        client.call("fail")
    with pytest.raises(RemoteError, match="object"):
        client.call("unsendable")
    assert client.call("same", 1) == 1
    assert own.service is not None
    assert own.service.statistics().servers["own/0"].failures == 2


def test_an_answer_may_come_later(own: Own, client: RpcClient) -> None:
    threading.Timer(0.0, own.later.set_result, ["later"]).start()
    assert client.call("answer_later", timeout_s=TIMEOUT_S) == "later"


def test_ctrl_c_in_a_handler_comes_out_of_the_call_once(own: Own, client: RpcClient) -> None:
    came_out: Counter[str] = Counter()
    deadline = time.monotonic() + TIMEOUT_S
    ways = itertools.cycle(("message", "call"))
    while min(came_out["message"], came_out["call"]) < 10:
        own.interrupted = False
        way = next(ways)
        try:
            if way == "call":
                client.call("interrupt_once")
            else:
                client.submit("interrupt_once").result()
        except KeyboardInterrupt:
            came_out[way] += 1
            assert own.interrupted
        else:
            assert not own.interrupted, "another thread ran the handler"
            assert time.monotonic() < deadline, came_out  # a thread of the engine leads, at times
        assert client.call("same", 1) == 1


def test_calls_overtake_nothing_that_was_sent_before(own: Own, client: RpcClient) -> None:
    for number in range(0, 300, 3):
        client.notify("keep", number)
        under_way = client.submit("keep", number + 1)
        assert client.call("keep", number + 2) == number + 2
        assert under_way.result() == number + 1
    assert own.kept == list(range(300))


@pytest.mark.parametrize("depth", [NESTED_MAX - 1, NESTED_MAX, NESTED_MAX + 1, 50])
def test_handlers_may_call_handlers(client: RpcClient, depth: int) -> None:
    assert client.call("depth", depth) == depth
    assert client.call("depth", 1) == 1


def test_a_handler_that_closes_its_client_ends_its_own_call(client: RpcClient) -> None:
    with pytest.raises(Closed, match="'close' of server 0"):
        client.call("close")


def test_others_are_served_while_one_call_follows_the_other(
    own: Own, client: RpcClient, master: Master
) -> None:
    with RpcService(master=master.address) as other:
        answered = other.create_client("own").submit("same", "from outside")
        deadline = time.monotonic() + TIMEOUT_S
        while not answered.done():
            assert time.monotonic() < deadline
            client.call("same", 1)
        assert answered.result() == "from outside"


def test_calls_and_their_bytes_are_counted(own: Own, client: RpcClient) -> None:
    assert own.service is not None
    before = own.service.statistics()
    for _ in range(10):
        client.call("same", bytes(1000))
    after = own.service.statistics()
    sent = [
        sum(peer.traffic.bytes_sent for peer in one.peers if peer.transport == "memory")
        for one in (before, after)
    ]
    requests = [sum(server.requests for server in one.servers.values()) for one in (before, after)]
    assert requests[1] - requests[0] == 10
    assert sent[1] - sent[0] >= 2 * 10 * 1000
