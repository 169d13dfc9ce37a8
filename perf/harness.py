"""Candidates measured in turn under the same conditions, repeat by repeat.

One repeat of one candidate is a child process on its own core (it measures), which starts the
candidate's server as a child on the other core. Both end before the next candidate starts, so that
no poller of one stands in the way of another. The repeats go round robin, a, b, c, a, b, c: a drift
of the machine hits all alike. What is reported is the median over repeats.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from . import machine
from .child import Announce, Child, ChildFailed, ChildSilent, NotOffered
from .timing import Effort, Sample

# One repeat of one candidate: start two or three processes, warm up, measure. The longest takes
# some 8 s; what takes longer than this hangs, is ended and reported as failed.
REPEAT_S_MAX = 60.0

Role = Literal["ours", "peer", "limit", "given"]  # given: published by others, not measured here


@dataclass(frozen=True, slots=True)
class Place:
    """Where a candidate is measured, handed to its `measure` function in the measuring process."""

    cores: tuple[int, ...]  # of the measuring process; (): not pinned
    server_cores: tuple[int, ...]
    # for a third process, that has nothing to do while figures are taken
    other_cores: tuple[int, ...]
    # private, for sockets; removed by the harness, with all in /dev/shm that begins with its name
    folder: str

    @contextlib.contextmanager
    def serve(self, target: Callable[..., None], *args: object) -> Iterator[tuple[Child, Any]]:
        """`target(announce, *args)` in a process on the server's core: that process, and what it
        announces first.
        """
        with Child(target, *args, cores=self.server_cores) as child:
            yield child, child.receive()

    @contextlib.contextmanager
    def serve_aside(
        self, target: Callable[..., None], *args: object
    ) -> Iterator[tuple[Child, Any]]:
        """The same for a process that is not measured."""
        with Child(target, *args, cores=self.other_cores) as child:
            yield child, child.receive()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do the work of a case."""

    name: str
    role: Role
    # a module's function or a partial of one; runs in the measuring process
    measure: Callable[[Place, Effort], Sample]
    module: str | None = None  # must be importable, else "not installed"
    distribution: str | None = None  # whose version to tell
    bytes_per_op: int | None = None  # where it differs from the case's


@dataclass(frozen=True, slots=True)
class Result:
    """One candidate in one case: medians over the repeats that succeeded."""

    bench: str
    case: str
    candidate: str
    role: Role
    state: Literal["ok", "not installed", "not offered", "failed"]
    note: str = ""  # why, when state is not ok
    version: str | None = None
    repeats: int = 0
    ops: int = 0  # of one repeat
    p50_ns: float | None = None
    p50_ns_low: float | None = None  # least and most p50 of any repeat
    p50_ns_high: float | None = None
    p99_ns: float | None = None
    p999_ns: float | None = None
    ops_per_s: float | None = None
    bytes_per_op: int = 0
    work: dict[str, int] = field(default_factory=dict)  # over all repeats
    figures: dict[str, float] = field(default_factory=dict)
    each: dict[str, list[float]] = field(default_factory=dict)  # figure -> of each repeat, in order

    @property
    def bytes_per_s(self) -> float | None:
        """Payload moved one way: by the median time of an operation, or by the rate where
        operations overlap.
        """
        if not self.bytes_per_op:
            return None
        if self.p50_ns:
            return self.bytes_per_op * 1e9 / self.p50_ns
        return self.ops_per_s * self.bytes_per_op if self.ops_per_s else None


