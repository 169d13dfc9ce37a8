"""The life of a client's session at the master, and what follows for what was asked over it: the
table that MasterSession goes by.
"""

from __future__ import annotations

from enum import Enum

from shard import StateTable


class SessionState(Enum):
    """Whether there is a connection that has the session."""

    NEW = "it was never open: the keeper tries until its time is over"
    UP = "there is a connection with the session"
    DOWN = "it was open: the keeper tries, for ever"
    MISSED = "it was never open, and the keeper tries no more; verbs wait until their deadlines"
    OVER = "closed on this side"


class SessionEvent(Enum):
    """What is asked of a session, and what becomes of its connection."""

    ASKED = "a verb is to be asked of the master"
    OPENED = "a connection has the session, a new one or that of before"
    FAILED = "an attempt to open it failed, and another one follows"
    REFUSED = "the same, because the master has another secret"
    GIVEN_UP = "an attempt failed, and no other one follows"
    LOST = "the connection was lost, or the master says that the session has expired"
    CLOSE = "its owner closes it"


class SessionAction(Enum):
    """What MasterSession does then."""

    ENTER = "the verb waits for its answer; Backpressure where too many do"
    REFUSE = "the verb is refused: Closed"
    SEND = "what waits is asked over the new connection"
    TRY_AGAIN = "the keeper makes another attempt, after a pause"
    CONNECT = "the keeper is told to connect again"
    FAIL = "what waits ends with the error of the attempt"
    TELL = "who waits for the first opening hears of its error"
    LEAVE = "the master is told"
    END = "the keeper is cancelled, and what waits ends with Closed"


_NEW, _UP, _DOWN, _MISSED, _OVER = SessionState
_Event, _Action = SessionEvent, SessionAction

# The keeper and the reactor may see any end of an attempt after another thread has closed the
# session. A loss is of the connection in use: it comes once, while that is in use.
SESSIONS = StateTable(
    "A session at the master",
    _NEW,
    {
        (_NEW, _Event.ASKED): (_NEW, (_Action.ENTER,)),
        (_NEW, _Event.OPENED): (_UP, (_Action.SEND,)),
        (_NEW, _Event.FAILED): (_NEW, (_Action.TRY_AGAIN,)),
        (_NEW, _Event.GIVEN_UP): (_MISSED, (_Action.TELL,)),
        (_NEW, _Event.CLOSE): (_OVER, (_Action.END,)),
        (_UP, _Event.ASKED): (_UP, (_Action.ENTER,)),
        (_UP, _Event.LOST): (_DOWN, (_Action.CONNECT,)),
        (_UP, _Event.CLOSE): (_OVER, (_Action.LEAVE, _Action.END)),
        (_DOWN, _Event.ASKED): (_DOWN, (_Action.ENTER,)),
        (_DOWN, _Event.OPENED): (_UP, (_Action.SEND,)),
        (_DOWN, _Event.FAILED): (_DOWN, (_Action.TRY_AGAIN,)),
        (_DOWN, _Event.REFUSED): (_DOWN, (_Action.FAIL, _Action.TRY_AGAIN)),
        (_DOWN, _Event.CLOSE): (_OVER, (_Action.END,)),
        (_MISSED, _Event.ASKED): (_MISSED, (_Action.ENTER,)),
        (_MISSED, _Event.CLOSE): (_OVER, (_Action.END,)),
        (_OVER, _Event.ASKED): (_OVER, (_Action.REFUSE,)),
        (_OVER, _Event.OPENED): (_OVER, ()),
        (_OVER, _Event.FAILED): (_OVER, ()),
        (_OVER, _Event.REFUSED): (_OVER, ()),
        (_OVER, _Event.GIVEN_UP): (_OVER, ()),
        (_OVER, _Event.CLOSE): (_OVER, ()),
    },
)
