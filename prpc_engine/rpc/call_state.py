"""The life of a call at its caller, as a table. No I/O and no clock.

It is the one table that nobody asks while calls are made. Threads decide there by single steps of
the interpreter: who takes a call out of its connection's dictionary ends the attempt, and who
deletes a future's `_open` completes it (shard/loop/future.py). A state stored beside those would
need a lock for each call. The tests derive it from the two, and drive calls beside the table.
"""

from __future__ import annotations

from enum import Enum

from shard import StateTable


class CallState(Enum):
    """Where a call is."""

    WAITING = "in no connection's table: it is new, or its owner will send it (again)"
    SENDING = "in the table; its thread has not said yet that it was sent"
    IN_FLIGHT = "it was sent, or waits in the outbox, and its server has not answered"
    FAILING = "an attempt has failed: its owner, if it has one, says whether another one follows"
    ANSWERED = "complete, with a value"
    FAILED = "complete, with an error"


class CallEvent(Enum):
    """What happens to it."""

    ENTERED = "a thread enters it into a connection's table, under a number, to send it"
    SENT = "the connection took it; its deadline counts from now on"
    NOT_SENT = "the connection refused it: no room, no connection, no memory"
    REPLY = "its server's value comes"
    FAILURE = "its server's error comes, or a value that cannot be read"
    LATE = "its deadline passes"
    LOST = "the connection ends while its thread may still be sending"
    ENDED_WITH_IT = "the connection was closed here, or has ended and its thread sends for too long"
    CANCELLED = "its caller gives it up"
    OVERDUE = "the thread that waits finds its deadline passed, and the reactor kept"
    KEPT = "its owner goes on with it"
    OUTLIVED = "its deadline has passed; its owner wants what the answer brings all the same"
    GIVEN_UP = "there is no owner, or no other attempt"


class CallAction(Enum):
    """What follows."""

    ENTER = "into the connection's table"
    TAKE_OUT = "of the table: a later answer finds nothing"
    RAISE = "NotSent, Backpressure, BadArguments or Closed to who was sending it"
    ASK_OWNER = "with NotSent, MaybeExecuted (loss.py), DeadlineExceeded or what the server said"
    LOOK_AGAIN = "soon: it is known then whether it was sent"
    SEND_CANCEL = "the server need not go on"
    COMPLETE = "its future: waiting threads and tasks go on, callbacks run"
    COUNT = "an answer that came for nobody"


_S, _E, _A = CallState, CallEvent, CallAction
_ATTEMPT_FAILED = _S.FAILING, (_A.TAKE_OUT, _A.ASK_OWNER)
_WITHDRAWN = _S.FAILING, (_A.TAKE_OUT, _A.SEND_CANCEL, _A.ASK_OWNER)
_OVERDUE = _S.FAILED, (_A.TAKE_OUT, _A.SEND_CANCEL, _A.COMPLETE)
CALL_STATES = StateTable(
    "A call at its caller",
    _S.WAITING,
    {
        (_S.WAITING, _E.ENTERED): (_S.SENDING, (_A.ENTER,)),
        (_S.WAITING, _E.CANCELLED): (_S.FAILING, (_A.ASK_OWNER,)),
        (_S.WAITING, _E.OVERDUE): (_S.FAILED, (_A.COMPLETE,)),
        (_S.WAITING, _E.GIVEN_UP): (_S.FAILED, (_A.COMPLETE,)),
        (_S.SENDING, _E.SENT): (_S.IN_FLIGHT, ()),
        (_S.SENDING, _E.NOT_SENT): (_S.WAITING, (_A.TAKE_OUT, _A.RAISE)),
        # it may be answered before its thread comes to say that it was sent
        (_S.SENDING, _E.REPLY): (_S.ANSWERED, (_A.TAKE_OUT, _A.COMPLETE)),
        (_S.SENDING, _E.FAILURE): _ATTEMPT_FAILED,
        (_S.SENDING, _E.LOST): (_S.SENDING, (_A.LOOK_AGAIN,)),
        (_S.SENDING, _E.ENDED_WITH_IT): _ATTEMPT_FAILED,
        (_S.SENDING, _E.CANCELLED): _WITHDRAWN,
        (_S.IN_FLIGHT, _E.REPLY): (_S.ANSWERED, (_A.TAKE_OUT, _A.COMPLETE)),
        (_S.IN_FLIGHT, _E.FAILURE): _ATTEMPT_FAILED,
        (_S.IN_FLIGHT, _E.LATE): _ATTEMPT_FAILED,
        (_S.IN_FLIGHT, _E.LOST): _ATTEMPT_FAILED,
        (_S.IN_FLIGHT, _E.ENDED_WITH_IT): _ATTEMPT_FAILED,
        (_S.IN_FLIGHT, _E.CANCELLED): _WITHDRAWN,
        (_S.IN_FLIGHT, _E.OVERDUE): _OVERDUE,
        (_S.FAILING, _E.KEPT): (_S.WAITING, ()),
        (_S.FAILING, _E.OUTLIVED): (_S.IN_FLIGHT, (_A.ENTER, _A.SEND_CANCEL)),
        (_S.FAILING, _E.GIVEN_UP): (_S.FAILED, (_A.COMPLETE,)),
        # its thread stood still, and its owner was told meanwhile
        (_S.WAITING, _E.SENT): (_S.WAITING, ()),
        **{
            (state, _E.NOT_SENT): (state, ())
            for state in (_S.WAITING, _S.IN_FLIGHT, _S.ANSWERED, _S.FAILED)
        },
        # the end is the end: whatever crossed it on the way changes nothing
        (_S.ANSWERED, _E.SENT): (_S.ANSWERED, ()),
        (_S.FAILED, _E.SENT): (_S.FAILED, ()),
        **{
            (state, event): (state, (_A.COUNT,))
            for state in (_S.ANSWERED, _S.FAILED)
            for event in (_E.REPLY, _E.FAILURE)
        },
        # to an attempt that was late, of a call that goes on
        **{(_S.WAITING, event): (_S.WAITING, (_A.COUNT,)) for event in (_E.REPLY, _E.FAILURE)},
        **{
            (state, event): (state, ())
            for state in (_S.ANSWERED, _S.FAILED)
            for event in (_E.LOST, _E.ENDED_WITH_IT, _E.CANCELLED)
        },
    },
)
