"""What becomes of a request that is not answered in the turn it arrived in, as a table that runs.
No I/O and no clock: ServedObject does the actions.
"""

from __future__ import annotations

from enum import Enum

from shard import StateTable


# Strings, too, as those hash in C: the table is asked three times for each job.
class JobState(str, Enum):
    """How far it has come."""

    TAKEN_ON = "it is among the requests of its peer, and has no place among the tasks"
    QUEUED = "as many tasks run as may: it waits for one of them to end"
    STARTING = "its handler is called, or makes its first step"
    ENDING = "as starting; it was ended meanwhile, by its caller or its server"
    RUNNING = "its coroutine waits for something"
    AWAITING = "its handler has returned a future, which others complete"
    OVER = "its caller was answered, and its coroutine cleans up: its place is taken still"
    ENDED = "nothing of it is left"


class JobEvent(str, Enum):
    """What happens to it."""

    NO_PLACE = "as many tasks run as may"
    PLACE = "it may run now"
    TOO_LATE = "its caller's deadline passes, or has passed, before it could run"
    CALLED = "its handler was called already: a plain function that answers later"
    WAITS = "its coroutine has made its first step, and has not ended"
    DEFERRED = "its handler has returned a future that is not done"
    RETURNED = "its handler ended, or the future is done: with a value or an error"
    ENDED_EARLY = "CANCEL, its deadline, the loss of its peer, or the end of its server"
    SERVER_CLOSED = "its server is closed while it is in the queue"


class JobAction(str, Enum):
    """What its server does then."""

    QUEUE_UP = "behind those that wait, until its caller's deadline at most"
    LEAVE_QUEUE = "take it out of those that wait"
    TAKE_PLACE = "count it among the tasks"
    START = "call its handler"
    WATCH_DEADLINE = "end it when its caller's deadline passes, if that has one"
    DROP = "as if it had never come: its callers get back what they handed over"
    FORGET = "nobody asks for it any more: it is no request of its peer, its stream is over"
    LEAVE_GATE = "it keeps its server from being stopped no longer"
    LEAVE = "that, and its place goes to the next one in the queue"
    REPORT = "answer with the value or the error; one that was answered before logs its error"
    TELL_END = "answer why it was ended: DEADLINE or CANCELLED"
    TELL_STOPPING = "answer STOPPING"
    TELL_TOO_LATE = "answer DEADLINE: it did not run"
    COUNT_CANCELLED = "count it among those that were given up"
    END_AGAIN = "end it now, as it can be by now: the holder of a Deferred may decide"
    THROW = "raise CancelledError at the await of its coroutine"


_S, _E, _A = JobState, JobEvent, JobAction
_DONE = _S.ENDED, (_A.FORGET, _A.LEAVE, _A.REPORT)
_NEVER_RAN = (_A.LEAVE_QUEUE, _A.DROP, _A.FORGET, _A.LEAVE_GATE)
JOB_STATES = StateTable(
    "A request at the server that is answered later",
    _S.TAKEN_ON,
    {
        (_S.TAKEN_ON, _E.NO_PLACE): (_S.QUEUED, (_A.QUEUE_UP,)),
        (_S.TAKEN_ON, _E.PLACE): (_S.STARTING, (_A.TAKE_PLACE, _A.START)),
        (_S.TAKEN_ON, _E.CALLED): (_S.STARTING, (_A.TAKE_PLACE,)),
        (_S.QUEUED, _E.PLACE): (_S.STARTING, (_A.LEAVE_QUEUE, _A.TAKE_PLACE, _A.START)),
        (_S.QUEUED, _E.TOO_LATE): (_S.ENDED, (*_NEVER_RAN, _A.TELL_TOO_LATE)),
        (_S.QUEUED, _E.ENDED_EARLY): (_S.ENDED, (*_NEVER_RAN, _A.COUNT_CANCELLED)),
        (_S.QUEUED, _E.SERVER_CLOSED): (
            _S.ENDED,
            (*_NEVER_RAN, _A.COUNT_CANCELLED, _A.TELL_STOPPING),
        ),
        (_S.STARTING, _E.WAITS): (_S.RUNNING, (_A.WATCH_DEADLINE,)),
        (_S.STARTING, _E.DEFERRED): (_S.AWAITING, (_A.WATCH_DEADLINE,)),
        (_S.STARTING, _E.RETURNED): _DONE,
        # nothing can be thrown into a coroutine that runs: when it waits, or never
        (_S.STARTING, _E.ENDED_EARLY): (_S.ENDING, ()),
        (_S.ENDING, _E.WAITS): (_S.OVER, (_A.FORGET, _A.TELL_END, _A.THROW)),
        (_S.ENDING, _E.DEFERRED): (_S.AWAITING, (_A.WATCH_DEADLINE, _A.END_AGAIN)),
        (_S.ENDING, _E.RETURNED): _DONE,
        (_S.ENDING, _E.ENDED_EARLY): (_S.ENDING, ()),
        (_S.RUNNING, _E.RETURNED): _DONE,
        (_S.RUNNING, _E.ENDED_EARLY): (_S.OVER, (_A.FORGET, _A.TELL_END, _A.THROW)),
        (_S.AWAITING, _E.RETURNED): _DONE,
        (_S.AWAITING, _E.ENDED_EARLY): (_S.ENDED, (_A.FORGET, _A.LEAVE, _A.TELL_END)),
        (_S.OVER, _E.RETURNED): (_S.ENDED, (_A.LEAVE, _A.REPORT)),
        # its server is closed, which does not wait for ever
        (_S.OVER, _E.ENDED_EARLY): (_S.OVER, (_A.THROW,)),
        # of a future that was cut: whoever holds it may not know
        (_S.ENDED, _E.RETURNED): (_S.ENDED, ()),
    },
)
