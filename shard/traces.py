"""The text of an error and its traceback, as Python prints them, for who may never read it.

The traceback module takes 100 to 400 us for what this does in some 10: it looks on disk, for each
file in each error, whether the source has changed, and marks the place within a line. Here a source
is read once, and a line has no marks; names that were misspelt get no suggestions. Groups of errors
and errors of syntax, which print in ways of their own, are left to that module.
"""

from __future__ import annotations

import builtins
import linecache
import traceback
from collections.abc import Sequence
from types import TracebackType

CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
# An error, and how it came to the one before it in the chain: CAUSE or CONTEXT. The last raised is
# first.
Chain = Sequence[tuple[BaseException, str]]
REPEATS_MAX = 3  # of one line in a row, as Python has it: a recursion
_SPECIAL = (SyntaxError, getattr(builtins, "BaseExceptionGroup", SyntaxError))


def chain_of(error: BaseException) -> Chain:
    """The error, what it was raised from or while handling, and so on."""
    chain, seen, link = [(error, "")], {id(error)}, ""
    while True:
        below = error.__cause__
        link = CAUSE
        if below is None and not error.__suppress_context__:
            below, link = error.__context__, CONTEXT
        if below is None or id(below) in seen:
            return chain
        error = below
        seen.add(id(error))
        chain.append((error, link))


def is_special(chain: Chain) -> bool:
    """Whether one of them prints in a way of its own."""
    return any(issubclass(type(error), _SPECIAL) for error, _ in chain)


def traceback_of(error: BaseException) -> str:
    """What traceback.format_exception() says, but for the marks within lines."""
    chain = chain_of(error)
    if is_special(chain):
        return "".join(traceback.format_exception(error))
    return text_of_chain(chain)


def text_of_chain(chain: Chain) -> str:
    """Their tracebacks, the first cause first. None of them is_special()."""
    parts: list[str] = []
    for error, link in reversed(chain):
        if error.__traceback__ is not None:
            parts.append("Traceback (most recent call last):\n")
            _append_frames(parts, error.__traceback__)
        parts.append(line_of(error))
        parts.append(link)
    return "".join(parts)


def line_of(error: BaseException) -> str:
    """Its type and text, and the notes that were added."""
    if issubclass(type(error), _SPECIAL):
        return "".join(traceback.format_exception_only(error))
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("__main__", "builtins"):
        name = f"{kind.__module__}.{name}"
    text = safe_text(error)
    line = f"{name}: {text}\n" if text else f"{name}\n"
    notes = error.__dict__.get("__notes__")
    if isinstance(notes, list):
        line += "".join(f"{safe_text(note)}\n" for note in notes)
    return line


def safe_text(value: object) -> str:
    """str(value), or that this failed: a `__str__` of the application's may raise anything."""
    try:
        return str(value)
    except BaseException:
        return "<exception str() failed>"


def _append_frames(parts: list[str], entry: TracebackType | None) -> None:
    last: tuple[object, int] | None = None
    repeats = 0
    while entry is not None:
        code, number = entry.tb_frame.f_code, entry.tb_lineno
        repeats = repeats + 1 if last == (code, number) else 0
        last = code, number
        if repeats < REPEATS_MAX:
            parts.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}\n')
            source = linecache.getline(code.co_filename, number, entry.tb_frame.f_globals).strip()
            if source:
                parts.append(f"    {source}\n")
        entry = entry.tb_next
        if repeats >= REPEATS_MAX and (
            entry is None or (entry.tb_frame.f_code, entry.tb_lineno) != last
        ):
            more = repeats - REPEATS_MAX + 1
            parts.append(f"  [Previous line repeated {more} more time{'s' if more > 1 else ''}]\n")
