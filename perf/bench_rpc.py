"""A call there and back between two pinned processes, beside every peer that is installed.

Expected, 64 B, one call at a time:
    shm, polling    two records through two rings (2.5 us measured for the rings alone), and on each
                    side one frame header packed and parsed, one lookup, one future: some 1 us each.
                    5 to 6 us.
    async def       a task and its first step more at the server: 2 us.
    shm, parking    the same while calls follow each other, for the adaptive window outlasts the
                    gaps; 1 us more to read the clock.
    shm, asyncio    the same with parking: the loop that awaits looks at the rings for 25 us before
                    it goes its round, so most answers cost no round of 20 to 40 us; 1 us for taking
                    the lead, and 1 in 33 goes the long way.
    unix, polling   as tcp, and 2 us less: the kernel wakes the peer without a round through its
                    network stack.
    tcp, polling    a raw spinning socket's round trip (8 us here: four system calls) and the same 2
                    to 3 us on top.
    blocking peers  a sleep and a wake-up each way, 25 us each on a virtual machine: Pipe and a
                    blocking socket 50 to 60, pyzmq and pynng 80 to 100 (an I/O thread more on each
                    side), grpcio 200 to 300 (HTTP/2, a thread pool; with asyncio on both sides a
                    poller thread in place of it), torch.distributed.rpc 80 to 300 (TensorPipe,
                    pickle, a pool of 16 threads).
    mpi4py          send() and recv() pickle in C, and MPI polls: 3 us, below ours by the call that
                    is looked up, the future and the frame.
    iceoryx2        polling: a loan, a copy into it, two looks at a subscriber on each side, all of
                    it native under a Python face: 6 us. Waiting: a notification each way more, and
                    a sleep: 50 to 80 us.
    Pinned to one core a side, libraries with I/O threads share it between them; `pinned=False`
    shows that this is not what makes them slow.
    two rings, pickled  what is left in pure Python without the call: both sides pickle and unpickle
                    a name, a number and the payload, and poll one ring each. 2.3 us for the rings
                    and 0.3 for each dumps() and loads(): 3.5 us.
    "cache line"  what one line takes there and back between the two cores, just before: on a
                  virtual machine the host moves them, and a raw socket's round trip is 3, 10 or 30
                  us with it, parking or polling alike (core_distance.py).
Expected, 64 calls under way: no waiting, only work: 3 us a call and side, both sides at once: 200 k
calls/s or more.
Expected, after a rest of 5 ms: a poller has lost its caches, not its core, and takes 2 to 8 times
as long as before; a sleeper is woken, 25 to 50 us each way on top, on a virtual machine more.
Expected, idle, parking: both processes sleep in epoll and wake a few times a second for timers:
below 0.5 % of a core. mpi4py's server polls and can do nothing else: 100 %.

    python -m perf.bench_rpc [--json] [--quick]
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import shard

from . import core_distance, peers
from .child import Announce
from .harness import Candidate, Place, Result, compare
from .machine import process_cpu_s
from .peers import PeerInfo, open_peer
from .peers.face import AwaitedPeer, Job
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each, time_in_turn, time_many, time_rested

NAME = "rpc"
ALL = [
    *(peers.SHM_POLLING, peers.SHM_TASK, peers.SHM_ASYNCIO, peers.SHM_PARKING, peers.UNIX_POLLING),
    *(peers.UNIX_PARKING, peers.TCP_POLLING, peers.TCP_PARKING),
    *(*peers.PEERS, peers.GRPC_AIO, peers.TORCH_RPC),
    *(peers.MPI4PY, peers.ICEORYX_POLLING, peers.ICEORYX_WAITING),
]
RESTED = [
    *(peers.SHM_POLLING, peers.SHM_PARKING, peers.TCP_PARKING, peers.PIPE, peers.ZMQ_IPC),
    *(peers.NNG, peers.GRPC, peers.MPI4PY, peers.ICEORYX_POLLING, peers.ICEORYX_WAITING),
]
IDLE = [
    *(peers.SHM_PARKING, peers.TCP_PARKING, peers.PIPE, peers.ZMQ_IPC, peers.NNG, peers.GRPC),
    *(peers.MPI4PY, peers.ICEORYX_WAITING),
]
WINDOW_FIRST = 256  # pipelined calls by which the rate is guessed
PICKLED_RINGS = "two rings, pickled"
RING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One call at a time."""

    size_bytes: int

    def __str__(self) -> str:
        return f"call, {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class Rested:
    """One call at a time, and none for a while before it."""

    size_bytes: int
    rest_s: float

    def __str__(self) -> str:
        return f"call after {self.rest_s * 1e3:g} ms of rest, {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Up to `window` calls under way."""

    size_bytes: int
    window: int

    def __str__(self) -> str:
        return f"{self.window} in flight, {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class Idle:
    """No calls: what does being connected cost?"""

    size_bytes: int

    def __str__(self) -> str:
        return "connected, idle"


