"""Sum, Avg, Max and Min: of numbers, or of arrays element by element.

Sums of ints are exact. Arrays are added up as int64 or float64, whatever they came as; an array
without dimensions is a number. What would overflow is refused and changes nothing (arithmetic.py),
and so are elements that int64 cannot hold. One counter is of numbers or of arrays of one shape: the
first value decides. Max and Min refuse NaN, which would make the answer depend on the order; Sum
and Avg become NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prpc_engine.accumulator.aggregator import (
    Aggregator,
    check_count,
    check_key,
    check_number,
    check_parameter,
)
from prpc_engine.accumulator.arithmetic import (
    add,
    add_counts,
    check_comparable,
    check_whole,
    total_of,
)
from prpc_engine.errors import BadArguments

KEYS_MAX = 65536  # of one keyed average: some 10 MB, and a message of 2 MB
Key = str | int | bytes
INT64_MAX = (1 << 63) - 1


class Elementwise(Aggregator):
    """What the four share: the shape, and the check of what does not fit it."""

    refuses_nan = False

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None  # known with the first value

    def fresh(self) -> Any:
        """As of any aggregator; and of the same shape, so that what does not fit is refused where
        it is written.
        """
        other = type(self)()
        other.shape = self.shape
        return other

    def check(self, value: Any) -> Any:
        if type(value) is float and not self.shape and (value == value or not self.refuses_nan):
            return value  # the usual case, without a further call; ints are `plain`
        whose = f"a {self.kind} counter"
        if isinstance(value, np.ndarray) and value.ndim:
            value = self._checked_array(whose, value)
        else:
            value = check_number(whose, value[()] if isinstance(value, np.ndarray) else value)
            if self.refuses_nan and value != value:
                raise BadArguments(f"{whose} takes no NaN: it has no place in an order")
        self._fit(value)
        return value

    def _checked_array(self, whose: str, value: Any) -> Any:
        if value.dtype.kind not in "biuf":
            raise BadArguments(f"{whose} takes arrays of numbers, not of {value.dtype}")
        if self.refuses_nan and value.dtype.kind == "f" and np.isnan(value).any():
            raise BadArguments(f"{whose} takes no NaN: it has no place in an order")
        if value.dtype.kind == "u" and value.size and value.max() > INT64_MAX:
            raise BadArguments(
                f"{whose} takes elements up to 2**63 - 1, not {value.max()}: write floats"
            )
        with np.errstate(over="ignore"):
            # a copy: the caller's may change
            kept = np.array(value, np.float64 if value.dtype.kind == "f" else np.int64)
        if (
            value.dtype.itemsize > kept.dtype.itemsize
            and (np.isinf(kept) & np.isfinite(value)).any()
        ):
            raise BadArguments(
                f"{whose} takes elements that float64 can hold, and one of this {value.dtype} is "
                "larger"
            )
        return kept

    def _fit(self, value: Any) -> None:
        shape = np.shape(value)
        if self.shape is not None and shape != self.shape:
            there = f"arrays of shape {self.shape}" if self.shape else "numbers"
            came = f"an array of shape {shape}" if shape else "a number"
            raise BadArguments(
                f"a {self.kind} counter of {there} cannot take {came}: use another name for it"
            )

    def merge_value(self, value: Any) -> None:
        """A checked number or array."""
        self.merge_values([value])

    def _total(self, values: Sequence[Any]) -> Any:
        """The sum of at least one checked value."""
        whose = f"a {self.kind} counter"
        if isinstance(values[0], np.ndarray):
            return functools.reduce(functools.partial(add, whose), values)
        return total_of(whose, values)


class Sum(Elementwise, kind="sum"):
    """Adds up numbers or arrays of one shape. `value` is the sum, 0 before anything came."""

    plain = frozenset({int, float})

    def __init__(self) -> None:
        super().__init__()
        self._sum: Any = None

    @property
    def value(self) -> Any:
        """A number or an array. It is never changed in place: what reads it keeps it."""
        return 0 if self._sum is None else self._sum

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(self._total(values))

    def _take(self, value: Any) -> None:
        self._fit(value)
        if self._sum is None:
            self._sum = np.array(value) if isinstance(value, np.ndarray) else value
        else:
            self._sum = add("a sum counter", self._sum, value)
        self.shape = np.shape(value)

    def merge_aggregator(self, other: Sum) -> None:
        if other._sum is not None:
            self._take(other._sum)

    def serialize(self) -> Any:
        return (None, 0) if self._sum is None else (self.shape, self._sum)

    def deserialize(self, state: Any) -> None:
        shape, value = state
        if shape is not None:
            self._take(self.check(value))

    def try_to_string(self) -> str | None:
        return _text(self.value)


class Max(Elementwise, kind="max"):
    """Keeps the largest number, or of arrays the largest of each element. `value` is None before
    anything came; NaN is refused.
    """

    plain = frozenset({int})
    refuses_nan = True
    _of_numbers: Callable[..., Any] = max
    _of_arrays: Callable[..., Any] = np.maximum

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def merge_values(self, values: Sequence[Any]) -> None:
        self._take(functools.reduce(self._better, values))

    def _better(self, one: Any, two: Any) -> Any:
        if isinstance(one, np.ndarray):
            check_comparable(f"a {self.kind} counter", one, two)
            return type(self)._of_arrays(one, two)
        return type(self)._of_numbers(one, two)

    def _take(self, value: Any) -> None:
        self._fit(value)
        if type(value) is int:
            check_whole(f"a {self.kind} counter", value)
        self.value = value if self.value is None else self._better(self.value, value)
        self.shape = np.shape(value)

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
    """Keeps the smallest number, or of arrays the smallest of each element. `value` is None before
    anything came; NaN is refused.
    """

    _of_numbers = min
    _of_arrays = np.minimum


class Avg(Elementwise, kind="avg"):
    """The mean of numbers, or of arrays element by element. `value` is None before anything came;
    `total` and `count` are exact as those of Sum.
    """

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
        self._take(self._total(values), len(values))

    def _take(self, total: Any, count: int) -> None:
        self._fit(total)
        counted = add_counts("an avg counter", self.count, count)
        self.total = (
            add("an avg counter", self.total, total)
            if self.count
            else np.array(total)
            if np.ndim(total)
            else total
        )
        self.shape, self.count = np.shape(total), counted

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

    Of the first `keys_max` keys; what comes under further ones is in `overflow`, so that the total
    stays right.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        check_parameter("KeyedAvg", "keys_max", keys_max, 1, KEYS_MAX)
        self.keys_max = keys_max
        self.sums: dict[Key, tuple[int | float, int]] = {}  # key -> (sum, count)
        self.overflow: tuple[int | float, int] = (0, 0)

    def parameters(self) -> dict[str, Any]:
        return {"keys_max": self.keys_max}

    @property
    def value(self) -> dict[Key, float]:
        """{key: mean}."""
        return {key: total / count for key, (total, count) in self.sums.items()}

    def check(self, value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != 2:
            raise BadArguments(f"a keyed_avg counter takes pairs (key, number), not {value!r:.80}")
        return check_key("a keyed_avg counter", value[0]), check_number(
            "a keyed_avg counter", value[1]
        )

    def merge_value(self, value: tuple[str | int | bytes, int | float]) -> None:
        self._take([(value[0], value[1], 1)])

    def merge_values(self, values: Sequence[tuple[str | int | bytes, int | float]]) -> None:
        self._take([(key, number, 1) for key, number in values])

    def _take(
        self,
        more: Sequence[tuple[str | int | bytes, int | float, int]],
        overflow: tuple[int | float, int] = (0, 0),
    ) -> None:
        """All of it, or nothing."""
        changed: dict[Key, tuple[int | float, int]] = {}
        new, room = 0, self.keys_max - len(self.sums)
        overflow = _both(self.overflow, overflow)
        for key, total, count in more:
            there = changed.get(key) or self.sums.get(key)
            if there is not None:
                changed[key] = _both(there, (total, count))
            elif new < room:
                changed[key] = _both((0, 0), (total, count))
                new += 1
            else:
                overflow = _both(overflow, (total, count))
        self.sums.update(changed)
        self.overflow = overflow

    def merge_aggregator(self, other: KeyedAvg) -> None:
        self._take(
            [(key, total, count) for key, (total, count) in other.sums.items()], other.overflow
        )

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
        more = []
        for key, one, number in zip(keys, totals, counts, strict=True):
            if not check_count(whose, number):
                raise BadArguments(f"{whose}: key {key!r:.80} without a value")
            more.append((check_key(whose, key), check_number(whose, one), number))
        self._take(more, (check_number(whose, total), check_count(whose, count)))

    def try_to_string(self) -> str | None:
        if not self.sums:
            return None
        means = ", ".join(f"{_key_text(key)}: {_text(mean)}" for key, mean in self.value.items())
        more = f" (and {self.overflow[1]} values under further keys)" if self.overflow[1] else ""
        return f"{{{means}}}{more}"


def _both(one: tuple[int | float, int], two: tuple[int | float, int]) -> tuple[int | float, int]:
    whose = "a keyed_avg counter"
    return total_of(whose, (one[0], two[0])), add_counts(whose, one[1], two[1])


def _key_text(key: str | int | bytes) -> str:
    escaped = str(key).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(value: Any) -> str:
    return np.array2string(value, threshold=20) if isinstance(value, np.ndarray) else repr(value)
