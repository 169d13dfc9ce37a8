"""The life of a connection, of every transport, as a table that runs. No I/O and no clock:
Connection does the actions.

It begins when the handshake is over: until then there is a socket and a coroutine (connecting.py,
laned.py) or a greeting at the door (handshake_io.py), and whoever wanted the connection is told by
an exception.
"""

from __future__ import annotations

from enum import Enum

from shard.errors import ClosedError, PeerLostError, ShardError
from shard.state_table import StateTable


class ConnectionLife(Enum):
    """What may be done with a connection, and who has been told of its end."""

    MADE = "past its handshake; no reactor drives it, so nothing comes in"
    UP = "its reactor drives it"
    DRAINING = "the peer sends nothing more; what it sent before is delivered"
    CLOSED = "this side ended it: sends raise ClosedError, and its owner was told"
    LOST = "the peer, the network or a lack of memory did: sends raise why, its owner was told"
    IN_FORK = "this process is a fork: the connection is the parent's, and its owner there goes on"


class ConnectionEvent(Enum):
    """What happens to it. The first one that ends it says why; those that follow change nothing."""

    ATTACHED = "it is given to a reactor"
    PEER_HUNG_UP = "the peer said goodbye, or ended one of its lanes"
    CLOSED_HERE = "close() without an error, or with ClosedError"
    PEER_LOST = "PeerLostError: it is gone, or silent, or all that it had sent is delivered"
    BROKEN = "any other error: the peer broke the protocol, or no memory is left for a message"
    FORKED = "this process was made by fork() from the connection's"


class ConnectionAction(Enum):
    """What its Connection does then."""

    DRIVE = "watch its descriptors and rings"
    HANG_UP = "send nothing more, so that the peer's other lanes end, too"
    READ_THE_REST = "deliver what the peer sent before; then it ends with PEER LOST"
    REFUSE_SENDS = "remember why; each send raises it from now on"
    SAY_GOODBYE = "tell a peer that would not see the end of a socket alone"
    LET_GO = "close rings, descriptors and timers; leave the reactor"
    NAME_UNSENT = "empty the outbox; say which messages had not begun to leave"
    TELL_OWNER = "call on_close, and neither that nor on_message again"
    LEAVE_TO_PARENT = "drop what would reach the peer or the parent, and touch nothing else"


_S, _E, _A = ConnectionLife, ConnectionEvent, ConnectionAction
_END = (_A.LET_GO, _A.NAME_UNSENT, _A.TELL_OWNER)
_CLOSED = _S.CLOSED, (_A.REFUSE_SENDS, _A.SAY_GOODBYE, *_END)
# A peer that was only slow lives, and must hear of the end: of the socket of a connection over
# shared memory a half stays open while arrays of its blocks are held here.
_LOST = _S.LOST, (_A.REFUSE_SENDS, _A.SAY_GOODBYE, *_END)
_FORKED = _S.IN_FORK, (_A.REFUSE_SENDS, _A.LEAVE_TO_PARENT)
CONNECTION_LIFE = StateTable(
    "A connection",
    _S.MADE,
    {
        (_S.MADE, _E.ATTACHED): (_S.UP, (_A.DRIVE,)),
        (_S.MADE, _E.CLOSED_HERE): _CLOSED,
        (_S.MADE, _E.PEER_LOST): _LOST,
        (_S.MADE, _E.BROKEN): _LOST,
        (_S.MADE, _E.FORKED): _FORKED,
        (_S.UP, _E.PEER_HUNG_UP): (_S.DRAINING, (_A.HANG_UP, _A.READ_THE_REST)),
        (_S.UP, _E.CLOSED_HERE): _CLOSED,
        (_S.UP, _E.PEER_LOST): _LOST,
        (_S.UP, _E.BROKEN): _LOST,
        (_S.UP, _E.FORKED): _FORKED,
        # another lane; or a handler of the rest waits, and another thread turns the reactor
        (_S.DRAINING, _E.PEER_HUNG_UP): (_S.DRAINING, (_A.READ_THE_REST,)),
        (_S.DRAINING, _E.CLOSED_HERE): _CLOSED,
        (_S.DRAINING, _E.PEER_LOST): _LOST,
        (_S.DRAINING, _E.BROKEN): _LOST,
        (_S.DRAINING, _E.FORKED): _FORKED,
        # after the end: its owner may give it to a reactor, or close it, before it hears of that
        **{
            (state, event): (state, ())
            for state in (_S.CLOSED, _S.LOST, _S.IN_FORK)
            for event in (_E.ATTACHED, _E.PEER_HUNG_UP, _E.CLOSED_HERE, _E.PEER_LOST, _E.BROKEN)
        },
        **{
            (state, _E.FORKED): (state, (_A.LEAVE_TO_PARENT,))
            for state in (_S.CLOSED, _S.LOST, _S.IN_FORK)
        },
    },
)


def event_of(error: ShardError) -> ConnectionEvent:
    """What an error that ends a connection is to its life."""
    if isinstance(error, ClosedError):
        return ConnectionEvent.CLOSED_HERE
    return ConnectionEvent.PEER_LOST if isinstance(error, PeerLostError) else ConnectionEvent.BROKEN
