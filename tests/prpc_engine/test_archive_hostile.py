"""Hostile bytes: whatever comes, it is a value or an ArchiveError, soon, and without reserving more
memory than was sent.

`archive_corpus.txt` holds bodies that were once of interest: a name and the bytes in hexadecimal a
line.
"""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prpc_engine.archive import DECODE_ERRORS, Archive, ArchiveError, Decoder, encode
from prpc_engine.archive.wire import (
    ARRAY,
    BYTES,
    CLASS,
    COMPLEX,
    COMPRESSED,
    FROZENSET,
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
from tests.examples import examples
from tests.prpc_engine.archives import ONE_OF_EACH, arrive, values

CORPUS = [
    line.split()
    for line in (Path(__file__).parent / "archive_corpus.txt").read_text().splitlines()
    if line[:1] != "#"
]


def decode_or_refuse(body: bytes, blocks: Any) -> None:
    """Any other exception than the archive's own fails the test that calls this."""
    with contextlib.suppress(ArchiveError):
        assert repr(Decoder().decode(body, blocks)), "what is a value can be looked at, too"
    with contextlib.suppress(*DECODE_ERRORS):
        Decoder().decode_plain(body)


def ext(code: int, *payload: Any) -> bytes:
    data = (
        payload[0]
        if len(payload) == 1 and isinstance(payload[0], bytes)
        else msgspec.msgpack.encode(payload)
    )
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


BLOCKS = [np.zeros(24, np.uint8), np.zeros(0, np.uint8), np.full(8, 7, np.uint8)]


def nested_record(depth: int) -> Any:
    spec: Any = "<f8"
    for _ in range(depth):
        spec = [8, False, [["a", 0, spec]]]
    return spec


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
        ext(ARRAY, 3, "<f8", [3]),
        ext(ARRAY, -1, "<f8", [3]),
        ext(ARRAY, "0", "<f8", [3]),
        ext(ARRAY, None, "<f8", [3]),
        ext(ARRAY, 0, "O", [3]),
        ext(ARRAY, 0, "|O", [3]),
        ext(ARRAY, 0, "i4,i4", [3]),
        ext(ARRAY, 0, "V8", [3]),
        ext(ARRAY, 0, "|V8", [3], "K"),
        ext(ARRAY, 0, "<f8", [3], 5),
        ext(ARRAY, 0, "<f8", [3], "C", 1),
        ext(ARRAY, 1, "|V0", [1 << 40]),
        ext(ARRAY, 1, "<U0", [1 << 20, 2]),
        ext(ARRAY, 0, "bfloat17", [12]),
        ext(ARRAY, 0, "finfo", [12]),
        ext(ARRAY, 0, [8, False, [["a", 0, "|O"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 4, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", -8, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 0x7FFFFFFC, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", (1 << 32) - 8, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 0.0, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 0, ["<f8", [1 << 29]]]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 0, "<f8"], ["a", 0, "<f8"]]], [3]),
        ext(ARRAY, 0, [8, False, [["a", 0]]], [3]),
        ext(ARRAY, 0, [8, True, [["a", 1, "<i4"]]], [3]),
        ext(ARRAY, 0, [8, False, [[5, 0, "<f8"]]], [3]),
        ext(ARRAY, 0, [-8, False, []], [3]),
        ext(ARRAY, 0, [1 << 63, False, []], [3]),
        ext(ARRAY, 0, [8, False, 7], [3]),
        ext(ARRAY, 0, ["<f8", [-1]], [3]),
        ext(ARRAY, 0, ["<f8", [1 << 62, 1 << 62]], [3]),
        ext(ARRAY, 0, ["<f8", 5], [3]),
        ext(ARRAY, 0, [], [3]),
        ext(ARRAY, 0, nested_record(100), [3]),
        ext(ARRAY, 0, [2000, False, [[f"f{i}", i, "|i1"] for i in range(2000)]], [0]),
        ext(ARRAY, 2, "|b1", [8]),
        ext(ARRAY, 2, [8, False, [["a", 0, "|b1"], ["b", 1, "|b1"]]], [1]),
        ext(ARRAY, 0, "(2,)f4", [3]),
        ext(ARRAY, 0, "|a8", [3]),
        ext(ARRAY, 0, "a8", [3]),
        ext(ARRAY, 0, "f8", [3]),
        ext(ARRAY, 0, "<f8, <f8", [1]),
        ext(ARRAY, 0, "=f8", [3]),
        ext(ARRAY, 0, "<f", [3]),
        ext(ARRAY, 0, "x" * 1000, [3]),
        ext(ARRAY, 0, "<U9999999999", [3]),
        ext(ARRAY, 0, "<M8[s/0]", [3]),
        ext(ARRAY, 0, "<M8[4294967296s]", [3]),
        ext(ARRAY, 0, ["<f8"], [3]),
        ext(ARRAY, 0, {}, [3]),
        ext(ARRAY, 0, 8, [3]),
        ext(ARRAY, 0, "<f8"),
        ext(ARRAY, b""),
        ext(BYTES, b"\x03"),
        ext(BYTES, b"\xff"),
        ext(BYTES, b""),
        ext(BYTES, -1),
        b"\x92" + ext(BYTES, b"\x00") * 2,  # one block, copied twice
        ext(TUPLE, b""),
        ext(TUPLE, b"\x91"),
        ext(TUPLE, b"\x05"),
        ext(INTEGER, bytes(INTEGER_BYTES_MAX + 1)),
        ext(SCALAR, "<f8", b"short"),
        ext(SCALAR, "O", bytes(8)),
        ext(SCALAR, "<f8"),
        ext(SCALAR, "<f8", 7),
        ext(COMPLEX, b"short"),
        ext(SET, [[1]]),
        ext(SET, b"\x05"),
        ext(SET, b""),
        ext(FROZENSET, {}, []),
        ext(MAP, 1, 2, 3),
        ext(MAP, [1], 2),
        ext(MAP, b"\x80"),
        ext(CLASS, "range"),
        ext(CLASS, "range", [1, 2], 3),
        ext(CLASS, b""),
        ext(STRINGS, [2], ["a"]),
        ext(STRINGS, [-1], ["a", 5]),
        ext(STRINGS, [1 << 40], []),
        ext(STRINGS),
        ext(TENSOR, "torch", 0, "<f8", [4]),
        ext(TENSOR, "pandas", 0, "<f8", [3]),
        ext(TENSOR, "jax", 9, "<f8", [3]),
        ext(TENSOR, "tensorflow", 0, "|O", [3]),
        ext(TENSOR, "jax", 0, [8, False, []], [3]),
        ext(PICKLE, b"N.", []),
        ext(PICKLE),
        ext(COMPRESSED, 1, 5, [24, -1]),
        ext(COMPRESSED, 1, 5, [24, -1, 5, 6]),
        ext(COMPRESSED, 99, 24, [-1, -1]),
        ext(COMPRESSED, 1, -1, [-1, -1]),
        ext(COMPRESSED, 1, 1 << 62, [-1, -1]),
        ext(COMPRESSED, 1, 5, [-2, -1]),
        ext(COMPRESSED, 1, 5, [1 << 62, -1]),
        ext(COMPRESSED, 1, 24, [24, -1]),
        ext(COMPRESSED, b""),
        ext(0, b""),
        ext(99, b"?"),
        ext(127, b"?"),
        b"\xc7\x00\xff",  # a timestamp of no bytes
        b"\x81" + ext(TUPLE, [[]]) + b"\x01",  # a key without a hash
        b"\x81\x91\x80\x01",
    ],
    ids=lambda body: body[:16].hex(),
)
def test_what_is_no_archive_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(ArchiveError):
        Decoder().decode(body, BLOCKS)
    with pytest.raises(DECODE_ERRORS):
        Decoder().decode_plain(body)


