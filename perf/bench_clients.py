"""One server, 1 to 1,000 clients over tcp: what a call costs, what an idle connection costs, and
whether everybody is served.

A client is here what a server sees of one: a connection past its handshake, with a call table of
its own. One process holds all of them, on one reactor: a thousand processes would measure the
kernel's scheduler. Nodes made of RpcService would each bring a reactor and two threads to the
client's side, and nothing to the server's.

Expected:
    clients in turn  one call at a time, the connections one after the other: a send, an epoll_wait
                     and a recv on each side, whatever their number, for epoll tells of those that
                     are ready only: 15 us. With 1,000 their state is no longer in the cache: half
                     as much again.
    64 in flight     each call is a send and a recv of its own on both sides, but for one
                     connection, where one recv takes several: some 10 us, both sides at once. With
                     1,000 twice that: each buffer is a page that was last touched a thousand calls
                     ago.
    a call of each   each connection sends its next call when it has its answer, and nobody may
                     starve: the one with the fewest calls has most of the mean. 1 connection is one
                     call at a time; from 10 on as above.
    idle             a connection costs its Python objects, those pages of its two lanes' buffers
                     that messages reached, and the kernel's sockets (which are not in the process's
                     size): 25 KB. Connecting takes a handshake of two messages each way for each
                     lane: 0.5 ms.

    python -m perf.bench_clients [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

import shard
from prpc_engine import errors
from prpc_engine.node.node import Node
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.address import Address
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import NO_SECRET

from .child import Announce
from .harness import Candidate, Place, Result, compare
from .limits import pattern
from .machine import process_cpu_s
from .peers.face import WAIT_S_MAX
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each, time_many

NAME = "clients"
CLIENTS = (1, 10, 100, 1_000)
SIZE_BYTES = 64
WINDOW = 64
CALLS_FIRST = 2_000  # by which a rate is guessed
PAYLOAD = pattern(SIZE_BYTES)
METHOD, KEY = "echo", method_key("echo")


@dataclass(frozen=True, slots=True)
class InTurn:
    """One call at a time, the connections one after the other."""

    counts: tuple[int, ...] = CLIENTS

    def __str__(self) -> str:
        return f"call, {SIZE_BYTES} B, clients in turn"


@dataclass(frozen=True, slots=True)
class Window:
    """WINDOW calls under way over all connections, which take turns."""

    counts: tuple[int, ...] = CLIENTS

    def __str__(self) -> str:
        return f"{WINDOW} in flight, {SIZE_BYTES} B, clients in turn"


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Each connection has one call under way all the time. How many calls did the one with the
    fewest get?
    """

    counts: tuple[int, ...] = CLIENTS

    def __str__(self) -> str:
        return f"a call of each client in flight, {SIZE_BYTES} B"


@dataclass(frozen=True, slots=True)
class Idle:
    """Connections that called once: what do they cost the server?"""

    counts: tuple[int, ...] = CLIENTS[-2:]  # fewer are lost in what the allocator rounds to

    def __str__(self) -> str:
        return "clients connected, idle"


Case = InTurn | Window | AllAtOnce | Idle
CASES: list[Case] = [InTurn(), Window(), AllAtOnce(), Idle()]

_IN_TURN, _WINDOW, _ALL_AT_ONCE, _IDLE = (str(case) for case in CASES)


def name_of(count: int) -> str:
    """How so many clients are called among candidates."""
    return f"{count:,} client{'s' * (count > 1)}"


