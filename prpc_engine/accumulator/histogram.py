"""Histogram: how values are spread, with quantiles of a bounded relative error, in buckets whose
width grows with the value.

    bucket i   holds values in (gamma**(i-1), gamma**i], with gamma = (1 + relative_error) / (1 -
               relative_error)
    its value  2 * gamma**i / (gamma + 1): no value of the bucket is further from it than
               relative_error times that value

This is DDSketch (C. Masson, J. E. Rim, H. K. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile
Sketch with Relative-Error Guarantees", VLDB 2019). Negative values have buckets of their own, zero
has one. Only buckets that hold something are kept, at most `buckets_max` of each sign, wherever
they lie: one value far away takes one bucket. Of more than that the lowest in magnitude are merged
into the lowest kept. Which are kept depends on all values together, so the order of merging changes
nothing.

quantile(q) is the value of rank floor(q * (count - 1)), from 0, up to relative_error (and the
rounding of a float), but for the `collapsed` values: those were counted in a bucket above their own
(in magnitude), and every text says how many they are.

The default of buckets_max holds values that fill DECADES powers of ten without a gap, whatever the
error asked for.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.accumulator.aggregator import (
    Aggregator,
    check_count,
    check_number,
    check_parameter,
)
from prpc_engine.accumulator.arithmetic import add_counts, overflow
from prpc_engine.errors import BadArguments

RELATIVE_ERROR = 0.01
RELATIVE_ERROR_MIN, RELATIVE_ERROR_MAX = 1e-4, 0.5
# nanoseconds to ages; full, it takes 4146 buckets with an error of 1 %, 414,467 (some 40 MB) with
# one of 0.01 %
DECADES = 36
BUCKETS_MAX_MAX = 1 << 20
# no float has a logarithm beyond these two, and so no bucket
LOG_MAX = math.log(sys.float_info.max) + 1
LOG_MIN = math.log(5e-324) - 1
WHOSE = "a histogram counter"
Buckets = dict[int, int]  # exponent -> count


class Histogram(Aggregator, kind="histogram"):
    """How values are spread, with quantiles of a bounded relative error.

    relative_error  of every quantile, 1e-4 to 0.5: 0.01 is 1 %
    buckets_max     buckets kept of each sign; None: enough for values that fill 36 powers of ten

    Values are finite numbers, or arrays of them, each element a value. `collapsed` is how many of
    them the error does not hold for, because there were too many buckets: 0 unless values fill more
    powers of ten than `buckets_max` was made for.
    """

    def __init__(
        self, relative_error: float = RELATIVE_ERROR, buckets_max: int | None = None
    ) -> None:
        check_parameter(
            "Histogram",
            "relative_error",
            relative_error,
            RELATIVE_ERROR_MIN,
            RELATIVE_ERROR_MAX,
            whole=False,
        )
        self.relative_error = relative_error
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._per_log = 1 / math.log(self._gamma)
        if buckets_max is None:
            # the first and the last may be cut
            buckets_max = math.ceil(DECADES * math.log(10) * self._per_log) + 1
        check_parameter("Histogram", "buckets_max", buckets_max, 16, BUCKETS_MAX_MAX)
        self.buckets_max = buckets_max
        self.positive: Buckets = {}
        self.negative: Buckets = {}
        self.zeros = 0
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        # Of each sign, how many values were counted in the lowest bucket kept and belong below it.
        self._collapsed_positive = self._collapsed_negative = 0

    @property
    def collapsed(self) -> int:
        """Values that were counted in a bucket above their own: quantiles among them may be too
        large in magnitude.
        """
        return self._collapsed_positive + self._collapsed_negative

    def parameters(self) -> dict[str, Any]:
        return {"relative_error": self.relative_error, "buckets_max": self.buckets_max}

    @property
    def mean(self) -> float:
        """NaN before anything came. Exact: it does not come from the buckets."""
        return self.total / self.count if self.count else math.nan

    # -- values in ---------------------------------------------------------------------------------

    def check(self, value: Any) -> Any:
        if type(value) is float and -math.inf < value < math.inf:
            return value  # the usual case, without a further call
        if isinstance(value, np.ndarray):
            with np.errstate(over="ignore"):
                floats = (
                    value.astype(np.float64).reshape(-1)
                    if value.dtype.kind in "biuf"
                    else np.array([math.nan])
                )
            if not np.isfinite(floats).all():
                raise BadArguments(
                    f"{WHOSE} takes arrays of finite numbers; this one of {value.dtype} is not"
                )
            return floats
        return float(check_number(WHOSE, value, finite=True))

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
        with np.errstate(over="ignore", invalid="ignore"):  # _take_moments() refuses what overflows
            total = float(array.sum())
        self._take_moments(array.size, total, float(array.min()), float(array.max()))
        positive, negative = self._counted(array[array > 0]), self._counted(-array[array < 0])
        self._collapsed_positive = self._add(self.positive, positive, self._collapsed_positive, 0)
        self._collapsed_negative = self._add(self.negative, negative, self._collapsed_negative, 0)
        self.zeros += int((array == 0).sum())

    def _take_moments(self, count: int, total: float, minimum: float, maximum: float) -> None:
        """First of all that is taken: it refuses what overflows, and changes nothing then."""
        counted, total = add_counts(WHOSE, self.count, count), self.total + total
        if not math.isfinite(total):
            raise overflow(WHOSE, "the total is larger than any float")
        self.count, self.total = counted, total
        self.minimum = min(self.minimum, minimum)
        self.maximum = max(self.maximum, maximum)

    def _counted(self, magnitudes: NDArray[np.float64]) -> Buckets:
        exponents, counts = np.unique(
            np.ceil(np.log(magnitudes) * self._per_log), return_counts=True
        )
        return dict(zip(exponents.astype(np.int64).tolist(), counts.tolist(), strict=True))

    def _add(self, buckets: Buckets, more: Buckets, collapsed: int, collapsed_more: int) -> int:
        """Count `more` into `buckets`; how many values of both are counted in the lowest bucket
        now, and belong below it.
        """
        lowest, lowest_more = (
            min(buckets, default=0) if collapsed else 0,
            min(more, default=0) if collapsed_more else 0,
        )
        for exponent, count in more.items():
            buckets[exponent] = buckets.get(exponent, 0) + count
        above = len(buckets) - self.buckets_max
        if above > 0:
            *below, kept = heapq.nsmallest(above + 1, buckets)
            moved = sum(buckets.pop(exponent) for exponent in below)
            buckets[kept] += moved
        elif collapsed or collapsed_more:
            kept, moved = min(buckets), 0
        else:
            return 0
        # Those of a bucket that stays the lowest; others went along with their bucket, which is
        # counted whole.
        return (
            moved
            + (collapsed if lowest == kept else 0)
            + (collapsed_more if lowest_more == kept else 0)
        )

    def merge_aggregator(self, other: Histogram) -> None:
        self._take_moments(other.count, other.total, other.minimum, other.maximum)
        self._collapsed_positive = self._add(
            self.positive, other.positive, self._collapsed_positive, other._collapsed_positive
        )
        self._collapsed_negative = self._add(
            self.negative, other.negative, self._collapsed_negative, other._collapsed_negative
        )
        self.zeros += other.zeros

    # -- answers out -------------------------------------------------------------------------------

    def quantile(self, q: float) -> float:
        """The value that a fraction `q` (0 to 1) of all values does not exceed; see the file's
        head. NaN before any came.
        """
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
        found = [
            (-self._value(exponent), self.negative[exponent])
            for exponent in sorted(self.negative, reverse=True)
        ]
        if self.zeros:
            found.append((0.0, self.zeros))
        return found + [
            (self._value(exponent), self.positive[exponent]) for exponent in sorted(self.positive)
        ]

    def _value(self, exponent: int) -> float:
        # From just below: gamma**exponent itself may be more than a float can hold, and so may be
        # the middle of its bucket.
        return min(
            math.exp((exponent - 1) / self._per_log) * (2 * self._gamma / (self._gamma + 1)),
            sys.float_info.max,
        )

    # -- as plain values ---------------------------------------------------------------------------

    def serialize(self) -> Any:
        moments = (self.count, self.total, self.minimum, self.maximum)
        collapsed = (self._collapsed_positive, self._collapsed_negative)
        return (_columns(self.positive), _columns(self.negative), self.zeros, collapsed, moments)

    def deserialize(self, state: Any) -> None:
        columns_positive, columns_negative, zeros, collapsed, (count, total, minimum, maximum) = (
            state
        )
        positive, negative = (
            self._from_columns(columns_positive),
            self._from_columns(columns_negative),
        )
        held = sum(positive.values()) + sum(negative.values()) + check_count(WHOSE, zeros)
        if held != check_count(WHOSE, count):
            raise BadArguments(f"{WHOSE}: {count} values, and its buckets hold {held}")
        # a state of an earlier release, which said no more than that
        if isinstance(collapsed, bool):
            collapsed = (int(collapsed and bool(positive)), 0)
        for buckets, number in zip((positive, negative), collapsed, strict=True):
            if check_count(WHOSE, number) > buckets.get(min(buckets, default=0), 0):
                raise BadArguments(
                    f"{WHOSE}: {number} values have collapsed, and its lowest bucket holds fewer"
                )
        if not count:
            return
        total, minimum, maximum = (
            float(check_number(WHOSE, number, finite=True)) for number in (total, minimum, maximum)
        )
        if not minimum <= maximum:
            raise BadArguments(f"{WHOSE} with minimum={minimum}, maximum={maximum}")
        self._take_moments(count, total, minimum, maximum)
        self._collapsed_positive = self._add(self.positive, positive, 0, collapsed[0])
        self._collapsed_negative = self._add(self.negative, negative, 0, collapsed[1])
        self.zeros = zeros

    def _from_columns(self, columns: Any) -> Buckets:
        exponents, counts = columns
        for column in (exponents, counts):
            if not isinstance(column, np.ndarray) or column.dtype != np.int64 or column.ndim != 1:
                raise BadArguments(f"{WHOSE}: buckets are two arrays int64[n]")
        lowest, highest = LOG_MIN * self._per_log, LOG_MAX * self._per_log
        if (
            exponents.size != counts.size
            or (counts <= 0).any()
            or ((exponents < lowest) | (exponents > highest)).any()
        ):
            raise BadArguments(f"{WHOSE}: buckets with impossible exponents or counts")
        buckets = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
        if len(buckets) != exponents.size:
            raise BadArguments(f"{WHOSE}: buckets that come twice")
        return buckets

    def try_to_string(self) -> str | None:
        if not self.count:
            return None
        quantiles = " ".join(
            f"{name}={self.quantile(q):.6g}"
            for name, q in (("P50", 0.5), ("P90", 0.9), ("P99", 0.99))
        )
        text = (
            f"COUNT={self.count} MEAN={self.mean:.6g} MIN={self.minimum:.6g} {quantiles} "
            f"MAX={self.maximum:.6g}"
        )
        if not self.collapsed:
            return text
        return (
            f"{text} COLLAPSED={self.collapsed} (quantiles of these are not within "
            f"{self.relative_error:g}: raise buckets_max)"
        )


def _columns(buckets: Buckets) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.fromiter(buckets, np.int64, len(buckets)), np.fromiter(
        buckets.values(), np.int64, len(buckets)
    )
