"""Functions and arrays from one worker to another by prpc_engine.remote, beside what people use for
that: torch.distributed.rpc, nng (DI-engine's message queue), MPI, iceoryx2.

The sizes are those of two tables of DI-engine's documentation (published.py), whose figures stand
in ours marked "other machine". An array goes one way, its first element comes back, so an answer is
counted; the first array of a new connection is in cold_ns, the medians are of those that follow.

Expected:
    function, 64 B      a call (5 us, polling), and the function's name looked up, its section, the
                        worker's tables: 3 us on top. torch: 80 to 300 us (pickle, 16 threads).
    64 in flight        5 us a call and side, both at once: 150 k calls/s. torch: 4 to 14 k.
    idle                four threads a worker, one more where the master is; both park. torch with
                        its shm transport polls in each process, with 40 threads and 190
                        descriptors.
    arrays within a host  as in bench_transfer, whose calls take 3 us less.
    between hosts       over tcp on this host's loopback: two copies by the kernel.

    python -m perf.bench_p2p [--json] [--quick] [--case function] [--plot p2p.svg]
torch.distributed.rpc is measured where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from . import bench_rpc, bench_tensor, bench_transfer, machine, peers, plot, published
from .bench_rpc import Idle, Pipelined, RoundTrip
from .bench_tensor import Handed
from .harness import Candidate, Place, Result, compare
from .peers import PeerInfo
from .peers.face import ITEM
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "p2p"
LARGE_REPEATS, LARGE_OPS_MIN = 3, 3
CALLING = [peers.REMOTE_POLLING, peers.REMOTE_PARKING, peers.REMOTE_TCP, peers.TORCH_RPC]
CALLING += [peers.NNG, peers.MPI4PY, peers.ICEORYX_POLLING]
WITHIN = [
    *(peers.REMOTE_SLAB, peers.REMOTE_POLLING, peers.REMOTE_PARKING, peers.TORCH_RPC, peers.NNG),
    *(peers.MPI4PY, bench_tensor.ICEORYX, bench_tensor.ICEORYX_LENT),
]
BETWEEN = [peers.REMOTE_TCP, peers.NNG_TCP, peers.TCP_SPINNING, peers.TCP_BLOCKING]
IDLING = [peers.REMOTE_PARKING, peers.TORCH_RPC, peers.NNG, peers.MPI4PY]


@dataclass(frozen=True, slots=True)
class Within:
    """An array of a published size, handed to a worker of this host."""

    label: str

    @property
    def size_bytes(self) -> int:
        return published.SIZES_BYTES[self.label]

    def __str__(self) -> str:
        return f"within a host, array of {self.label}"


@dataclass(frozen=True, slots=True)
class Between:
    """The same over tcp, by the loopback of this host."""

    label: str

    @property
    def size_bytes(self) -> int:
        return published.INTER_SIZES_BYTES[self.label]

    def __str__(self) -> str:
        return f"over tcp, array of {self.label}"


Case = RoundTrip | Pipelined | Idle | Within | Between
CASES: list[Case] = [
    RoundTrip(64),
    Pipelined(64, window=64),
    Idle(64),
    *(Within(label) for label in published.SIZES_BYTES),
    *(Between(label) for label in published.INTER_SIZES_BYTES),
]
_CALL, _PIPELINED, _IDLE, _40_MB = map(str, (*CASES[:3], Within("40 MB")))
TARGETS = [
    Target(_CALL, peers.REMOTE_POLLING.name, "p50_ns", "at most", 10_000),
    Target(
        _CALL, peers.REMOTE_POLLING.name, "p50_ns", "at most", 1 / 8, against=peers.TORCH_RPC.name
    ),
    Target(
        _PIPELINED,
        peers.REMOTE_POLLING.name,
        "ops_per_s",
        "at least",
        8.0,
        against=peers.TORCH_RPC.name,
    ),
    Target(_IDLE, peers.REMOTE_PARKING.name, "server_cpu_percent", "at most", 1.0),
    Target(_IDLE, peers.REMOTE_PARKING.name, "server_threads", "at most", 4),
    Target(_IDLE, peers.REMOTE_PARKING.name, "server_descriptors", "at most", 40),
    Target(
        _40_MB, peers.REMOTE_POLLING.name, "p50_ns", "at most", 1 / 5, against=peers.TORCH_RPC.name
    ),
    Target(_40_MB, peers.REMOTE_POLLING.name, "p50_ns", "at most", 1 / 10, against=peers.NNG.name),
]


def infos_of(case: Case) -> list[PeerInfo]:
    """Who is measured in it."""
    if isinstance(case, Within):
        return WITHIN
    if isinstance(case, Between):
        return BETWEEN
    return IDLING if isinstance(case, Idle) else CALLING


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
    only: list[PeerInfo] | None = None,
) -> list[Result]:
    """Measure one case with all candidates, or those named; what was published comes after them."""
    candidates = [
        Candidate(
            info.name,
            info.role,
            partial(measure, case=case, info=info),
            info.module,
            info.distribution,
        )
        for info in only or infos_of(case)
    ]
    if case.size_bytes >= bench_transfer.LARGE_BYTES:
        fewer = min(effort.repeats, LARGE_REPEATS)
        effort = replace(effort, repeats=fewer, ops_min=min(effort.ops_min, LARGE_OPS_MIN))
    measured = compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )
    if isinstance(case, Within):
        return measured + published.results(NAME, str(case), case.label)
    if isinstance(case, Between):
        return measured + published.results(NAME, str(case), case.label, between_hosts=True)
    return measured


def measure(place: Place, effort: Effort, case: Case, info: PeerInfo) -> Sample:
    """One repeat of one candidate: as bench_rpc and bench_tensor do."""
    if isinstance(case, Within | Between):
        bench_transfer.check_room(case.size_bytes)
        return bench_tensor.measure(place, effort, Handed(case.size_bytes // ITEM.itemsize), info)
    return bench_rpc.measure(place, effort, case, info)


# -- showing ---------------------------------------------------------------------------------------


def draw(results: Sequence[Result], path: Path) -> None:
    """All curves to a file. Raises NoPlot where matplotlib is missing, OSError, ValueError for an
    unknown ending.
    """
    plot.draw(panels(results), path)


def panels(results: Sequence[Result]) -> list[plot.Panel]:
    """Time by size, within a host and over tcp: a panel for each that was measured."""
    given = frozenset(
        map(published.name_of, (*published.TIMES_MS, *published.INTER_TIMES_MS)),
    )
    drawn = [
        plot.Panel(
            f"{NAME}: {name}",
            "bytes of an array",
            "p50, ms",
            bench_transfer.curves(results, cases, _p50_ms),
            is_log=True,
            given=given,
        )
        for name, cases in (
            ("within a host", [case for case in CASES if isinstance(case, Within)]),
            ("over tcp", [case for case in CASES if isinstance(case, Between)]),
        )
    ]
    return [panel for panel in drawn if panel.curves]


def _p50_ms(result: Result) -> float | None:
    return None if result.p50_ns is None else result.p50_ns / 1e6


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_every_candidate_answers_and_tells_what_it_cost() -> None:
    for case in CASES[:3]:
        for result in run(case, TINY):
            assert result.state in ("ok", "not installed", "not offered"), result.note
            if result.state == "ok":
                assert result.work["bytes_echoed"] >= 64
    for result in run(Idle(64), TINY, only=[peers.REMOTE_PARKING]):
        assert result.figures["server_threads"] >= 3
        assert result.figures["server_descriptors"] > 3


def test_arrays_arrive_and_published_figures_stand_beside_ours(tmp_path: Path) -> None:
    results = run(Within("20 KB"), TINY) + run(Between("20 KB"), TINY)
    for result in results:
        assert result.state in ("ok", "not installed", "not offered"), result.note
        assert result.state != "ok" or result.role == "given" or result.work == {"first_right": 1}
    given = [result.p50_ns for result in results if result.role == "given"]
    assert given == [352_000, 110_400, 578_000, 5_735_300, 5_669_100, 21_388_400]
    assert len(panels(results)) == 2
    if machine.is_installed("matplotlib"):
        draw(results, tmp_path / "p2p.svg")
        assert published.OTHER_MACHINE in (tmp_path / "p2p.svg").read_text()


def test_every_target_has_something_to_judge() -> None:
    cases = {str(case): case for case in CASES}
    for target in TARGETS:
        assert {name for name in (target.candidate, target.against) if name} <= {
            info.name for info in infos_of(cases[target.case])
        }


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
