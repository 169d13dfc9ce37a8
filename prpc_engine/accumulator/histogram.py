"""Histogram: how values are spread, with quantiles of a bounded relative error, in buckets whose width grows with the value.

    bucket i    holds values in (gamma**(i-1), gamma**i], with gamma = (1 + relative_error) / (1 - relative_error)
    its value   2 * gamma**i / (gamma + 1): no value of the bucket is further from it than relative_error times that value

This is DDSketch (C. Masson, J. E. Rim, H. K. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019). Negative values have buckets of their own, zero has one. Buckets are kept for the `buckets_max` largest
exponents of each sign; what is smaller in magnitude goes into the lowest bucket kept, and `collapsed` says that this happened.
Which buckets are kept depends on the largest value alone, so the order of merging changes nothing.

quantile(q) is the value of rank floor(q * (count - 1)), from 0, up to relative_error (and the rounding of a float). Where
`collapsed`, this does not hold for ranks in the lowest bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.accumulator.aggregator import Aggregator, check_count, check_number, check_parameter
from prpc_engine.errors import BadArguments

RELATIVE_ERROR = 0.01
RELATIVE_ERROR_MIN, RELATIVE_ERROR_MAX = 1e-4, 0.5
BUCKETS_MAX = 4096  # with an error of 1 %: 35 powers of ten, nanoseconds to ages, in at most 100 KB a sign
BUCKETS_MAX_MAX = 1 << 20
Buckets = dict[int, int]  # exponent -> count


class Histogram(Aggregator, kind="histogram"):
    """See the file's head. Values are finite numbers, or arrays of them, each element a value."""

    def __init__(self, relative_error: float = RELATIVE_ERROR, buckets_max: int = BUCKETS_MAX) -> None:
        check_parameter("Histogram", "relative_error", relative_error, RELATIVE_ERROR_MIN, RELATIVE_ERROR_MAX, whole=False)
        check_parameter("Histogram", "buckets_max", buckets_max, 16, BUCKETS_MAX_MAX)
        self.relative_error = relative_error
        self.buckets_max = buckets_max
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._per_log = 1 / math.log(self._gamma)
        self.positive: Buckets = {}
        self.negative: Buckets = {}
        self.zeros = 0
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.collapsed = False

    def parameters(self) -> dict[str, Any]:
        return {"relative_error": self.relative_error, "buckets_max": self.buckets_max}

    @property
    def mean(self) -> float:
        """NaN before anything came. Exact: it does not come from the buckets."""
        return self.total / self.count if self.count else math.nan

    # -- values in -----------------------------------------------------------------------------------------------------

    def check(self, value: Any) -> Any:
        if type(value) is float and -math.inf < value < math.inf:
            return value  # the usual case, without a further call
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
                raise BadArguments(f"a histogram counter takes arrays of finite numbers; this one of {value.dtype} is not")
            return value.astype(np.float64).reshape(-1)
        return float(check_number("a histogram counter", value, finite=True))

    def merge_value(self, value: Any) -> None:
        self._take(np.array(value, np.float64).reshape(-1))

    def merge_values(self, values: Sequence[Any]) -> None:
        if any(isinstance(value, np.ndarray) for value in values):
            super().merge_values(values)
        else:
            self._take(np.array(values, np.float64))

    def _take(self, array: NDArray[np.float64]) -> None:
        if not array.size:
            return
        self._count_into(self.positive, array[array > 0])
        self._count_into(self.negative, -array[array < 0])
        self.zeros += int((array == 0).sum())
        self._take_moments(array.size, float(array.sum()), float(array.min()), float(array.max()))

    def _take_moments(self, count: int, total: float, minimum: float, maximum: float) -> None:
        self.count += count
        self.total += total
        self.minimum = min(self.minimum, minimum)
        self.maximum = max(self.maximum, maximum)

    def _count_into(self, buckets: Buckets, magnitudes: NDArray[np.float64]) -> None:
        if magnitudes.size:
            exponents, counts = np.unique(np.ceil(np.log(magnitudes) * self._per_log), return_counts=True)
            self._add(buckets, dict(zip(exponents.astype(np.int64).tolist(), counts.tolist(), strict=True)))

    def _add(self, buckets: Buckets, more: Buckets) -> None:
        for exponent, count in more.items():
            buckets[exponent] = buckets.get(exponent, 0) + count
        if not buckets:
            return
        lowest = max(buckets) - self.buckets_max + 1
        below = [exponent for exponent in buckets if exponent < lowest]
        if below:
            buckets[lowest] = buckets.get(lowest, 0) + sum(buckets.pop(exponent) for exponent in below)
            self.collapsed = True

    def merge_aggregator(self, other: Histogram) -> None:
        self._add(self.positive, other.positive)
        self._add(self.negative, other.negative)
        self.zeros += other.zeros
        self.collapsed |= other.collapsed
        self._take_moments(other.count, other.total, other.minimum, other.maximum)

    # -- answers out ---------------------------------------------------------------------------------------------------

    def quantile(self, q: float) -> float:
        """The value that a fraction `q` (0 to 1) of all values does not exceed; see the file's head. NaN before any came."""
        if not 0 <= q <= 1:
            raise BadArguments(f"quantile({q!r}): a number from 0 to 1 is allowed")
        if not self.count:
            return math.nan
        rank = int(q * (self.count - 1))
        for value, count in self.buckets():
            rank -= count
            if rank < 0:
                return min(max(value, self.minimum), self.maximum)
        return self.maximum

    def buckets(self) -> list[tuple[float, int]]:
        """(value, count) of each bucket that is not empty, smallest value first."""
        found = [(-self._value(exponent), self.negative[exponent]) for exponent in sorted(self.negative, reverse=True)]
        if self.zeros:
            found.append((0.0, self.zeros))
        return found + [(self._value(exponent), self.positive[exponent]) for exponent in sorted(self.positive)]

    def _value(self, exponent: int) -> float:
        # From just below: gamma**exponent itself may be more than a float can hold.
        return math.exp((exponent - 1) / self._per_log) * (2 * self._gamma / (self._gamma + 1))

    # -- as plain values -----------------------------------------------------------------------------------------------

    def serialize(self) -> Any:
        moments = (self.count, self.total, self.minimum, self.maximum)
        return (_columns(self.positive), _columns(self.negative), self.zeros, self.collapsed, moments)

    def deserialize(self, state: Any) -> None:
        whose = "a histogram counter"
        positive, negative, zeros, collapsed, (count, total, minimum, maximum) = state
        self._add(self.positive, _from_columns(positive))
        self._add(self.negative, _from_columns(negative))
        self.zeros = check_count(whose, zeros)
        self.collapsed |= bool(collapsed)
        if sum(self.positive.values()) + sum(self.negative.values()) + self.zeros != check_count(whose, count):
            raise BadArguments(f"{whose}: {count} values, and its buckets hold another number")
        if count:
            numbers = (check_number(whose, number, finite=True) for number in (total, minimum, maximum))
            self._take_moments(count, *(float(number) for number in numbers))

    def try_to_string(self) -> str | None:
        if not self.count:
            return None
        quantiles = " ".join(f"{name}={self.quantile(q):.6g}" for name, q in (("P50", 0.5), ("P90", 0.9), ("P99", 0.99)))
        return f"COUNT={self.count} MEAN={self.mean:.6g} MIN={self.minimum:.6g} {quantiles} MAX={self.maximum:.6g}"


def _columns(buckets: Buckets) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.fromiter(buckets, np.int64, len(buckets)), np.fromiter(buckets.values(), np.int64, len(buckets))


def _from_columns(columns: Any) -> Buckets:
    exponents, counts = columns
    for column in (exponents, counts):
        if not isinstance(column, np.ndarray) or column.dtype != np.int64 or column.ndim != 1:
            raise BadArguments("a histogram counter: buckets are two arrays int64[n]")
    # Floats span 2**-1074 to 2**1024: with the finest error that is 3.8 million buckets to each side of 1.
    if exponents.size != counts.size or (counts <= 0).any() or (np.abs(exponents) > 1 << 22).any():
        raise BadArguments("a histogram counter: buckets with impossible exponents or counts")
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))
