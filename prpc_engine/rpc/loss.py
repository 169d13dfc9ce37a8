"""What the end of a connection means for the calls on it. No I/O here.

    the request                                this side closed it  the connection was lost
    waits for room still: not a byte has left  Closed               NotSent: it may go again, over
                                                                    another path too
    has left, wholly or in part                Closed               MaybeExecuted

What left once and waited here to be sent again says so in its state (retry.py), whichever of these
it ends with.
"""

from __future__ import annotations

from collections.abc import Iterable

from prpc_engine import errors
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import HEADER, KIND_MASK, NOTIFY, OPEN, REQUEST
from shard import ClosedError, ShardError


def calls_of(messages: Iterable[bytes | bytearray | memoryview]) -> frozenset[int]:
    """The ids of those calls that some of these messages, or beginnings of messages, ask for."""
    headers = [HEADER.unpack_from(message) for message in messages]
    return frozenset(
        call_id for what, _, call_id, _, _ in headers if what & KIND_MASK in (REQUEST, OPEN)
    )


def notifications_in(messages: Iterable[bytes | bytearray | memoryview]) -> int:
    """How many of them are notifications."""
    headers = (HEADER.unpack_from(message) for message in messages)
    return sum(1 for what, *_ in headers if what & KIND_MASK == NOTIFY)


def error_of(call: Call, error: ShardError, is_unsent: bool, now: float) -> errors.RpcError:
    """How a call ends whose connection ended with `error`."""
    method, route = call.asked
    if isinstance(error, ClosedError):
        return errors.Closed(
            f"this side closed the connection while {method!r} of {route} was in flight"
        )
    after_s = now - call.sent
    if is_unsent:
        return errors.NotSent(
            f"{method!r} was not sent to {route}: it waited for {after_s:.3f} s for room, "
            f"then the peer was lost ({error})"
        )
    return errors.MaybeExecuted(
        f"{method!r} was sent to {route}, and the peer was lost {after_s:.3f} s later ({error}): "
        "it may have run; "
        "retry it only if running it twice is harmless"
    )
