"""How a failure travels: a status and three texts on the wire, an error of ours where it arrives.
No I/O here.

    text        of a handler's error                          bytes at most
    type name   module and name of its type                   NAME_BYTES_MAX
    message     what it says                                  TEXT_BYTES_MAX
    traceback   its frames and causes, as Python prints them  TRACEBACK_BYTES_MAX
      then      a line "via ..." for each server that the     HOPS_MAX + 1 lines of HOP_BYTES_MAX
                error of another one passed through

A RemoteError that a handler lets through keeps the texts of its origin and gains that one line:
what it says to its reader, which contains them all, would double with each hop.

What leaves the process is what the handler raised, its causes (`raise ... from`), and what the
handler was handling when it raised. Python also links what the thread was handling far outside of
the handler: a thread that waits in an `except` block turns the reactor, and what it handles is no
business of a peer. So a context counts only where it was caught in a frame that the error, or one
that is told already, was raised through.

Texts may hold anything, and may not even be there (a `__str__` that raises): what cannot be encoded
is escaped, what is too long loses its middle.
"""

from __future__ import annotations

import opcode
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

from prpc_engine import errors
from prpc_engine.archive import Archive
from prpc_engine.errors import text_of
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import FAILURE, HEADER, STATUS_SHIFT, Status
from shard import traces

# Of one failure, all texts together: it must fit everywhere that a small answer fits, and a person
# reads no more.
ERROR_BYTES_MAX = 32 << 10
NAME_BYTES_MAX, TEXT_BYTES_MAX, TRACEBACK_BYTES_MAX = 1 << 10, 10 << 10, 16 << 10
# Servers that an error may name on its way: more than honest chains of calls have, so beyond it a
# loop is likely.
HOPS_MAX, HOP_BYTES_MAX = 16, 256
assert (
    NAME_BYTES_MAX + TEXT_BYTES_MAX + TRACEBACK_BYTES_MAX + (HOPS_MAX + 1) * HOP_BYTES_MAX
    <= ERROR_BYTES_MAX
)
_VIA, _MORE_HOPS = "via ", f"via more than {HOPS_MAX} hops"
_RAISE = opcode.opmap["RAISE_VARARGS"]


