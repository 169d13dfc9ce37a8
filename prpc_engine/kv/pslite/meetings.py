"""Barriers, at the scheduler: who has come to which group's. No I/O and no clock here.

    event                                  what follows
    nodes come, others are missing         they wait
    the last ones come                     all that wait are answered at once: (); the group's next barrier begins
    their patience is over                 answered with the ids of those that are missing, and they wait no more
    their call has ended (dead, given up)  they wait no more

One call may bring several nodes: those that one process is.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard import Future


class Meetings:
    """See the file's head. Called in the reactor's thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Future]] = {}  # {group: {node: what its call waits for}}

    def arrive(self, group: int, expected: Sequence[int], nodes: Sequence[int], call: Future) -> bool:
        """Whether the barrier opens by this. Else `call` is completed later: tell leave() when it is."""
        waiting = self._waiting.setdefault(group, {})
        if len(waiting) + len(nodes) < len(expected) or self._missing(waiting, expected, nodes):
            for node in nodes:
                waiting[node] = call
            return False
        del self._waiting[group]
        for each in dict.fromkeys(waiting.values()):
            each.set_result(())
        return True

    def give_up(self, group: int, expected: Sequence[int], call: Future) -> None:
        """Answer that call with the ids of those that are missing."""
        call.set_result(self._missing(self._waiting.get(group, {}), expected, ()))

    def leave(self, group: int, nodes: Sequence[int], call: Future) -> None:
        """That call is over, however it was."""
        waiting = self._waiting.get(group, {})
        for node in nodes:
            if waiting.get(node) is call:
                del waiting[node]

    @staticmethod
    def _missing(waiting: dict[int, Future], expected: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(each for each in expected if each not in waiting and each not in nodes)
