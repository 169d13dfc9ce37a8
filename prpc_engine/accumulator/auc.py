"""AUC: how often a model scores a positive example above a negative one (ties count half).

    exact   while there are at most `distinct_max` different scores: counts of negatives and
            positives for each of them
    binned  from then on: counts for `bins` bins of equal width from `low` to `high`; what lies
            outside counts in the last bin of that side

Binning takes the pairs within one bin for ties, each of which may be wrong by a half at most, so
the value is off by no more than

    error_bound = sum over bins(negatives * positives) / (2 * all negatives * all positives)

which is known exactly (0 while exact), and printed with the value. Whether scores end in bins
depends on all of them together and not on the order: the number of different scores never shrinks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.accumulator.aggregator import Aggregator, check_number, check_parameter
from prpc_engine.accumulator.arithmetic import add_counts
from prpc_engine.errors import BadArguments, ConfigError

DISTINCT_MAX = 65536  # 1.5 MB, as much as the bins
BINS = 65536
SIZE_MAX = 1 << 24
# scores that wait to be sorted in: sorting them one by one would cost the whole table each time
SORT_MIN = 4096

WHOSE = "an auc counter"
EXACT_SUM_MAX = 2.0**62  # a sum of counts that is below, as a float, has room in int64

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]  # [n], or [2, n]: of negatives and of positives


class AUC(Aggregator, kind="auc"):
    """An AUC counts how often a model scores a positive example above a negative one.

    Values are pairs (label, score): 0 or 1 and a finite number, or two arrays of those. It is exact
    up to distinct_max different scores, and counts in `bins` bins of equal width from `low` to
    `high` from then on; error_bound says how far `value` may be off. Raises ConfigError for such
    numbers that are not possible, BadArguments for other values.
    """

    def __init__(
        self,
        distinct_max: int = DISTINCT_MAX,
        bins: int = BINS,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        check_parameter("AUC", "distinct_max", distinct_max, 0, SIZE_MAX)
        check_parameter("AUC", "bins", bins, 2, SIZE_MAX)
        if (
            not low < high
            or not math.isfinite(high - low)
            or not math.isfinite(bins / (high - low))
        ):
            raise ConfigError(
                f"AUC with low={low!r}, high={high!r}: two finite numbers are allowed, "
                f"low below high by more than {bins / sys.float_info.max:.2g}"
            )
        self.distinct_max, self.bins, self.low, self.high = distinct_max, bins, low, high
        self._scores: Floats = np.empty(0)  # sorted; the numbers of bins once binned
        self._counts: Counts = np.empty((2, 0), np.int64)  # negatives and positives of each
        self._waiting: list[tuple[Floats, Counts]] = []  # to be sorted in
        self._waiting_size = 0
        self._total = 0  # examples
        self.binned = False

    def parameters(self) -> dict[str, Any]:
        return {
            "distinct_max": self.distinct_max,
            "bins": self.bins,
            "low": self.low,
            "high": self.high,
        }

    # -- values in ---------------------------------------------------------------------------------

    def check(self, value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != 2:
            raise BadArguments(f"an auc counter takes pairs (label, score), not {value!r:.80}")
        label, score = value
        if (
            type(label) is int
            and 0 <= label <= 1
            and type(score) is float
            and -math.inf < score < math.inf
        ):
            return value  # the usual case, without a further call
        if isinstance(label, np.ndarray) or isinstance(score, np.ndarray):
            return _checked_arrays(label, score)
        label = check_number("an auc counter's label", label)
        if label != 0 and label != 1:
            raise BadArguments(f"an auc counter takes labels 0 and 1, not {label!r}")
        return label, check_number("an auc counter's score", score, finite=True)

    def holds_at_once(self, value: Any) -> bool:
        return isinstance(value[0], np.ndarray)

    def merge_value(self, value: Any) -> None:
        labels, scores = value
        self._take(
            np.atleast_1d(np.asarray(labels, np.int64)),
            np.atleast_1d(np.asarray(scores, np.float64)),
        )

    def merge_values(self, values: Sequence[Any]) -> None:
        if any(self.holds_at_once(value) for value in values):
            super().merge_values(values)
        else:
            pairs = np.array(values, np.float64)
            self._take(pairs[:, 0].astype(np.int64), pairs[:, 1])

    def _take(self, labels: Counts, scores: Floats) -> None:
        self._wait(self._binned(scores) if self.binned else scores, np.stack([1 - labels, labels]))

    def _wait(self, scores: Floats, counts: Counts) -> None:
        # No count of the table is larger than the total: what int64 holds of that, it holds of
        # every sum in here.
        self._total = add_counts(WHOSE, self._total, _sum(counts))
        self._waiting.append((scores, counts))
        self._waiting_size += scores.size
        if self._waiting_size > max(SORT_MIN, self._scores.size):
            self._sort_in()

    def _sort_in(self) -> None:
        if not self._waiting:
            return
        scores = np.concatenate([self._scores, *(scores for scores, _ in self._waiting)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._waiting)], axis=1)
        self._waiting, self._waiting_size = [], 0
        self._scores, self._counts = _sorted(scores, counts)
        if not self.binned and self._scores.size > self.distinct_max:
            self.binned = True
            self._scores, self._counts = _sorted(self._binned(self._scores), self._counts)

    def _binned(self, scores: Floats) -> Floats:
        with np.errstate(over="ignore"):  # far outside: it counts in the last bin
            bins = np.floor((scores - self.low) * (self.bins / (self.high - self.low)))
        return np.clip(bins, 0, self.bins - 1)

    def merge_aggregator(self, other: AUC) -> None:
        add_counts(WHOSE, self._total, other._total)  # before anything is binned
        other._sort_in()
        if other.binned and not self.binned:
            self._sort_in()
        if other.binned and not self.binned:
            self.binned = True
            self._scores, self._counts = _sorted(self._binned(self._scores), self._counts)
        self._wait(
            self._binned(other._scores) if self.binned and not other.binned else other._scores,
            other._counts,
        )

    # -- answers out -------------------------------------------------------------------------------

    @property
    def negatives(self) -> int:
        """Examples with label 0."""
        self._sort_in()
        return int(self._counts[0].sum())

    @property
    def positives(self) -> int:
        """Examples with label 1."""
        self._sort_in()
        return int(self._counts[1].sum())

    @property
    def value(self) -> float:
        """From 0 to 1; NaN until there is a negative and a positive."""
        pairs = self.negatives * self.positives
        if not pairs:
            return math.nan
        # products of counts may not fit 64 bits
        negatives, positives = self._counts.astype(np.float64)
        below = np.cumsum(negatives) - negatives / 2
        return float(positives @ below) / pairs

    @property
    def error_bound(self) -> float:
        """How far `value` may be from the AUC of the very scores that came; 0 while exact, NaN as
        `value`.
        """
        pairs = self.negatives * self.positives
        if not pairs:
            return math.nan
        if not self.binned:
            return 0.0
        negatives, positives = self._counts.astype(np.float64)
        return float(negatives @ positives) / (2 * pairs)

    # -- as plain values ---------------------------------------------------------------------------

    def serialize(self) -> Any:
        self._sort_in()
        return (self.binned, self._scores.copy(), self._counts[0].copy(), self._counts[1].copy())

    def deserialize(self, state: Any) -> None:
        binned, scores, negatives, positives = state
        for column, dtype in ((scores, np.float64), (negatives, np.int64), (positives, np.int64)):
            if (
                not isinstance(column, np.ndarray)
                or column.dtype != dtype
                or column.shape != (len(scores),)
            ):
                raise BadArguments(
                    "an auc counter: a state is three arrays of one length, "
                    "scores float64 and counts int64"
                )
        if not np.isfinite(scores).all() or (negatives < 0).any() or (positives < 0).any():
            raise BadArguments("an auc counter: a state with impossible scores or counts")
        if binned and ((scores < 0) | (scores >= self.bins) | (scores != np.floor(scores))).any():
            raise BadArguments(
                f"an auc counter: a state with numbers of bins outside of 0 to {self.bins - 1}"
            )
        self.binned = bool(binned)
        self._wait(np.array(scores), np.stack([negatives, positives]))
        self._sort_in()

    def try_to_string(self) -> str | None:
        value = self.value
        if math.isnan(value):
            return None
        bound = f" +-{self.error_bound:.2g}" if self.binned else ""
        return f"{value:.6f}{bound}"


def _checked_arrays(labels: Any, scores: Any) -> tuple[Counts, Floats]:
    labels, scores = np.asarray(labels), np.asarray(scores)
    if (
        labels.ndim != 1
        or labels.shape != scores.shape
        or labels.dtype.kind not in "biuf"
        or scores.dtype.kind not in "biuf"
    ):
        raise BadArguments(
            "an auc counter takes two arrays of numbers of one length, "
            f"not {labels.dtype}{list(labels.shape)} and {scores.dtype}{list(scores.shape)}"
        )
    if not np.isin(labels, (0, 1)).all() or not np.isfinite(scores).all():
        raise BadArguments("an auc counter takes labels 0 and 1 and finite scores")
    return labels.astype(np.int64), scores.astype(np.float64)


def _sum(counts: Counts) -> int:
    if counts.sum(dtype=np.float64) < EXACT_SUM_MAX:
        return int(counts.sum())
    return sum(counts.ravel().tolist())


def _sorted(scores: Floats, counts: Counts) -> tuple[Floats, Counts]:
    """Each score once, in order, with the counts of all that were equal to it."""
    if not scores.size:
        return scores, counts
    order = np.argsort(scores, kind="stable")
    scores = scores[order]
    first = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
    return scores[first], np.add.reduceat(counts[:, order], first, axis=1)