Case = RoundTrip | Rested | Pipelined | Idle
CASES: list[Case] = [RoundTrip(64), Rested(64, rest_s=0.005), Pipelined(64, window=64), Idle(64)]

_CALL, _RESTED, _PIPELINED, _IDLE = (str(case) for case in CASES)
TARGETS = [
    Target(_CALL, "prpc shm, polling", "p50_ns", "at most", 5_000),
    Target(_CALL, "prpc shm, polling", "p50_ns", "at most", 1 / 25, against="grpcio"),
    Target(_CALL, "prpc shm, polling", "p50_ns", "at most", 1 / 4, against="pyzmq ipc"),
    Target(_CALL, "prpc shm, polling", "p50_ns", "at most", 1 / 2, against="multiprocessing.Pipe"),
    Target(_CALL, "prpc shm, parking", "p50_ns", "at most", 1.0, against="pyzmq ipc"),
    Target(_CALL, "prpc shm, polling, async def", "p50_ns", "at most", 8_000),
    Target(_CALL, "prpc shm, asyncio", "p50_ns", "at most", 60_000),
    Target(_CALL, "prpc tcp, polling", "p50_ns", "at most", 1.6, against="raw tcp, spinning"),
    Target(_CALL, "prpc tcp, parking", "p50_ns", "at most", 1.6, against="raw tcp, blocking"),
    Target(_CALL, "prpc shm, polling", "p50_ns", "at most", 1.8, against="mpi4py"),
    # each way one wake-up, as a byte through the socketpair under a Pipe needs
    Target(_RESTED, "prpc shm, parking", "p50_ns", "at most", 2.2, against="multiprocessing.Pipe"),
    Target(_RESTED, "prpc shm, polling", "p50_ns", "at most", 30_000),
    Target(_PIPELINED, "prpc shm, polling", "ops_per_s", "at least", 200_000),
    Target(_IDLE, "prpc shm, parking", "client_cpu_percent", "at most", 1.0),
    Target(_IDLE, "prpc shm, parking", "server_cpu_percent", "at most", 1.0),
]


