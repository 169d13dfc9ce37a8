"""The last changes of the tree, for watchers that come back. No I/O and no clock here.

known version                  answer
older than all that is kept    None: what was forgotten may matter; a snapshot is read
up to the newest               the changes since
newer, or none (-1)            None: it is another master's, or none
"""

from __future__ import annotations

from collections import deque
from typing import Any

# Some MiB of short values: who was away longer gets a snapshot.
CHANGES_MAX = 16384
LENGTH_MAX = 64 << 20  # characters of their values

TreeChange = list[Any]  # version of the tree, kind, path, value, version of the node


class History:
    """Keeps the last changes of the master's tree, within bounds.

    version      of the tree before the first change
    changes_max  how many are kept at most
    length_max   how many characters their values have in all, at most

    Owned by MasterMethods, and used in the master's reactor alone.
    """

    def __init__(
        self, version: int, changes_max: int = CHANGES_MAX, length_max: int = LENGTH_MAX
    ) -> None:
        self._from = version  # what came after it is kept
        self._changes: deque[TreeChange] = deque()
        self._length = 0
        self._changes_max, self._length_max = changes_max, length_max

    def append(self, change: TreeChange) -> None:
        """The newest change; the oldest ones go where there are too many."""
        self._changes.append(change)
        self._length += len(change[3])
        while len(self._changes) > self._changes_max or self._length > self._length_max:
            oldest = self._changes.popleft()
            self._from = oldest[0]
            self._length -= len(oldest[3])

    def since(self, known: int, version: int) -> list[TreeChange] | None:
        """The changes after that version, of a tree that has another one now; None: not all of them
        are known.
        """
        if not self._from <= known <= version:
            return None
        return [change for change in self._changes if change[0] > known]
