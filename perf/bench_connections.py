"""Connections to a server of 1, 2 and 4 shards, each of which accepts, decodes, executes and answers on its own ones.

Clients are those of bench_clients, in one process for each shard, so that clients do not become the bound as shards are added. A
connection has one call under way all the time. A candidate is marked "oversubscribed" where shards and processes of clients are
more than the cores that there are.

Expected:
    calls       what bench_clients shows for one process, 50 to 100 k/s, times the shards while each shard and each process of
                clients has a core; no more than the cores allow beyond that. p99 is as many calls' time as connections share a
                shard: 1 to 2 ms for 100, 10 to 20 ms for 1,000.
    shares      the connection with the fewest calls has most of the mean of its shard. Across shards too, unless they are
                oversubscribed: then the kernel decides which of them runs.
    idle        a connection is two sockets (lanes), their Python objects and what they keep of buffers: 10 to 30 KiB of the
                server, whatever the number of shards.

    python -m perf.bench_connections [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import shard
from perf import bench_clients
from perf.bench_clients import CALLS_FIRST, CLIENTS, PAYLOAD, SIZE_BYTES, Answers, Clients, keep_busy, resident_bytes, submit
from perf.bench_shard import pin_application
from perf.child import Announce, Child, StopRequest
from perf.harness import Candidate, Place, Result, compare
from perf.targets import Target
from perf.timing import FULL, TINY, Effort, Sample

NAME = "connections"
SHARDS = (1, 2, 4)
IDLE_CONNECTIONS_MIN = 100  # of fewer, what each costs is lost in what the allocator rounds to
WATCH_S_MIN = 0.2  # tests: there are answers in it however busy the machine is


@dataclass(frozen=True, slots=True)
class Connections:
    """So many connections, spread evenly over the shards, each with one call under way."""

    shards: int
    counts: tuple[int, ...] = CLIENTS

    def __str__(self) -> str:
        return f"a call of each client in flight, {SIZE_BYTES} B, {self.shards} shard{'s' * (self.shards > 1)}"

    def name_of(self, count: int) -> str:
        """How so many connections are called among candidates."""
        busy = self.shards + min(self.shards, count)
        return bench_clients.name_of(count) + ", oversubscribed" * (busy > len(shard.usable_cores()))


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
    case: Connections, effort: Effort = FULL, progress: Callable[[str], None] | None = None, pinned: bool = True
) -> list[Result]:
    """Measure one case with all numbers of connections."""
    candidates = [
        Candidate(case.name_of(count), "ours", partial(measure, shards=case.shards, count=count)) for count in case.counts
    ]
    return compare(NAME, str(case), candidates, effort, pinned=pinned, progress=progress)


def open_node_here() -> str:
    """In a shard: a node of its own that serves at an address of its own, which is returned."""
    this = shard.this_shard()
    node = bench_clients.open_node(this.reactor, None, this.slab)
    this.at_stop(node.close)
    return "tcp://" + node.address("tcp")


def call_until_stopped(announce: Announce, address: str, count: int) -> None:
    """A process of clients: announces that each is answered, then calls until SIGTERM and announces its Answers. It stays
    connected, silent, until it is killed."""
    stop = StopRequest()
    with contextlib.closing(Clients(address)) as clients:
        clients.connect(count)
        announce(sum(submit(peer).result() == PAYLOAD for peer in clients.peers))
        answers = keep_busy(clients, lambda begun: not stop.asked)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who has the answers may end us
        announce(answers)
        signal.pause()


def measure(place: Place, effort: Effort, shards: int, count: int) -> Sample:
    """The rate of all connections together, what single calls took, shares, and what an idle connection costs the shards."""
    with shard.ShardGroup(shards, polling=False, pin=pin_application(place)) as group, contextlib.ExitStack() as exits:
        addresses = group.map(open_node_here)
        for address in addresses:
            _warm_up(address)
        servers = group.statistics().shards
        before_bytes = sum(resident_bytes(server.pid) for server in servers)
        shares = [len(range(index, count, shards)) for index in range(min(shards, count))]
        cores = _left_by([server.core for server in servers]) if place.cores else ()
        children = [
            exits.enter_context(Child(call_until_stopped, address, share, cores=cores))
            for address, share in zip(addresses, shares, strict=False)
        ]
        answered = sum(child.receive() for child in children)
        time.sleep(effort.warm_s)
        start_ns = time.perf_counter_ns()  # one clock for all processes
        time.sleep(max(effort.timed_s, WATCH_S_MIN))
        end_ns = time.perf_counter_ns()
        for child in children:
            os.kill(child.pid, signal.SIGTERM)
        parts: list[Answers] = [child.receive() for child in children]
        grown_bytes = sum(resident_bytes(server.pid) for server in servers) - before_bytes
    watched = [part.between(start_ns, end_ns) for part in parts]
    every = _joined(watched, shares)
    in_shard = [part.figures(share)["fewest_share"] for part, share in zip(watched, shares, strict=True)]
    sample = Sample.of_rate(len(every.at_ns), end_ns - start_ns)
    sample.figures.update(every.figures(count), fewest_share_in_shard=min(in_shard))
    if count >= IDLE_CONNECTIONS_MIN:
        sample.figures["server_bytes"] = grown_bytes / count
    return sample.with_work(unserved=count - answered, silent=int((_joined(parts, shares).calls_of(count) == 0).sum()))


def _warm_up(address: str) -> None:
    """As many calls as the allocator needs to have its pools."""
    with contextlib.closing(Clients(address)) as clients:
        clients.connect(1)
        for _ in range(CALLS_FIRST):
            submit(clients.peers[0]).result()


def _left_by(taken: list[int | None]) -> tuple[int, ...]:
    """The cores that the shards leave to clients; all of them where they leave none."""
    return tuple(core for core in shard.usable_cores() if core not in taken) or tuple(shard.usable_cores())


def _joined(parts: list[Answers], shares: list[int]) -> Answers:
    """The answers of all processes, their clients numbered on."""
    firsts = np.cumsum([0, *shares[:-1]])
    return Answers(
        np.concatenate([part.client + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.at_ns for part in parts]),
        np.concatenate([part.took_ns for part in parts]),
    )


# -- the same code on tiny sizes ---------------------------------------------------------------------------------------


def test_every_connection_of_every_shard_is_answered_all_the_time() -> None:
    for result in run(Connections(2, (1, 101)), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"unserved": 0, "silent": 0}
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


def test_more_busy_processes_than_cores_are_marked() -> None:
    assert "oversubscribed" in Connections(len(shard.usable_cores())).name_of(1)


if __name__ == "__main__":
    from perf import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
