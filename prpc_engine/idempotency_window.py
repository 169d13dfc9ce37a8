"""Which numbered requests were carried out, so that one that comes again is answered and not
carried out again. No I/O, no clock, no lock in this file.

A sender gives its requests numbers that grow. What is kept of one sender (SeenNumbers):

    floor     no number up to it is NEW
    highest   the greatest number seen; not below the floor
    kept      numbers seen, each with its outcome: above the floor, or kept by keep()

    a number               is
    above highest          NEW
    in kept                SEEN
    above the floor        NEW
    above highest - window SEEN: the floor rose over numbers that were seen
    any other              FORGOTTEN: it may have been seen

There are two ways to tell what was seen, and an owner takes one of them:

    note()   numbers come without gaps, nearly in order: of one, only that it was seen. The floor
             rises over what is seen without a gap, and so as not to be below highest - window: kept
             has at most `window` numbers. window > 0
    keep()   with an outcome, for the answer. The floor rises by forget(), when an outcome goes, and
             by settle(), when the sender waits for no number up to it any more: so what may come
             above the floor is NEW only if it was never seen. window == 0

Invariant: a number that was seen is never NEW, but for those of a sender that was forgotten.
Senders are bounded (IdempotencyWindow): of too many, the one heard least recently is forgotten as a
whole, counted, and what it sends after that is NEW. Owners to whom that matters look at
`senders_forgotten`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from shard import StateTable

Outcome = TypeVar("Outcome")
Sender = TypeVar("Sender", bound=Hashable)


class NumberState(Enum):
    """What is known of one number of one sender."""

    NEW = "no request of that number was carried out"
    SEEN = "its request was carried out, or is being"
    FORGOTTEN = "its request may have been carried out: nobody knows any more"


class NumberEvent(Enum):
    """What may happen to one number of one sender."""

    ARRIVES = "a request of that number comes, for the first time or again"
    NOTED = "its request is carried out: note(), or keep() with an outcome"
    PASSED = (
        "the floor has risen over it, and it is not kept: the window went on, its outcome was over "
        "a bound, or its sender waits for it no more"
    )
    SENDER_GONE = "its sender is forgotten: others were heard since, as many as may be remembered"


class NumberAction(Enum):
    """What an owner does with a request that arrives."""

    CARRY_OUT = "the owner carries the request out"
    ANSWER = "the owner answers, and does nothing else"
    REFUSE = "the owner refuses it by name: it may have been carried out"


NUMBERS = StateTable(
    "A number of a sender",
    NumberState.NEW,
    {
        (NumberState.NEW, NumberEvent.ARRIVES): (NumberState.NEW, (NumberAction.CARRY_OUT,)),
        (NumberState.NEW, NumberEvent.NOTED): (NumberState.SEEN, ()),
        (NumberState.NEW, NumberEvent.PASSED): (NumberState.FORGOTTEN, ()),
        (NumberState.NEW, NumberEvent.SENDER_GONE): (NumberState.NEW, ()),
        (NumberState.SEEN, NumberEvent.ARRIVES): (NumberState.SEEN, (NumberAction.ANSWER,)),
        (NumberState.SEEN, NumberEvent.PASSED): (NumberState.FORGOTTEN, ()),
        (NumberState.SEEN, NumberEvent.SENDER_GONE): (NumberState.NEW, ()),
        (NumberState.FORGOTTEN, NumberEvent.ARRIVES): (
            NumberState.FORGOTTEN,
            (NumberAction.REFUSE,),
        ),
        (NumberState.FORGOTTEN, NumberEvent.PASSED): (NumberState.FORGOTTEN, ()),
        (NumberState.FORGOTTEN, NumberEvent.SENDER_GONE): (NumberState.NEW, ()),
    },
)
NEW, SEEN, FORGOTTEN = NumberState.NEW, NumberState.SEEN, NumberState.FORGOTTEN


class SeenNumbers(Generic[Outcome]):
    """Which numbers of one sender were seen. Parts and answers: the tables at the file's head.

    floor: no number up to it will be NEW.
    """

    __slots__ = ("floor", "highest", "kept")

    def __init__(self, floor: int = 0) -> None:
        self.floor = self.highest = floor
        self.kept: dict[int, Outcome] = {}  # in the order in which they were kept

    def find(self, number: int, window: int = 0) -> NumberState:
        """NEW, SEEN or FORGOTTEN."""
        if number > self.highest:
            return NEW
        if number in self.kept:
            return SEEN
        if number > self.floor:
            return NEW
        return SEEN if number > self.highest - window else FORGOTTEN

    def note(self: SeenNumbers[None], number: int, window: int) -> None:
        """A number that find() called NEW was seen. window: at most so many are kept."""
        self.kept[number] = None
        if number > self.highest:
            self.highest = number
        self._close_up(window)

    def keep(self, number: int, outcome: Outcome) -> None:
        """It was seen, and this came of it."""
        self.kept[number] = outcome
        if number > self.highest:
            self.highest = number

    def forget(self, number: int) -> None:
        """Its outcome goes: that number, and any below it that is not kept, is FORGOTTEN."""
        self.kept.pop(number, None)
        if number > self.floor:
            self.floor = number
            if number > self.highest:
                self.highest = number

    def settle(self, number: int) -> None:
        """The sender waits for none of those up to that number any more: their outcomes go."""
        if number <= self.floor:
            return
        self.floor = number
        if number >= self.highest:
            self.highest = number
            self.kept = {}
        else:
            for each in [each for each in self.kept if each <= number]:
                del self.kept[each]

    def merge(self: SeenNumbers[None], other: SeenNumbers[None], window: int) -> None:
        """What either has noted was seen. window: as of note()."""
        self.floor = max(self.floor, other.floor)
        self.highest = max(self.highest, other.highest)
        self.kept = {each: None for each in (*self.kept, *other.kept) if each > self.floor}
        self._close_up(window)

    def _close_up(self: SeenNumbers[None], window: int) -> None:
        """Raise the floor over what was seen without a gap, and to where the window begins."""
        lowest = self.highest - window
        if self.floor < lowest - window:  # nothing of before is left
            self.floor = lowest
            self.kept = {each: None for each in self.kept if each > lowest}
        while self.floor < lowest:
            self.floor += 1
            self.kept.pop(self.floor, None)
        while self.floor + 1 in self.kept:
            self.floor += 1
            del self.kept[self.floor]


class IdempotencyWindow(Generic[Sender, Outcome]):
    """Which numbers of each of many senders were seen. Not thread-safe; owned by what carries the
    requests out. What find() answers: the table at the file's head.

    senders_max  senders that are remembered; of more, the one heard least recently is forgotten
    window       of note(): so many numbers of a sender are told apart, up to its highest; 0: keep()
    """

    def __init__(self, senders_max: int, window: int = 0) -> None:
        self.senders_forgotten = 0
        self._senders: OrderedDict[Sender, SeenNumbers[Outcome]] = OrderedDict()  # latest last
        self._senders_max, self._window = senders_max, window

    def __len__(self) -> int:
        """Senders."""
        return len(self._senders)

    def __contains__(self, sender: Sender) -> bool:
        return sender in self._senders

    def senders(self) -> Iterator[tuple[Sender, SeenNumbers[Outcome]]]:
        """Each with its numbers, the one heard least recently first."""
        return iter(self._senders.items())

    def of(self, sender: Sender) -> SeenNumbers[Outcome] | None:
        """The numbers of one; None: it is not known."""
        return self._senders.get(sender)

    def find(self, sender: Sender, number: int) -> NumberState:
        """NEW, SEEN or FORGOTTEN."""
        known = self._senders.get(sender)
        if known is None or number > known.highest:
            return NEW
        return known.find(number, self._window)

    def note(self: IdempotencyWindow[Sender, None], sender: Sender, number: int) -> None:
        """A number that find() called NEW was seen."""
        known = self._senders.get(sender)  # as heard(), without its call
        if known is None:
            known = self._add(sender, self._begun(sender))
        else:
            self._senders.move_to_end(sender)
        if number == known.floor + 1 and not known.kept:  # as nearly all are
            known.floor = known.highest = number
        else:
            known.note(number, self._window)

    def heard(self, sender: Sender) -> SeenNumbers[Outcome]:
        """The numbers of one, to keep(), forget() or settle(): it is the one heard last."""
        known = self._senders.get(sender)
        if known is None:
            return self._add(sender, self._begun(sender))
        self._senders.move_to_end(sender)
        return known

    def merge(
        self: IdempotencyWindow[Sender, None], sender: Sender, numbers: SeenNumbers[None]
    ) -> None:
        """What `numbers` has noted of that sender was seen, too; they are the window's from now on.

        Of a window of note(). A sender that was not known counts as heard now.
        """
        known = self._senders.get(sender)
        if known is None:
            known = self._add(sender, numbers)
        known.merge(numbers, self._window)

    def _begun(self, sender: Sender) -> SeenNumbers[Outcome]:
        """Those of a sender that was not known."""
        return SeenNumbers()

    def _add(self, sender: Sender, numbers: SeenNumbers[Outcome]) -> SeenNumbers[Outcome]:
        self._senders[sender] = numbers
        if len(self._senders) > self._senders_max:
            self._senders.popitem(last=False)
            self.senders_forgotten += 1
        return numbers
