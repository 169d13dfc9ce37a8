"""What can go wrong in the engine, sorted by who has to act.

CancelledError               this side gave the call or task up     → nothing; it asked for it
ShardError
├── ClosedError              this side closed it first              → fix the caller
├── ForkedError              used in a child made by fork()         → start processes by spawn, open
                                                                    things there
├── PeerLostError            the other side died or hung up         → reconnect, or fail over
├── UnreachableError         nobody answers at that address         → start the peer, or mend the
                                                                    address
├── AddressInUseError        the port is taken                      → another port, or 0
├── AuthenticationError      the peer does not hold our secret      → the same secret on both sides
├── BackpressureError        a queue's bound is reached             → slow down, or retry later
├── ShmFull                  no room for shared memory              → more memory, or smaller slabs
├── FailpointError           asked for by PRPC_FAILPOINTS           → a test's business
└── ProtocolError            (abstract) the wire format was broken
    ├── LocalProtocolError   we were about to send it               → a bug on this side
    └── RemoteProtocolError  the peer sent it                       → drop the connection
        └── ForeignProtocolError  another kind of server is there   → mend the address, or start
                                                                    ours there
"""

from __future__ import annotations


class ShardError(Exception):
    """The root of all errors that the engine raises on purpose. Each subclass says who has to act;
    the text names what was asked, the limit and what to try.
    """


class CancelledError(BaseException):
    """This side gave a call, task or wait up, so there is no result. Raised in a coroutine that is
    cancelled, at its await, and where somebody still asks for the result; there is nothing to mend.

    No Exception, like asyncio's: an `except Exception` that logs and goes on must not keep a
    cancelled coroutine alive.
    """


class ClosedError(ShardError):
    """This side closed the ring, connection or group before it was used."""


class ForkedError(ShardError):
    """Something that lives in one process was used in a child made by fork()."""


class PeerLostError(ShardError):
    """The other process died or hung up; the text says how that was noticed. Reconnect, or use
    another peer. What was sent before may have been handled.
    """


class UnreachableError(ShardError):
    """No process accepts connections at the address asked for, or none answered in time. Start the
    peer, or correct the address.
    """


class AddressInUseError(ShardError):
    """Another process listens at the address already. Choose another port, or port 0 for any free
    one, which the listener then names.
    """


class AuthenticationError(ShardError):
    """The peer proved no knowledge of the secret, or belongs to another user."""


class BackpressureError(ShardError):
    """A bounded queue is full and nothing of the message was queued. The text has the bound; send
    more slowly, or try again later.
    """


class ShmFull(ShardError, MemoryError):
    """There is no memory for the segment asked for, within the bounds of slab, cgroup and host."""


class FailpointError(ShardError):
    """Raised at a failpoint that a test armed to raise; never without PRPC_FAILPOINTS."""


class ProtocolError(ShardError):
    """The wire format was broken: LocalProtocolError if by this side, RemoteProtocolError if by the
    peer. Only these two are raised.
    """


class LocalProtocolError(ProtocolError):
    """This side was about to send something that the format does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the format does not allow, or that is over a limit. The
    connection ends; the peer is of another version, damaged or hostile.
    """


class ForeignProtocolError(RemoteProtocolError):
    """A server of another protocol listens at that address:
    to connect again leads to the same one.
    """
