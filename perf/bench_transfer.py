"""Arrays from 1 MB to 640 MB over tcp beside raw sockets; from 1.25 KB to 1.25 GB over shared
memory beside published figures.

The work is bench_tensor's: an array goes one way, its first element comes back. The sizes of shared
memory are those of a published table (published.py), whose figures stand in ours marked "other
machine".

Expected:
    tcp, 1 MB             raw: 0.1 ms, all of it in the cache. Ours 30 us more for the call around
                          it, which 90 % leave 10 of.
    tcp, 40 and 640 MB    raw: 2 to 4 GB/s, a copy into the kernel and one out of it, each on its
                          core: 0.3 to 0.5 CPU seconds per GB a side. Ours the same, for it receives
                          into the array that the handler sees. A poller that waits for memory to be
                          copied uses its core all the time; who blocks, as little as the raw socket
                          does.
    unix                  the same two copies, into pages that the kernel finds anew for each: 0.2
                          ms more for 1 MB.
    pyzmq, pynng, grpcio  one to three copies more, into memory that is touched for the first time:
                          half of raw and less.
    shm, slab array       10 to 20 us, whatever the size: a descriptor goes.
    shm, ordinary array   the same up to 20 KB; then one copy: np.copyto and 30 us.
    pynng ipc             raw tcp's copies and its own: 1 GB/s. torch.distributed.rpc: 0.2 ms, and
                          one or two copies.
    cold                  connects first, 2 to 5 ms; then the slab's block is made, 0.1 ms for each
                          MB.

From LARGE_BYTES on a case has fewer repeats, and is not measured at all where memory or /dev/shm
has no room for it.

    python -m perf.bench_transfer [--json] [--quick] [--case shm] [--plot transfer.svg]
torch.distributed.rpc is measured where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from . import bench_tensor, machine, peers, plot, published, units
from .bench_tensor import SHM_ORDINARY, SHM_SLAB, TCP_ORDINARY, Handed
from .child import NotOffered
from .harness import Candidate, Place, Result, compare
from .peers import PeerInfo
from .peers.face import ITEM
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "transfer"
LARGE_BYTES = 256 << 20
# Of those, one operation of the slowest candidate takes some 5 s: two to warm up and three that
# count end before a repeat must.
LARGE_REPEATS, LARGE_OPS_MIN = 3, 3
# The array, what a library copies it to before it sends, its queue, and the same at the other side:
# the most that any holds.
COPIES_MAX = 6
SHM_COPIES_MAX = 2  # the array of the slab, and the block that one is received into

TCP_ORDINARY_PARKING = replace(peers.TCP_PARKING, name="prpc tcp, ordinary array, parking")
UNIX_ORDINARY = replace(peers.UNIX_POLLING, name="prpc unix, ordinary array")
SHM_ORDINARY_PARKING = replace(peers.SHM_PARKING, name="prpc shm, ordinary array, parking")
OVER_TCP = [
    *(UNIX_ORDINARY, TCP_ORDINARY, TCP_ORDINARY_PARKING, peers.TCP_SPINNING, peers.TCP_BLOCKING),
    *(peers.ZMQ_TCP, peers.NNG_TCP, peers.GRPC),
]
OVER_SHM = [SHM_SLAB, SHM_ORDINARY, SHM_ORDINARY_PARKING, peers.NNG, peers.TORCH_RPC]
COPY = "np.copyto"


@dataclass(frozen=True, slots=True)
class OverTcp:
    """float32[items], handed to the peer over tcp."""

    items: int

    @property
    def size_bytes(self) -> int:
        return self.items * ITEM.itemsize

    def __str__(self) -> str:
        return f"tcp, array of {self.size_bytes / 1e6:g} MB"


@dataclass(frozen=True, slots=True)
class OverShm:
    """An array of a published size, handed to a peer of this host."""

    label: str  # in published.SIZES_BYTES

    @property
    def size_bytes(self) -> int:
        return published.SIZES_BYTES[self.label]

    def __str__(self) -> str:
        return f"shm, array of {self.label}"


class Sized(Protocol):
    """A case that an array of some size is handed over in."""

    @property
    def size_bytes(self) -> int:
        """Of the array."""


Case = OverTcp | OverShm
TCP_CASES = [OverTcp(250_000), OverTcp(10_000_000), OverTcp(160_000_000)]
SHM_CASES = [OverShm(label) for label in published.SIZES_BYTES]
CASES: list[Case] = [*TCP_CASES, *SHM_CASES]

# Each beside what waits as it does: a poller beside a socket that spins, who parks beside a socket
# that blocks.
OURS_AND_RAW = [(TCP_ORDINARY, peers.TCP_SPINNING), (TCP_ORDINARY_PARKING, peers.TCP_BLOCKING)]
# What a message to another process of the same host may take here: an ordinary array, answered.
SHM_MS_MAX = {"1.25 KB": 0.06, "20 KB": 0.06, "1.25 MB": 0.2, "10 MB": 1.2, "40 MB": 10.0}
TARGETS = [
    *(
        Target(str(case), ours.name, "bytes_per_s", "at least", 0.9, against=raw.name)
        for case in TCP_CASES
        for ours, raw in OURS_AND_RAW
    ),
    *(
        Target(
            str(case), TCP_ORDINARY_PARKING.name, "bytes_per_s", "at least", 1.5, against=peer.name
        )
        for case in TCP_CASES
        for peer in (peers.NNG_TCP, peers.ZMQ_TCP, peers.GRPC)
    ),
    *(
        Target(str(OverShm(label)), SHM_ORDINARY.name, "p50_ns", "at most", most_ms * 1e6)
        for label, most_ms in SHM_MS_MAX.items()
    ),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates;
    over shared memory what was published comes after them.
    """
    infos = OVER_TCP if isinstance(case, OverTcp) else OVER_SHM
    candidates = [
        Candidate(
            info.name,
            info.role,
            partial(measure, case=case, info=info),
            info.module,
            info.distribution,
        )
        for info in infos
    ]
    candidates.append(Candidate(COPY, "limit", partial(measure_copy, case=case)))
    if case.size_bytes >= LARGE_BYTES:
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
    return (
        measured
        if isinstance(case, OverTcp)
        else measured + published.results(NAME, str(case), case.label)
    )