def told(error: BaseException) -> tuple[str, str, str]:
    """What a handler raised, as texts: the type's name, what it says, its traceback. Raises
    nothing, whatever the error is.
    """
    # isinstance() asks a `__class__` of the user's, which may raise
    if issubclass(type(error), errors.RemoteError):
        assert isinstance(error, errors.RemoteError)  # for the types
        return error.type_name, error.remote_message, _with_hop(error)
    kind = type(error)
    name = (
        str(kind.__qualname__)
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return (
        name,
        shortened(text_of(error), TEXT_BYTES_MAX),
        shortened(_traceback_of(error), TRACEBACK_BYTES_MAX),
    )


def shortened(text: str, bytes_max: int) -> str:
    """The text as UTF-8 can have it, without its middle where that is more than `bytes_max`
    bytes.
    """
    if len(text) <= bytes_max:
        encoded = text.encode("utf-8", "backslashreplace")
        if len(encoded) <= bytes_max:
            return encoded.decode()
    mark = (
        f"\n[... of {len(text)} characters, those in the middle are left out: "
        "only the ends are sent; characters left out ...]\n"
    )
    side = (bytes_max - len(mark)) // 2
    head = text[:side].encode("utf-8", "backslashreplace")[:side].decode("utf-8", "ignore")
    tail = text[-side:].encode("utf-8", "backslashreplace")[-side:].decode("utf-8", "ignore")
    return head + mark + tail


# -- the traceback, and what leaves the process ----------------------------------------------------


def _traceback_of(error: BaseException) -> str:
    try:
        chain = _told_chain(error)
        if not traces.is_special(chain):
            return traces.text_of_chain(chain)
        shown = traceback.TracebackException.from_exception(error)
        _leave_out_strangers(error, shown)
        return "".join(shown.format())
    except BaseException as failure:
        # of attributes of the user's, or of something that is no exception at all
        return f"<its traceback cannot be made: {type(failure).__name__}>\n"


def _told_chain(error: BaseException) -> traces.Chain:
    """The error, its causes, and of its contexts those that belong to the handler."""
    chain, frames = [], set[FrameType]()
    for one, link in traces.chain_of(error):
        if link == traces.CONTEXT and _caught_in(one) not in frames:
            break
        chain.append((one, link))
        frames.update(_frames_of(one.__traceback__))
    return chain


def _leave_out_strangers(error: BaseException, shown: traceback.TracebackException) -> None:
    """Take out of what is `shown` the contexts that the thread was handling outside of the
    handler.
    """
    seen: set[int] = set()
    frames: set[FrameType] = set()
    waiting = [(error, shown)]
    while waiting:
        one, its = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        frames.update(_frames_of(one.__traceback__))
        if its.__cause__ is not None and one.__cause__ is not None:
            waiting.append((one.__cause__, its.__cause__))
        if its.__context__ is not None and one.__context__ is not None:
            if _caught_in(one.__context__) in frames:
                waiting.append((one.__context__, its.__context__))
            else:
                its.__context__ = None
        members = getattr(one, "exceptions", None)  # of an ExceptionGroup
        waiting += zip(members or (), getattr(its, "exceptions", None) or (), strict=False)


def _caught_in(error: BaseException) -> FrameType | None:
    """The outermost frame that it reached."""
    return error.__traceback__.tb_frame if error.__traceback__ is not None else None


def _frames_of(entry: TracebackType | None) -> Iterator[FrameType]:
    """Where an error was raised through, as far as it was raised once: an entry that stands at a
    `raise` and goes on in another frame raised again what had been raised elsewhere before, in
    another thread perhaps."""
    while entry is not None:
        yield entry.tb_frame
        below = entry.tb_next
        if (
            below is not None
            and below.tb_frame is not entry.tb_frame
            and entry.tb_frame.f_code.co_code[entry.tb_lasti] == _RAISE
        ):
            return
        entry = below


def _with_hop(error: errors.RemoteError) -> str:
    """Its traceback, and the line of the server that lets it through now."""
    lines = error.remote_traceback.rstrip("\n").split("\n")
    hops = 0
    while hops < len(lines) and lines[-1 - hops].startswith(_VIA):
        hops += 1
    if hops > HOPS_MAX:
        return error.remote_traceback
    where = error.where or text_of(error).partition("\n")[0]
    line = (
        _MORE_HOPS
        if hops == HOPS_MAX
        else shortened(_VIA + where.replace("\n", " "), HOP_BYTES_MAX)
    )
    return "\n".join([*lines, line]) + "\n"


# -- on the wire -----------------------------------------------------------------------------------


def failure_message(
    archive: Archive, call_id: int, status: Status, name: str, text: str, more: str
) -> bytes:
    """The answer that there is no value: `name` of the error's type, its `text`, and `more`: a
    traceback, or what there is.
    """
    more_max = ERROR_BYTES_MAX - NAME_BYTES_MAX - TEXT_BYTES_MAX
    texts = [
        shortened(name, NAME_BYTES_MAX),
        shortened(text, TEXT_BYTES_MAX),
        shortened(more, more_max),
    ]
    body, _ = archive.encode(texts)
    return HEADER.pack(FAILURE | status << STATUS_SHIFT, 0, call_id, 0, 0) + body


def error_for(
    call: Call, peer: str, status: Status, name: str, text: str, more: str
) -> errors.RpcError:
    """What the caller gets for such an answer of that peer."""
    method, route = call.asked
    where = f"{route} at {peer}"
    if status == Status.HANDLER_RAISED:
        return errors.RemoteError(
            f"{method!r} of {where} raised {name}: {text}\n\n{more}",
            type_name=name,
            remote_message=text,
            remote_traceback=more,
            where=f"{method!r} of {where}",
        )
    if status == Status.UNKNOWN_METHOD:
        return errors.UnknownMethod(f"{where} has no method {method!r}; it has: {more}")
    if status == Status.UNKNOWN_SERVICE:
        return errors.UnknownService(
            f"{where} does not serve that any more ({method!r} was asked): create the client again"
        )
    if status == Status.BAD_ARGUMENTS:
        return errors.BadArguments(
            f"{method!r} of {where} refused its arguments: {text}"
            + (f"; it is {more}" if more else "")
        )
    if status == Status.BACKPRESSURE:
        return errors.Backpressure(
            f"{method!r} of {where} was refused: {text}; slow down, or retry later"
        )
    if status == Status.STOPPING:
        return errors.Stopping(
            f"{method!r} of {where} was refused: {text}; another server of that service may take it"
        )
    if status == Status.NOT_ALLOWED:
        return errors.NotAllowed(f"{method!r} of {where} was refused: {text}")
    if status == Status.FORGOTTEN:
        return errors.Forgotten(
            f"{method!r} of {where} was refused: {text}; ask the service whether it was done"
        )
    if status == Status.CANCELLED:
        return errors.Cancelled(f"{method!r} of {where} was cancelled there: {text}")
    if status == Status.DEADLINE:
        return errors.DeadlineExceeded(f"{method!r} of {where} was cut there: {text}")
    return errors.RemoteError(
        f"{method!r} of {where} returned what cannot be sent: {text}",
        type_name=name,
        remote_message=text,
        remote_traceback="",
        where=f"{method!r} of {where}",
    )
