"""What a function raised, with its type: the caller raises the very exception, and beneath it, as
its cause, the traceback of where it happened.

An exception travels as a pickle where both sides allow pickles; else, and where it cannot be
pickled or read, by its name and arguments if it is one of Python's own or of prpc_engine.errors,
else as RemoteError, which has its texts.
"""

from __future__ import annotations

import pickle
from typing import Any

from prpc_engine import errors
from prpc_engine.archive import register
from prpc_engine.remote.functions import UnknownFunction, ValueGone, builtin_error
from prpc_engine.remote.members import UnknownWorker
from prpc_engine.rpc.failure_codes import told
from shard import RemoteTraceback

ARGUMENTS_MAX, TEXT_MAX, INT_BITS_MAX = 16, 4096, 8191  # of an exception that travels by name
# Those that need no more than a text.
_OWN = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *map(vars(errors).get, errors.__all__),
        UnknownFunction,
        UnknownWorker,
        ValueGone,
    )
    if kind is not None and kind is not errors.RemoteError
}
_PLAIN = (type(None), bool, float, bytes)


class Raised:
    """An answer: what the function raised."""

    __slots__ = ("arguments", "pickled", "texts")

    def __init__(self, texts: list[str], arguments: list[Any] | None, pickled: bytes) -> None:
        self.texts = texts  # type, message, traceback
        self.arguments = arguments  # of one of Python's own; None: they are not plain
        self.pickled = pickled  # b"": it cannot be

    @classmethod
    def of(cls, error: BaseException, may_pickle: bool) -> Raised:
        """What to answer; raises nothing. The caller gets a SystemExit, or another error that is
        no Exception, as a RemoteError.
        """
        if not isinstance(error, Exception):
            return cls(list(told(error)), None, b"")
        pickled = b""
        if may_pickle:
            try:
                pickled = pickle.dumps(error, 5)
                pickle.loads(pickled)  # many can be written and not read
            except Exception:
                pickled = b""
        kind, arguments = type(error), None
        if (
            kind.__module__ == "builtins"
            and builtin_error(kind.__name__) is kind
            and len(error.args) <= ARGUMENTS_MAX
            and all(map(_is_plain, error.args))
        ):
            arguments = list(error.args)
        return cls(list(told(error)), arguments, pickled)

    def error(self, where: str, may_pickle: bool) -> BaseException:
        """What its caller raises."""
        name, text, trace = self.texts
        found: BaseException | None = None
        if self.pickled and may_pickle:
            try:
                found = pickle.loads(self.pickled)
            except Exception:  # a class that is not here
                found = None
        if not isinstance(found, BaseException) and self.arguments is not None:
            kind = builtin_error(name)
            try:
                found = kind(*self.arguments) if kind is not None else None
            except Exception:
                found = None
        if not isinstance(found, BaseException) and name in _OWN:
            found = _OWN[name](text)
        if isinstance(found, BaseException):
            found.__cause__ = RemoteTraceback(f"\nraised at {where}:\n{trace}")
            return found
        return errors.RemoteError(
            f"{where} raised {name}: {text}\n\n{trace}",
            type_name=name,
            remote_message=text,
            remote_traceback=trace,
            where=where,
        )


def _is_plain(argument: object) -> bool:
    """Whether the archive takes it, and it is short: not so long whole numbers, nor text that is
    no valid Unicode, as that of a UnicodeEncodeError.
    """
    if type(argument) is int:
        return argument.bit_length() <= INT_BITS_MAX
    if type(argument) is str:
        try:
            return len(argument.encode()) <= TEXT_MAX
        except UnicodeEncodeError:
            return False
    return type(argument) in _PLAIN and len(repr(argument)) <= TEXT_MAX


def _unpack(fields: Any) -> Raised:
    texts, arguments, pickled = fields
    if (
        not (isinstance(texts, list) and len(texts) == 3 and all(type(one) is str for one in texts))
        or not (arguments is None or isinstance(arguments, list))
        or type(pickled) is not bytes
    ):
        raise ValueError("what a function raised: three texts, arguments and a pickle are expected")
    return Raised(texts, arguments, pickled)


register(
    Raised,
    name="prpc.remote.Raised",
    pack=lambda raised: [raised.texts, raised.arguments, raised.pickled],
    unpack=_unpack,
)
