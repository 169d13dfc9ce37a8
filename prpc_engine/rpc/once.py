"""Calls that must not run twice: what a server remembers of those it took on. No I/O and no clock
here: `now` is handed in.

A call is known by the name of the node that makes it, which that node has proved
(shard/transport/callers.py), and by its number there, which no other call of that node ever has.
The floor of a caller is the largest number of a call of it that was forgotten.

    state     event                                             next
    unknown   asked, and refusal() says nothing                 running, by begin(): it never ran
                                                                here
    unknown   asked, and its number is not above the floor      unknown: refused, since it may have
                                                                run
    unknown   asked again, no floor is known and some are gone  unknown: refused, for the same
                                                                reason
    running   asked again                                       running: the newest connection gets
                                                                the answer
    running   dropped before its handler ran                    unknown
    running   answered                                          answered
    answered  asked again                                       answered, the same; refused where
                                                                that was too large to keep
    answered  a bound is reached, and it is the oldest          forgotten: unknown, and its caller's
                                                                floor is not below it

Invariant: whatever ran is running, or answered, or not above its caller's floor. So an unknown call
above it never ran, and may; numbers grow, so the next calls of a caller are above its floor. First
attempts are looked up as well: one may arrive after its repeat, from what was still to be read of
the lost connection.

One case is left out: the floors that were raised longest ago are dropped (CALLERS_MAX). Repeats of
callers without a floor are refused from then on; a first attempt has to be taken for one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

# Answers kept. Half a second of what the fastest server answers; a repeat follows some 10 ms after
# its connection was reset.
ANSWERS_MAX = 1 << 16
# Bytes of them: some thousand large answers, and little beside what a server holds of requests.
ANSWERS_BYTES_MAX = 1 << 26
# One answer may take this share of those bytes, so that a huge one does not drive out all others.
ANSWER_SHARE = 4
# Longer than it takes to find that a peer has vanished (Limits.peer_silent_s) and to connect again,
# with all backoffs.
KEEP_S = 120.0
# Callers whose calls were forgotten: the nodes of a large job, many times over, at some 150 bytes
# each.
CALLERS_MAX = 1 << 14

Running = TypeVar("Running")
Answer = TypeVar("Answer")
Identity = tuple[int, int]  # proven name of the caller, number of the call


class OnceEntry(Generic[Running, Answer]):
    """One call: `running` until it is answered, then with an `answer`; with neither when that was
    too large.

    `asked`: what was called, and by whom, for who has to compare it with what comes again."""

    __slots__ = ("answer", "answered", "asked", "nbytes", "running")

    def __init__(self, running: Running, asked: Any = None) -> None:
        self.asked = asked
        self.running: Running | None = running
        self.answer: Answer | None = None
        self.nbytes = 0
        self.answered = 0.0  # when


class OnceWindow(Generic[Running, Answer]):
    """Remembers the calls that a server took on and their answers, so that none of them runs twice.

    answers_max  answers kept
    bytes_max    of the answers kept; one of more than bytes_max // ANSWER_SHARE is not kept
    keep_s       seconds after which an answer is forgotten, when the next one comes
    callers_max  callers of whom it is known up to which number their calls were forgotten

    What runs is bounded by who runs it, what was answered here. Owned by a server's Repeats; not
    thread-safe; `now` is in seconds of one clock. States: the table at the file's head.
    """

    def __init__(
        self,
        answers_max: int = ANSWERS_MAX,
        bytes_max: int = ANSWERS_BYTES_MAX,
        keep_s: float = KEEP_S,
        callers_max: int = CALLERS_MAX,
    ) -> None:
        self.answers_max, self.bytes_max, self.keep_s, self.callers_max = (
            answers_max,
            bytes_max,
            keep_s,
            callers_max,
        )
        self.answer_bytes_max = bytes_max // ANSWER_SHARE
        self.forgotten = 0  # answers that a bound has driven out
        self.nbytes = 0  # of the answers kept
        self._entries: dict[Identity, OnceEntry[Running, Answer]] = {}
        self._answered: deque[Identity] = deque()  # oldest first
        # by caller; the one raised last is the last
        self._floors: OrderedDict[int, int] = OrderedDict()
        self._floors_are_gone = False  # of some callers

    def __len__(self) -> int:
        """Answers kept."""
        return len(self._answered)

    def find(self, call: Identity) -> OnceEntry[Running, Answer] | None:
        """What is known of that call."""
        return self._entries.get(call)

    def refusal(self, call: Identity, is_repeat: bool) -> str | None:
        """Why that call can neither be answered nor run; None: it never ran here, or it can be
        answered.
        """
        entry = self._entries.get(call)
        if entry is not None:
            if entry.running is not None or entry.answer is not None:
                return None
            return f"it ran, and its answer of more than {self.answer_bytes_max} bytes was not kept"
        caller, call_id = call
        floor = self._floors.get(caller)
        if (call_id > floor) if floor is not None else not (is_repeat and self._floors_are_gone):
            return None
        return (
            f"it may have run before what is remembered: {len(self)} answers of {self.nbytes} "
            f"bytes, at most {self.answers_max} "
            f"of {self.bytes_max} bytes for {self.keep_s:g} s"
        )

    def begin(self, call: Identity, running: Running, asked: Any = None) -> None:
        """A call that refusal() has nothing against is taken on."""
        assert call not in self._entries
        self._entries[call] = OnceEntry(running, asked)

    def drop(self, call: Identity) -> None:
        """A call that was taken on will not run."""
        assert self._entries[call].running is not None
        del self._entries[call]

    def answered(self, call: Identity, answer: Answer | None, nbytes: int, now: float) -> None:
        """A call has its answer; None: one that was too large, or cannot be kept. What is over a
        bound then is forgotten.
        """
        entry = self._entries[call]
        assert entry.running is not None
        entry.running, entry.answer, entry.nbytes, entry.answered = None, answer, nbytes, now
        self._answered.append(call)
        self.nbytes += nbytes
        while self._answered and self._is_over(now):
            self._forget(self._answered.popleft())

    def _is_over(self, now: float) -> bool:
        return (
            len(self._answered) > self.answers_max
            or self.nbytes > self.bytes_max
            or self._entries[self._answered[0]].answered + self.keep_s < now
        )

    def _forget(self, call: Identity) -> None:
        caller, call_id = call
        self.nbytes -= self._entries.pop(call).nbytes
        self.forgotten += 1
        self._floors[caller] = max(call_id, self._floors.pop(caller, call_id))
        if len(self._floors) > self.callers_max:
            self._floors.popitem(last=False)
            self._floors_are_gone = True
