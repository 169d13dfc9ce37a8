"""Connections to one port of a server of 1, 2 and 4 shards, each of which greets, decodes, executes
and answers on its own ones.

The application accepts and hands each connection to the shard with the fewest
(shard/transport/shared_port.py).

Clients are those of bench_clients, in one process for each shard, so that clients do not become the
bound as shards are added. A connection has one call under way all the time. A candidate is marked
"oversubscribed" where shards and processes of clients are more than the cores that there are.

Expected:
    calls   what bench_clients shows for one process, 50 to 100 k/s, times the shards while each
            shard and each process of clients has a core; no more than the cores allow beyond that.
            p99 is as many calls' time as connections share a shard: 1 to 2 ms for 100, 10 to 20 ms
            for 1,000.
    shares  the connection with the fewest calls has most of the mean of its shard, and of all.
            Oversubscribed, the kernel decides which shard and which clients run: with few
            connections in a short time the fewest may be a tenth of the mean, and none of them is
            silent.
    spread  the shards have as many connections each, or one more.
    idle    a connection is two sockets (lanes), their Python objects and what they keep of buffers:
            10 to 30 KiB of the server, whatever the number of shards.

    python -m perf.bench_connections [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

import shard
from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.slab import default_slab

from . import bench_clients
from .bench_clients import (
    CALLS_FIRST,
    CLIENTS,
    PAYLOAD,
    SIZE_BYTES,
    Answers,
    Clients,
    keep_busy,
    resident_bytes,
    submit,
)
from .bench_shard import pin_application
from .child import Announce, Child, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "connections"
SHARDS = (1, 2, 4)
IDLE_CONNECTIONS_MIN = 100  # of fewer, what each costs is lost in what the allocator rounds to
LOOK_S = 0.01
WATCH_S_MIN = 4.0  # tests: there are answers in it however busy the machine is


@dataclass(frozen=True, slots=True)
class Connections:
    """So many connections to one port, spread evenly over the shards, each with one call under
    way.
    """

    shards: int
    counts: tuple[int, ...] = CLIENTS

    def __str__(self) -> str:
        return (
            f"a call of each client in flight, {SIZE_BYTES} B, {self.shards} "
            f"shard{'s' * (self.shards > 1)}"
        )

    def name_of(self, count: int) -> str:
        """How so many connections are called among candidates."""
        busy = self.shards + min(self.shards, count)
        return bench_clients.name_of(count) + ", oversubscribed" * (
            busy > len(shard.usable_cores())
        )


CASES = [Connections(shards) for shards in SHARDS]
TARGETS = [
    target
    for case in CASES
    for target in (
        Target(str(case), case.name_of(CLIENTS[-1]), "fewest_share_in_shard", "at least", 0.5),
        Target(str(case), case.name_of(CLIENTS[-1]), "server_bytes", "at most", 64 << 10),
    )
]


def run(
    case: Connections,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all numbers of connections."""
    candidates = [
        Candidate(case.name_of(count), "ours", partial(measure, shards=case.shards, count=count))
        for count in case.counts
    ]
    return compare(NAME, str(case), candidates, effort, pinned=pinned, progress=progress)


def open_node_here(dealer: str, key: bytes, port: int) -> None:
    """In a shard: a node of its own that serves what is dealt out at the port."""
    this = shard.this_shard()
    node = bench_clients.open_node(this.reactor, None, this.slab, transports=())
    this.at_stop(node.close)
    node.take(shard.DistributedPort(dealer, key, ("127.0.0.1", port)))


@contextlib.contextmanager
def one_port(
    place: Place, shards: int
) -> Iterator[tuple[str, shard.ShardGroup, shard.SocketDistributor]]:
    """The address of a server of so many shards; the application only hands connections to them."""
    driver = shard.Driver(polling=False)
    node = bench_clients.open_node(driver.reactor, driver, default_slab())
    dealer = shard.SocketDistributor(driver.reactor)
    try:
        with shard.ShardGroup(
            shards, polling=False, pin=pin_application(place), driver=driver
        ) as group:
            address = "tcp://" + node.address("tcp")
            group.map(open_node_here, dealer.name, dealer.key, int(address.rpartition(":")[2]))
            node.deal_out(dealer)
            driver.take_over()
            yield address, group, dealer
    finally:
        driver.reactor.call_soon(dealer.close)
        close_in_reactor(driver, node)


def call_until_stopped(announce: Announce, address: str, count: int) -> None:
    """A process of clients: announces that each is answered, then calls until SIGTERM and announces
    its Answers, and which process each client was connected to. It stays connected, silent, until
    it is killed."""
    stop = StopRequest()
    with contextlib.closing(Clients(address)) as clients:
        clients.connect(count)
        announce(sum(submit(peer).result() == PAYLOAD for peer in clients.peers))
        # each calls once, however soon it is over
        answers = keep_busy(clients, lambda begun: begun < count or not stop.asked)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who has the answers may end us
        announce((answers, [peer.connection.peer_incarnation for peer in clients.peers]))
        signal.pause()


