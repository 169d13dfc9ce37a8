"""A body and its blocks into values. What a peer sends is checked before it is believed; any fault
is an ArchiveError.

Bounds on what bytes can make us do: a block is copied at most once (otherwise a body of a megabyte
could name one block a hundred thousand times); extension types nest no deeper than values may; keys
whose hashes are equal are refused before a set or dict of them is begun, which would take their
number squared (keys.py). What MessagePack itself carries, msgspec builds: each length is held
against the bytes that are there, so a body makes at most some 70 times its size (of empty dicts).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import device_tensors, pickles, tensors
from prpc_engine.archive.classes import by_name
from prpc_engine.archive.compression import expand
from prpc_engine.archive.dtypes import CHECKED_KINDS, Spec, check_items, dtype_of, unchecked
from prpc_engine.archive.keys import PLAIN_BYTES_MAX, check_maps, check_pairs
from prpc_engine.archive.lazy import Handover, handovers_in
from prpc_engine.archive.wire import (
    ARRAY,
    BYTES,
    CLASS,
    COMPLEX,
    COMPRESSED,
    DEVICE,
    EXTENSION_DEPTH_MAX,
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
    ArchiveError,
    PickleRefused,
)
from prpc_engine.errors import BadArguments, text_of
from shard import DEFAULT_LIMITS, DeviceBlock, Limits

_COMPLEX = struct.Struct("<dd")
_NO_BLOCKS: tuple[NDArray[np.uint8], ...] = ()
_decode_number = msgspec.msgpack.Decoder(int).decode
# What decode_plain() raises for bytes that are no archive: ArchiveError for extension types, and
# msgspec's own (a ValueError; a TypeError for a map's key that has no hash; a RecursionError; a
# MemoryError) for the rest.
DECODE_ERRORS = (ValueError, TypeError, RecursionError, MemoryError)


class _ArrayHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    block: int
    dtype: str | list[Any]
    shape: tuple[int, ...]
    order: str = "C"


class _ScalarHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    dtype: str | list[Any]
    data: bytes


class _StringsHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    shape: tuple[int, ...]
    items: list[str]


class _TensorHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    library: str
    block: int
    dtype: str
    shape: tuple[int, ...]


class _DeviceHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    library: str
    target: int
    block: int
    dtype: str
    shape: tuple[int, ...]
    share: tuple[int, int, bytes, bytes] | None


class _PickleHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    stream: list[bytes | int]
    buffers: list[int]


_decode_array = msgspec.msgpack.Decoder(_ArrayHeader).decode
_decode_scalar = msgspec.msgpack.Decoder(_ScalarHeader).decode
_decode_strings = msgspec.msgpack.Decoder(_StringsHeader).decode
_decode_tensor = msgspec.msgpack.Decoder(_TensorHeader).decode
_decode_device = msgspec.msgpack.Decoder(_DeviceHeader).decode
_decode_pickle = msgspec.msgpack.Decoder(_PickleHeader).decode


class Decoder:
    """Reads values back. Not thread-safe: one per connection.

    `allow_pickle`: this side runs what the peer has pickled. `limits`: how far a compressed message
    may expand. `peeks`: leaves its value to a Lazy of this process.
    """

    def __init__(
        self, *, allow_pickle: bool = False, limits: Limits = DEFAULT_LIMITS, peeks: bool = False
    ) -> None:
        self._peeks = peeks
        self.allow_pickle = allow_pickle
        self.limits = limits
        self._blocks: Sequence[NDArray[np.uint8]] = _NO_BLOCKS
        self._copied: set[int] = set()  # numbers of the blocks that were
        self._depth = 0  # of extension types in extension types
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self._decode_list: Callable[[memoryview], list[Any]] = msgspec.msgpack.Decoder(
            list, ext_hook=self._extension
        ).decode
        self._decode_tuple: Callable[[memoryview], tuple[Any, ...]]
        self._decode_tuple = msgspec.msgpack.Decoder(tuple, ext_hook=self._extension).decode
        # Of a message without blocks, of PLAIN_BYTES_MAX bytes at most: the shortest way, straight
        # into C. Raises DECODE_ERRORS.
        self.decode_plain: Callable[[memoryview | bytes], Any] = self._decode
        self._readers: dict[int, Callable[[memoryview], Any]] = {
            TUPLE: self._decode_tuple,
            BYTES: self._bytes,
            INTEGER: self._integer,
            SCALAR: self._scalar,
            COMPLEX: lambda payload: complex(*_COMPLEX.unpack(payload)),
            SET: lambda payload: set(_hashable(self._decode_list(payload))),
            FROZENSET: lambda payload: frozenset(_hashable(self._decode_list(payload))),
            MAP: self._map,
            CLASS: self._object,
            STRINGS: self._strings,
            TENSOR: self._tensor,
            DEVICE: self._device,
            PICKLE: self._pickle,
            COMPRESSED: self._compressed,
            HANDOVER: self._handover,
        }

    def decode(self, body: memoryview | bytes, blocks: Sequence[NDArray[np.uint8]]) -> Any:
        """The value that encode() or encode_arguments() was given. Raises ArchiveError, and then no
        Lazy has lost its value.
        """
        self._blocks = blocks
        try:
            if len(body) > PLAIN_BYTES_MAX:
                check_maps(body)
            return self._decode(body)
        except Exception as error:
            for handover in handovers_in(blocks):
                handover.give_back()
            if isinstance(error, ArchiveError):
                raise
            raise ArchiveError(f"{type(error).__name__}: {text_of(error)}") from error
        finally:
            self._blocks = _NO_BLOCKS
            if self._copied:
                self._copied.clear()

    def _extension(self, code: int, payload: memoryview) -> Any:
        if code == ARRAY:  # nothing is nested in it, so there is nothing to count
            return self._array(payload)
        reader = self._readers.get(code)
        if reader is None:
            raise ArchiveError(f"unknown extension type {code}")
        if self._depth >= EXTENSION_DEPTH_MAX:
            raise ArchiveError(f"extension types nested deeper than {EXTENSION_DEPTH_MAX}")
        self._depth += 1
        try:
            return reader(payload)
        except ArchiveError:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # of msgspec, of numpy, of a user's class, which may raise anything
            raise ArchiveError(f"{type(error).__name__}: {text_of(error)}") from error
        finally:
            self._depth -= 1

    def _block(self, number: int) -> NDArray[np.uint8]:
        if type(number) is not int or not 0 <= number < len(self._blocks):
            raise ArchiveError(f"block {str(number)[:40]} of {len(self._blocks)}")
        block = self._blocks[number]
        if type(block) is DeviceBlock:  # whose bytes are elsewhere: see _device()
            raise ArchiveError(f"block {number} is in memory of a device, and no tensor of one")
        return block

    def _block_to_copy(self, number: int) -> NDArray[np.uint8]:
        return self._once(number, self._block(number))

    def _once(self, number: int, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if number in self._copied:
            raise ArchiveError(f"block {number} is named twice")
        self._copied.add(number)
        return block

    # -- one small function a type -----------------------------------------------------------------

    def _array(self, payload: memoryview) -> NDArray[Any]:
        header = _decode_array(payload)
        order = header.order
        if order != "C" and order != "F":
            raise ArchiveError(f"array of order {order[:10]!r}")
        return _array_on(self._block(header.block), header.dtype, header.shape, order)

    def _bytes(self, payload: memoryview) -> bytes:
        return self._block_to_copy(_decode_number(payload)).tobytes()

    def _integer(self, payload: memoryview) -> int:
        if len(payload) > INTEGER_BYTES_MAX:
            raise ArchiveError(
                f"integer of {len(payload)} bytes, at most {INTEGER_BYTES_MAX} allowed"
            )
        return int.from_bytes(payload, "little", signed=True)

    def _scalar(self, payload: memoryview) -> Any:
        header = _decode_scalar(payload)
        dtype = dtype_of(header.dtype)
        data = header.data
        if len(data) != dtype.itemsize:
            raise ArchiveError(f"numpy scalar of dtype {dtype} in {len(data)} bytes")
        scalars = np.ndarray((1,), dtype, np.frombuffer(data, np.uint8) if data else None)
        check_items(scalars)
        return scalars[0]

    def _map(self, payload: memoryview) -> dict[Any, Any]:
        flat = self._decode_list(payload)
        if len(flat) % 2:
            raise ArchiveError(f"dict of {len(flat)} keys and values")
        return dict(zip(_hashable(flat[::2]), flat[1::2], strict=True))

    def _object(self, payload: memoryview) -> Any:
        name, packed = self._decode_list(payload)
        entry = by_name.get(name) if type(name) is str else None
        if entry is None:
            raise ArchiveError(
                f"class {str(name)[:200]!r} is not registered here: "
                "call prpc_engine.register(Class) at both sides, with "
                "name= where they import it by different names"
            )
        try:
            return entry.unpack(packed)
        except ArchiveError:
            raise
        except Exception as error:  # the class refuses these fields, in its own way
            why = f"{type(error).__name__}: {text_of(error)}"
            raise ArchiveError(f"no {name} can be made of what was sent: {why}") from error

    def _strings(self, payload: memoryview) -> NDArray[Any]:
        header = _decode_strings(payload)
        kind = getattr(getattr(np, "dtypes", None), "StringDType", None)
        if kind is None:
            raise ArchiveError(
                f"array of StringDType, which numpy {np.__version__} lacks: numpy 2 is needed"
            )
        _check_dimensions(header.shape)
        array: NDArray[Any] = np.array(header.items, kind()).reshape(header.shape)
        array.flags.writeable = False
        return array

    def _tensor(self, payload: memoryview) -> Any:
        header = _decode_tensor(payload)
        block, shape = self._block(header.block), header.shape
        library = header.library
        if library not in tensors.LIBRARIES:
            raise ArchiveError(f"tensor of unknown library {library[:40]!r}")
        if not tensors.is_at_hand(library):
            return _array_on(block, header.dtype, shape, "C")
        self._block_to_copy(header.block)
        if library == "torch":
            _check_dimensions(shape)
            return tensors.make_torch(block, header.dtype, shape)
        return tensors.make_other(library, _array_on(block, header.dtype, shape, "C"))

    def _device(self, payload: memoryview) -> Any:
        header = _decode_device(payload)
        library = header.library
        if library not in device_tensors.LIBRARIES:
            raise ArchiveError(f"tensor of a device, of unknown library {library[:40]!r}")
        number = header.block
        here = 0 <= number < len(self._blocks)
        block = self._once(number, self._blocks[number] if here else self._block(number))
        return device_tensors.make(
            library, header.target, block, header.dtype, header.shape, header.share
        )

    def _pickle(self, payload: memoryview) -> Any:
        if not self.allow_pickle:
            raise PickleRefused(
                "the message holds a pickle, which this side does not read: "
                f"it takes {pickles.CONSENT}"
            )
        header = _decode_pickle(payload)
        return pickles.load(
            [
                piece if isinstance(piece, bytes) else self._block_to_copy(piece)
                for piece in header.stream
            ],
            [self._block_to_copy(number) for number in header.buffers],
        )

    def _handover(self, payload: memoryview) -> Any:
        block = self._block(_decode_number(payload))
        if type(block) is not Handover:
            raise ArchiveError("an object of this process, named by another process")
        try:
            return block.peek() if self._peeks else block.claim()
        except BadArguments as error:
            raise ArchiveError(str(error)) from error

    def _compressed(self, payload: memoryview) -> Any:
        if self._depth > 1 or self._copied:
            raise ArchiveError("a compressed message inside of another")
        blocks = self._blocks
        self._copied.add(-1)  # one in a message: a second one would be refused here
        body, self._blocks = expand(payload, blocks, self.limits)
        check_maps(body)
        return self._decode(body)


def _array_on(
    block: NDArray[np.uint8], spec: Spec, shape: tuple[int, ...], order: Any
) -> NDArray[Any]:
    known = unchecked.get(spec) if type(spec) is str else None
    if known is not None and len(shape) == 1 and shape[0] * known.itemsize == block.nbytes:
        return block.view(known)  # what follows comes to the same, at three times the price
    dtype = known or dtype_of(spec)
    _check_dimensions(shape)
    # refuses shapes that are none, and blocks too small
    array: NDArray[Any] = np.ndarray(shape, dtype, block, 0, None, order)
    if array.nbytes != block.nbytes:
        raise ArchiveError(
            f"array of shape {shape} and dtype {dtype} in a block of {block.nbytes} bytes"
        )
    if known is None and (dtype.kind in CHECKED_KINDS or not dtype.itemsize):
        check_items(array)
    return array


def _check_dimensions(shape: tuple[int, ...]) -> None:
    """Raises ArchiveError for a negative one, which numpy and torch read as "whatever is there"."""
    if min(shape, default=0) < 0:
        raise ArchiveError(f"array of shape {shape}, with a negative dimension")


def _hashable(keys: list[Any]) -> list[Any]:
    """The keys, when a dict of them takes time by their number. Raises ArchiveError, and TypeError
    without a hash.
    """
    check_pairs(keys)
    return keys
