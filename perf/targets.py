"""What a benchmark must show, judged from its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .harness import Result


@dataclass(frozen=True, slots=True)
class Target:
    """`figure` of `candidate` in `case` must be at most, or at least, `bound`; times that of
    `against`, when given.
    """

    case: str
    candidate: str
    figure: str  # "p50_ns", "ops_per_s", or a name in Result.figures
    kind: Literal["at most", "at least"]
    bound: float
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target beside what was measured."""

    target: Target
    measured: float | None  # in the unit of target.bound; None: there is nothing to judge by

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        if self.measured is None:
            return None
        return (
            self.measured <= self.target.bound
            if self.target.kind == "at most"
            else self.measured >= self.target.bound
        )


def judge(targets: Sequence[Target], results: Sequence[Result]) -> list[Verdict]:
    """One verdict per target."""
    verdicts = []
    for target in targets:
        measured = _figure(results, target.case, target.candidate, target.figure)
        if target.against is not None and measured is not None:
            other = _figure(results, target.case, target.against, target.figure)
            measured = measured / other if other else None
        verdicts.append(Verdict(target, measured))
    return verdicts


def _figure(results: Sequence[Result], case: str, candidate: str, figure: str) -> float | None:
    for result in results:
        if (result.case, result.candidate) == (case, candidate):
            value: float | None = (
                getattr(result, figure) if hasattr(result, figure) else result.figures.get(figure)
            )
            return value
    return None
