"""Values as bytes and arrays, and back: what one process of a group sends to another. For peers
that trust each other.

    format  which values                 bytes                                        arrays
    PLAIN   all exactly of PLAIN_TYPES   marshal of the tuple: a third of what        none
                                         pickle takes
    ARRAYS  those, arrays of numbers or  marshal of ([values, None for the rest],     their bytes,
            text, and `bytes` from       [(place, dtype, shape); dtype None:          where they
            APART_BYTES on               bytes]): numpy's own pickle takes 7 us more  lie
    PICKLE  anything else                pickle, protocol 5                           its buffers

`| APART`: the bytes are more than APART_BYTES, and travel as one more array, the last. So no value
is too large for a message (only for the slab), and what is large is copied once, into the slab.

Bytes end by themselves: whatever follows them is not looked at.

Received arrays are read-only, whatever their size and strides and wherever they stand in a value:
large ones are the sender's memory. Only what holds Python objects, and subclasses of np.ndarray
with a pickle of their own (masked arrays), are made anew for the receiver, and writable.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import LocalProtocolError, ShardError, ShmFull
from shard.memory.slab import Slab
from shard.traces import line_of, safe_text, traceback_of

PICKLE, PLAIN, ARRAYS = 0, 1, 2
APART = 4
APART_BYTES = 64 << 10  # from here on a copy less outweighs the microseconds of a block in the slab
# Exactly these, none of a subclass: what marshal gives back as it was. (It takes arrays and numpy's
# scalars for bytes.)
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
# numpy's own numbers, text and times: `dtype.str` says all there is to say about them; not so of
# records and of other packages'.
_NAMED_BY_STR = frozenset(np.dtype(code).num for code in "?bhilqBHILQefdgFDGSUmM")

# characters of an error's texts, and bytes of its pickle: an answer must always fit the ring
TEXT_MAX = 64 << 10

dump_plain = marshal.dumps
load_plain = marshal.loads
are_plain = PLAIN_TYPES.issuperset
_are_plain_or_arrays = (PLAIN_TYPES | {np.ndarray}).issuperset


def encode(values: tuple[Any, ...], slab: Slab) -> tuple[int, bytes, Sequence[NDArray[Any]]]:
    """Format, bytes and arrays (1-D uint8) of the values.
    Raises what pickle raises, and ShmFull.
    """
    form, payload, blocks = _encode(values, slab)
    if len(payload) > APART_BYTES:
        return form | APART, b"", [*blocks, np.frombuffer(payload, np.uint8)]
    return form, payload, blocks


def _encode(values: tuple[Any, ...], slab: Slab) -> tuple[int, bytes, Sequence[NDArray[Any]]]:
    if _are_plain_or_arrays(map(type, values)):
        plain = list(values)
        places: list[tuple[int, str | None, Any]] = []
        arrays: list[NDArray[Any]] = []
        for place, value in enumerate(values):
            if type(value) is np.ndarray:
                dtype, is_whole = value.dtype, value.flags.c_contiguous
                if dtype.num not in _NAMED_BY_STR or not (is_whole or not value.flags.f_contiguous):
                    break
                plain[place] = None
                places.append((place, dtype.str, value.shape))
                arrays.append(
                    np.frombuffer(value, np.uint8)
                    if is_whole and value.nbytes
                    else _copied(value, slab)
                )
            elif type(value) is bytes and len(value) >= APART_BYTES:
                plain[place] = None
                places.append((place, None, None))
                arrays.append(np.frombuffer(value, np.uint8))
        else:
            try:
                return (
                    (ARRAYS, marshal.dumps((plain, places)), arrays)
                    if arrays
                    else (PLAIN, marshal.dumps(values), ())
                )
            except ValueError:  # a text of over 2 GiB
                pass
    buffers: list[pickle.PickleBuffer] = []
    pickled = (
        b"" if _shows_arrays(values) else pickle.dumps(values, 5, buffer_callback=buffers.append)
    )
    if not pickled or _WITHIN_A_PICKLE in pickled:  # the other way takes 2 us more
        buffers.clear()
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = {
            **copyreg.dispatch_table,
            np.ndarray: partial(_reduce_array, slab),
        }
        pickler.dump(values)
        pickled = file.getvalue()
    return PICKLE, pickled, [np.asarray(buffer.raw()) for buffer in buffers]


def _shows_arrays(values: tuple[Any, ...]) -> bool:
    """Whether a first look finds one: by itself, or in a list, tuple or dict."""
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            if _ndarray in map(type, value):
                return True
        elif kind is _ndarray or (kind is dict and _ndarray in map(type, value.values())):
            return True
    return False


def _copied(array: NDArray[Any], slab: Slab) -> NDArray[np.uint8]:
    """The bytes of an array with any strides, in C order: copied once, to where they can be lent
    from.
    """
    nbytes = array.nbytes
    if not nbytes:
        return _NO_BYTES
    if nbytes <= COPIED_IN_PLACE_MAX:
        return np.frombuffer(np.ascontiguousarray(array), np.uint8)
    try:
        root = slab.wrap(slab.allocate(nbytes), nbytes)
    except ShmFull:  # it is sent over a socket then
        return np.frombuffer(np.ascontiguousarray(array), np.uint8)
    np.copyto(np.ndarray(array.shape, array.dtype, root), array)
    return np.ndarray((nbytes,), np.uint8, root)


def _reduce_array(slab: Slab, array: NDArray[Any]) -> Any:
    """numpy's own pickle leaves memory that is in one piece out of band; other strides it would
    write into the pickle.
    """
    flags, dtype = array.flags, array.dtype
    if flags.c_contiguous or flags.f_contiguous or dtype.hasobject:
        return array.__reduce_ex__(5)
    if dtype.num not in _NAMED_BY_STR:
        return np.ascontiguousarray(array).__reduce_ex__(5)
    return _received_array, (pickle.PickleBuffer(_copied(array, slab).data), dtype.str, array.shape)


def _received_array(block: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.ndarray(shape, dtype, block)


def decode(
    form: int, payload: memoryview | bytes, blocks: Sequence[NDArray[np.uint8]]
) -> Sequence[Any]:
    """What encode() was given; `blocks` as received. Raises what pickle raises, and
    ValueError, TypeError, EOFError, IndexError for what encode() never wrote."""
    if form >= APART:
        form -= APART
        blocks, payload = blocks[:-1], blocks[-1].data
    if form == PLAIN:
        return marshal.loads(payload)  # type: ignore[no-any-return]
    if form == ARRAYS:
        plain, places = marshal.loads(payload)
        for (place, dtype, shape), block in zip(places, blocks, strict=True):
            plain[place] = block.tobytes() if dtype is None else np.ndarray(shape, dtype, block)
        return plain  # type: ignore[no-any-return]
    return pickle.loads(payload, buffers=blocks)  # type: ignore[no-any-return]


_ndarray = np.ndarray  # a name less to look up
_WITHIN_A_PICKLE = b"_reconstruct"  # numpy's function for arrays whose bytes stand in the pickle
# what travels in a record of the ring anyway (shm_connection.INLINE_BYTES_MAX)
COPIED_IN_PLACE_MAX = 16 << 10
_NO_BYTES = np.empty(0, np.uint8)


# -- functions and errors --------------------------------------------------------------------------


# Python's own that pickle makes again from their arguments: no need to try.
_MADE_OF_ARGS = frozenset(
    {ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, LookupError}
    | {NotImplementedError, RuntimeError, TimeoutError, TypeError, ValueError, ZeroDivisionError}
)


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in another process: its traceback there, as
    text.
    """