def check_room(size_bytes: int) -> None:
    """Raises NotOffered where an array of that size, and the copies that libraries make of it, find
    no room.
    """
    for where, free_bytes, copies in (
        ("memory", machine.memory_available_bytes(), COPIES_MAX),
        (machine.SHM_FOLDER, machine.shm_available_bytes(), SHM_COPIES_MAX),
    ):
        if free_bytes < copies * size_bytes:
            free, wanted = units.amount(free_bytes, "B"), units.amount(copies * size_bytes, "B")
            raise NotOffered(
                f"{free} of {where} is free, up to {wanted} are wanted for an array of "
                f"{size_bytes} bytes"
            )


def measure(place: Place, effort: Effort, case: Case, info: PeerInfo) -> Sample:
    """As bench_tensor does."""
    check_room(case.size_bytes)
    return bench_tensor.measure(place, effort, _handed(case), info)


def measure_copy(place: Place, effort: Effort, case: Case) -> Sample:
    """As bench_tensor does."""
    check_room(case.size_bytes)
    return bench_tensor.measure_copy(place, effort, _handed(case))


def _handed(case: Case) -> Handed:
    return Handed(case.size_bytes // ITEM.itemsize)


# -- showing ---------------------------------------------------------------------------------------


def draw(results: Sequence[Result], path: Path) -> None:
    """All curves to a file. Raises NoPlot where matplotlib is missing, OSError, ValueError for an
    unknown ending.
    """
    plot.draw(panels(results), path)


def panels(results: Sequence[Result]) -> list[plot.Panel]:
    """Time by size over shared memory, and bytes a second by size over tcp: a panel for each that
    was measured.
    """
    over_shm = curves(
        results, SHM_CASES, lambda result: None if result.p50_ns is None else result.p50_ns / 1e6
    )
    over_tcp = curves(
        results,
        TCP_CASES,
        lambda result: None if result.bytes_per_s is None else result.bytes_per_s / 1e9,
    )
    given = frozenset(map(published.name_of, published.TIMES_MS))
    drawn = [
        plot.Panel(
            f"{NAME}: shm", "bytes of an array", "p50, ms", over_shm, is_log=True, given=given
        ),
        plot.Panel(f"{NAME}: tcp", "bytes of an array", "GB/s", over_tcp, is_log=True),
    ]
    return [panel for panel in drawn if panel.curves]


def curves(
    results: Sequence[Result],
    cases: Sequence[Sized],
    value_of: Callable[[Result], float | None],
) -> dict[str, list[tuple[float, float]]]:
    """By candidate: a value by the size of the arrays of those cases."""
    sizes = {str(case): case.size_bytes for case in cases}
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        value = value_of(result)
        if result.case in sizes and value is not None:
            found.setdefault(result.candidate, []).append((sizes[result.case], value))
    return found


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_over_tcp_every_candidate_sees_the_first_element_and_tells_what_it_cost() -> None:
    results = run(OverTcp(20_000), TINY)
    for result in results:
        assert result.state in ("ok", "not installed"), result.note
        if result.state == "ok":
            assert result.work == {"first_right": 1}
            assert result.candidate == COPY or min(result.figures.values()) > 0
    assert not any(result.role == "given" for result in results)


def test_over_shm_published_figures_stand_beside_ours_and_in_the_plot_marked(
    tmp_path: Path,
) -> None:
    results = run(OverShm("20 KB"), TINY)
    for result in results:
        assert result.state in ("ok", "not installed"), result.note
        assert result.state != "ok" or result.role == "given" or result.work == {"first_right": 1}
    given = [result for result in results if result.role == "given"]
    assert [result.p50_ns for result in given] == [352_000, 110_400, 578_000]
    (panel,) = panels(results)
    assert panel.given == {result.candidate for result in given} < panel.curves.keys()
    assert all(published.OTHER_MACHINE in name for name in panel.given)
    if machine.is_installed("matplotlib"):
        draw(results, tmp_path / "transfer.svg")
        assert published.OTHER_MACHINE in (tmp_path / "transfer.svg").read_text()


def test_an_array_that_finds_no_room_is_not_measured_and_the_result_says_why() -> None:
    import pytest  # who only measures need not have it

    with pytest.raises(NotOffered, match="wanted for an array of 1125899906842624 bytes"):
        check_room(1 << 50)


def test_every_target_has_something_to_judge() -> None:
    for target in TARGETS:
        infos = OVER_TCP if target.case in map(str, TCP_CASES) else OVER_SHM
        assert target.case in map(str, CASES)
        assert {name for name in (target.candidate, target.against) if name} <= {
            info.name for info in infos
        }


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
