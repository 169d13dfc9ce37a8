"""Timer: count, total, mean, variance, minimum and maximum of numbers, durations above all.

The state is (count, total, m2, minimum, maximum), where m2 is the sum of squared distances from the
mean. The textbook's sum of squares can be had from it, and not the other way round: for durations
of 1000 s that differ by microseconds the squares agree in all digits a float has, and their
difference is noise. Two states merge by the formula of T. F. Chan, G. H. Golub, R. J. LeVeque:
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prpc_engine.accumulator.aggregator import Aggregator, check_count, check_number
from prpc_engine.accumulator.arithmetic import add_counts, overflow
from prpc_engine.errors import BadArguments


class Timer(Aggregator, kind="timer"):
    """A timer keeps count, total, mean, variance, minimum and maximum of numbers.

    Values are finite numbers; their unit is the caller's, and belongs into the counter's name.
    Raises BadArguments for other values, and for those whose total or squares no float can hold.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.m2 = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf

    @property
    def mean(self) -> float:
        """NaN before anything came, as the variance."""
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Of the values as they are (divided by count, not by count - 1)."""
        return self.m2 / self.count if self.count else math.nan

    @property
    def sum_of_squares(self) -> float:
        """Of the values, not of their distances from the mean."""
        return self.m2 + self.total * self.total / self.count if self.count else 0.0

    def check(self, value: Any) -> Any:
        if type(value) is float and -math.inf < value < math.inf:
            return value  # the usual case, without a further call
        return float(check_number("a timer counter", value, finite=True))

    def merge_value(self, value: float) -> None:
        self._take(1, value, 0.0, value, value)

    def merge_values(self, values: Sequence[float]) -> None:
        array = np.array(values, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # _take() refuses what overflows
            total = float(array.sum())
            distances = array - total / len(array)
            m2 = float(distances @ distances)
        self._take(len(array), total, m2, float(array.min()), float(array.max()))

    def _take(self, count: int, total: float, m2: float, minimum: float, maximum: float) -> None:
        whose = "a timer counter"
        counted = add_counts(whose, self.count, count)
        if self.count:
            apart = total / count - self.total / self.count
            m2 += self.m2 + apart * apart * (self.count * count / counted)
            total += self.total
        if not math.isfinite(total) or not math.isfinite(m2):
            what = "total" if not math.isfinite(total) else "sum of squared distances from the mean"
            raise overflow(whose, f"their {what} is larger than any float")
        self.count, self.total, self.m2 = counted, total, m2
        self.minimum = min(self.minimum, minimum)
        self.maximum = max(self.maximum, maximum)

    def merge_aggregator(self, other: Timer) -> None:
        if other.count:
            self._take(other.count, other.total, other.m2, other.minimum, other.maximum)

    def serialize(self) -> Any:
        return (self.count, self.total, self.m2, self.minimum, self.maximum)

    def deserialize(self, state: Any) -> None:
        count, *numbers = state
        if not check_count("a timer counter", count):
            return
        total, m2, minimum, maximum = (
            float(check_number("a timer counter", number, finite=True)) for number in numbers
        )
        if not m2 >= 0 or not minimum <= maximum:
            raise BadArguments(
                f"a timer counter with m2={m2}, minimum={minimum}, maximum={maximum}"
            )
        self._take(count, total, m2, minimum, maximum)

    def try_to_string(self) -> str | None:
        if not self.count:
            return None
        return (
            f"TOTAL={self.total:.6g} COUNT={self.count} MEAN={self.mean:.6g} "
            f"VARIANCE={self.variance:.6g} "
            f"MIN={self.minimum:.6g} MAX={self.maximum:.6g}"
        )