def is_from_a_prompt(function: Callable[..., Any]) -> bool:
    """Whether it was typed at a prompt, in a notebook, or piped into Python: no other process can
    import it.
    """
    return getattr(function, "__module__", None) == "__main__" and _is_at_a_prompt()


def _is_at_a_prompt() -> bool:
    return not hasattr(sys.modules["__main__"], "__file__")


def pickle_function(function: Callable[..., Any]) -> bytes:
    """By name where the other process can import it, else (lambdas, closures, a notebook's cells)
    by value through dill, which multiprocess brings. One from a prompt takes the global variables
    along that it uses, as they stand.

    Raises TypeError for what cannot be called, LocalProtocolError for what cannot be pickled."""
    if not callable(function):
        raise TypeError(
            f"{function!r:.100} cannot be called: a function to run in another shard is expected"
        )
    try:
        pickled = pickle.dumps(function, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled = b""
    at_a_prompt = _is_at_a_prompt()
    # a partial of one from there names that, too
    if pickled and not (at_a_prompt and b"__main__" in pickled):
        return b"p" + pickled
    try:
        return b"d" + _by_value(function, at_a_prompt)
    except Exception as error:
        why = f"{type(error).__name__}: {safe_text(error)}"
        raise LocalProtocolError(
            f"{function!r} cannot be sent to another shard: {why}; one at the top of a module can"
        ) from error


def _by_value(function: Callable[..., Any], with_globals: bool) -> bytes:
    import dill  # 40 ms, and only these need it

    class Pickler(dill.Pickler):  # type: ignore[misc]
        """Modules by name: dill would take along all that they hold, and put it over what they hold
        in the other process.
        """

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
        reason = ShardError(
            "the function cannot be found in this shard: "
            f"{type(error).__name__}: {safe_text(error)}"
        )

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
    line = line_of(error).strip()[-TEXT_MAX:]
    text = traceback_of(error)[-TEXT_MAX:]
    if type(error) in _MADE_OF_ARGS and not error.__dict__ and are_plain(map(type, error.args)):
        pickled = pickle.dumps(error, 5)
        if len(pickled) <= TEXT_MAX:
            return pickle.dumps((pickled, line, text), 5)
    pickled = b""
    for attempt in (error, _Rebuilt(error)):
        try:
            pickled = pickle.dumps(attempt, 5)
            if len(pickled) > TEXT_MAX:
                raise ValueError("too large to be worth it")
            # an exception may pickle and yet not load, or load as another one
            loaded = pickle.loads(pickled)
            if type(loaded) is type(error) and safe_text(loaded) == safe_text(error):
                break
        except Exception:
            # whatever its __reduce__ or __init__ does: the texts, which always pass, then say it
            # all
            pass
        pickled = b""
    return pickle.dumps((pickled, line, text), 5)


class _Rebuilt:
    """Pickles an exception that pickle cannot make again, as its __init__ wants other arguments
    than it has in `args`.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self.error), self.error.args, self.error.__dict__)


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Without its __init__, which has run once, where it was raised."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def unpickle_error(body: memoryview) -> BaseException:
    """The exception that was raised over there, or a ShardError with its text when it cannot be
    read here; its cause is the traceback."""
    pickled, line, text = pickle.loads(body)
    try:
        raised = pickle.loads(pickled) if pickled else None
    except Exception:  # its class cannot be imported here
        raised = None
    if not isinstance(raised, BaseException):
        raised = ShardError(line)
    raised.__cause__ = RemoteTraceback("\n" + text)
    return raised
