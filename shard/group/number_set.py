"""A set of whole numbers that come nearly in order, such as those of what has ended: kept as
ranges, so numbers without gaps take as much room as one.
"""

from __future__ import annotations

from bisect import bisect_right


class NumberSet:
    """Whole numbers. add() and `in` cost a binary search among the ranges, of which there is one
    for each gap, and one more.
    """

    def __init__(self) -> None:
        # where they begin and end, in order: begin, end of the first, begin of the second ...
        self._bounds: list[int] = []

    def __contains__(self, number: int) -> bool:
        return bool(bisect_right(self._bounds, number) & 1)

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._bounds) // 2

    def add(self, number: int) -> None:
        """One more; nothing to do for one that it has."""
        bounds = self._bounds
        at = bisect_right(bounds, number)
        if at & 1:
            return
        follows = at > 0 and bounds[at - 1] == number
        precedes = at < len(bounds) and bounds[at] == number + 1
        if follows and precedes:
            del bounds[at - 1 : at + 1]
        elif follows:
            bounds[at - 1] = number + 1
        elif precedes:
            bounds[at] = number
        else:
            bounds[at:at] = number, number + 1
