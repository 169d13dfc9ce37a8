"""Values <-> a small typed body and untouched blocks. No I/O here.

The body is MessagePack (msgspec does the work in C and checks every length), with extension types for what MessagePack lacks:

    code  value              payload
       1  tuple              MessagePack array of its items
       2  numpy array        MessagePack [block number, dtype string, shape]; the bytes are that block, C order
       3  bytes              MessagePack block number: bytes of over BYTES_INLINE_MAX
       4  int over 64 bits   two's complement, little-endian
       5  numpy scalar       MessagePack [dtype string, bytes]
       6  complex            two little-endian doubles

None, bool, int, float, str, bytes, list and dict are MessagePack's own. Blocks are 1-D uint8 arrays: the very memory of the
array that was given, and at the other end the memory that it arrived in. Anything else is refused with BadArguments, which
says where in the value it stands; pickle is never used. Lists come back as lists, tuples as tuples, arrays read-only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prpc_engine.errors import BadArguments

TUPLE, ARRAY, BYTES, INTEGER, SCALAR, COMPLEX = 1, 2, 3, 4, 5, 6

# Longer bytes travel as a block, so that a large payload is not copied through the encoder.
BYTES_INLINE_MAX = 16 << 10
DEPTH_MAX = 64  # of containers in containers; Python's and msgspec's recursion limits are far above
INTEGER_BYTES_MAX = 1024  # 8192 bits: keys and hashes, and no way to make us compute with megabytes of digits
DTYPE_KINDS = "biufcmMSU"  # bool, int, uint, float, complex, timedelta, datetime, bytes, str
_DTYPES_CACHED_MAX = 256
_DIMENSIONS_MAX = 32

_COMPLEX = struct.Struct("<dd")
_PLAIN = frozenset({type(None), bool, float, str})  # what MessagePack carries as it is, whatever the value
_SIMPLE = _PLAIN | {int, bytes}  # what it carries when it is small enough
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode
_decode_plain = msgspec.msgpack.Decoder().decode
_Ext = msgspec.msgpack.Ext
_NO_BLOCKS: tuple[NDArray[np.uint8], ...] = ()

ALLOWED = "None, bool, int, float, complex, str, bytes, tuple, list, dict and numpy arrays and scalars"


def encode(value: Any) -> tuple[bytes, Sequence[NDArray[np.uint8]]]:
    """Body and blocks of one value. Raises BadArguments for what cannot be sent."""
    if type(value) in _SIMPLE:
        try:
            body = _encode(value)
        except (OverflowError, ValueError):
            body = b""  # an integer over 64 bits, or a lone surrogate: named below
        if 0 < len(body) <= BYTES_INLINE_MAX:
            return body, _NO_BLOCKS
    blocks: list[NDArray[np.uint8]] = []
    return _finish(_plain(value, blocks, "the value", 0)), blocks


def encode_arguments(values: tuple[Any, ...]) -> tuple[bytes, Sequence[NDArray[np.uint8]]]:
    """Body and blocks of a call's positional arguments; they arrive as a list. Raises BadArguments."""
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
    blocks: list[NDArray[np.uint8]] = []
    return _finish([_plain(value, blocks, f"argument {index}", 0) for index, value in enumerate(values)]), blocks


def _finish(plain: Any) -> bytes:
    try:
        return _encode(plain)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:  # a lone surrogate, say
        raise BadArguments(f"cannot be put into a message: {error}; allowed are {ALLOWED}") from error


# -- encoding: one small function a type --------------------------------------------------------------------------------


