"""When no call of a group is under way any more, and none can begin: shutdown() waits for that, as
torch's does, so that no call is cut off by it.

A worker whose program waits in shutdown() tells the others, round by round, how many calls it has
begun in all: in each round once none of them is under way and no function runs in it. The others
see it at the master (members.py).

    round                          then
    some have not told theirs      wait for them; who dies is waited for no more
    all have; the first, or the    tell the next
      numbers are not all those of
      the round before
    all numbers are                it is over
      those of the round before

Between the last two rounds no call was under way at one moment, and none has begun since: programs
wait here, and functions run for calls alone (F. Mattern, Algorithms for distributed termination
detection, 1987: the four-counter method). All workers decide by the same numbers. No I/O, no clock
in this file.
"""

from __future__ import annotations

from prpc_engine.remote.calls import RemoteCalls
from prpc_engine.remote.members import Members
from prpc_engine.remote.running import Runner


class Termination:
    """One worker's part in it. Owned by who waits.

    told  what this worker has told: the calls it had begun, in each round
    """

    def __init__(self, members: Members, calls: RemoteCalls, runner: Runner) -> None:
        self._members, self._calls, self._runner = members, calls, runner
        self.told: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way in the whole group."""
        told = [self.told, *self._members.begun().values()]
        last = len(self.told) - 1
        return last > 0 and all(len(one) > last and one[last] == one[last - 1] for one in told)

    @property
    def is_turn(self) -> bool:
        """Whether this worker is to tell its number of the next round, as soon as it is quiet."""
        return self._may_follow(self.told)

    @property
    def is_quiet(self) -> bool:
        """Whether no call of this worker is under way, and no function runs in it."""
        return not (self._calls.under_way or self._runner.running)

    def _may_follow(self, told: tuple[int, ...]) -> bool:
        return not any(len(one) < len(told) for one in self._members.begun().values())

    def next_told(self) -> tuple[int, ...]:
        """All that this worker is to tell now; (): nothing. Several threads may ask: of one round
        they all get the same.
        """
        before = self.told
        if not (self.is_quiet and self._may_follow(before)):
            return ()
        self.told = told = (*before, self._calls.begun)
        return told

    def begin_again(self) -> None:
        """This worker does not wait any more: what it has told counts no longer."""
        self.told = ()

    def waits_for(self) -> str:
        """For the text of an error."""
        calls, functions = self._calls.under_way, self._runner.running
        if calls or functions:
            return f"{calls} calls of its own are under way and {functions} functions run in it"
        staying = self._members.staying()
        if staying:
            return f"{', '.join(map(repr, staying))} have not called it"
        behind = [
            name for name, begun in self._members.begun().items() if len(begun) < len(self.told)
        ]
        return f"calls or functions of {', '.join(map(repr, sorted(behind))) or 'others'} go on"
