"""Distributed reference counts: who holds references to the values of one owner. No I/O and no
clock here: `now`, in seconds, is handed in.

Each RRef object stands for one fork. A fork is numbered by the worker that passes the reference on
(its parent); the worker that receives it is its holder. Both tell the owner, each over a connection
of its own, so in any order; what a holder says comes in order, as it waits for each answer. The
states are drawn in docs/reference/states.md.

Each says a thing until it is answered, and so twice at times. A fork that is over is forgotten; the
numbers of a parent's forks for one owner being 1, 2, ..., the owner remembers of which it has heard
from the parent: said again, that is no news, and it makes no new one. A holder says nothing of a
fork any more once it has told that it dropped it.

A value is kept while one of its forks is PASSED, CLAIMED or HELD. When a worker has left or died,
its forks are over, and of those that it passed on nothing more is expected from it. Who receives a
reference from a worker that is dying has GRACE_S seconds to claim it: so long is the death kept
from this table. A fork in an answer has no known holder until the holder claims it. A fork in a
call that failed, or one whose parent has left or died, may never have reached its holder. If the
holder does not claim such a fork within UNCLAIMED_S seconds, it is over.

A worker is known by its incarnation, a number that no other worker ever has: one that is started
again under the same name and rank is another one. A value's id is (creator, number), the numbers of
one creator for one owner being 1, 2, ...: so an id that is not there was freed, or is still to be
created.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from shard import StateTable

# An answer that has left is with its caller by then, however long that one's turns are.
UNCLAIMED_S = 60.0
GRACE_S = 2.0  # longer than a message is under way, and short for what is kept too long
NOBODY = 0  # the holder of a fork is not known

ValueT = TypeVar("ValueT")
ValueId = tuple[int, int]  # creator, number
ForkId = tuple[int, int]  # parent, number


class ForkState(str, Enum):
    """What the owner has heard of one fork."""

    UNKNOWN = "nothing"
    PASSED = "its parent has passed it on; its holder has said nothing yet"
    CLAIMED = "its holder has it; its parent has said nothing yet"
    HELD = "its holder has it, and its parent has said so"
    DROPPED = "its holder has dropped it; its parent will still say that it passed it on"
    OVER = "nothing more will come"


class ForkEvent(str, Enum):
    """What the owner hears."""

    PASS = "from the parent: it passes a reference on"
    CLAIM = "from the holder: it has received it"
    DROP = (
        "from the holder: nobody refers to it there any more; or from the parent: it was not sent"
    )
    HOLDER_GONE = "the holder has left or died, or never claimed it"
    PARENT_GONE = "the parent has left or died: it will say nothing more"


class ForkAction(str, Enum):
    """What the owner does then."""

    FORGET = "take it out of the value's forks; the value is freed with its last one that counts"


_S, _E, _FORGET = ForkState, ForkEvent, (ForkAction.FORGET,)
FORKS = StateTable(
    "A reference passed on, at the owner of its value",
    _S.UNKNOWN,
    {
        (_S.UNKNOWN, _E.PASS): (_S.PASSED, ()),
        (_S.UNKNOWN, _E.CLAIM): (_S.CLAIMED, ()),
        (_S.PASSED, _E.PASS): (_S.PASSED, ()),
        (_S.PASSED, _E.CLAIM): (_S.HELD, ()),
        (_S.PASSED, _E.DROP): (_S.OVER, _FORGET),
        (_S.PASSED, _E.HOLDER_GONE): (_S.OVER, _FORGET),
        (_S.PASSED, _E.PARENT_GONE): (_S.PASSED, ()),
        (_S.CLAIMED, _E.PASS): (_S.HELD, ()),
        (_S.CLAIMED, _E.CLAIM): (_S.CLAIMED, ()),
        (_S.CLAIMED, _E.DROP): (_S.DROPPED, ()),
        (_S.CLAIMED, _E.HOLDER_GONE): (_S.DROPPED, ()),
        (_S.CLAIMED, _E.PARENT_GONE): (_S.HELD, ()),
        (_S.HELD, _E.PASS): (_S.HELD, ()),
        (_S.HELD, _E.CLAIM): (_S.HELD, ()),
        (_S.HELD, _E.DROP): (_S.OVER, _FORGET),
        (_S.HELD, _E.HOLDER_GONE): (_S.OVER, _FORGET),
        (_S.HELD, _E.PARENT_GONE): (_S.HELD, ()),
        (_S.DROPPED, _E.PASS): (_S.OVER, _FORGET),
        (_S.DROPPED, _E.CLAIM): (_S.DROPPED, ()),
        (_S.DROPPED, _E.DROP): (_S.DROPPED, ()),
        (_S.DROPPED, _E.HOLDER_GONE): (_S.DROPPED, ()),
        (_S.DROPPED, _E.PARENT_GONE): (_S.OVER, _FORGET),
    },
)
_COUNTS = (_S.PASSED, _S.CLAIMED, _S.HELD)


class _Fork:
    """One of them, as its owner knows it."""

    __slots__ = ("holder", "may_be_lost", "since", "state")

    def __init__(self, now: float) -> None:
        self.state = FORKS.initial
        self.holder = NOBODY
        self.may_be_lost = False
        self.since = now


class _Entry(Generic[ValueT]):
    """One value. Freed, it stays while parents of dropped forks are still to be heard."""

    __slots__ = ("created", "forks", "value")

    def __init__(self, value: ValueT) -> None:
        self.value: ValueT | None = value  # None: it was freed
        self.created = False
        self.forks: dict[ForkId, _Fork] = {}


class _Numbers:
    """Which of 1, 2, ... have come: nearly in order."""

    def __init__(self) -> None:
        self.below = 1
        self._above: set[int] = set()

    @property
    def apart(self) -> int:
        return len(self._above)

    def add(self, number: int) -> None:
        self._above.add(number)
        while self.below in self._above:
            self._above.discard(self.below)
            self.below += 1

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above


class References(Generic[ValueT]):
    """The values of one owner, and the forks that keep them. Called in one thread.

    make   an empty value, for an id that others speak of before it is created
    freed  called with each value that nobody refers to any more
    """

    def __init__(self, make: Callable[[], ValueT], freed: Callable[[ValueT], object]) -> None:
        self._make = make
        self._freed = freed
        self._entries: dict[ValueId, _Entry[ValueT]] = {}
        self._created: dict[int, _Numbers] = {}  # by creator
        # By parent: its forks for which nothing is expected from it any more.
        self._heard: dict[int, _Numbers] = {}
        self._gone: set[int] = set()  # workers that have left or died

    def __len__(self) -> int:
        """How many values there are, those to be created included."""
        return sum(entry.value is not None for entry in self._entries.values())

    @property
    def forks(self) -> int:
        """How many forks are known, dropped ones whose parents are to be heard included."""
        return sum(len(entry.forks) for entry in self._entries.values())

    @property
    def numbers_apart(self) -> int:
        """How many numbers are remembered one by one, as others before them have not come."""
        return sum(each.apart for each in (*self._created.values(), *self._heard.values()))

    def create(self, value_id: ValueId, fork_id: ForkId, holder: int, now: float) -> ValueT | None:
        """Its creator refers to it by that fork: the value, to be filled; None where it was created
        before.
        """
        creator, number = value_id
        created = self._numbers_of(creator)
        if number in created:
            return None
        created.add(number)
        entry = self._entry(value_id)
        entry.created = True
        self._tell(value_id, fork_id, ForkEvent.PASS, now, holder)
        self._tell(value_id, fork_id, ForkEvent.CLAIM, now, holder)
        return entry.value

    def find(self, value_id: ValueId) -> ValueT | None:
        """The value, created or to be; None: it was freed, or will never be created."""
        if value_id not in self._entries and self._is_past(value_id):
            return None
        return self._entry(value_id).value

    def passed(self, value_id: ValueId, fork_id: ForkId, holder: int, now: float) -> bool:
        """From the parent. False: there is no such value any more."""
        return self._tell(value_id, fork_id, ForkEvent.PASS, now, holder)

    def claimed(self, value_id: ValueId, fork_id: ForkId, holder: int, now: float) -> bool:
        """From the holder. False: there is no such value any more."""
        return self._tell(value_id, fork_id, ForkEvent.CLAIM, now, holder)

    def may_be_lost(self, value_id: ValueId, fork_id: ForkId, now: float) -> bool:
        """From the parent: the call that it travels in has failed. Whether it is still waited for
        that its holder claims it.
        """
        entry = self._entries.get(value_id)
        fork = None if entry is None else entry.forks.get(fork_id)
        if fork is None or fork.state is not ForkState.PASSED:
            return False
        fork.may_be_lost, fork.since = True, now
        return True

    def dropped(self, value_id: ValueId, fork_id: ForkId) -> ValueT | None:
        """From the holder, or from a parent that could not pass it on. The value that is not to be
        created any more: others referred to it, and its creator has given up, whose call failed.
        """
        entry = self._entries.get(value_id)
        if entry is not None and fork_id in entry.forks:
            self._follow(value_id, entry, fork_id, ForkEvent.DROP)
            return None
        if fork_id[0] != value_id[0] or self._is_past(value_id):
            return None
        # The owner has heard of each fork that is passed on before it is dropped: this one is the
        # creator's own, and the call to create the value was lost, or is still to come.
        self._numbers_of(value_id[0]).add(value_id[1])
        self._hear(fork_id)
        self._entries.pop(value_id, None)
        return None if entry is None else entry.value

    def worker_gone(self, worker: int) -> list[ValueT]:
        """A worker has left or died. Those values that it was to create, and never will."""
        self._gone.add(worker)  # its numbers stay: if it is back, they tell what was freed
        orphans = []
        for value_id, entry in list(self._entries.items()):
            if value_id[0] == worker and not entry.created:
                del self._entries[value_id]
                if entry.value is not None:
                    orphans.append(entry.value)
                continue
            for fork_id, fork in list(entry.forks.items()):
                if fork.holder == worker:
                    self._follow(value_id, entry, fork_id, ForkEvent.HOLDER_GONE)
                if fork_id[0] == worker:
                    self._hear(fork_id)  # it may be back, and say what is known
                    fork.may_be_lost = True
                    if fork_id in entry.forks:
                        self._follow(value_id, entry, fork_id, ForkEvent.PARENT_GONE)
        return orphans

    def worker_back(self, worker: int) -> None:
        """It was taken for dead, and is not: its word counts again."""
        self._gone.discard(worker)

    def give_up_unclaimed(self, now: float) -> int:
        """End the forks in answers, in failed calls and of lost parents that their holders have not
        claimed in time; how many of these still wait for a claim.
        """
        waiting = 0
        for value_id, entry in list(self._entries.items()):
            for fork_id, fork in list(entry.forks.items()):
                if fork.state is ForkState.PASSED and (fork.may_be_lost or fork.holder == NOBODY):
                    if now - fork.since >= UNCLAIMED_S:
                        self._follow(value_id, entry, fork_id, ForkEvent.HOLDER_GONE)
                    else:
                        waiting += 1
        return waiting

    def clear(self) -> list[ValueT]:
        """Forget all; the values that there were."""
        values = [one.value for one in self._entries.values() if one.value is not None]
        self._entries.clear()
        return values

    def _is_past(self, value_id: ValueId) -> bool:
        creator, number = value_id
        return creator in self._gone or number in self._created.get(creator, ())

    def _numbers_of(self, creator: int) -> _Numbers:
        return self._created.setdefault(creator, _Numbers())

    def _hear(self, fork_id: ForkId) -> bool:
        """Its parent has said what it had to; whether it had before."""
        parent, number = fork_id
        heard = self._heard.setdefault(parent, _Numbers())
        if number in heard:
            return True
        heard.add(number)
        return False

    def _was_heard(self, fork_id: ForkId) -> bool:
        parent, number = fork_id
        return number in self._heard.get(parent, ())

    def _entry(self, value_id: ValueId) -> _Entry[ValueT]:
        entry = self._entries.get(value_id)
        if entry is None:
            entry = self._entries[value_id] = _Entry(self._make())
        return entry

    def _tell(
        self, value_id: ValueId, fork_id: ForkId, event: ForkEvent, now: float, holder: int
    ) -> bool:
        was_heard = self._hear(fork_id) if event is ForkEvent.PASS else self._was_heard(fork_id)
        if value_id not in self._entries and self._is_past(value_id):
            return False
        entry = self._entry(value_id)
        fork = entry.forks.get(fork_id)
        if fork is None and was_heard and event is ForkEvent.PASS:
            return entry.value is not None  # it is over
        if fork is None:
            fork = entry.forks[fork_id] = _Fork(now)
            if was_heard:  # its holder was taken for dead, and is back
                self._follow(value_id, entry, fork_id, ForkEvent.PASS)
        if holder != NOBODY:
            fork.holder = holder
        self._follow(value_id, entry, fork_id, event)
        if fork_id in entry.forks and fork.holder in self._gone:
            self._follow(value_id, entry, fork_id, ForkEvent.HOLDER_GONE)
        if fork_id in entry.forks and fork_id[0] in self._gone:
            fork.may_be_lost = True
            self._follow(value_id, entry, fork_id, ForkEvent.PARENT_GONE)
        return entry.value is not None

    def _follow(
        self, value_id: ValueId, entry: _Entry[ValueT], fork_id: ForkId, event: ForkEvent
    ) -> None:
        fork = entry.forks[fork_id]
        fork.state, actions = FORKS.after(fork.state, event)
        if ForkAction.FORGET in actions:
            del entry.forks[fork_id]
        if not entry.created or any(one.state in _COUNTS for one in entry.forks.values()):
            return
        if entry.value is not None:
            self._freed(entry.value)
            entry.value = None
        if not entry.forks:
            self._entries.pop(value_id, None)
