"""Values as bytes and arrays, and back: what one process of a group sends to another. For peers that trust each other.

    format   which values                              bytes                                                 arrays
    PLAIN    all exactly of PLAIN_TYPES                marshal of the tuple: a third of what pickle takes    none
    ARRAYS   those, and C-ordered arrays of numbers    marshal of ([values, None for arrays], [(place,       the arrays' bytes,
             or text                                   dtype, shape)]): numpy's own pickle takes 7 us more   where they lie
    PICKLE   anything else                             pickle, protocol 5                                    its buffers

Bytes end by themselves: whatever follows them is not looked at. Received arrays are read-only.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import LocalProtocolError, ShardError

PICKLE, PLAIN, ARRAYS = 0, 1, 2
# Exactly these, none of a subclass: what marshal gives back as it was. (It takes arrays and numpy's scalars for bytes.)
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
# numpy's own numbers, text and times: `dtype.str` says all there is to say about them; not so of records and of other packages'.
_NAMED_BY_STR = frozenset(np.dtype(code).num for code in "?bhilqBHILQefdgFDGSUmM")

TEXT_MAX = 64 << 10  # characters of an error's texts, and bytes of its pickle: an answer must always fit the ring

dump_plain = marshal.dumps
load_plain = marshal.loads
are_plain = PLAIN_TYPES.issuperset
_are_plain_or_arrays = (PLAIN_TYPES | {np.ndarray}).issuperset


def encode(values: tuple[Any, ...]) -> tuple[int, bytes, Sequence[NDArray[Any]]]:
    """Format, bytes and arrays (1-D uint8) of the values. Raises what pickle raises."""
    if _are_plain_or_arrays(map(type, values)):
        plain = list(values)
        places = []
        arrays = []
        for place, value in enumerate(values):
            if type(value) is np.ndarray:
                dtype = value.dtype
                if dtype.num not in _NAMED_BY_STR or not value.flags.c_contiguous:
                    break
                plain[place] = None
                places.append((place, dtype.str, value.shape))
                arrays.append(np.frombuffer(value, np.uint8) if value.nbytes else _NO_BYTES)
        else:
            return (ARRAYS, marshal.dumps((plain, places)), arrays) if arrays else (PLAIN, marshal.dumps(values), ())
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(values, 5, buffer_callback=buffers.append)
    return PICKLE, pickled, [np.asarray(buffer.raw()) for buffer in buffers]


def decode(form: int, payload: memoryview | bytes, blocks: Sequence[NDArray[np.uint8]]) -> Sequence[Any]:
    """What encode() was given; `blocks` as received. Raises what pickle raises, and ValueError, TypeError, EOFError for what
    encode() never wrote."""
    if form == PLAIN:
        return marshal.loads(payload)  # type: ignore[no-any-return]
    if form == ARRAYS:
        plain, places = marshal.loads(payload)
        for (place, dtype, shape), block in zip(places, blocks, strict=True):
            plain[place] = np.ndarray(shape, dtype, block)
        return plain  # type: ignore[no-any-return]
    return pickle.loads(payload, buffers=blocks)  # type: ignore[no-any-return]


_NO_BYTES = np.empty(0, np.uint8)


# -- functions and errors ------------------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in another shard: its traceback there, as text."""


def is_from_a_prompt(function: Callable[..., Any]) -> bool:
    """Whether it was typed at a prompt, in a notebook, or piped into Python: no other process can import it."""
    return getattr(function, "__module__", None) == "__main__" and _is_at_a_prompt()


def _is_at_a_prompt() -> bool:
    return not hasattr(sys.modules["__main__"], "__file__")


def pickle_function(function: Callable[..., Any]) -> bytes:
    """By name where the other process can import it, else (lambdas, closures, a notebook's cells) by value through dill,
    which multiprocess brings. One from a prompt takes the global variables along that it uses, as they stand."""
    try:
        pickled = pickle.dumps(function, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled = b""
    at_a_prompt = _is_at_a_prompt()
    if pickled and not (at_a_prompt and b"__main__" in pickled):  # a partial of one from there names that, too
        return b"p" + pickled
    try:
        return b"d" + _by_value(function, at_a_prompt)
    except Exception as error:
        raise LocalProtocolError(
            f"{function!r} cannot be sent to another shard: {type(error).__name__}: {error}; one at the top of a module can"
        ) from error


def _by_value(function: Callable[..., Any], with_globals: bool) -> bytes:
    import dill  # 40 ms, and only these need it

    class Pickler(dill.Pickler):  # type: ignore[misc]
        """Modules by name: dill would take along all that they hold, and put it over what they hold in the other process."""

        def reducer_override(self, value: Any) -> Any:
            is_module = isinstance(value, ModuleType) and value.__name__ != "__main__"
            return (importlib.import_module, (value.__name__,)) if is_module else NotImplemented

    file = io.BytesIO()
    Pickler(file, recurse=with_globals).dump(function)
    return file.getvalue()


def unpickle_function(payload: memoryview | bytes) -> Callable[..., Any]:
    try:
        if payload[0] == ord("d"):
            import dill

            function = dill.loads(bytes(payload[1:]))
        else:
            function = pickle.loads(payload[1:])
    except Exception as error:
        reason = ShardError(f"the function cannot be found in this shard: {type(error).__name__}: {error}")

        def refuse(*args: Any) -> None:
            raise reason

        return refuse
    assert callable(function)
    return function  # type: ignore[no-any-return]


def call_pickled(pickled: bytes, args: tuple[Any, ...]) -> Any:
    """How a function runs that goes with each call."""
    return unpickle_function(pickled)(*args)


def pickle_error(error: BaseException) -> bytes:
    """The exception, its last line and its traceback as texts."""
    line = "".join(traceback.format_exception_only(error)).strip()[-TEXT_MAX:]
    text = "".join(traceback.format_exception(error))[-TEXT_MAX:]
    try:
        pickled = pickle.dumps(error, 5)
        if len(pickled) > TEXT_MAX:
            raise ValueError("too large to be worth it")
        pickle.loads(pickled)  # an exception may pickle and yet not load: then the caller gets its texts
    except Exception:  # whatever its __reduce__ does: the texts, which always pass, then say it all
        pickled = b""
    return pickle.dumps((pickled, line, text), 5)


def unpickle_error(body: memoryview) -> BaseException:
    """The exception that was raised over there, or a ShardError with its text when it cannot be read here; its cause is the
    traceback."""
    pickled, line, text = pickle.loads(body)
    try:
        raised = pickle.loads(pickled) if pickled else None
    except Exception:  # its class cannot be imported here
        raised = None
    if not isinstance(raised, BaseException):
        raised = ShardError(line)
    raised.__cause__ = RemoteTraceback("\n" + text)
    return raised
