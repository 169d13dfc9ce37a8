"""Values to bytes and blocks, and back: equal, of the same types; what cannot be sent is named with its place."""

from __future__ import annotations

import collections
import decimal
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prpc_engine.archive import (
    ARRAY,
    BYTES,
    BYTES_INLINE_MAX,
    COMPLEX,
    DEPTH_MAX,
    INTEGER,
    INTEGER_BYTES_MAX,
    SCALAR,
    TUPLE,
    ArchiveError,
    Decoder,
    encode,
    encode_arguments,
)
from prpc_engine.errors import BadArguments

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 500), 1 << 500)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=200)
)
keys = st.text(max_size=5) | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=30,
)


def arrive(body: bytes, blocks: Any) -> Any:
    """As at the other end: read-only blocks of its own, and a body that is a view."""
    own = [np.frombuffer(block.tobytes(), np.uint8) for block in blocks]
    return Decoder().decode(memoryview(body), own)


def there_and_back(value: Any) -> Any:
    return arrive(*encode(value))


def same(one: Any, two: Any) -> bool:
    """Equal, of the same types all the way down; nan is nan."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, float | complex):
        return repr(one) == repr(two)
    return bool(one == two)


@given(values)
def test_nested_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(st.lists(values, max_size=5))
def test_arguments_come_back_as_a_list(arguments: list[Any]) -> None:
    assert same(arrive(*encode_arguments(tuple(arguments))), arguments)


# -- arrays ------------------------------------------------------------------------------------------------------------

DTYPES = ["?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i8", ">i8", "<f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c16"]
DTYPES += ["<U5", ">U3", "S7", "<M8[ns]", "<m8[s]", "<M8[D]"]


def filled(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    count = math.prod(shape)
    return np.arange(count).astype("i8").astype(dtype).reshape(shape)


def check(array: NDArray[Any]) -> None:
    back = there_and_back(array)
    assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
    assert back.dtype.str == array.dtype.str
    assert back.tobytes() == np.ascontiguousarray(array).tobytes()
    assert not back.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back(dtype: str) -> None:
    for shape in ((), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4)):
        check(filled(shape, dtype))


@pytest.mark.parametrize("dtype", ["<i4", ">f8", "?", "<U2"])
def test_the_order_and_strides_of_an_array_do_not_matter(dtype: str) -> None:
    array = filled((6, 5, 4), dtype)
    for view in (
        array.T,
        array[::2],
        array[:, ::-1],
        array[1:, 2],
        array[..., 0],
        np.asfortranarray(array),
        np.broadcast_to(array, (2, 6, 5, 4)),
    ):
        check(view)
    array.flags.writeable = False
    check(array)


@given(st.lists(st.integers(0, 5), max_size=5), st.sampled_from(DTYPES), st.data())
def test_any_part_of_any_array_comes_back(shape: list[int], dtype: str, data: st.DataObject) -> None:
    array = filled(tuple(shape), dtype)
    steps: list[Any] = [slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape]
    check(array[(*steps, ...)])


def test_subclasses_of_arrays_arrive_as_arrays() -> None:
    class Mine(np.ndarray[Any, Any]):
        """An array with a name of its own."""

    back = there_and_back(np.arange(6).reshape(2, 3).view(Mine))
    assert type(back) is np.ndarray
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_memory_of_a_contiguous_array_is_the_block_itself() -> None:
    array = np.arange(1000)
    _, (block,) = encode(array)
    array[0] = 77
    assert block.view(np.int64)[0] == 77
    assert block.ctypes.data == array.ctypes.data


def test_a_decoded_array_is_the_memory_that_arrived() -> None:
    body, (block,) = encode(np.arange(1000))
    own = block.copy()
    back = Decoder().decode(body, [own])
    assert back.ctypes.data == own.ctypes.data


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.5),
        np.int8(-3),
        np.uint64(1 << 63),
        np.bool_(True),
        np.complex128(1 + 2j),
        np.str_("añb"),
        np.bytes_(b"xy"),
        np.datetime64("2013-01-01T05:00"),
        np.timedelta64(7, "m"),
        np.float64(2.5),
        np.float16(0.5),
    ],
    ids=repr,
)
def test_numpy_scalars_keep_their_type(scalar: np.generic) -> None:
    back = there_and_back([scalar])[0]
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert back == scalar


@pytest.mark.parametrize("size", [0, BYTES_INLINE_MAX - 10, BYTES_INLINE_MAX, BYTES_INLINE_MAX + 1, 1_000_000])
def test_bytes_of_every_size_and_kind_arrive_as_bytes(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for value in (data, bytearray(data), memoryview(data)):
        assert there_and_back(value) == data
        assert there_and_back([value, value]) == [data, data]
    _, blocks = encode(data)
    assert bool(blocks) == (size > BYTES_INLINE_MAX), "long ones are not copied through the encoder"


@pytest.mark.parametrize(
    "number", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 1 << 8000, -(1 << 8000)]
)
def test_integers_of_any_size_come_back(number: int) -> None:
    for value in (number, [1, number], {"n": number}, (number,)):
        assert same(there_and_back(value), value)


def test_depth_up_to_the_bound_is_fine() -> None:
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}):
        value: Any = "bottom"
        for _ in range(DEPTH_MAX):
            value = wrap(value)
        assert same(there_and_back(value), value)


# -- what cannot be sent -----------------------------------------------------------------------------------------------


class Odd:
    """Of no type that a message holds."""


class OddInt(int):
    """A subclass would come back as its base: refused rather than changed."""


@pytest.mark.parametrize(
    "value",
    [
        {1},
        frozenset(),
        Odd(),
        Odd,
        print,
        OddInt(3),
        collections.OrderedDict(a=1),
        decimal.Decimal(1),
        range(3),
        iter([]),
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_with_their_name_and_place(value: Any) -> None:
    for wrapped, place in (
        (value, "the value"),
        ([0, value], r"the value\[1\]"),
        ({"k": (value,)}, r"the value\['k'\]\[0\]"),
    ):
        with pytest.raises(
            BadArguments, match=f"{place} is of type .*{type(value).__qualname__}.* cannot be sent; allowed are None"
        ):
            encode(wrapped)
    with pytest.raises(BadArguments, match=r"argument 1 is of type"):
        encode_arguments((1, value))


@pytest.mark.parametrize(
    "array",
    [np.array([None, 1]), np.zeros(2, [("a", "i4")]), np.zeros(3, "V5"), np.array([[Odd()]])],
    ids=["objects", "records", "void", "custom class"],
)
def test_arrays_without_plain_bytes_are_refused_by_dtype(array: NDArray[Any]) -> None:
    with pytest.raises(BadArguments, match=r"the value\[0\] is an array of dtype .*cannot be sent.*convert it to numbers"):
        encode([array])


def test_too_deep_too_long_and_odd_keys_are_refused() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(BadArguments, match="is nested deeper than 64 containers"):
        encode(deep)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadArguments, match="is nested deeper than 64 containers"):
        encode(loop)
    with pytest.raises(BadArguments, match="an integer of 1025 bytes, at most 1024 allowed"):
        encode(1 << 8 * INTEGER_BYTES_MAX)
    with pytest.raises(BadArguments, match="has a key of type tuple; keys may be str, int"):
        encode({(1,): 2})
    with pytest.raises(BadArguments, match="not contiguous"):
        encode([memoryview(bytes(100))[::2]])
    for surrogate in ("\ud800", ["\ud800"], {"\ud800": 1}):
        with pytest.raises(BadArguments, match="cannot be put into a message"):
            encode(surrogate)


# -- hostile bytes -----------------------------------------------------------------------------------------------------


def ext(code: int, *payload: Any) -> bytes:
    data = payload[0] if len(payload) == 1 and isinstance(payload[0], bytes) else msgspec.msgpack.encode(payload)
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


BLOCKS = [np.zeros(24, np.uint8), np.zeros(0, np.uint8)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion entries
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        ext(ARRAY, 0, "<f8", [4]),
        ext(ARRAY, 0, "<f8", [-3]),
        ext(ARRAY, 0, "<f8", [1 << 62, 1 << 62, 0, 3]),
        ext(ARRAY, 0, "<f8", [3.0]),
        ext(ARRAY, 0, "<f8", [True, 3]),
        ext(ARRAY, 0, "<f8", [1] * 33),
        ext(ARRAY, 0, "<f8", 3),
        ext(ARRAY, 0, "<f8", None),
        ext(ARRAY, 2, "<f8", [3]),
        ext(ARRAY, -1, "<f8", [3]),
        ext(ARRAY, "0", "<f8", [3]),
        ext(ARRAY, None, "<f8", [3]),
        ext(ARRAY, 0, "O", [3]),
        ext(ARRAY, 0, "|O", [3]),
        ext(ARRAY, 0, "i4,i4", [3]),
        ext(ARRAY, 0, "V8", [3]),
        ext(ARRAY, 0, "(2,)f4", [3]),
        ext(ARRAY, 0, "|a8", [3]),
        ext(ARRAY, 0, "a8", [3]),
        ext(ARRAY, 0, "f8", [3]),
        ext(ARRAY, 0, "<f8, <f8", [1]),
        ext(ARRAY, 0, "=f8", [3]),
        ext(ARRAY, 0, "<f", [3]),
        ext(ARRAY, 0, "x" * 1000, [3]),
        ext(ARRAY, 0, "<U9999999999", [3]),
        ext(ARRAY, 0, ["<f8"], [3]),
        ext(ARRAY, 0, {}, [3]),
        ext(ARRAY, 0, 8, [3]),
        ext(ARRAY, 0, "<f8"),
        ext(ARRAY, b""),
        ext(BYTES, b"\x02"),
        ext(BYTES, b"\xff"),
        ext(BYTES, b""),
        ext(TUPLE, b""),
        ext(TUPLE, b"\x91"),
        ext(TUPLE, b"\x05"),
        ext(INTEGER, bytes(INTEGER_BYTES_MAX + 1)),
        ext(SCALAR, "<f8", b"short"),
        ext(SCALAR, "O", bytes(8)),
        ext(SCALAR, "<f8"),
        ext(SCALAR, "<f8", 7),
        ext(COMPLEX, b"short"),
        ext(0, b""),
        ext(99, b"?"),
    ],
    ids=lambda body: body[:16].hex(),
)
def test_what_is_no_archive_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(ArchiveError):
        Decoder().decode(body, BLOCKS)


def test_a_tuple_in_a_tuple_a_thousand_deep_is_refused() -> None:
    body = b"\x90"
    for _ in range(20_000):
        size = len(body)
        body = b"\xc9" + size.to_bytes(4, "big") + bytes([TUPLE]) + b"" + body
        body = b"\x91" + body
        if len(body) > 60_000:
            break
    with pytest.raises(ArchiveError):
        Decoder().decode(body, [])


@given(st.binary(max_size=200))
@settings(max_examples=1000)
def test_any_bytes_are_a_value_or_an_archive_error(body: bytes) -> None:
    try:
        Decoder().decode(body, BLOCKS)
    except ArchiveError:
        return


@given(values, st.integers(0, 1 << 16), st.integers(1, 255))
@settings(max_examples=500)
def test_an_archive_with_a_byte_changed_is_a_value_or_an_archive_error(value: Any, position: int, change: int) -> None:
    body, blocks = encode([value, np.arange(5), np.float32(1)])
    hostile = bytearray(body)
    hostile[position % len(hostile)] ^= change
    try:
        Decoder().decode(bytes(hostile), list(blocks))
    except ArchiveError:
        return


def test_a_decoder_forgets_its_blocks_and_goes_on_after_an_error() -> None:
    decoder = Decoder()
    body, blocks = encode(np.arange(3))
    with pytest.raises(ArchiveError, match="block 0 of 0"):
        decoder.decode(body, [])
    assert decoder.decode(body, list(blocks)).tolist() == [0, 1, 2]
    with pytest.raises(ArchiveError, match="block 0 of 0"):
        decoder.decode(body, [])
