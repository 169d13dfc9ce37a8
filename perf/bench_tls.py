"""What TLS costs: small calls and large arrays over tcp with it and without it, beside raw sockets
in both ways.

With TLS means TLS 1.3 with certificates of both sides, verified by both (mTLS), as in a job with
PRPC_TLS_CERT, _KEY and _CA.

Expected:
    64 B call  a record each way: some 4 us more at each of the four ends of sealing, opening and
               Python's ssl around them, on raw sockets as on ours.
    40 MB      AES-GCM at 2 to 4 GB/s, sealed by one side and opened by the other at the same time,
               in records of 16 KiB, each a read of its own: half of plain tcp's speed.

    python -m perf.bench_tls [--json] [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from . import bench_rpc, bench_tensor, peers
from .bench_rpc import RoundTrip
from .bench_tensor import Handed
from .certificates import tls_switched_on
from .harness import Candidate, Place, Result, compare
from .peers import PeerInfo
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "tls"


def _with_tls(info: PeerInfo, name: str, **options: object) -> PeerInfo:
    return replace(info, name=name, module="cryptography", options={**info.options, **options})


TLS_POLLING = _with_tls(peers.TCP_POLLING, "prpc tcp with TLS, polling")
TLS_PARKING = _with_tls(peers.TCP_PARKING, "prpc tcp with TLS, parking")
TLS_RAW_SPINNING = _with_tls(peers.TCP_SPINNING, "raw TLS, spinning", tls=True)
TLS_RAW_BLOCKING = _with_tls(peers.TCP_BLOCKING, "raw TLS, blocking", tls=True)
WITH_TLS = [TLS_POLLING, TLS_PARKING, TLS_RAW_SPINNING, TLS_RAW_BLOCKING]
ALL = [*WITH_TLS, peers.TCP_POLLING, peers.TCP_PARKING, peers.TCP_SPINNING, peers.TCP_BLOCKING]

Case = RoundTrip | Handed
CASES: list[Case] = [RoundTrip(64), Handed(10_000_000)]

_CALL, _ARRAY = (str(case) for case in CASES)
TARGETS = [
    Target(_CALL, TLS_POLLING.name, "p50_ns", "at most", 2.0, against=TLS_RAW_SPINNING.name),
    Target(_ARRAY, TLS_POLLING.name, "p50_ns", "at most", 1 / 0.8, against=TLS_RAW_BLOCKING.name),
]


def run(
    case: Case,
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
    """As bench_rpc and bench_tensor do, in an environment that has certificates where the candidate
    wants them.
    """
    with tls_switched_on() if info in WITH_TLS else nullcontext():
        if isinstance(case, RoundTrip):
            return bench_rpc.measure_round_trip(place, effort, case, info)
        return bench_tensor.measure(place, effort, case, info)


def test_every_candidate_echoes_every_byte_and_sees_the_first_element() -> None:
    for case, work in ((RoundTrip(64), {"bytes_echoed": 64}), (Handed(20_000), {"first_right": 1})):
        for result in run(case, TINY, [TLS_PARKING, TLS_RAW_SPINNING, TLS_RAW_BLOCKING]):
            assert result.state in ("ok", "not installed"), result.note
            if result.state == "ok":
                assert result.work == work


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