def _plain(value: Any, blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    """The value as msgspec takes it: extension types made, arrays moved to `blocks`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    convert = _CONVERT.get(kind)
    if convert is None:
        convert = _conversion_of_subclass(value, where)
    if depth > DEPTH_MAX:
        raise BadArguments(f"{where} is nested deeper than {DEPTH_MAX} containers")
    return convert(value, blocks, where, depth + 1)


def _conversion_of_subclass(value: Any, where: str) -> Callable[[Any, list[NDArray[np.uint8]], str, int], Any]:
    if isinstance(value, np.ndarray):
        return _plain_array
    if isinstance(value, np.generic):
        return _plain_scalar
    raise BadArguments(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be sent; allowed are {ALLOWED}"
    )


def _plain_int(value: int, blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    size = value.bit_length() // 8 + 1
    if size > INTEGER_BYTES_MAX:
        raise BadArguments(f"{where} is an integer of {size} bytes, at most {INTEGER_BYTES_MAX} allowed")
    return _Ext(INTEGER, value.to_bytes(size, "little", signed=True))


def _plain_bytes(value: bytes | bytearray | memoryview, blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    if len(value) <= BYTES_INLINE_MAX and not isinstance(value, memoryview):
        return value
    try:
        blocks.append(np.frombuffer(value, np.uint8))
    except (ValueError, BufferError) as error:
        raise BadArguments(f"{where} is a memoryview that is not contiguous bytes: {error}") from error
    return _Ext(BYTES, _encode(len(blocks) - 1))


def _plain_list(value: list[Any], blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    kinds = set(map(type, value))  # in C, so that a list of a million numbers costs no Python loop
    if _PLAIN.issuperset(kinds) or (kinds == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX):
        return value
    return [_plain(item, blocks, f"{where}[{index}]", depth) for index, item in enumerate(value)]


def _plain_tuple(value: tuple[Any, ...], blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    return _Ext(TUPLE, _finish([_plain(item, blocks, f"{where}[{index}]", depth) for index, item in enumerate(value)]))


def _plain_dict(value: dict[Any, Any], blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int, float, bool, bytes, type(None)):
            raise BadArguments(
                f"{where} has a key of type {type(key).__qualname__}; keys may be str, int, float, bool, bytes or None"
            )
    return {key: _plain(item, blocks, f"{where}[{key!r}]", depth) for key, item in value.items()}


def _plain_array(value: NDArray[Any], blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    dtype = value.dtype
    if dtype.kind not in DTYPE_KINDS:
        raise BadArguments(
            f"{where} is an array of dtype {dtype}, which cannot be sent: an array of Python objects or records has no "
            "plain bytes; convert it to numbers, or send a list"
        )
    shape = value.shape
    if type(value) is not np.ndarray:
        value = np.asarray(value)
    if not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    blocks.append(value.reshape(-1).view(np.uint8) if value.size else np.empty(0, np.uint8))
    return _Ext(ARRAY, _encode((len(blocks) - 1, dtype.str, shape)))


def _plain_scalar(value: np.generic, blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    if value.dtype.kind not in DTYPE_KINDS:
        raise BadArguments(f"{where} is a numpy scalar of dtype {value.dtype}, which cannot be sent; allowed are {ALLOWED}")
    return _Ext(SCALAR, _encode((value.dtype.str, value.tobytes())))


def _plain_complex(value: complex, blocks: list[NDArray[np.uint8]], where: str, depth: int) -> Any:
    return _Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag))


_CONVERT: dict[type, Callable[[Any, list[NDArray[np.uint8]], str, int], Any]] = {
    int: _plain_int,
    bytes: _plain_bytes,
    bytearray: _plain_bytes,
    memoryview: _plain_bytes,
    list: _plain_list,
    tuple: _plain_tuple,
    dict: _plain_dict,
    complex: _plain_complex,
    np.ndarray: _plain_array,
}

# -- decoding -----------------------------------------------------------------------------------------------------------


class ArchiveError(ValueError):
    """Bytes that are no archive, or one that does not fit its blocks."""


class Decoder:
    """Reads values back. Not thread-safe: one per connection."""

    def __init__(self) -> None:
        self._blocks: Sequence[NDArray[np.uint8]] = _NO_BLOCKS
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self.decode_plain: Callable[[memoryview | bytes], Any] = self._decode  # without blocks; raises ValueError, RecursionError
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def decode(self, body: memoryview | bytes, blocks: Sequence[NDArray[np.uint8]]) -> Any:
        """The value that encode() or encode_arguments() was given. Raises ArchiveError."""
        self._blocks = blocks
        try:
            return self._decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, struct.error, OverflowError) as error:
            raise ArchiveError(f"{type(error).__name__}: {error}") from error
        finally:
            self._blocks = _NO_BLOCKS

    def _extension(self, code: int, payload: memoryview) -> Any:
        if code == ARRAY:
            number, name, shape = _decode_plain(payload)
            dtype = self._dtypes.get(name) or self._dtype(name)
            block = self._block(number)
            if len(shape) > _DIMENSIONS_MAX or any(type(extent) is not int or extent < 0 for extent in shape):
                raise ArchiveError(f"array of impossible shape {shape}")
            if math.prod(shape) * dtype.itemsize != block.nbytes:
                raise ArchiveError(f"array of shape {shape} and dtype {dtype} in a block of {block.nbytes} bytes")
            return np.ndarray(shape, dtype, block)
        if code == TUPLE:
            return tuple(self._decode(payload))
        if code == BYTES:
            return self._block(_decode_plain(payload)).tobytes()
        if code == SCALAR:
            name, data = _decode_plain(payload)
            return np.frombuffer(data, self._dtypes.get(name) or self._dtype(name), 1)[0]
        if code == INTEGER:
            if len(payload) > INTEGER_BYTES_MAX:
                raise ArchiveError(f"integer of {len(payload)} bytes, at most {INTEGER_BYTES_MAX} allowed")
            return int.from_bytes(payload, "little", signed=True)
        if code == COMPLEX:
            return complex(*_COMPLEX.unpack(payload))
        raise ArchiveError(f"unknown extension type {code}")

    def _block(self, number: Any) -> NDArray[np.uint8]:
        if type(number) is not int or not 0 <= number < len(self._blocks):
            raise ArchiveError(f"block {number!r} of {len(self._blocks)}")
        return self._blocks[number]

    def _dtype(self, name: Any) -> np.dtype[Any]:
        # Looked at before numpy does: its parser takes far more than dtype.str ever says, some of it with a warning.
        if type(name) is not str or not 3 <= len(name) <= 32 or name[0] not in "<>|" or name[1] not in DTYPE_KINDS:
            raise ArchiveError(f"dtype {name!r}")
        dtype: np.dtype[Any] = np.dtype(name)
        if dtype.kind not in DTYPE_KINDS or dtype.str != name:
            raise ArchiveError(f"dtype {name!r} is not allowed")
        if len(self._dtypes) < _DTYPES_CACHED_MAX:
            self._dtypes[name] = dtype
        return dtype