_MOST = name_of(CLIENTS[-1])
TARGETS = [
    Target(_IN_TURN, _MOST, "p50_ns", "at most", 2.0, against=name_of(1)),
    Target(_ALL_AT_ONCE, _MOST, "fewest_share", "at least", 0.5),
    Target(_IDLE, _MOST, "server_cpu_percent", "at most", 1.0),
    Target(_IDLE, _MOST, "server_bytes", "at most", 64 << 10),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all numbers of clients."""
    measures: dict[type[Case], Callable[..., Sample]] = {
        InTurn: measure_in_turn,
        Window: measure_window,
        AllAtOnce: measure_all_at_once,
        Idle: measure_idle,
    }
    candidates = [
        Candidate(name_of(count), "ours", partial(measures[type(case)], count=count))
        for count in case.counts
    ]
    return compare(NAME, str(case), candidates, effort, pinned=pinned, progress=progress)


# -- both sides ------------------------------------------------------------------------------------


class Route:
    """The way to the only server of the node."""

    target = 1

    def __str__(self) -> str:
        return "the server of the benchmark"


ROUTE = Route()


def serve(announce: Announce) -> None:
    """A node with one server, as RpcService makes it, but without a master.
    Answers until killed.
    """
    driver = shard.Driver(polling=False)
    node = open_node(driver.reactor, driver, default_slab())
    announce("tcp://" + node.address("tcp"))
    driver.run(None)


def open_node(
    reactor: shard.Reactor,
    driver: shard.Driver | None,
    slab: shard.Slab,
    transports: Sequence[str] = ("tcp",),
) -> Node:
    """A node with the server that the route leads to, at any port.
    In a shard there is no driver.
    """
    config = NodeConfig.load(secret=NO_SECRET, limits=shard.DEFAULT_LIMITS).listening_at(
        Address("127.0.0.1", 0), transports
    )
    node = Node(reactor, driver, slab, config)
    node.servers[Route.target] = ServedObject(
        NAME, 0, Route.target, {METHOD: lambda payload: payload}
    )
    return node


class Clients:
    """Connections to the server at `address`, all on one reactor, which whoever waits drives. A
    context manager.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._driver = shard.Driver(polling=False)
        identity = shard.Node(
            secret=b"", incarnation=secrets.randbits(63) | 1, limits=shard.DEFAULT_LIMITS
        )
        self._transport = shard.TcpTransport(identity, default_slab())
        self.peers: list[Peer] = []

    def connect(self, count: int) -> None:
        """So many more, one after the other."""
        reactor = self._driver.reactor
        for _ in range(count):
            connection = (
                shard.control_loop()
                .spawn(self._transport.connect(self._address, WAIT_S_MAX))
                .result()
            )
            self.peers.append(Peer(connection, reactor, self._driver, {}, lambda peer: None))
            reactor.call_soon(partial(connection.attach, reactor))

    def future(self) -> shard.Future:
        """One that a wait drives the reactor for."""
        return shard.Future(self._driver)

    def in_reactor(self, callback: Callable[[], object]) -> None:
        """Run it in the thread that drives the reactor."""
        self._driver.reactor.call_soon(callback)

    def close(self) -> None:
        """Hang up."""
        closed = self.future()

        def close_all() -> None:
            for peer in self.peers:
                peer.connection.close()
            closed.set_result(None)

        self._driver.reactor.call_soon(close_all)
        try:
            closed.result(WAIT_S_MAX)
        finally:
            self._driver.close()


@contextlib.contextmanager
def connected(place: Place, count: int) -> Iterator[Clients]:
    """A server, and `count` connections to it."""
    with place.serve(serve) as (_, address), contextlib.closing(Clients(address)) as clients:
        clients.connect(count)
        yield clients


def submit(peer: Peer) -> Call:
    """One call of one client."""
    return peer.request(ROUTE, METHOD, KEY, (PAYLOAD,), WAIT_S_MAX, True)


# -- measuring -------------------------------------------------------------------------------------


def measure_in_turn(place: Place, effort: Effort, count: int) -> Sample:
    """Time each call."""
    with connected(place, count) as clients:
        turns = itertools.cycle(clients.peers)
        sample = time_each(lambda: submit(next(turns)).result(), effort)
        return sample.with_work(
            unserved=sum(submit(peer).result() != PAYLOAD for peer in clients.peers)
        )


def measure_window(place: Place, effort: Effort, count: int) -> Sample:
    """The rate, and one over it."""
    with connected(place, count) as clients:
        turns = itertools.cycle(clients.peers)

        def calls(number: int) -> int:
            under_way: deque[Call] = deque()
            right = 0
            for sent in range(number + WINDOW):
                if sent < number:
                    under_way.append(submit(next(turns)))
                if sent >= WINDOW:
                    right += under_way.popleft().result() == PAYLOAD
            return right

        sample, right = time_many(calls, effort, CALLS_FIRST, 4 * effort.ops_max)
        return _with_cost(sample).with_work(wrong=sample.ops - right)


def measure_all_at_once(place: Place, effort: Effort, count: int) -> Sample:
    """The rate, what single calls took, and the fewest and most calls that one connection got, as
    shares of the mean.
    """
    with connected(place, count) as clients:
        sample, answers = time_many(
            lambda number: keep_busy(clients, lambda started: started < number),
            effort,
            CALLS_FIRST,
            4 * effort.ops_max,
        )
        sample = _with_cost(sample)
        calls = answers.calls_of(count)
        sample.figures.update(answers.figures(count))
        return sample.with_work(
            unanswered=sample.ops - int(calls.sum()), unserved=int((calls == 0).sum())
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """A column for each right answer: the client that got it, when, and how long after its call."""

    client: np.ndarray
    at_ns: np.ndarray  # of time.perf_counter_ns()
    took_ns: np.ndarray

    def between(self, start_ns: int, end_ns: int) -> Answers:
        """Those that came within that time."""
        chosen = (start_ns <= self.at_ns) & (self.at_ns < end_ns)
        return Answers(self.client[chosen], self.at_ns[chosen], self.took_ns[chosen])

    def calls_of(self, count: int) -> np.ndarray:
        """How many answers each of `count` clients got."""
        return np.bincount(self.client, minlength=count)

    def figures(self, count: int) -> dict[str, float]:
        """What single calls took, and the fewest and most that one of `count` clients got, as
        shares of the mean.
        """
        calls = self.calls_of(count)
        p50_ns, p99_ns = (float(each) for each in np.percentile(self.took_ns, [50, 99]))
        fewest, most = float(calls.min() / calls.mean()), float(calls.max() / calls.mean())
        return {
            "answer_p50_ns": p50_ns,
            "answer_p99_ns": p99_ns,
            "fewest_share": fewest,
            "most_share": most,
        }


def keep_busy(clients: Clients, may_begin: Callable[[int], bool]) -> Answers:
    """Each connection makes its next call when it has its answer, as long as may_begin(calls begun
    so far) allows one more.
    """
    peers = clients.peers
    began_ns = [0] * len(peers)
    answers: list[tuple[int, int, int]] = []
    begun = ended = 0
    over = clients.future()
    clock = time.perf_counter_ns

    def begin(index: int) -> None:
        nonlocal begun
        if may_begin(begun):
            begun += 1
            began_ns[index] = clock()
            submit(peers[index]).when_done(partial(answered, index))

    def answered(index: int, call: shard.Future) -> None:
        nonlocal ended
        now_ns = clock()
        try:
            if call.result() == PAYLOAD:
                answers.append((index, now_ns, now_ns - began_ns[index]))
        except errors.RpcError as error:
            over.set_error(error)
            return
        ended += 1
        begin(index)
        if ended == begun:
            over.set_result(None)

    def begin_all() -> None:
        for index in range(len(peers)):
            begin(index)

    # where answers are taken, too: of two threads that count, each would lose what the other adds
    clients.in_reactor(begin_all)
    over.result(WAIT_S_MAX)
    return Answers(*np.array(answers, dtype=np.int64).reshape(-1, 3).T)


def measure_idle(place: Place, effort: Effort, count: int) -> Sample:
    """What the server grows by for each connection, uses of a core while all are silent, and takes
    to connect to.
    """
    with place.serve(serve) as (server, address), contextlib.closing(Clients(address)) as clients:
        clients.connect(1)
        for _ in range(CALLS_FIRST):
            submit(clients.peers[0]).result()
        before_bytes, start_ns = resident_bytes(server.pid), time.perf_counter_ns()
        clients.connect(count)
        connect_ns = (time.perf_counter_ns() - start_ns) / count
        unserved = sum(submit(peer).result() != PAYLOAD for peer in clients.peers)
        grown_bytes = resident_bytes(server.pid) - before_bytes
        before_s, start_s = process_cpu_s(server.pid), time.monotonic()
        time.sleep(effort.idle_s)
        server_cpu_percent = (
            100 * (process_cpu_s(server.pid) - before_s) / (time.monotonic() - start_s)
        )
        figures = {
            "server_bytes": grown_bytes / count,
            "server_cpu_percent": server_cpu_percent,
            "connect_ns": connect_ns,
        }
        return Sample(figures=figures).with_work(unserved=unserved)


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in use and not swapped out: proc_pid_statm(5)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _with_cost(sample: Sample) -> Sample:
    """With the time from one answer to the next."""
    assert sample.ops_per_s is not None
    sample.figures["cost_ns"] = 1e9 / sample.ops_per_s
    return sample


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_every_client_is_answered() -> None:
    for case in (InTurn((1, 3)), Idle((3,))):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work == {"unserved": 0}


def test_calls_under_way_are_all_answered() -> None:
    for result in run(Window((3,)), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"wrong": 0}


def test_clients_that_call_all_at_once_all_get_their_turn() -> None:
    for result in run(AllAtOnce((3, 100)), replace(TINY, ops_min=500, ops_max=500)):
        assert result.state == "ok", result.note
        assert result.work == {"unanswered": 0, "unserved": 0}


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