def run(
    case: Case,
    effort: Effort = FULL,
    infos: list[PeerInfo] | None = None,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates, or with those named."""
    candidates_of = {Rested: RESTED, Idle: IDLE}
    chosen = infos or candidates_of.get(type(case), ALL)
    candidates = [
        Candidate(
            info.name,
            info.role,
            partial(measure, case=case, info=info),
            info.module,
            info.distribution,
        )
        for info in chosen
    ]
    if isinstance(case, RoundTrip):
        candidates.append(
            Candidate(PICKLED_RINGS, "limit", partial(measure_pickled_rings, case=case))
        )
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure(place: Place, effort: Effort, case: Case, info: PeerInfo) -> Sample:
    """One repeat of one candidate."""
    if isinstance(case, RoundTrip):
        return measure_round_trip(place, effort, case, info)
    if isinstance(case, Rested):
        return measure_rested(place, effort, case, info)
    if isinstance(case, Pipelined):
        return measure_pipelined(place, effort, case, info)
    return measure_idle(place, effort, case, info)


def measure_round_trip(place: Place, effort: Effort, case: RoundTrip, info: PeerInfo) -> Sample:
    """Time each call; of a client in an asyncio loop, each call that a coroutine awaits. Figure:
    cache_line_ns, see the head.
    """
    payload = _payload(case.size_bytes)
    cache_line_ns = core_distance.round_trip_ns(place)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        if peer.round_trip(payload) != payload:
            raise AssertionError(f"{info.name} sent something else back")
        if isinstance(peer, AwaitedPeer):
            sample = peer.run(time_in_turn([partial(peer.begin, payload)], effort))[0]
        else:
            sample = time_each(partial(peer.round_trip, payload), effort)
        sample.figures["cache_line_ns"] = cache_line_ns
        return sample.with_work(bytes_echoed=len(peer.round_trip(payload)))


def measure_pickled_rings(place: Place, effort: Effort, case: RoundTrip) -> Sample:
    """As measure_round_trip(), of two rings with nothing around them but pickle, as mpi4py has it
    around its messages: who writes a call in Python has this to pay at least.
    """
    payload = _payload(case.size_bytes)
    cache_line_ns = core_distance.round_trip_ns(place)
    with shard.Ring.create(RING_BYTES) as there, shard.Ring.create(RING_BYTES) as back:
        producer, consumer = there.producer(), back.consumer()
        with place.serve(echo_pickled, there, back):
            try_write, try_read = producer.try_write, consumer.try_read
            dumps, loads = pickle.dumps, pickle.loads

            def round_trip() -> bytes:
                try_write(dumps(("echo", 1, payload), pickle.HIGHEST_PROTOCOL))
                while (answer := try_read()) is None:
                    pass
                _, echo = loads(answer)
                return bytes(echo)

            if round_trip() != payload:
                raise AssertionError(f"{PICKLED_RINGS} sent something else back")
            sample = time_each(round_trip, effort)
            sample.figures["cache_line_ns"] = cache_line_ns
            return sample.with_work(bytes_echoed=len(round_trip()))


def echo_pickled(announce: Announce, there: shard.Ring, back: shard.Ring) -> None:
    """Answer (method, id, payload) with (id, payload), until killed."""
    try_read, try_write = there.consumer().try_read, back.producer().try_write
    dumps, loads = pickle.dumps, pickle.loads
    announce("ready")
    while True:
        asked = try_read()
        if asked is not None:
            _, call_id, payload = loads(asked)
            try_write(dumps((call_id, payload), pickle.HIGHEST_PROTOCOL))


def measure_rested(place: Place, effort: Effort, case: Rested, info: PeerInfo) -> Sample:
    """Time each call, after a sleep."""
    payload = _payload(case.size_bytes)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        sample = time_rested(partial(peer.round_trip, payload), effort, case.rest_s)
        echo = peer.round_trip(payload)
        if echo != payload:
            raise AssertionError(f"{info.name} sent something else back")
        return sample.with_work(bytes_echoed=len(echo))


def measure_pipelined(place: Place, effort: Effort, case: Pipelined, info: PeerInfo) -> Sample:
    """Time so many calls at once; warm up with few, which says how many fit into the time."""
    payload = _payload(case.size_bytes)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        sample, echoed = time_many(
            lambda count: peer.round_trips(payload, count, case.window),
            effort,
            WINDOW_FIRST,
            4 * effort.ops_max,
        )
        return sample.with_work(bytes_echoed=echoed, calls=sample.ops)


def measure_idle(place: Place, effort: Effort, case: Idle, info: PeerInfo) -> Sample:
    """After some calls, sleep, and read what both processes, all their threads, have used of a core
    meanwhile; and how many threads and descriptors the server has.
    """
    payload = _payload(case.size_bytes)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        for _ in range(100):
            peer.round_trip(payload)
        assert peer.server is not None
        client, server = os.getpid(), peer.server.pid
        time.sleep(effort.idle_s / 10)  # what is left to settle
        before = process_cpu_s(client), process_cpu_s(server)
        start = time.monotonic()
        time.sleep(effort.idle_s)
        took_s = time.monotonic() - start
        return Sample(
            figures={
                "client_cpu_percent": 100 * (process_cpu_s(client) - before[0]) / took_s,
                "server_cpu_percent": 100 * (process_cpu_s(server) - before[1]) / took_s,
                "server_threads": float(len(os.listdir(f"/proc/{server}/task"))),
                "server_descriptors": float(len(os.listdir(f"/proc/{server}/fd"))),
            }
        ).with_work(bytes_echoed=len(peer.round_trip(payload)))  # still awake when called


def _payload(size_bytes: int) -> bytes:
    return bytes(index & 0xFF for index in range(size_bytes))


def test_every_candidate_echoes_every_byte() -> None:
    for result in run(RoundTrip(64), TINY):
        assert result.state in ("ok", "not installed", "not offered"), result.note
        if result.state == "ok":
            assert result.work["bytes_echoed"] == 64
            assert result.ops == TINY.ops_min
            assert result.figures["cache_line_ns"] > 0


def test_every_candidate_echoes_every_byte_after_a_rest() -> None:
    for result in run(Rested(64, rest_s=0.001), TINY):
        assert result.state in ("ok", "not installed"), result.note
        if result.state == "ok":
            assert result.work["bytes_echoed"] == 64
            assert result.ops == TINY.ops_min


def test_calls_under_way_are_all_answered() -> None:
    for result in run(Pipelined(64, window=8), TINY):
        assert result.state in ("ok", "not installed", "not offered"), result.note
        if result.state == "ok":
            assert result.work["bytes_echoed"] == 64 * result.work["calls"]


def test_every_target_has_something_to_judge() -> None:
    names = {info.name for info in ALL}
    assert {target.case for target in TARGETS} <= {str(case) for case in CASES}
    assert {
        name for target in TARGETS for name in (target.candidate, target.against) if name
    } <= names


def test_an_idle_pair_still_answers_afterwards() -> None:
    # mpi4py's server is no child of the process that looks at it
    for result in run(Idle(64), TINY, [peers.SHM_PARKING, peers.TCP_PARKING, peers.MPI4PY]):
        if result.state == "not installed" and result.role == "peer":
            continue
        assert result.state == "ok", result.note
        assert result.work["bytes_echoed"] == 64


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
