"""Learning rates that change with the steps of a table: data, sent with the table's spec; a pure
function of the step.

    name         rate at step 0, 1, 2, ...
    exponential  initial * factor ** (step / steps)
    polynomial   from initial to final over `steps` steps, as (1 - progress) ** power; then final
    cosine       from initial to final over `steps` steps, along half a cosine; then final
    warm_up      in equal parts up to what `then` starts with, over `steps` steps; then `then`, its
                 steps counted from there

A constant rate is a plain number. Steps are counted at the table: the pushes that this partition
has applied before. So with several partitions each goes by its own pushes, and a sparse one counts
only those that brought it keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from prpc_engine.kv.table.spec import build, checked_count, checked_number

STEPS_MAX = 2**53  # whole numbers up to here are exact in a float


class Schedule(ABC):
    """The settings of one schedule: frozen, comparable, and back and forth to a plain dict."""

    name: ClassVar[str]

    @abstractmethod
    def at(self, step: int) -> float:
        """The rate of step 0, 1, 2, ..."""

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal schedule."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    def _check(self, steps: int, final: float = 0.0, **above_0: float) -> None:
        checked_count(f"schedule {self.name!r}: steps", steps, at_least=1, at_most=STEPS_MAX)
        checked_number(f"schedule {self.name!r}: final", final, at_least=0)
        for setting, value in above_0.items():
            checked_number(f"schedule {self.name!r}: {setting}", value, above=0)


Rate = float | Schedule


@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiplied by `factor` every `steps` steps, evenly in between: tf.keras' ExponentialDecay,
    not in stairs.
    """

    name = "exponential"
    initial: float
    factor: float
    steps: int

    def __post_init__(self) -> None:
        self._check(self.steps, initial=self.initial, factor=self.factor)

    def at(self, step: int) -> float:
        return self.initial * math.pow(self.factor, step / self.steps)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """final + (initial - final) * (1 - step / steps) ** power; with power 1 a straight line."""

    name = "polynomial"
    initial: float
    steps: int
    final: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        self._check(self.steps, initial=self.initial, final=self.final, power=self.power)

    def at(self, step: int) -> float:
        left = 1.0 - min(step, self.steps) / self.steps
        return self.final + (self.initial - self.final) * math.pow(left, self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine without restarts. Loshchilov, Hutter, "SGDR" (ICLR 2017), equation 5."""

    name = "cosine"
    initial: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check(self.steps, initial=self.initial, final=self.final)

    def at(self, step: int) -> float:
        progress = min(step, self.steps) / self.steps
        return self.final + (self.initial - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Step i < steps has (i + 1) / (steps + 1) of the first rate of `then`, which is a number or a
    schedule.
    """

    name = "warm_up"
    steps: int
    then: Rate

    def __post_init__(self) -> None:
        self._check(self.steps)
        object.__setattr__(self, "then", from_spec("schedule 'warm_up': then", self.then))

    def at(self, step: int) -> float:
        if step < self.steps:
            return rate_at(self.then, 0) * (step + 1) / (self.steps + 1)
        return rate_at(self.then, step - self.steps)

    def to_spec(self) -> dict[str, Any]:
        return {"name": self.name, "steps": self.steps, "then": to_spec(self.then)}


SCHEDULES: dict[str, type[Schedule]] = {
    "exponential": Exponential,
    "polynomial": Polynomial,
    "cosine": Cosine,
    "warm_up": WarmUp,
}


def rate_at(rate: Rate, step: int) -> float:
    """The learning rate of step 0, 1, 2, ...: of a number, that number."""
    return rate.at(step) if isinstance(rate, Schedule) else rate


def from_spec(what: str, spec: object) -> Rate:
    """A number above 0 as it is; {"name": "cosine", ...} -> Cosine(...). ConfigError says what is
    allowed of `what`.
    """
    if isinstance(spec, Schedule | dict):
        return build("schedule", SCHEDULES, spec)
    return checked_number(what, spec, above=0)


def to_spec(rate: Rate) -> Any:
    """The number or dict from which from_spec() makes an equal rate."""
    return rate.to_spec() if isinstance(rate, Schedule) else rate