@pytest.mark.parametrize("shape", [[-1], [-1, 1], [3, -1], [-1, -3], [0, -1]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_negative_dimension_is_not_the_rest_of_the_block(shape: list[int], order: str) -> None:
    with pytest.raises(ArchiveError, match="negative dimension"):
        Decoder().decode(ext(ARRAY, 0, "<f8", shape, order), BLOCKS)
    with pytest.raises(ArchiveError, match="negative dimension"):
        Decoder().decode(ext(TENSOR, "torch", 0, "<f8", shape), BLOCKS)


@pytest.mark.skipif(not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="needs numpy 2")
def test_a_negative_dimension_is_not_the_rest_of_the_strings() -> None:
    with pytest.raises(ArchiveError, match="negative dimension"):
        Decoder().decode(ext(STRINGS, [-1], ["a", "b"]), [])


# -- bounds ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def reserving_at_most(size_bytes: int) -> Iterator[None]:
    """The block within never holds more memory than that at once, beside what was there before."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", [TUPLE, SET, FROZENSET, MAP, CLASS])
def test_extension_types_a_thousand_deep_are_refused(code: int) -> None:
    body = b"\x90"
    while len(body) < 60_000:
        inner = {MAP: b"\x92\xc0", CLASS: b"\x92\xa5range"}.get(code, b"\x91") + body
        body = b"\xc9" + struct.pack(">IB", len(inner), code) + inner
    with pytest.raises(ArchiveError, match="nested deeper"):
        Decoder().decode(body, [])


def test_a_count_that_was_made_huge_reserves_nothing() -> None:
    for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        for count in (1 << 20, 1 << 28, (1 << 32) - 1):
            with reserving_at_most(1 << 20), pytest.raises(ArchiveError):
                Decoder().decode((head + struct.pack(">I", count)) * 200, [])


@pytest.mark.parametrize("code", [SET, FROZENSET, MAP])
def test_keys_that_all_have_one_hash_are_refused_before_they_are_compared(code: int) -> None:
    modulus = (1 << 61) - 1  # Python's hash of an integer is its remainder
    keys = [
        msgspec.msgpack.Ext(INTEGER, (n * modulus).to_bytes(16, "little")) for n in range(1, 20_000)
    ]
    assert len({hash(n * modulus) for n in range(1, 20_000)}) == 1
    items = [part for key in keys for part in ((key, 1) if code == MAP else (key,))]
    with pytest.raises(ArchiveError, match="pairs of 19999 keys have the same hash"):
        Decoder().decode(ext(code, msgspec.msgpack.encode(items)), [])


def test_a_mask_with_bytes_that_are_no_truth_values_is_refused() -> None:
    body, _ = encode(np.array([True, False, True]))
    assert Decoder().decode(body, [np.array([1, 0, 1], np.uint8)]).tolist() == [True, False, True]
    with pytest.raises(ArchiveError, match="neither 0 nor 1"):
        Decoder().decode(body, [np.array([1, 0, 255], np.uint8)])


def test_text_beyond_unicode_is_refused_wherever_it_stands() -> None:
    good, bad = b"a\0\0\0b\0\0\0", b"a\0\0\0\xff\xff\xff\xff"
    record = [9, False, [["n", 0, "|i1"], ["t", 1, ["<U1", [2]]]]]
    for spec, before in (("<U2", b""), ("<U1", b""), (record, b"\5")):
        shape = [2] if spec == "<U1" else [1]
        body = ext(ARRAY, 0, spec, shape)
        assert Decoder().decode(body, [np.frombuffer(before + good, np.uint8)]).shape == tuple(
            shape
        )
        with pytest.raises(ArchiveError, match="character of over 0x10ffff"):
            Decoder().decode(body, [np.frombuffer(before + bad, np.uint8)])
    with pytest.raises(ArchiveError, match="character of over 0x10ffff"):
        Decoder().decode(ext(SCALAR, record, b"\5" + bad), [])
    assert Decoder().decode(
        ext(ARRAY, 0, ">U2", [1]), [np.frombuffer(b"\0\0\0a\0\0\0b", np.uint8)]
    ).tolist() == ["ab"]


# -- anything --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "body"), CORPUS, ids=[name for name, _ in CORPUS])
def test_what_is_in_the_corpus_is_a_value_or_an_archive_error(name: str, body: str) -> None:
    decode_or_refuse(bytes.fromhex(body), BLOCKS)


@given(st.binary(max_size=200))
@settings(max_examples=examples(1000))
def test_any_bytes_are_a_value_or_an_archive_error(body: bytes) -> None:
    decode_or_refuse(body, BLOCKS)


@given(st.integers(0, 127), st.binary(max_size=60))
@settings(max_examples=examples(1000))
def test_any_bytes_in_an_extension_type_are_a_value_or_an_archive_error(
    code: int, payload: bytes
) -> None:
    decode_or_refuse(ext(code % 16, payload), BLOCKS)


specs = st.recursive(
    st.text("<>|biufcmMSUVO0123456789[]nsD", max_size=8)
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, st.lists(st.integers(-1, 1 << 40), max_size=3))
    ),
    max_leaves=8,
)


@given(
    specs,
    st.lists(st.integers(-2, (1 << 64) - 1), max_size=5),
    st.integers(-1, 5),
    st.sampled_from([ARRAY, SCALAR, TENSOR, STRINGS]),
)
@settings(max_examples=examples(1000))
def test_any_dtype_and_shape_is_an_array_or_an_archive_error(
    spec: Any, shape: list[int], number: int, code: int
) -> None:
    decode_or_refuse(
        ext(code, number, spec, shape) if code == ARRAY else ext(code, spec, number, shape), BLOCKS
    )


@st.composite
def mutations(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    """A valid message with bits flipped, bytes cut out or put in, a length made huge, or blocks
    lost or swapped.
    """
    value = draw(st.lists(values | st.sampled_from(ONE_OF_EACH), max_size=4))
    body, blocks = draw(
        st.sampled_from([Archive(), Archive(compression="zlib"), Archive(allow_pickle=True)])
    ).encode([value, np.arange(draw(st.sampled_from([5, 2000]))), slice(1), np.ones(2, bool)])
    hostile = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(hostile)))
        match draw(st.sampled_from(["flip", "cut", "insert", "huge"])):
            case "flip" if place < len(hostile):
                hostile[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del hostile[place : place + draw(st.integers(1, 20))]
            case "insert":
                hostile[place:place] = draw(st.binary(min_size=1, max_size=20))
            case _:
                hostile[place : place + 4] = draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xdd\xff\xff\xff"])
                )
    own = [np.frombuffer(block.tobytes(), np.uint8) for block in blocks]
    if own and draw(st.booleans()):
        chosen = draw(st.integers(0, len(own) - 1))
        damaged = bytearray(own[chosen].tobytes())
        if damaged:
            damaged[draw(st.integers(0, len(damaged) - 1))] ^= 1 << draw(st.integers(0, 7))
        own[chosen] = np.frombuffer(bytes(damaged[: draw(st.integers(0, len(damaged)))]), np.uint8)
    return bytes(hostile), own


@given(mutations())
@settings(max_examples=examples(600))
@example((b"", []))
def test_a_damaged_archive_is_a_value_or_an_archive_error(message: tuple[bytes, list[Any]]) -> None:
    decode_or_refuse(*message)


@given(st.lists(values, max_size=3), st.data())
def test_an_archive_cut_short_anywhere_is_refused(sent: list[Any], data: st.DataObject) -> None:
    body, blocks = encode([sent, None])
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ArchiveError):
        arrive(body[:cut], blocks)
