"""Sum, Avg, Max and Min: of numbers, or of arrays element by element.

Python's ints never overflow, so sums of ints are exact. Arrays are added up as int64 (which wraps, as numpy's do) or float64,
whatever they came as. One counter is of numbers or of arrays of one shape: the first value decides. Max and Min refuse NaN,
which would make the answer depend on the order; Sum and Avg become NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from prpc_engine.accumulator.aggregator import Aggregator, check_count, check_key, check_number, check_parameter
from prpc_engine.errors import BadArguments

KEYS_MAX = 65536  # of one keyed average: some 10 MB, and a message of 2 MB
NUMBER: tuple[int, ...] = ()  # the shape of a number


class Elementwise(Aggregator):
    """What the four share: the shape, and the check of what does not fit it."""

    refuses_nan = False

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None  # known with the first value

    def fresh(self) -> Any:
        """As of any aggregator; and of the same shape, so that what does not fit is refused where it is written."""
        other = type(self)()
        other.shape = self.shape
        return other

    def check(self, value: Any) -> Any:
        if (type(value) is float or type(value) is int) and not self.shape and (value == value or not self.refuses_nan):
            return value  # the usual case, without a further call
        whose = f"a {self.kind} counter"
        if isinstance(value, np.ndarray):
            value = self._checked_array(whose, value)
        else:
            value = check_number(whose, value)
            if self.refuses_nan and value != value:
                raise BadArguments(f"{whose} takes no NaN: it has no place in an order")
        self._fit(value)
        return value

    def _checked_array(self, whose: str, value: Any) -> Any:
        if value.dtype.kind not in "biuf":
            raise BadArguments(f"{whose} takes arrays of numbers, not of {value.dtype}")
        if self.refuses_nan and value.dtype.kind == "f" and np.isnan(value).any():
            raise BadArguments(f"{whose} takes no NaN: it has no place in an order")
        return np.array(value, np.float64 if value.dtype.kind == "f" else np.int64)  # a copy: the caller's may change

    def _fit(self, value: Any) -> None:
        shape = np.shape(value)
        if self.shape is not None and shape != self.shape:
            there = f"arrays of shape {self.shape}" if self.shape else "numbers"
            came = f"an array of shape {shape}" if shape else "a number"
            raise BadArguments(f"a {self.kind} counter of {there} cannot take {came}: use another name for it")

    def merge_value(self, value: Any) -> None:
        """A checked number or array."""
        self.merge_values([value])


class Sum(Elementwise, kind="sum"):
    """The sum; `value` is 0 before anything came."""

    plain = frozenset({int, float})

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = 0

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(sum(values[1:], values[0]))

    def _take(self, value: Any) -> None:
        self._fit(value)
        self.shape = np.shape(value)
        self.value = self.value + value  # never in place: what read it before keeps it

    def merge_aggregator(self, other: Sum) -> None:
        if other.shape is not None:
            self._take(other.value)

    def serialize(self) -> Any:
        return (self.shape, self.value)

    def deserialize(self, state: Any) -> None:
        shape, value = state
        if shape is not None:
            self._take(self.check(value))

    def try_to_string(self) -> str | None:
        return _text(self.value)


class Max(Elementwise, kind="max"):
    """The largest value; `value` is None before anything came."""

    plain = frozenset({int})
    refuses_nan = True

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(functools.reduce(self._better, values) if isinstance(values[0], np.ndarray) else max(values))

    @staticmethod
    def _better(one: Any, two: Any) -> Any:
        return np.maximum(one, two) if isinstance(one, np.ndarray) else max(one, two)

    def _take(self, value: Any) -> None:
        self._fit(value)
        self.shape = np.shape(value)
        self.value = value if self.value is None else self._better(self.value, value)

    def merge_aggregator(self, other: Any) -> None:
        if other.value is not None:
            self._take(other.value)

    def serialize(self) -> Any:
        return self.value

    def deserialize(self, state: Any) -> None:
        if state is not None:
            self._take(self.check(state))

    def try_to_string(self) -> str | None:
        return None if self.value is None else _text(self.value)


class Min(Max, kind="min"):
    """The smallest value; `value` is None before anything came."""

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(functools.reduce(self._better, values) if isinstance(values[0], np.ndarray) else min(values))

    @staticmethod
    def _better(one: Any, two: Any) -> Any:
        return np.minimum(one, two) if isinstance(one, np.ndarray) else min(one, two)


class Avg(Elementwise, kind="avg"):
    """The mean; `total` and `count` are exact as those of Sum."""

    plain = frozenset({int, float})

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0
        self.count = 0

    @property
    def value(self) -> Any:
        """The mean, None before anything came."""
        return self.total / self.count if self.count else None

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(sum(values[1:], values[0]), len(values))

    def _take(self, total: Any, count: int) -> None:
        self._fit(total)
        self.shape = np.shape(total)
        self.total = self.total + total
        self.count += count

    def merge_aggregator(self, other: Avg) -> None:
        if other.count:
            self._take(other.total, other.count)

    def serialize(self) -> Any:
        return (self.total, self.count)

    def deserialize(self, state: Any) -> None:
        total, count = state
        if check_count("an avg counter", count):
            self._take(self.check(total), count)

    def try_to_string(self) -> str | None:
        return _text(self.value) if self.count else None


class KeyedAvg(Aggregator, kind="keyed_avg"):
    """A mean for each key. Values are pairs (key, number); keys are str, bytes or ints of 64 bits.

    Of the first `keys_max` keys; what comes under further ones is in `overflow`, so that the total stays right.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        check_parameter("KeyedAvg", "keys_max", keys_max, 1, KEYS_MAX)
        self.keys_max = keys_max
        self.sums: dict[str | int | bytes, tuple[int | float, int]] = {}  # key -> (sum, count)
        self.overflow: tuple[int | float, int] = (0, 0)

    def parameters(self) -> dict[str, Any]:
        return {"keys_max": self.keys_max}

    @property
    def value(self) -> dict[str | int | bytes, float]:
        """{key: mean}."""
        return {key: total / count for key, (total, count) in self.sums.items()}

    def check(self, value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != 2:
            raise BadArguments(f"a keyed_avg counter takes pairs (key, number), not {value!r:.80}")
        return check_key("a keyed_avg counter", value[0]), check_number("a keyed_avg counter", value[1])

    def merge_value(self, value: tuple[str | int | bytes, int | float]) -> None:
        self._take(value[0], value[1], 1)

    def _take(self, key: str | int | bytes, total: int | float, count: int) -> None:
        there = self.sums.get(key)
        if there is not None:
            self.sums[key] = (there[0] + total, there[1] + count)
        elif len(self.sums) < self.keys_max:
            self.sums[key] = (total, count)
        else:
            self.overflow = (self.overflow[0] + total, self.overflow[1] + count)

    def merge_aggregator(self, other: KeyedAvg) -> None:
        for key, (total, count) in other.sums.items():
            self._take(key, total, count)
        self.overflow = (self.overflow[0] + other.overflow[0], self.overflow[1] + other.overflow[1])

    def serialize(self) -> Any:
        return (
            list(self.sums),
            [total for total, _ in self.sums.values()],
            [count for _, count in self.sums.values()],
            self.overflow,
        )

    def deserialize(self, state: Any) -> None:
        keys, totals, counts, (total, count) = state
        whose = "a keyed_avg counter"
        for key, one, number in zip(keys, totals, counts, strict=True):
            if not check_count(whose, number):
                raise BadArguments(f"{whose}: key {key!r:.80} without a value")
            self._take(check_key(whose, key), check_number(whose, one), number)
        self.overflow = (self.overflow[0] + check_number(whose, total), self.overflow[1] + check_count(whose, count))

    def try_to_string(self) -> str | None:
        if not self.sums:
            return None
        means = ", ".join(f"{_key_text(key)}: {_text(mean)}" for key, mean in self.value.items())
        more = f" (and {self.overflow[1]} values under further keys)" if self.overflow[1] else ""
        return f"{{{means}}}{more}"


def _key_text(key: str | int | bytes) -> str:
    escaped = str(key).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(value: Any) -> str:
    return np.array2string(value, threshold=20) if isinstance(value, np.ndarray) else repr(value)
