"""How a failure travels: a status and three texts on the wire, an error of ours where it arrives. No I/O here."""

from __future__ import annotations

import traceback

from prpc_engine import errors
from prpc_engine.archive import Archive
from prpc_engine.call import Call
from prpc_engine.message import FAILURE, HEADER, Status


def told(error: BaseException) -> tuple[str, str, str]:
    """What a handler raised, as texts: the type's name, what it says, its traceback."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name, str(error), "".join(traceback.format_exception(error))


def failure_message(archive: Archive, call_id: int, status: Status, name: str, text: str, more: str) -> bytes:
    """The answer that there is no value: `name` of the error's type, its `text`, and `more`: a traceback, or what there is."""
    body, _ = archive.encode([name, text, more])
    return HEADER.pack(FAILURE, 0, status, 0, call_id, 0, 0) + body


def error_for(call: Call, peer: str, status: Status, name: str, text: str, more: str) -> errors.RpcError:
    """What the caller gets for such an answer of that peer."""
    method, route = call.asked
    where = f"{route} at {peer}"
    if status == Status.HANDLER_RAISED:
        return errors.RemoteError(
            f"{method!r} of {where} raised {name}: {text}\n\n{more}",
            type_name=name,
            remote_message=text,
            remote_traceback=more,
        )
    if status == Status.UNKNOWN_METHOD:
        return errors.UnknownMethod(f"{where} has no method {method!r}; it has: {more}")
    if status == Status.UNKNOWN_SERVICE:
        return errors.UnknownService(f"{where} does not serve that any more ({method!r} was asked): create the client again")
    if status == Status.BAD_ARGUMENTS:
        return errors.BadArguments(f"{method!r} of {where} refused its arguments: {text}" + (f"; it is {more}" if more else ""))
    if status == Status.BACKPRESSURE:
        return errors.Backpressure(f"{method!r} of {where} was refused: {text}; slow down, or retry later")
    if status == Status.STOPPING:
        return errors.Stopping(f"{method!r} of {where} was refused: {text}; another server of that service may take it")
    if status == Status.NOT_ALLOWED:
        return errors.NotAllowed(f"{method!r} of {where} was refused: {text}")
    if status == Status.FORGOTTEN:
        return errors.Forgotten(f"{method!r} of {where} was refused: {text}; ask the service whether it was done")
    if status == Status.CANCELLED:
        return errors.Cancelled(f"{method!r} of {where} was cancelled there: {text}")
    if status == Status.DEADLINE:
        return errors.DeadlineExceeded(f"{method!r} of {where} was cut there: {text}")
    return errors.RemoteError(
        f"{method!r} of {where} returned what cannot be sent: {text}",
        type_name=name,
        remote_message=text,
        remote_traceback="",
    )
