"""A large array handed to another pinned process, which answers with its first element.

Expected, 40 MB (float32[10 M]):
    np.copyto               40 MB into warm memory: 2 to 4 ms (10 to 20 GB/s). Who copies once takes
                            this.
    shm, array in the slab  no byte of it moves: a call with a descriptor, and a lease given back.
                            10 to 30 us, the same for 1 MB and 1 GB. "Fresh" takes a new array from
                            the slab for each call: a few us more.
    shm, ordinary array     one copy, into a warm block of the slab: np.copyto and 30 us.
    raw tcp                 two copies through the kernel, partly at the same time: 2 to 4 GB/s, 10
                            to 15 ms.
    tcp, ordinary or slab   the same, for the socket reads into the slab: the raw socket's time and
                            0.1 ms.
    tcp with TLS 1.3        every byte sealed and opened, AES-GCM at 2 to 4 GB/s a core, in records
                            of 16 KiB: a quarter of plain tcp's speed for 1 MB, which is in the
                            cache, and half of it for 40 MB.
    Pipe, pyzmq             raw TCP's copies, one or two more, and fresh memory touched first: 25 to
                            50 ms.
    pynng, grpcio           more copies still: around 100 ms.
    mpi4py                  a copy into shared memory by pieces and one out of it, partly at the
                            same time: twice np.copyto.
    iceoryx2, lent array    no byte of it moves, and no call is dispatched: 6 to 10 us.
    iceoryx2                one copy, into memory that it lends: np.copyto and 10 us.

    python -m perf.bench_tensor [--json] [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from . import peers
from .certificates import tls_switched_on
from .harness import Candidate, Place, Result, compare
from .machine import process_cpu_s
from .peers import PeerInfo, open_peer
from .peers.face import ITEM, Job, Peer
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, calls_for, time_calls, time_each

NAME = "tensor"
FIRST = 1.5  # a value that float32 holds exactly


def _in_slab(info: PeerInfo, name: str) -> PeerInfo:
    return replace(info, name=name, options={**info.options, "in_slab": True})


SHM_SLAB = _in_slab(peers.SHM_POLLING, "prpc shm, slab array")
SHM_SLAB_PARKING = _in_slab(peers.SHM_PARKING, "prpc shm, slab array, parking")
SHM_FRESH = _in_slab(peers.SHM_POLLING, "prpc shm, fresh slab array")
SHM_ORDINARY = replace(peers.SHM_POLLING, name="prpc shm, ordinary array")
TCP_SLAB = _in_slab(peers.TCP_POLLING, "prpc tcp, slab array")
TCP_ORDINARY = replace(peers.TCP_POLLING, name="prpc tcp, ordinary array")
TCP_TLS = replace(
    TCP_ORDINARY,
    name="prpc tcp with TLS, ordinary array",
    module="cryptography",
    distribution="cryptography",
)
ICEORYX = replace(peers.ICEORYX_POLLING, name="iceoryx2, ordinary array")
ICEORYX_LENT = replace(
    peers.ICEORYX_POLLING, name="iceoryx2, lent array", options={"waiting": False, "lent": True}
)
# A new array for each call: of these one is sent once, or is to be shown beside those.
FRESH = {SHM_FRESH.name, ICEORYX_LENT.name}
ALL = [
    SHM_SLAB,
    SHM_SLAB_PARKING,
    SHM_FRESH,
    SHM_ORDINARY,
    TCP_SLAB,
    TCP_ORDINARY,
    TCP_TLS,
    *peers.PEERS,
    *(peers.MPI4PY, ICEORYX, ICEORYX_LENT),
]


@dataclass(frozen=True, slots=True)
class Handed:
    """float32[items], handed to the peer."""

    items: int

    @property
    def size_bytes(self) -> int:
        return self.items * ITEM.itemsize

    def __str__(self) -> str:
        return f"array of {self.size_bytes / 1e6:g} MB"


CASES = [Handed(250_000), Handed(10_000_000)]

_LARGE = str(CASES[-1])
TARGETS = [
    Target(_LARGE, SHM_SLAB.name, "p50_ns", "at most", 40_000),
    Target(_LARGE, SHM_SLAB.name, "p50_ns", "at most", 1.0, against=ICEORYX_LENT.name),
    Target(_LARGE, SHM_ORDINARY.name, "p50_ns", "at most", 1.3, against="np.copyto"),
    Target(
        _LARGE, TCP_ORDINARY.name, "p50_ns", "at most", 1 / 0.85, against=peers.TCP_BLOCKING.name
    ),
]


def run(
    case: Handed,
    effort: Effort = FULL,
    infos: list[PeerInfo] | None = None,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates, or with those named."""
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
    candidates.append(Candidate("np.copyto", "limit", partial(measure_copy, case=case)))
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure(place: Place, effort: Effort, case: Handed, info: PeerInfo) -> Sample:
    """Time each array from the send to the answer. It is written once, before: what it holds is not
    the question.

    Figures: cold_ns, the very first array over a new connection, which some make for it; what the
    two processes used of their cores for each GB (10^9 bytes) of those that were timed.
    """
    tls = tls_switched_on() if info.name == TCP_TLS.name else nullcontext()
    with tls, open_peer(info, place, Job("array", case.size_bytes)) as peer:
        array = peer.new_array(case.items)
        array[:] = 0.0
        array[0] = FIRST

        def operate() -> float:
            return peer.send_array(array)

        def operate_fresh() -> float:
            fresh = peer.new_array(case.items)
            fresh[0] = FIRST
            return peer.send_array(fresh)

        chosen = operate_fresh if info.name in FRESH else operate
        start_ns = time.perf_counter_ns()
        chosen()
        cold_ns = time.perf_counter_ns() - start_ns
        calls = calls_for(chosen, effort)
        before = _cpu_s(peer)
        sample = time_calls(chosen, calls)
        used = [
            1e9 * (after_s - before_s)
            for after_s, before_s in zip(_cpu_s(peer), before, strict=True)
        ]
        client_ns, server_ns = (each_ns / (calls * case.size_bytes / 1e9) for each_ns in used)
        sample.figures.update(
            cold_ns=cold_ns, client_cpu_per_gb_ns=client_ns, server_cpu_per_gb_ns=server_ns
        )
        return sample.with_work(first_right=int(chosen() == FIRST))


def _cpu_s(peer: Peer) -> tuple[float, float]:
    """What this process and the peer's server have used."""
    assert peer.server is not None
    return process_cpu_s(os.getpid()), process_cpu_s(peer.server.pid)


def measure_copy(place: Place, effort: Effort, case: Handed) -> Sample:
    """One copy into memory that has been written before."""
    source, target = np.full(case.items, FIRST, ITEM), np.zeros(case.items, ITEM)
    return time_each(partial(np.copyto, target, source), effort).with_work(
        first_right=int(target[0] == FIRST)
    )


def test_every_candidate_sees_the_first_element() -> None:
    for result in run(Handed(20_000), TINY):
        assert result.state in ("ok", "not installed"), result.note
        if result.state == "ok":
            assert result.work == {"first_right": 1}
            assert result.bytes_per_op == 80_000


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
