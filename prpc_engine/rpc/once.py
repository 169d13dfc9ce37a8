"""Calls that must not run twice: what a server remembers of those it took on. No I/O and no clock
here: `now` is handed in.

A call is known by the name of the node that makes it, which that node has proved
(shard/transport/callers.py), and by its number there, which no other call of that node ever has.
What becomes of it: ONCE_CALLS. What runs or was answered is kept here; of each caller whose answers
were forgotten, idempotency_window.py keeps up to which number. So an unknown call above that never
ran, and may; numbers grow, so the next calls of a caller are above it. First attempts are looked up
as well: one may arrive after its repeat, from what was still to be read of the lost connection.

One case is left out: the callers whose answers were forgotten longest ago are forgotten
(CALLERS_MAX). Repeats of callers of whom nothing is known are refused from then on; a first attempt
has to be taken for one.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, Generic, TypeVar

from prpc_engine.idempotency_window import NEW, IdempotencyWindow
from shard import StateTable

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
# Callers whose calls were forgotten: the nodes of a large job, many times over, at some 300 bytes
# each.
CALLERS_MAX = 1 << 14


class OnceState(Enum):
    """What is known of a call marked once, at the server that it was sent to."""

    UNKNOWN = "it never ran here"
    RUNNING = "it was taken on, and has no answer yet"
    ANSWERED = "it ran, and its answer is kept"
    UNKEPT = "it ran, and its answer was too large to keep, or handed memory over"
    FORGOTTEN = "it may have run: a later call of its caller, or it, was forgotten"


class OnceEvent(Enum):
    """What may happen to such a call."""

    ASKED = "a first attempt or a repeat arrives"
    DROPPED = "it ends before its handler ran"
    REPLIED = "its handler has ended, and the answer is kept"
    REPLIED_UNKEPT = "its handler has ended, and the answer cannot be kept"
    OVER_A_BOUND = "it is the oldest answer, and there are too many, of too many bytes or too old"
    PASSED = "a later call of its caller is forgotten"
    CALLER_GONE = "nothing is kept of its caller any more: then repeats are refused"


class OnceAction(Enum):
    """What the server does."""

    RUN = "its handler runs"
    MOVE = "the newest connection that asked will get the answer"
    ANSWER_AGAIN = "the same bytes and blocks are sent"
    REFUSE_IT = "the server refuses it with Status.FORGOTTEN"


ONCE_CALLS = StateTable(
    "A call marked once, at its server",
    OnceState.UNKNOWN,
    {
        (OnceState.UNKNOWN, OnceEvent.ASKED): (OnceState.RUNNING, (OnceAction.RUN,)),
        (OnceState.UNKNOWN, OnceEvent.PASSED): (OnceState.FORGOTTEN, ()),
        (OnceState.RUNNING, OnceEvent.ASKED): (OnceState.RUNNING, (OnceAction.MOVE,)),
        (OnceState.RUNNING, OnceEvent.PASSED): (OnceState.RUNNING, ()),
        (OnceState.RUNNING, OnceEvent.DROPPED): (OnceState.UNKNOWN, ()),
        (OnceState.RUNNING, OnceEvent.REPLIED): (OnceState.ANSWERED, ()),
        (OnceState.RUNNING, OnceEvent.REPLIED_UNKEPT): (OnceState.UNKEPT, ()),
        (OnceState.ANSWERED, OnceEvent.ASKED): (OnceState.ANSWERED, (OnceAction.ANSWER_AGAIN,)),
        (OnceState.ANSWERED, OnceEvent.PASSED): (OnceState.ANSWERED, ()),
        (OnceState.ANSWERED, OnceEvent.OVER_A_BOUND): (OnceState.FORGOTTEN, ()),
        (OnceState.UNKEPT, OnceEvent.ASKED): (OnceState.UNKEPT, (OnceAction.REFUSE_IT,)),
        (OnceState.UNKEPT, OnceEvent.PASSED): (OnceState.UNKEPT, ()),
        (OnceState.UNKEPT, OnceEvent.OVER_A_BOUND): (OnceState.FORGOTTEN, ()),
        (OnceState.FORGOTTEN, OnceEvent.ASKED): (OnceState.FORGOTTEN, (OnceAction.REFUSE_IT,)),
        (OnceState.FORGOTTEN, OnceEvent.PASSED): (OnceState.FORGOTTEN, ()),
        (OnceState.FORGOTTEN, OnceEvent.CALLER_GONE): (OnceState.UNKNOWN, ()),
    },
)

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
    thread-safe; `now` is in seconds of one clock. States: ONCE_CALLS.
    """

    def __init__(
        self,
        answers_max: int = ANSWERS_MAX,
        bytes_max: int = ANSWERS_BYTES_MAX,
        keep_s: float = KEEP_S,
        callers_max: int = CALLERS_MAX,
    ) -> None:
        self.answers_max, self.bytes_max, self.keep_s = answers_max, bytes_max, keep_s
        self.answer_bytes_max = bytes_max // ANSWER_SHARE
        self.forgotten = 0  # answers that a bound has driven out
        self.nbytes = 0  # of the answers kept
        self._entries: dict[Identity, OnceEntry[Running, Answer]] = {}
        self._answered: deque[Identity] = deque()  # oldest first
        self._callers: IdempotencyWindow[int, None] = IdempotencyWindow(callers_max)

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
        callers = self._callers
        if callers.find(caller, call_id) is NEW and not (
            is_repeat and callers.senders_forgotten and caller not in callers
        ):
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
        self._callers.heard(caller).forget(call_id)
