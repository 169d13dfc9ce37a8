"""Arrays through the archive: every dtype, shape and order, without a copy where their memory is in
one piece.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prpc_engine.archive import Archive, ArchiveError, Decoder, encode, encode_arguments
from prpc_engine.archive.dtypes import EMPTY_ITEMS_MAX, FIELDS_MAX, ML_DTYPES, dtype_of, spec_of
from prpc_engine.errors import BadArguments
from tests.prpc_engine.archives import DTYPES, same, there_and_back

MAP_NORESERVE = 0x4000  # of Linux on x86-64: address space only; Python's mmap has no name for it


def filled(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    count = math.prod(shape)
    return np.arange(count).astype("i8").astype(dtype).reshape(shape)


def check(array: NDArray[Any]) -> None:
    """It comes back with its values, dtype, shape and order, read-only."""
    back = there_and_back(array)
    assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
    assert back.dtype.str == array.dtype.str
    assert back.tobytes() == array.tobytes()
    assert back.flags.f_contiguous or not array.flags.f_contiguous, "the order is kept"
    assert back.flags.c_contiguous or not array.flags.c_contiguous
    assert not back.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back(dtype: str) -> None:
    for shape in ((), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4)):
        check(filled(shape, dtype))


@pytest.mark.parametrize("dtype", ["<i4", ">f8", "?", "<U2"])
def test_arrays_in_any_order_and_with_any_strides_come_back(dtype: str) -> None:
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
def test_any_part_of_any_array_comes_back(
    shape: list[int], dtype: str, data: st.DataObject
) -> None:
    array = filled(tuple(shape), dtype)
    steps: list[Any] = [slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape]
    check(array[(*steps, ...)])


class Named(np.ndarray[Any, Any]):
    """What numpy lets anybody make of an array."""


class NamedMemmap(np.memmap[Any, Any]):
    """The same, of a file."""


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4).reshape(2, 2).view(np.matrix),
        np.rec.array(np.zeros(3, "<f8,<i4")),
        np.arange(6).view(Named),
        np.zeros(2, object).view(Named),
        np.zeros(3).view(NamedMemmap),
    ],
    ids=lambda array: type(array).__name__,
)
def test_a_subclass_of_ndarray_never_arrives_as_a_plain_array(array: NDArray[Any]) -> None:
    name = f"{type(array).__module__}.{type(array).__qualname__}"
    reason = rf"is of type {name}, which would arrive as a plain array: send np.asarray\(it\)"
    for sent in (encode, lambda value: encode_arguments((0, value))):
        with pytest.raises(BadArguments, match=reason):
            sent(array)
    with pytest.raises(BadArguments, match=rf"the value\['a'\] {reason}"):
        encode({"a": array})
    trusting = Archive(allow_pickle=True)
    back = trusting.decode(*trusting.encode(array))
    assert type(back) is type(array)
    assert back.tolist() == array.tolist()


def test_a_memory_map_is_sent_as_the_array_that_it_is(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(100, 100))
    mapped[:] = np.arange(10_000).reshape(100, 100)
    _, (block,) = encode(mapped)
    assert type(block) is np.ndarray
    assert block.ctypes.data == mapped.ctypes.data
    for part in (mapped, mapped.T, mapped[::2], mapped[:0]):
        check(part)


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


def test_the_memory_of_a_fortran_ordered_and_of_a_read_only_array_is_the_block_itself() -> None:
    fortran = np.asfortranarray(np.arange(1000).reshape(10, 100))
    fixed = np.arange(1000)
    fixed.flags.writeable = False
    for array in (fortran, fixed, np.arange(1000).astype("M8[s]"), np.zeros(100, POINT)):
        _, (block,) = encode(array)
        assert np.shares_memory(block, array)
        assert block.dtype == np.uint8


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
        np.longdouble(1) / 3,
        np.str_(""),
        np.bytes_(b""),
        np.void(b"abc"),
        np.datetime64("NaT", "s"),
    ],
    ids=repr,
)
def test_numpy_scalars_keep_their_type(scalar: np.generic) -> None:
    back = there_and_back([scalar])[0]
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert same(back, scalar)


# -- records ---------------------------------------------------------------------------------------

POINT = np.dtype([("x", "<f4"), ("y", ">i2")])
RECORDS = [
    POINT,
    np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    np.dtype(
        {"names": ["late", "early"], "formats": ["<i4", "S3"], "offsets": [8, 1], "itemsize": 20}
    ),
    np.dtype({"names": ["all", "low"], "formats": ["<u4", "<u2"], "offsets": [0, 0]}),
    np.dtype(
        [
            ("point", POINT),
            ("grid", "<f4", (2, 3)),
            ("name", "<U4"),
            ("when", "<M8[s]"),
            ("raw", "V3"),
            ("is", "?"),
        ]
    ),
    np.dtype([("points", POINT, (2,)), ("\u00e9 t\u00e9", "i1")]),
    np.dtype([]),
]


@pytest.mark.parametrize("dtype", RECORDS, ids=str)
def test_records_come_back_with_their_layout(dtype: np.dtype[Any]) -> None:
    for shape in ((), (3,), (2, 2)):
        array = np.zeros(shape, dtype)
        if dtype.names:
            array[dtype.names[0]] = np.ones(shape, dtype[0])
        back = there_and_back(array)
        assert (back.dtype, back.shape, back.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
        assert back.dtype.isalignedstruct == dtype.isalignedstruct
        assert back.dtype.fields == dtype.fields
    one = np.zeros(1, dtype)[0]
    assert same(there_and_back([one])[0].tolist(), one.tolist())


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([None, 1]), "of dtype object, .*convert it to numbers, or send a list"),
        (np.zeros(2, [("a", "O")]), "its records hold Python objects"),
        (
            np.zeros(2, np.dtype({"names": ["a"], "formats": ["i4"], "titles": ["title"]})),
            "field 'a' has a title",
        ),
        (
            np.zeros(1, [(f"f{i}", "i1") for i in range(FIELDS_MAX + 1)]),
            f"{FIELDS_MAX + 1} fields, at most {FIELDS_MAX}",
        ),
        (np.ma.masked_array([1, 2], [True, False]), "masked array, which would lose its mask"),
        (np.zeros(EMPTY_ITEMS_MAX + 1, "V0"), "items of no bytes"),
    ],
    ids=[
        "objects",
        "records of objects",
        "titles",
        "too many fields",
        "masked",
        "too many of no bytes",
    ],
)
def test_arrays_that_would_not_arrive_as_they_are_are_refused_with_the_reason(
    array: NDArray[Any], reason: str
) -> None:
    with pytest.raises(BadArguments, match=rf"the value\[0\] is an? .*{reason}"):
        encode([array])


@pytest.mark.skipif(
    not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="StringDType came with numpy 2"
)
def test_arrays_of_strings_of_any_length_come_back() -> None:
    kind: Any = np.dtypes.StringDType
    for array in (
        np.array(["", "a\u00f1o", "x" * 1000], kind()),
        np.array([["a"], ["b"]], kind()),
        np.empty((0, 2), kind()),
    ):
        back = there_and_back(array)
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
        assert not back.flags.writeable
    with pytest.raises(BadArguments, match="array of dtype StringDType"):
        encode(np.array(["a", None], kind(na_object=None)))


# -- ml_dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ML_DTYPES))
def test_dtypes_of_ml_dtypes_come_back(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    dtype = np.dtype(getattr(ml_dtypes, name))
    for array in (
        np.ones((2, 3), dtype),
        np.ones((2, 3), dtype).T,
        np.ones((), dtype),
        np.ones(0, dtype),
        np.ones(6, dtype)[::2],
    ):
        check(array)
    scalar = np.ones(1, dtype)[0]
    back = there_and_back([scalar])[0]
    assert type(back) is type(scalar)
    assert back == scalar


def test_the_memory_of_an_array_of_bfloat16_is_the_block_itself() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.ones(1000, ml_dtypes.bfloat16)
    _, (block,) = encode(array)
    assert np.shares_memory(array, block)
    record = np.zeros(3, [("b", ml_dtypes.bfloat16), ("n", "i4")])
    assert same(there_and_back(record).tolist(), record.tolist())
    with pytest.raises(BadArguments, match="only native byte order"):
        encode(array.astype(array.dtype.newbyteorder(">")))


# -- large ones ------------------------------------------------------------------------------------


def test_an_array_of_over_4_gib_is_a_block_like_any_other() -> None:
    size_bytes = (5 << 30) + 8
    # not a page is touched
    address_space = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    array = np.frombuffer(address_space, "<f8").reshape(-1, 1)
    body, (block,) = encode(array)
    assert block.nbytes == size_bytes
    back = Decoder().decode(body, [block])
    assert back.shape == (size_bytes // 8, 1)
    assert back.ctypes.data == array.ctypes.data
    with pytest.raises(ArchiveError, match="buffer is too small"):
        Decoder().decode(body, [block[:-8]])
    del array, block, back
    address_space.close()


@given(st.sampled_from([*map(np.dtype, DTYPES), *RECORDS]))
def test_a_dtype_written_down_and_read_is_that_dtype(dtype: np.dtype[Any]) -> None:
    assert dtype_of(spec_of(dtype)) == dtype