def measure(place: Place, effort: Effort, shards: int, count: int) -> Sample:
    """The rate of all connections together, what single calls took, shares, and what an idle
    connection costs the shards.
    """
    with one_port(place, shards) as (address, group, dealer), contextlib.ExitStack() as exits:
        _warm_up(address, shards)
        wait_until_sum(dealer, 0)
        servers = group.statistics().shards
        before_bytes = sum(resident_bytes(server.pid) for server in servers)
        shares = [len(range(index, count, shards)) for index in range(min(shards, count))]
        cores = _left_by([server.core for server in servers]) if place.cores else ()
        children = [
            exits.enter_context(Child(call_until_stopped, address, share, cores=cores))
            for share in shares
        ]
        answered = sum(child.receive() for child in children)
        wait_until_sum(dealer, count)
        spread = dealer.connections()
        time.sleep(effort.warm_s)
        start_ns = time.perf_counter_ns()  # one clock for all processes
        time.sleep(max(effort.timed_s, WATCH_S_MIN))
        end_ns = time.perf_counter_ns()
        for child in children:
            os.kill(child.pid, signal.SIGTERM)
        parts, servers_of = zip(*(child.receive() for child in children), strict=True)
        grown_bytes = sum(resident_bytes(server.pid) for server in servers) - before_bytes
    every = _joined(parts, shares)
    watched = every.between(start_ns, end_ns)
    sample = Sample.of_rate(len(watched.at_ns), end_ns - start_ns)
    in_shard = fewest_share_in_shard(watched.calls_of(count), np.concatenate(servers_of))
    sample.figures.update(watched.figures(count), fewest_share_in_shard=in_shard)
    if count >= IDLE_CONNECTIONS_MIN:
        sample.figures["server_bytes"] = grown_bytes / count
    unspread = sum(spread) != count or max(spread) - min(spread) > 1
    silent = int((every.calls_of(count) == 0).sum())
    return sample.with_work(unserved=count - answered, silent=silent, unspread=int(unspread))


def fewest_share_in_shard(calls: np.ndarray, shard_of: np.ndarray) -> float:
    """The calls of each connection, as a share of the mean of its shard: the fewest."""
    of_shards = [calls[shard_of == one] for one in np.unique(shard_of)]
    return min(float(one.min() / one.mean()) for one in of_shards)


def _warm_up(address: str, shards: int) -> None:
    """As many calls at each shard as the allocator needs to have its pools."""
    with contextlib.closing(Clients(address)) as clients:
        clients.connect(shards)
        for _ in range(CALLS_FIRST):
            for peer in clients.peers:
                submit(peer).result()


def wait_until_sum(dealer: shard.SocketDistributor, count: int) -> None:
    """Until the dealer knows of so many connections: it hears of those that ended later, and counts
    them once they are dealt. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S_MAX
    while (known := sum(dealer.connections())) != count:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{known} connections are open after {WAIT_S_MAX} s, {count} are expected"
            )
        time.sleep(LOOK_S)


def _left_by(taken: list[int | None]) -> tuple[int, ...]:
    """The cores that the shards leave to clients; all of them where they leave none."""
    return tuple(core for core in shard.usable_cores() if core not in taken) or tuple(
        shard.usable_cores()
    )


def _joined(parts: Sequence[Answers], shares: list[int]) -> Answers:
    """The answers of all processes, their clients numbered on."""
    firsts = np.cumsum([0, *shares[:-1]])
    return Answers(
        np.concatenate([part.client + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.at_ns for part in parts]),
        np.concatenate([part.took_ns for part in parts]),
    )


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_every_connection_of_every_shard_is_answered_all_the_time() -> None:
    for result in run(Connections(2, (1, 101)), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"unserved": 0, "silent": 0, "unspread": 0}
        assert result.ops_per_s
        assert ("server_bytes" in result.figures) == result.candidate.startswith("101")


def test_answers_of_several_processes_are_joined_by_client() -> None:
    import pytest  # who only measures need not have it

    first = Answers(np.array([0, 1, 0]), np.array([5, 6, 7]), np.array([1, 1, 1]))
    second = Answers(np.array([0]), np.array([8]), np.array([3]))
    joined = _joined([first, second], [2, 1])
    assert joined.calls_of(3).tolist() == [2, 1, 1]
    assert joined.figures(3) == {
        "answer_p50_ns": 1.0,
        "answer_p99_ns": pytest.approx(2.94),
        "fewest_share": 0.75,
        "most_share": 1.5,
    }


def test_a_connection_is_compared_with_those_of_its_shard() -> None:
    assert fewest_share_in_shard(np.array([1, 3, 10, 10]), np.array([7, 7, 9, 9])) == 0.5


def test_more_busy_processes_than_cores_are_marked() -> None:
    assert "oversubscribed" in Connections(len(shard.usable_cores())).name_of(1)


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