def compare(
    bench: str,
    case: str,
    candidates: Sequence[Candidate],
    effort: Effort,
    *,
    bytes_per_op: int = 0,
    pinned: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """Measure all candidates of one case; one result each, in their order, whatever happens to any
    of them.
    """
    samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in candidates}
    refused: dict[str, Result] = {}
    for candidate in candidates:
        if candidate.module and not machine.is_installed(candidate.module):
            refused[candidate.name] = Result(
                bench,
                case,
                candidate.name,
                candidate.role,
                "not installed",
                f"no module {candidate.module}",
            )
    for repeat in range(effort.repeats):
        for candidate in candidates:
            if candidate.name in refused:
                continue
            if progress:
                progress(f"{bench}  {case}  {candidate.name}  {repeat + 1}/{effort.repeats}")
            try:
                samples[candidate.name].append(_one_repeat(candidate, effort, pinned))
            except NotOffered as reason:
                refused[candidate.name] = Result(
                    bench, case, candidate.name, candidate.role, "not offered", str(reason)
                )
            except (ChildFailed, ChildSilent) as error:
                refused[candidate.name] = Result(
                    bench, case, candidate.name, candidate.role, "failed", str(error)
                )
    return [
        refused.get(candidate.name)
        or _result(bench, case, candidate, samples[candidate.name], bytes_per_op)
        for candidate in candidates
    ]


def _place(folder: str, pinned: bool) -> Place:
    """The measuring process gets the last core that this one may use, the server the one before, if
    there is one.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    if not pinned:
        return Place((), (), (), folder)
    return Place(allowed[-1:], allowed[-2:-1] or allowed, allowed, folder)


def _one_repeat(candidate: Candidate, effort: Effort, pinned: bool) -> Sample:
    with tempfile.TemporaryDirectory(prefix="prpc-bench-") as folder, _shm_of(folder):
        place = _place(folder, pinned)
        with Child(_measure, candidate.measure, place, effort, cores=place.cores) as child:
            sample: Sample = child.receive(REPEAT_S_MAX)
            child.finish()
            return sample


@contextlib.contextmanager
def _shm_of(folder: str) -> Iterator[None]:
    """Remove afterwards what a candidate left in /dev/shm under the folder's name: a library may
    leave files there by design, and leaves them when its process is killed.
    """
    try:
        yield
    finally:
        for path in Path(machine.SHM_FOLDER).glob(f"{Path(folder).name}*"):
            path.unlink(missing_ok=True)


def _measure(
    announce: Announce, measure: Callable[[Place, Effort], Sample], place: Place, effort: Effort
) -> None:
    announce(measure(place, effort))


def _result(
    bench: str, case: str, candidate: Candidate, samples: list[Sample], bytes_per_op: int
) -> Result:
    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None

    p50s = [sample.p50_ns for sample in samples if sample.p50_ns is not None]
    return Result(
        bench=bench,
        case=case,
        candidate=candidate.name,
        role=candidate.role,
        state="ok",
        version=machine.version_of(candidate.distribution) if candidate.distribution else None,
        repeats=len(samples),
        ops=int(statistics.median(sample.ops for sample in samples)),
        p50_ns=median([sample.p50_ns for sample in samples]),
        p50_ns_low=min(p50s, default=None),
        p50_ns_high=max(p50s, default=None),
        p99_ns=median([sample.p99_ns for sample in samples]),
        p999_ns=median([sample.p999_ns for sample in samples]),
        ops_per_s=median([sample.ops_per_s for sample in samples]),
        bytes_per_op=bytes_per_op if candidate.bytes_per_op is None else candidate.bytes_per_op,
        work={key: sum(sample.work[key] for sample in samples) for key in samples[0].work},
        figures={
            key: statistics.median(sample.figures[key] for sample in samples)
            for key in samples[0].figures
        },
        each=_each(samples),
    )


def _each(samples: list[Sample]) -> dict[str, list[float]]:
    """The figures that all repeats have, of each of them."""
    found: dict[str, list[float]] = {}
    for name in ("p50_ns", "ops_per_s"):
        values = [getattr(sample, name) for sample in samples]
        if None not in values:
            found[name] = values
    for name in samples[0].figures:
        found[name] = [sample.figures[name] for sample in samples]
    return found


def as_record(result: Result) -> dict[str, object]:
    """A result as plain values, for JSON."""
    record: dict[str, object] = {item.name: getattr(result, item.name) for item in fields(result)}
    record["bytes_per_s"] = result.bytes_per_s
    return record


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what runs now, when somebody looks."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    start = time.monotonic()

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{time.monotonic() - start:5.0f} s  {text}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()
