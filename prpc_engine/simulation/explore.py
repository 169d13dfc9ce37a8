"""Runs a scenario under many seeds, and makes what fails small.

    scenario(simulation)   makes processes, lets them run, asserts what must hold

    for failure in explore(scenario, range(2000)):
        print(failure)

A failing seed is run again with fewer and fewer faults: first without those after its failure, then
without halves, quarters and single ones, as long as it fails in the same way (delta debugging:
Zeller and Hildebrandt, 2002).
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from prpc_engine.errors import text_of
from prpc_engine.simulation.errors import SimulationError, Stuck
from prpc_engine.simulation.process import never_runs
from prpc_engine.simulation.simulation import Simulation

Scenario = Callable[[Simulation], object]
TRIES_MAX = 200  # runs that a failure is made small in, at most
SEEDS_AHEAD = 64  # of each process that are taken from `seeds` at a time: these may have no end


@dataclass(frozen=True)
class RunOutcome:
    """One run of a scenario. error: "" where it held."""

    seed: int
    skip: frozenset[int]
    error: str  # its last line: what failed
    text: str  # the whole of it
    faults: tuple[str, ...]  # those that there were
    numbers: tuple[int, ...]  # of these
    events: int
    virtual_s: float
    digest: str
    kind: str = ""  # of the error: its type, and that of its cause


@dataclass(frozen=True)
class Failure:
    """A seed that fails, and how few faults it takes."""

    first: RunOutcome
    least: RunOutcome
    tries: int

    def __str__(self) -> str:
        least = self.least
        faults = "\n".join(f"    {each}" for each in least.faults) or "    none"
        return (
            f"seed {least.seed} fails after {least.events} events and {least.virtual_s:.3f} s: "
            f"{least.error}\n  with {len(least.faults)} of {len(self.first.faults)} faults "
            f"({self.tries} runs):\n{faults}\n"
            f"  again: Simulation({least.seed}, skip={sorted(least.skip)})"
        )


def run_once(
    scenario: Scenario,
    seed: int,
    skip: Collection[int] = (),
    keep: str | Path | None = None,
) -> RunOutcome:
    """One run. keep: a folder for its timeline, as text and as a trace for Perfetto. Raises
    SimulationError.
    """
    _check_runs(scenario)
    skip, failure = frozenset(skip), _HELD
    simulation = Simulation(seed, keep=keep is not None, skip=skip)
    try:
        with simulation:
            try:
                _check_ran(scenario, scenario(simulation))
            except (Exception, SystemExit) as failed:
                failure = _told(failed)
            faults = [each for each in simulation.faults if each.number not in skip]
            events, virtual_s, digest = simulation.events, simulation.now, simulation.digest
            if keep is not None:
                _keep(simulation, Path(keep), failure.text)
    except Stuck as stuck:  # threads that do not end with the simulation
        failure = failure if failure.error else _told(stuck)
    outcome = RunOutcome(
        seed,
        skip,
        failure.error,
        failure.text,
        tuple(map(str, faults)),
        tuple(each.number for each in faults),
        events,
        virtual_s,
        digest,
        failure.kind,
    )
    begun = tuple(each.number for each in faults if each.begins_s > virtual_s)
    return outcome if not begun else _without(outcome, begun)


@dataclass(frozen=True)
class _Told:
    """What an error is in a RunOutcome."""

    error: str
    text: str
    kind: str


_HELD = _Told("", "", "")  # there was none


def _told(failed: BaseException) -> _Told:
    line = (text_of(failed).splitlines() or [type(failed).__name__])[0]
    types = (type(each).__name__ for each in (failed, failed.__cause__) if each is not None)
    text = "".join(traceback.format_exception(failed))
    return _Told(f"{type(failed).__name__}: {line}", text, " of ".join(types))


def _keep(simulation: Simulation, folder: Path, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SimulationError(f"keep={str(folder)!r:.200}: a folder, and that is a file") from None
    timeline = f"{simulation.timeline.text()}\n\n{text}"
    (folder / f"seed-{simulation.seed}.txt").write_text(timeline, "utf-8", "backslashreplace")
    simulation.timeline.write_trace(folder / f"seed-{simulation.seed}.json")


def _check_runs(scenario: Scenario) -> None:
    if not callable(scenario) or never_runs(scenario):
        raise SimulationError(
            f"{scenario!r:.200} is no scenario: nothing would run what is `async` or has a "
            "`yield`; a plain function of a Simulation"
        )


def _check_ran(scenario: Scenario, result: object) -> None:
    if never_runs(result):  # as of a lambda
        raise SimulationError(f"{scenario!r:.200} answers {result!r:.100}, which nothing runs")


def _without(outcome: RunOutcome, later: tuple[int, ...]) -> RunOutcome:
    """The same, whose faults after its end are skipped."""
    kept = [
        (number, text)
        for number, text in zip(outcome.numbers, outcome.faults, strict=True)
        if number not in later
    ]
    return replace(
        outcome,
        skip=outcome.skip | set(later),
        faults=tuple(text for _, text in kept),
        numbers=tuple(number for number, _ in kept),
    )


def shrink(scenario: Scenario, first: RunOutcome) -> Failure:
    """A failing run with as few faults as still fail with an error of the same kind."""
    least, tries = first, 0
    pieces = 2
    while least.numbers and tries < TRIES_MAX:
        size = max(1, len(least.numbers) // pieces)
        for at in range(0, len(least.numbers), size):
            left_out = set(least.numbers[at : at + size])
            outcome = run_once(scenario, first.seed, least.skip | left_out)
            tries += 1
            if outcome.kind == first.kind:
                least, pieces = outcome, max(2, pieces - 1)
                break
            if tries >= TRIES_MAX:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(least.numbers))
    return Failure(first, least, tries)


def outcomes(scenario: Scenario, seeds: Iterable[int], jobs: int = 1) -> Iterator[RunOutcome]:
    """The run of each seed, as they end; `jobs` processes. Raises SimulationError."""
    _check_runs(scenario)
    if type(jobs) is not int or jobs < 1:
        raise SimulationError(f"jobs={jobs!r:.100}: 1 or more processes")
    try:
        numbers = iter(seeds)
    except TypeError:
        raise SimulationError(
            f"seeds={seeds!r:.100}: several, as range(100) or [7]; run_once() runs one"
        ) from None
    once = partial(run_once, scenario)
    if jobs == 1:
        yield from map(once, numbers)
        return
    try:
        pickle.dumps(scenario)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SimulationError(
            f"jobs={jobs}: {scenario!r:.200} is not found in another process: define it with `def` "
            "at the top of a module, or use jobs=1"
        ) from error
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("forkserver")) as processes:
        while some := list(islice(numbers, SEEDS_AHEAD * jobs)):
            yield from processes.map(once, some, chunksize=8)


def explore(
    scenario: Scenario,
    seeds: Iterable[int],
    jobs: int = 1,
    keep: str | Path | None = None,
    failures_max: int = 10,
) -> list[Failure]:
    """Run all seeds; those that fail, made small, `failures_max` of them at most. keep: a folder
    for their timelines. Raises SimulationError.
    """
    if failures_max < 1:
        raise SimulationError(f"failures_max={failures_max}: 1 or more")
    failures: list[Failure] = []
    for outcome in outcomes(scenario, seeds, jobs):
        if outcome.error:
            failure = shrink(scenario, outcome)
            failures.append(failure)
            if keep is not None:
                run_once(scenario, outcome.seed, failure.least.skip, keep)
            if len(failures) >= failures_max:
                break
    return failures
