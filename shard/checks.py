"""Whether a setting is a number at all: what `0 < value` lets through, and fails on much later."""

from __future__ import annotations

import math
from numbers import Integral, Real


def is_count(value: object, least: int | None = None) -> bool:
    """Whether it is a whole number from `least` on: neither a bool, nor a float that happens to be
    whole, nor NaN.
    """
    return (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and (least is None or int(value) >= least)
    )


def is_finite(value: object, least: float | None = None) -> bool:
    """Whether it is a number from `least` on: no bool, no text, not NaN, not infinite."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and (least is None or float(value) >= least)
    except OverflowError:  # an int beyond every float
        return False
