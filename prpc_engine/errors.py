"""What can go wrong with a call, sorted by who has to act.

RpcError
├── NotSent                 it never left this process          → safe to send again, elsewhere
│   ├── MasterUnreachable   no master answers there             → start one, or mend the address
│   ├── NoPath              none of our transports connects     → the text says why, one each
│   ├── NoServer            no live server of that service      → start one, or wait longer
│   └── NotAPeer            a server of another kind is there   → mend the address, or start ours
│                                                                 there
├── Rejected                the server refused before running   → safe to send again when mended
│   ├── UnknownService      nobody there has that name          → mend the name
│   ├── UnknownMethod       the service lacks that method       → mend the name
│   ├── NotAllowed          this caller may not call that       → ask for it in the server's allow
│   │                                                             list
│   ├── Stopping            the server takes on nothing new     → another server of that service
│   ├── NoSuchNode          the master's tree lacks it          → add it first
│   ├── NodeExists          it is there already                 → another name, or take that one
│   ├── Forgotten           it came again too late              → ask the service whether it was
│   │                                                             done
│   ├── VersionMismatch     compare-and-set came too late       → read it again
│   ├── BadArguments        the arguments cannot be sent        → change their types (a TypeError,
│   │                                                             too)
│   └── Backpressure        a queue's bound is reached          → slow down, or retry later
├── MaybeExecuted           sent, then the peer was lost        → only a caller who knows the method
│                                                                 may retry
├── RemoteError             the handler raised                  → read its traceback below the first
│                                                                 line
├── DeadlineExceeded        no answer in time                   → a larger timeout_s, or find what
│                                                                 is slow (a TimeoutError, too)
├── Cancelled               this side gave the call up
├── Closed                  this side closed the thing first    → fix the caller
├── AuthenticationFailed    the peer does not hold our secret   → the same PRPC_SECRET_FILE on both
│                                                                 sides
├── SessionExpired          the master ended our session        → the text says what went with it;
│                                                                 ask again over the new one
├── JournalError            a master cannot keep its journal    → another folder, more room, or the
│                                                                 file restored
├── AddressInUse            the port is taken                   → another port, or 0 for any
├── ShmFull                 no memory for shared segments       → the text says how much there is (a
│                                                                 MemoryError, and shard.ShmFull)
└── ConfigError             a setting is not allowed            → the text names it and what is
                                                                  allowed

Every first line says what was asked, of whom, over what, after how long, and what to try.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from functools import partial
from typing import Any

import shard

__all__ = [
    "AddressInUse",
    "AuthenticationFailed",
    "Backpressure",
    "BadArguments",
    "Cancelled",
    "Closed",
    "ConfigError",
    "DeadlineExceeded",
    "Forgotten",
    "JournalError",
    "MasterUnreachable",
    "MaybeExecuted",
    "NoPath",
    "NoServer",
    "NoSuchNode",
    "NodeExists",
    "NotAPeer",
    "NotAllowed",
    "NotSent",
    "Rejected",
    "RemoteError",
    "RpcError",
    "SessionExpired",
    "ShmFull",
    "Stopping",
    "UnknownMethod",
    "UnknownService",
    "VersionMismatch",
]


class RpcError(Exception):
    """The root of all errors that this package raises on purpose. Each subclass says who has to
    act; the text says what was asked, of whom, what is allowed and what to try.
    """


class NotSent(RpcError):
    """The request never left this process: sending it again cannot run it twice."""


class MasterUnreachable(NotSent):
    """No master answers at that address: start one, or correct the address. Nothing was sent."""


class NoPath(NotSent):
    """No transport leads to the other node; `refusals` has why, a paths.Refusal each."""

    def __init__(self, text: str, refusals: Iterable[Any] = ()) -> None:
        super().__init__(text)
        self.refusals = tuple(refusals)

    @property
    def is_lasting(self) -> bool:
        """Whether another try must end the same: nothing failed that could have worked, our
        transports lead nowhere else.
        """
        return bool(self.refusals) and not any(one.failed for one in self.refusals)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle, which would call it with the text alone."""
        return type(self), (*self.args, self.refusals)


class NoServer(NotSent):
    """No live server of that service is known to the master. Start one, or wait longer; nothing was
    sent.
    """


