"""Small calls while another thread of the same client sends large arrays over the same connection.

Expected:
    alone          the call as bench_rpc has it.
    beside, busy   small calls one after the other. The client's interpreter runs one thread at a
                   time and changes after 5 ms at the latest, so many small calls go between two
                   arrays: p50 is that of a call alone. p99 and above are calls that met an array:
                   shm copies 5 MiB into the slab in 1 ms, tcp moves it through the kernel in 2 to
                   5.
    beside, paced  a small call every 0.5 ms, as a control message would come: most meet an array,
                   for the bulk thread goes on meanwhile. p50 is a part of an array's time, p99 one
                   or two arrays'. tcp has one lane, where a small message waits for the array that
                   has begun, and for that alone.
    longest        one or two arrays and a change of threads on either side: no call should take 40
                   ms.

Percentiles are of calls, not of time: busy callers make few calls while they wait, so look at the
paced ones and at the longest. All is in one long repeat, so that the longest is the longest of all.
Arrays are ordinary ones: each is copied.

    python -m perf.bench_mixed [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from . import peers, units
from .harness import Candidate, Place, Result, compare
from .limits import pattern
from .peers import PeerInfo, open_peer
from .peers.face import ITEM, WAIT_S_MAX, Job, Peer
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, summary

NAME = "mixed"
SIZE_BYTES = 64
BULK_BYTES = 5 << 20
NUMBERS = 1 << 24  # that float32 holds exactly
GAP_S = 0.0005
# times what all repeats would take: p99.9 wants 10,000 calls, which take longer beside bulk
REPEAT_PARTS = 4
ALL = [
    peers.SHM_PARKING,
    peers.TCP_PARKING,
    peers.SHM_POLLING,
    peers.TCP_POLLING,
    peers.GRPC,
]  # those with one connection for both


@dataclass(frozen=True, slots=True)
class Mixed:
    """Calls of SIZE_BYTES, one at a time, with `gap_s` between them, beside arrays of `bulk_bytes`,
    one at a time; 0: alone.
    """

    bulk_bytes: int
    gap_s: float = 0.0

    def __str__(self) -> str:
        where = f"beside arrays of {units.size(self.bulk_bytes)}" if self.bulk_bytes else "alone"
        return f"call, {SIZE_BYTES} B, {where}" + (
            f", one every {units.duration(self.gap_s * 1e9)}" if self.gap_s else ""
        )


CASES = [Mixed(0), Mixed(BULK_BYTES), Mixed(BULK_BYTES, GAP_S)]

LONGEST_NS_MAX = 40e6
TARGETS = [
    Target(str(case), info.name, "longest_ns", "at most", LONGEST_NS_MAX)
    for case in CASES[1:]
    for info in (peers.SHM_PARKING, peers.TCP_PARKING)
]


def run(
    case: Mixed,
    effort: Effort = FULL,
    infos: list[PeerInfo] | None = None,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates, or with those named, in one repeat."""
    parts = REPEAT_PARTS * effort.repeats
    long = replace(
        effort, repeats=1, timed_s=effort.timed_s * parts, ops_max=effort.ops_max * parts
    )
    candidates = [
        Candidate(
            info.name,
            info.role,
            partial(measure, case=case, info=info),
            info.module,
            info.distribution,
        )
        for info in infos or ALL
    ]
    return compare(NAME, str(case), candidates, long, pinned=pinned, progress=progress)


def measure(place: Place, effort: Effort, case: Mixed, info: PeerInfo) -> Sample:
    """Time each small call for as long as `effort` says."""
    payload = pattern(SIZE_BYTES)
    with (
        open_peer(info, place, Job("echo", SIZE_BYTES)) as peer,
        _bulk(peer, case.bulk_bytes) as bulk,
    ):
        _calls(peer, payload, effort.warm_s, case.gap_s, effort)
        arrays, start_ns = bulk.arrays, time.perf_counter_ns()
        took_ns, wrong = _calls(peer, payload, effort.timed_s, case.gap_s, effort)
        arrays, elapsed_ns = bulk.arrays - arrays, time.perf_counter_ns() - start_ns
    sample = summary(np.array(took_ns))
    sample.figures.update(longest_ns=max(took_ns))
    if case.bulk_bytes:
        sample.figures.update(bulk_bytes_per_s=arrays * case.bulk_bytes * 1e9 / elapsed_ns)
    return sample.with_work(wrong=wrong + bulk.wrong, arrays=bulk.arrays)


def _calls(
    peer: Peer, payload: bytes, span_s: float, gap_s: float, effort: Effort
) -> tuple[list[int], int]:
    """Small calls for `span_s` seconds: what each took, and how many came back wrong."""
    took_ns: list[int] = []
    wrong = 0
    clock = time.perf_counter_ns
    now = clock()
    end = now + span_s * 1e9
    while len(took_ns) < effort.ops_min or (now < end and len(took_ns) < effort.ops_max):
        if gap_s:
            time.sleep(gap_s)
        before = clock()
        answer = peer.round_trip(payload)
        now = clock()
        took_ns.append(now - before)
        wrong += answer != payload
    return took_ns, wrong


@dataclass
class Bulk:
    """What the other thread has sent."""

    arrays: int = 0
    wrong: int = 0  # answers


@contextlib.contextmanager
def _bulk(peer: Peer, nbytes: int) -> Iterator[Bulk]:
    """Meanwhile a thread sends arrays, one after the other, each with its number in it; the first
    has been answered before.
    """
    sent = Bulk()
    if not nbytes:
        yield sent
        return
    array = np.zeros(nbytes // ITEM.itemsize, ITEM)
    is_over = threading.Event()

    def send() -> None:
        array[0] = sent.arrays % NUMBERS
        sent.wrong += peer.send_array(array) != array[0]
        sent.arrays += 1

    def send_on() -> None:
        while not is_over.is_set():
            send()

    send()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_on)
        try:
            yield sent
        finally:
            is_over.set()
        sending.result(WAIT_S_MAX)


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_calls_and_arrays_come_back_right() -> None:
    alone, _, paced = CASES
    for case, infos in (
        (alone, [peers.SHM_PARKING]),
        (paced, [peers.SHM_PARKING, peers.TCP_PARKING, peers.GRPC]),
    ):
        for result in run(case, TINY, infos):
            assert result.state in ("ok", "not installed"), result.note
            if result.state == "ok":
                assert result.work["wrong"] == 0
                assert bool(result.work["arrays"]) == bool(case.bulk_bytes)
                assert result.figures["longest_ns"] > 0


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
