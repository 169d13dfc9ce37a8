"""Values into a body and blocks.

Python walks a value only as far as it must: a list or dict of what MessagePack carries as it is
goes to msgspec whole, after one look at the types in it, in C. The first look takes all integers
for small ones; when msgspec meets one of over 64 bits, the value is walked again by an encoder that
looks at each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import device_tensors, exporters, pickles, tensors
from prpc_engine.archive.classes import ClassEntry, by_class
from prpc_engine.archive.dtypes import EMPTY_ITEMS_MAX, spec_of, specs
from prpc_engine.archive.lazy import Handover, Lazy
from prpc_engine.archive.wire import (
    ARRAY,
    BUILT_IN,
    BYTES,
    BYTES_INLINE_MAX,
    CLASS,
    COMPLEX,
    DEPTH_MAX,
    DEVICE,
    FROZENSET,
    HANDOVER,
    INTEGER,
    INTEGER_BYTES_MAX,
    MAP,
    PICKLE,
    SCALAR,
    SET,
    STRINGS,
    TENSOR,
    TUPLE,
)
from prpc_engine.cuda.placement import HOST, PlacedValue, placing
from prpc_engine.errors import BadArguments, text_of

Block = NDArray[np.uint8]
Blocks = list[Block]
Message = tuple[bytes, Sequence[Block]]
Convert = Callable[[Any, Blocks, int], Any]

_COMPLEX = struct.Struct("<dd")
# what MessagePack carries as it is when it is small enough
_SIMPLE = frozenset({type(None), bool, float, str, int, bytes})
_PLAIN = _SIMPLE - {bytes}  # whatever the value, integers over 64 bits apart
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
# for the place of what cannot be sent: then the text goes without it
_PLACES_LOOKED_AT_MAX = 100_000
_encode = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext
_NO_BLOCKS: tuple[NDArray[np.uint8], ...] = ()
_UINT8 = np.dtype(np.uint8)  # numpy looks np.uint8 up each time
_BYTES_FORMATS = frozenset("Bbc")  # of memoryviews that are as good as bytes
_EMPTY: NDArray[np.uint8] = np.empty(0, np.uint8)


class _Unsendable(Exception):
    """`culprit`, somewhere in the value, cannot be sent, and why: "it is ..." without its place."""

    def __init__(self, culprit: Any, reason: str) -> None:
        super().__init__(culprit, reason)
        self.culprit = culprit
        self.reason = reason


# What a value that cannot be sent ends its encoding with; RuntimeError: another thread adds to a
# dict or set in it meanwhile.
_REFUSED = (_Unsendable, TypeError, ValueError, RuntimeError)


# The shortest way, for values that msgspec takes as they are. Functions, not methods: a bound
# method takes 20 ns of 200 more.


def _quickly(walk: Callable[[Any], Message]) -> Callable[[Any], Message]:
    def encode(value: Any) -> Message:
        if type(value) in _SIMPLE:
            try:
                body = _encode(value)
            except (OverflowError, ValueError):
                body = b""  # an integer over 64 bits, or a lone surrogate: named below
            if 0 < len(body) <= BYTES_INLINE_MAX:
                return body, _NO_BLOCKS
        return walk(value)

    return encode


def _arguments_quickly(
    walk: Callable[[tuple[Any, ...]], Message],
) -> Callable[[tuple[Any, ...]], Message]:
    def encode_arguments(values: tuple[Any, ...]) -> Message:
        for value in values:
            if type(value) not in _SIMPLE:
                break
        else:
            try:
                body = _encode(values)
            except (OverflowError, ValueError):
                body = b""
            if 0 < len(body) <= BYTES_INLINE_MAX:
                return body, _NO_BLOCKS
        return walk(values)

    return encode_arguments


class Encoder:
    """Turns values into messages. Keeps nothing between two: any thread may use it.

    `allow_pickle`: other objects travel as a pickle, to peers who agreed to that. `in_process`: the
    receiver is this process, and gets the very object of a Lazy.
    """

    def __init__(self, *, allow_pickle: bool = False, in_process: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.in_process = in_process
        # Body and blocks of one value. Raises BadArguments for what cannot be sent.
        self.encode: Callable[[Any], Message] = _quickly(self._encode_walked)
        # Body and blocks of a call's positional arguments; they arrive as a list. Raises
        # BadArguments.
        self.encode_arguments: Callable[[tuple[Any, ...]], Message] = _arguments_quickly(
            self._encode_arguments_walked
        )
        self._plain = _PLAIN
        self._keys = _SIMPLE
        self._exact: Encoder | None = None  # made when the first integer of over 64 bits comes
        self._conversions: dict[type, Convert] = {
            int: self._int,
            bytes: self._bytes,
            bytearray: self._bytes,
            memoryview: self._bytes,
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            set: self._set,
            frozenset: self._frozenset,
            complex: self._complex,
            np.ndarray: self._array,
            Lazy: self._hand_over if in_process else self._lazy,
            PlacedValue: self._placed,
        }

    def _encode_walked(self, value: Any) -> Message:
        blocks: Blocks = []
        try:
            return _encode(self._convert(value, blocks, 0)), blocks
        except OverflowError:
            return self._exactly()._encode_walked(value)
        except _REFUSED as error:
            raise _refusal(error, [("the value", value)]) from error

    def _encode_arguments_walked(self, values: tuple[Any, ...]) -> Message:
        blocks: Blocks = []
        try:
            converted = list(values)
            for place, value in enumerate(values):
                kind = type(value)
                if kind is np.ndarray:
                    converted[place] = self._array(value, blocks, 1)
                elif kind not in self._plain:
                    converted[place] = self._convert(value, blocks, 0)
            return _encode(converted), blocks
        except OverflowError:
            return self._exactly()._encode_arguments_walked(values)
        except _REFUSED as error:
            raise _refusal(
                error, [(f"argument {index}", value) for index, value in enumerate(values)]
            ) from error

    def _exactly(self) -> Encoder:
        """This encoder, but one that looks at every integer."""
        if self._exact is None:
            exact = Encoder(allow_pickle=self.allow_pickle, in_process=self.in_process)
            exact._plain = self._plain - {int}
            exact._keys = self._keys - {int}
            self._exact = exact
        return self._exact

    # -- one small function a type -----------------------------------------------------------------

    def _convert(self, value: Any, blocks: Blocks, depth: int) -> Any:
        """The value as msgspec takes it: extension types made, arrays moved to `blocks`."""
        kind = type(value)
        if kind in self._plain:
            return value
        if depth > DEPTH_MAX:
            raise _Unsendable(value, f"is nested deeper than {DEPTH_MAX} containers")
        convert = self._conversions.get(kind)
        if convert is not None:
            return convert(value, blocks, depth + 1)
        entry = by_class.get(kind)
        if entry is not None:
            return self._registered(entry, value, blocks, depth + 1)
        return self._of_other_class(value, blocks)

    def _int(self, value: int, blocks: Blocks, depth: int) -> Any:
        if _INT_MIN <= value <= _INT_MAX:
            return value
        size = value.bit_length() // 8 + 1
        if size > INTEGER_BYTES_MAX:
            raise _Unsendable(
                value, f"is an integer of {size} bytes, at most {INTEGER_BYTES_MAX} allowed"
            )
        return _Ext(INTEGER, value.to_bytes(size, "little", signed=True))

    def _bytes(self, value: bytes | bytearray | memoryview, blocks: Blocks, depth: int) -> Any:
        if type(value) is memoryview:
            if value.ndim != 1 or value.format not in _BYTES_FORMATS:
                shape = f"a memoryview of shape {value.shape} and format {value.format!r}"
                raise _Unsendable(
                    value,
                    f"is {shape}, which would arrive as flat bytes: send np.asarray(it), "
                    "or it.cast('B')",
                )
        elif len(value) <= BYTES_INLINE_MAX:
            return value
        try:
            blocks.append(np.frombuffer(value, np.uint8) if len(value) else _EMPTY)
        except (ValueError, BufferError) as error:
            raise _Unsendable(
                value, f"is a memoryview that is not contiguous bytes: {error}"
            ) from error
        return _Ext(BYTES, _encode(len(blocks) - 1))

    def _items(self, value: Any, blocks: Blocks, depth: int) -> Any:
        plain = self._plain
        # in C, so that a list of a million numbers costs no Python loop
        if plain.issuperset(map(type, value)):
            return value
        convert = self._convert
        return [item if type(item) in plain else convert(item, blocks, depth) for item in value]

    _list = _items

    def _tuple(self, value: tuple[Any, ...], blocks: Blocks, depth: int) -> Any:
        return _Ext(TUPLE, _encode(self._items(value, blocks, depth)))

    def _set(self, value: set[Any], blocks: Blocks, depth: int) -> Any:
        return _Ext(SET, _encode(self._items(value, blocks, depth)))

    def _frozenset(self, value: frozenset[Any], blocks: Blocks, depth: int) -> Any:
        return _Ext(FROZENSET, _encode(self._items(value, blocks, depth)))

    def _dict(self, value: dict[Any, Any], blocks: Blocks, depth: int) -> Any:
        plain = self._plain
        convert = self._convert
        if not self._keys.issuperset(map(type, value)):
            flat = []
            for key, item in value.items():
                flat.append(convert(key, blocks, depth))
                flat.append(convert(item, blocks, depth))
            return _Ext(MAP, _encode(flat))
        if plain.issuperset(map(type, value.values())):
            return value
        return {
            key: item if type(item) in plain else convert(item, blocks, depth)
            for key, item in value.items()
        }

    def _complex(self, value: complex, blocks: Blocks, depth: int) -> Any:
        return _Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag))

    def _lazy(self, value: Lazy, blocks: Blocks, depth: int) -> Any:
        _check_full(value)
        return self._convert(value.value, blocks, depth)

    def _hand_over(self, value: Lazy, blocks: Blocks, depth: int) -> Any:
        _check_full(value)
        blocks.append(Handover(value))
        return _Ext(HANDOVER, _encode(len(blocks) - 1))

    def _array(self, value: NDArray[Any], blocks: Blocks, depth: int) -> Any:
        dtype = value.dtype
        spec = specs.get(dtype)
        if spec is not None and value.nbytes and value.flags.c_contiguous:
            blocks.append(_memory(value))
            return _Ext(ARRAY, _encode((len(blocks) - 1, spec, value.shape)))
        try:
            spec = spec_of(dtype)
        except ValueError as error:
            return self._array_without_bytes(value, blocks, str(error))
        shape = value.shape
        number = len(blocks)
        flags = value.flags
        if not value.nbytes:
            if not dtype.itemsize and value.size > EMPTY_ITEMS_MAX:
                raise _Unsendable(
                    value,
                    f"is an array of {value.size} items of no bytes, "
                    f"at most {EMPTY_ITEMS_MAX} allowed",
                )
            blocks.append(_EMPTY)
        elif flags.c_contiguous:
            blocks.append(_memory(value))
        elif flags.f_contiguous:
            blocks.append(_memory(value.T))
            return _Ext(ARRAY, _encode((number, spec, shape, "F")))
        else:
            blocks.append(_memory(np.ascontiguousarray(value)))
        return _Ext(ARRAY, _encode((number, spec, shape)))

    def _array_without_bytes(self, value: NDArray[Any], blocks: Blocks, reason: str) -> Any:
        # StringDType, of numpy 2
        if value.dtype.kind == "T" and not hasattr(value.dtype, "na_object"):
            return _Ext(STRINGS, _encode((value.shape, value.ravel().tolist())))
        return self._pickled(
            value, blocks, f"is an array of dtype {value.dtype}, which cannot be sent: {reason}"
        )

    def _subclass_of_array(self, value: NDArray[Any], blocks: Blocks) -> Any:
        kind = type(value)
        if kind is np.memmap:  # a file's memory, and in all else an array
            return self._array(np.asarray(value), blocks, 0)
        if isinstance(value, np.ma.MaskedArray):
            reason = "is a masked array, which would lose its mask: send its .data and its .mask"
        else:  # np.matrix multiplies otherwise, and others have attributes
            reason = (
                f"is of type {kind.__module__}.{kind.__qualname__}, which would arrive as a plain "
                "array: send np.asarray(it)"
            )
        return self._pickled(value, blocks, reason)

    def _scalar(self, value: np.generic, blocks: Blocks) -> Any:
        try:
            return _Ext(
                SCALAR,
                _encode((spec_of(value.dtype), value.tobytes() if value.dtype.itemsize else b"")),
            )
        except ValueError as error:
            reason = f"is a numpy scalar of dtype {value.dtype}, which cannot be sent: {error}"
            return self._pickled(value, blocks, reason)

    def _registered(self, entry: ClassEntry, value: Any, blocks: Blocks, depth: int) -> Any:
        try:
            packed = entry.pack(value)
        except Exception as error:  # a pack of the user's, which may raise anything
            why = f"{type(error).__name__}: {text_of(error)}"
            return self._pickled(value, blocks, f"cannot be sent as {entry.name!r}: {why}")
        return _Ext(CLASS, _encode((entry.name, self._convert(packed, blocks, depth))))

    def _of_other_class(self, value: Any, blocks: Blocks) -> Any:
        if isinstance(value, np.ndarray):
            return self._subclass_of_array(value, blocks)
        if isinstance(value, np.generic):
            return self._scalar(value, blocks)
        library = tensors.library_of(value)
        if library:
            return self._tensor(library, value, blocks)
        if self.allow_pickle and exporters.is_pickled_by_name(value):
            try:
                return self._pickle(value, blocks)  # which keeps its type
            except ValueError as error:
                reason = f"cannot be sent: {error}"
        else:
            kind = type(value)
            reason = f"is of type {kind.__module__}.{kind.__qualname__}, which cannot be sent"
        try:
            array = exporters.array_of(value)
        except ValueError as error:
            raise _Unsendable(value, f"{reason}: {error}") from error
        if array is None:
            raise _Unsendable(value, reason)
        return self._array(array, blocks, 0)

    def _tensor(self, library: str, value: Any, blocks: Blocks) -> Any:
        try:
            device = device_tensors.device_of(library, value)
            sent, spec, shape = device_tensors.take_apart(library, device, value)
        except Exception as error:
            if self.allow_pickle and library == "torch" and tensors.is_without_array(value):
                return self._pickled(value, blocks, f"cannot be sent: {error}")
            # a tracer or a tensor of a graph has errors of its library's own
            raise _Unsendable(value, f"cannot be sent: {error}") from error
        block, target, share = sent
        blocks.append(block)
        number = len(blocks) - 1
        if target != HOST:
            return _Ext(DEVICE, _encode((library, target, number, spec, shape, share)))
        if library not in tensors.LIBRARIES:
            return _Ext(ARRAY, _encode((number, spec, shape)))
        return _Ext(TENSOR, _encode((library, number, spec, shape)))

    def _placed(self, value: PlacedValue, blocks: Blocks, depth: int) -> Any:
        with placing(value.placement):
            return self._convert(value.value, blocks, depth)

    def _pickled(self, value: Any, blocks: Blocks, reason: str) -> Any:
        """The last resort, where that was agreed to."""
        if not self.allow_pickle:
            raise _Unsendable(value, reason)
        try:
            return self._pickle(value, blocks)
        except ValueError as error:
            raise _Unsendable(value, f"cannot be sent: {error}") from error

    def _pickle(self, value: Any, blocks: Blocks) -> Any:
        stream, buffers = pickles.dump(value, max(0, pickles.BLOCKS_MAX - len(blocks)))
        numbers = list(range(len(blocks), len(blocks) + len(buffers)))
        blocks += buffers
        pieces: list[bytes | int] = []
        for piece in stream:
            if isinstance(piece, bytes):
                pieces.append(piece)
            else:
                pieces.append(len(blocks))
                blocks.append(piece)
        return _Ext(PICKLE, _encode((pieces, numbers)))


def _check_full(value: Lazy) -> None:
    if value.is_handed_over:
        raise _Unsendable(
            value,
            "is a Lazy that was handed over already, to a receiver in this process: make a new one",
        )


def _memory(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a C-ordered array, where they lie."""
    try:
        return np.frombuffer(array, _UINT8)  # twice as fast as a view
    except (ValueError, BufferError):  # ml_dtypes and some records are no buffers to Python
        return array.reshape(-1).view(np.uint8)