class NotAPeer(NotSent):
    """A server of another protocol, such as gRPC, listens at that address, so that trying again is
    useless. Correct the address.
    """


class Rejected(RpcError):
    """The server refused the request before its handler ran, so that nothing has changed there. The
    subclass says what has to be mended before it is sent again.
    """


class UnknownService(Rejected):
    """The peer does not offer the service asked for: its name is another, or that server was
    closed.
    """


class UnknownMethod(Rejected):
    """The service has no public method of that name; the text lists those that there are."""


class NotAllowed(Rejected):
    """The server's allow list does not let this caller call that method."""


class Stopping(Rejected):
    """The server is ending and takes on no new requests. Another server of the service may."""


class NoSuchNode(Rejected):
    """The master's tree has no node at that path. Add it first."""


class NodeExists(Rejected):
    """The master's tree has a node at that path already, or a service a server of that id."""


class Forgotten(Rejected):
    """A call of a `once` method came again, and the server does not remember it: it was not run
    now, but may have been before.
    """


class VersionMismatch(Rejected):
    """A compare-and-set came too late: the node has another version than it expected. Read the node
    again.
    """


class BadArguments(Rejected, TypeError):
    """A value cannot be put into a message, or is not what the handler or verb takes. A TypeError,
    too.
    """


class Backpressure(Rejected):
    """A queue is full in calls or bytes, here or at the server, and the request was not queued.
    Send more slowly, or try again later.
    """


class MaybeExecuted(RpcError):
    """The request was sent and the peer was lost before it answered."""


class RemoteError(RpcError):
    """The handler raised, whatever that was and whichever kind of method it is: a DeadlineExceeded
    of a call that it made, too.

    `type_name` is the original exception's qualified type name, `remote_message` its text and
    `remote_traceback` its traceback as text; the exception itself stays where it was raised.
    `where` is who was asked: the method, the server and its address. A handler that lets a
    RemoteError through passes its origin's three texts on; a line "via ..." at the end of the
    traceback names each server that it came through.
    """

    def __init__(
        self,
        text: str,
        *,
        type_name: str,
        remote_message: str,
        remote_traceback: str,
        where: str = "",
    ) -> None:
        super().__init__(text)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle, which would call it with the text alone."""
        names = ("type_name", "remote_message", "remote_traceback", "where")
        return partial(type(self), **{name: getattr(self, name) for name in names}), self.args


class DeadlineExceeded(RpcError, TimeoutError):
    """The answer did not come in time; the handler may still be running. Never the handler's own,
    which is a RemoteError.
    """


class Cancelled(RpcError):
    """This side gave the call up before its answer came, or its server was closed while it ran."""


class Closed(RpcError):
    """This side closed the service, client or master before the call."""


class AuthenticationFailed(RpcError):
    """The peer did not prove that it holds the job's secret. Give both sides the same one."""


class SessionExpired(RpcError):
    """The master ended this client's session: its lease was over before it came back."""


class JournalError(RpcError):
    """A master's journal is held by another master, is damaged, or cannot be written; the text
    names the file and the place.
    """


class AddressInUse(RpcError):
    """Another process listens at that address: choose another port, or 0 for any free one."""


class ShmFull(RpcError, shard.ShmFull):
    """There is no memory for the array or ring asked for, within the bounds of slab, cgroup and
    host; nothing was sent.

    The engine raises shard.ShmFull, and knows nothing of RPC; every verb of this package raises
    this one in its place, so that `except RpcError` and `except shard.ShmFull` both catch it.
    """


class ConfigError(RpcError, ValueError):
    """A setting or an argument has a value that is not allowed; the text names it and what is
    allowed. A ValueError, too.
    """


def is_number(value: object) -> bool:
    """Whether it can be held against bounds: no text, no bool, no nan."""
    # isinstance() asks an abstract class, which takes longer
    if type(value) is float or type(value) is int:
        return value == value
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(value == value)


def text_of(error: BaseException) -> str:
    """What an error says, or that it says nothing: a `__str__` of the user's may raise anything."""
    try:
        return str(error)
    except BaseException as failure:
        return f"<its text cannot be made: {type(failure).__name__}>"
