"""Barriers, at the node that holds them: who has come to which group's. No I/O and no clock here.

    event                                        what follows
    nodes come, others are missing               they wait
    the last ones come                           all that wait are answered at once: (); the group's
                                                 next barrier begins
    their patience is over                       answered with the ids of those that are missing,
                                                 and they wait no more
    their call has ended (dead, given up)        they wait no more
    one comes that has passed more of them than  those with fewer did not hear that theirs was open
      others                                     (its holder died while it told them, say): they are
                                                 answered now, and the barrier goes on without them

One call may bring several nodes: those that one process is. It says how many barriers of the group
it has passed; ANY, where it cannot know, because it took the place of a process that died.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard import Future

ANY = -1


class Barriers:
    """Barriers keep, at the node that holds them, who has come to which group's barrier.

    Owned by one NodeEndpoint. Called in the reactor's thread, but for waiting(). Calls are futures:
    done with (), or with the ids of those that are missing. Rules: the table at the file's head.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Future]] = {}  # {group: {node: what its call waits for}}
        self._passed: dict[Future, int] = {}  # by those that wait

    def arrive(
        self,
        group: int,
        expected: Sequence[int],
        nodes: Sequence[int],
        call: Future,
        passed: int = ANY,
    ) -> bool:
        """Whether the barrier is open for that call. Else it is completed later: tell leave() when
        it is.
        """
        waiting = self._waiting.setdefault(group, {})
        for each in dict.fromkeys(waiting.values()):
            if ANY < self._passed[each] < passed:
                each.set_result(())
                self.leave(group, expected, each)
            elif ANY < passed < self._passed[each]:
                return True
        if len(waiting) + len(nodes) < len(expected) or self._missing(waiting, expected, nodes):
            for node in nodes:
                waiting[node] = call
            self._passed[call] = passed
            return False
        del self._waiting[group]
        for each in waiting.values():
            self._passed.pop(each, None)
        for each in dict.fromkeys(waiting.values()):
            each.set_result(())
        return True

    def give_up(self, group: int, expected: Sequence[int], call: Future) -> None:
        """Answer that call with the ids of those that are missing."""
        call.set_result(self._missing(self._waiting.get(group, {}), expected, ()))

    def leave(self, group: int, nodes: Sequence[int], call: Future) -> None:
        """That call is over, however it was."""
        waiting = self._waiting.get(group, {})
        self._passed.pop(call, None)
        for node in nodes:
            if waiting.get(node) is call:
                del waiting[node]

    def waiting(self, group: int) -> set[int]:
        """Who waits for that group's barrier. From any thread."""
        return set(self._waiting.get(group, ()))

    @staticmethod
    def _missing(
        waiting: dict[int, Future], expected: Sequence[int], nodes: Sequence[int]
    ) -> tuple[int, ...]:
        return tuple(each for each in expected if each not in waiting and each not in nodes)