# -- what cannot be sent ---------------------------------------------------------------------------


def _refusal(error: Exception, roots: list[tuple[str, Any]]) -> BadArguments:
    if not isinstance(error, _Unsendable):  # a lone surrogate, say
        return BadArguments(f"cannot be put into a message: {error}; allowed are {BUILT_IN}")
    place = next((place for place, value in _places(roots) if value is error.culprit), None)
    return BadArguments(
        f"{place or 'something in the value'} {error.reason}; allowed are {BUILT_IN}; "
        "a class of your own after "
        f"prpc_engine.register(Class) on both sides; any object with {pickles.CONSENT}"
    )


def _places(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Every value in the roots with its place, outer ones first; a bounded number of them."""
    seen = list(roots)
    for place, value in seen:  # which grows while it is read
        yield place, value
        if len(seen) > _PLACES_LOOKED_AT_MAX:
            continue
        if isinstance(value, dict):
            items = list(value.items())  # in one step: other threads may change it as we look
            seen += [(f"a key of {place}", key) for key, _ in items if type(key) not in _SIMPLE]
            seen += [(f"{place}[{key!r}]", item) for key, item in items]
        elif isinstance(value, list | tuple):
            seen += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, set | frozenset):
            seen += [(f"an item of {place}", item) for item in list(value)]
        elif type(value) is Lazy and not value.is_handed_over:
            seen.append((place, value.value))
        elif type(value) in by_class:
            seen += [(f"{place}.{name}", getattr(value, name)) for name in _fields(value)]


def _fields(value: Any) -> Sequence[str]:
    names: Sequence[str] = getattr(type(value), "__struct_fields__", ()) or tuple(
        getattr(type(value), "__dataclass_fields__", ())
    )
    return [name for name in names if hasattr(value, name)]
