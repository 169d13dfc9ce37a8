"""Sums that refuse to overflow: what an aggregator adds up stays what serialize(), deserialize()
and its text can show.

    whole numbers  exact, up to INTEGER_BITS_MAX bits: each of them is a float, too, so means and
                   mixed sums have a value
    floats         the sum of finite numbers is finite; infinities and NaN that were written pass
                   through
    int64 arrays   exact; they do not wrap
    counts         up to 2**63 - 1

Everything else raises BadArguments, before anything was changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prpc_engine.errors import BadArguments

INTEGER_BITS_MAX = 1023  # the largest float has 1024: whatever has fewer can be converted
COUNT_MAX = (1 << 63) - 1
# up to here each whole number is a float, and no two are the same one
WHOLE_FLOAT_MAX = float((1 << 53) - 1)


def overflow(whose: str, what: str) -> BadArguments:
    """The error of a write that would overflow."""
    return BadArguments(
        f"{whose} would overflow: {what}; what it held before is kept, and this is not counted"
    )


def check_whole(whose: str, value: int) -> int:
    """A whole number within the range allowed."""
    if value.bit_length() > INTEGER_BITS_MAX:
        raise BadArguments(
            f"{whose} takes whole numbers of at most {INTEGER_BITS_MAX} bits, "
            f"not of {value.bit_length()}: it would overflow"
        )
    return value


def add_counts(whose: str, one: int, two: int) -> int:
    """one + two."""
    total = one + two
    if total > COUNT_MAX:
        raise overflow(whose, f"it has counted {one} of at most {COUNT_MAX}, and {two} more came")
    return total


def add(whose: str, one: Any, two: Any) -> Any:
    """one + two, both numbers or both arrays of one shape: a new array."""
    if isinstance(one, np.ndarray):
        return _add_arrays(whose, one, two)
    return total_of(whose, (one, two))


def total_of(whose: str, numbers: Sequence[int | float]) -> int | float:
    """The sum of at least one number."""
    try:
        total = sum(numbers[1:], numbers[0])
    except OverflowError:  # a float and an int that has no float
        raise overflow(
            whose, f"a whole number of more than {INTEGER_BITS_MAX} bits was added to floats"
        ) from None
    if type(total) is int:
        if total.bit_length() > INTEGER_BITS_MAX:
            raise overflow(whose, f"the sum is a whole number of more than {INTEGER_BITS_MAX} bits")
        return total
    if math.isfinite(total):
        return total
    not_finite = [
        number for number in numbers if type(number) is float and not math.isfinite(number)
    ]
    if not not_finite:
        raise overflow(whose, "the sum of finite numbers is larger than any float")
    return sum(not_finite)  # without the others, whose own sum may have overflowed on the way


def _add_arrays(whose: str, one: Any, two: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        total = one + two
    if total.dtype == np.int64:
        if ((one ^ total) & (two ^ total) < 0).any():  # both have another sign than their sum
            raise overflow(
                whose, "the sum of two elements has no room in int64: write floats, or split it"
            )
    elif (~np.isfinite(total) & np.isfinite(one) & np.isfinite(two)).any():
        raise overflow(whose, "the sum of two finite elements is larger than any float")
    return total


def check_comparable(whose: str, one: Any, two: Any) -> None:
    """Two arrays whose elements can be compared exactly, although one may be of int64 and the other
    of float64.
    """
    if one.dtype == two.dtype:
        return
    whole = one if one.dtype == np.int64 else two
    if (np.abs(whole.astype(np.float64)) > WHOLE_FLOAT_MAX).any():
        raise BadArguments(
            f"{whose} compares floats with whole numbers of more than 53 bits, "
            "which no float64 holds exactly: write all arrays as one of the two"
        )
