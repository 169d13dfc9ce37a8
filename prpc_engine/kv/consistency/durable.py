"""Pushes that are answered once a checkpoint which holds them is on the disk. Decides only.

    a push        event                                    next
    applied       a save cuts the tables                   cut: in that save
    cut           that save, or a later one, is committed  answered
    cut           the save fails                           cut: the next one holds it, too
    applied, cut  the tables are restored or dropped, or   failed: the caller gets the reason
                  the push's own table is reset
    applied, cut  its caller gives it up, at its deadline  forgotten: what waits is bounded as calls
                                                           in flight are

Pushes are cut in the order in which they were applied, so a save is known by how many there had
been.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from prpc_engine.rpc.deferred import Deferred

# whose commit may still be told; there is one at a time, and those that failed are never told
SAVES_MAX = 16


class Durable:
    """A Durable holds back the answers of pushes until a checkpoint that has them is on the disk.

    Owned by one partition. wait() gives the answer to a push; cut(), committed() and fail() tell
    how saves go. Answers fail with the error that fail() was given. States of a push: the table at
    the file's head.
    """

    def __init__(self) -> None:
        # by their numbers, which grow: the answer, its value, the table
        self._waiting: dict[int, tuple[Deferred, Any, str]] = {}
        self._pushes = 0
        self._cuts: OrderedDict[str, int] = OrderedDict()  # save -> how many pushes there had been

    def __len__(self) -> int:
        """Pushes that wait."""
        return len(self._waiting)

    def wait(self, value: Any, table: str) -> Deferred:
        """The answer of a push to that table that was applied, with `value`."""
        answer = Deferred()
        self._pushes += 1
        self._waiting[self._pushes] = answer, value, table
        answer.when_done(partial(self._ended, self._pushes))
        return answer

    def _ended(self, number: int, answer: object) -> None:
        self._waiting.pop(number, None)

    def cut(self, save: str) -> None:
        """That save holds all that wait."""
        self._cuts[save] = self._pushes
        if len(self._cuts) > SAVES_MAX:
            self._cuts.popitem(last=False)

    def committed(self, save: str) -> None:
        """That save is on the disk."""
        count = self._cuts.pop(save, 0)
        for number, (answer, value, _) in list(self._waiting.items()):
            if number > count:
                break
            answer.reply(value)

    def fail(self, error: BaseException) -> None:
        """None of those that wait will be saved as it was."""
        self._cuts.clear()
        for answer, _, _ in list(self._waiting.values()):
            answer.fail(error)

    def fail_of(self, table: str, error: BaseException) -> None:
        """None of those that wait will be saved that were pushed to that table."""
        for answer, _, whose in list(self._waiting.values()):
            if whose == table:
                answer.fail(error)
