"""Memory of whatever object has it travels as blocks: inside of a pickle, and at a typed place.

Each test looks at the bytes of the body: what is copied into it makes it long.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prpc_engine.archive import Archive, ArchiveError, Decoder, encode, pickles
from prpc_engine.archive.wire import BYTES_INLINE_MAX, CLASS, PICKLE
from prpc_engine.errors import BadArguments
from tests.examples import examples
from tests.prpc_engine.archives import arrive, same, there_and_back

TRUSTING = Archive(allow_pickle=True)
BODY_BYTES_MAX = 2000  # of an object whose memory is elsewhere
COUNT = 100_000  # items of what is large
FRAME_BYTES = 64 << 10  # bytes of so many are pieces of their own


class Holder:
    """An object with something in it."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Strided:
    """What a user's library has: memory behind DLPack, and no numpy."""

    def __init__(self, array: NDArray[Any], device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Unpicklable(Strided):
    """The same, with memory that no pickle can have."""

    def __reduce__(self) -> Any:
        raise LookupError("not me")


def held_elsewhere(held: Any, size_bytes: int) -> tuple[list[NDArray[np.uint8]], Any]:
    """The blocks of an object that holds it, which have so many bytes, and what it holds there."""
    body, blocks = TRUSTING.encode(Holder(held))
    assert len(body) < BODY_BYTES_MAX, "its memory was copied into the body"
    assert max(block.nbytes for block in blocks) >= size_bytes
    assert sum(block.nbytes for block in blocks) < size_bytes + BODY_BYTES_MAX
    return list(blocks), arrive(body, blocks, TRUSTING).held


def address(value: Any) -> int:
    """Where its first byte lies."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return int(np.frombuffer(value, np.uint8).ctypes.data)


# -- inside of a pickle ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held",
    [
        np.arange(COUNT),
        np.asfortranarray(np.arange(COUNT).reshape(100, -1)),
        np.arange(COUNT).reshape(4, 5, -1).transpose(1, 0, 2),
        np.arange(COUNT).astype("M8[s]").reshape(4, 5, -1).transpose(2, 0, 1),
        np.arange(COUNT).astype("M8[s]"),
        np.arange(COUNT).astype("m8[ms]").reshape(100, -1).T,
        np.zeros(COUNT, [("when", "<M8[s]"), ("price", "<f8")]),
        np.full(COUNT, "text", "<U4"),
    ],
    ids=lambda held: f"{held.dtype} {held.shape}",
)
def test_an_array_in_an_object_is_the_block_itself_whatever_its_dtype(held: NDArray[Any]) -> None:
    blocks, back = held_elsewhere(held, held.nbytes)
    assert any(block.ctypes.data == held.ctypes.data for block in blocks)
    assert (back.dtype, back.shape, back.strides) == (held.dtype, held.shape, held.strides)
    assert back.tobytes() == held.tobytes()
    assert not back.flags.writeable


def test_an_array_of_bfloat16_in_an_object_is_the_block_itself() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    held = np.arange(COUNT).astype(ml_dtypes.bfloat16)
    blocks, back = held_elsewhere(held, held.nbytes)
    assert any(block.ctypes.data == held.ctypes.data for block in blocks)
    assert same(back, held)


@pytest.mark.parametrize("dtype", ["<f8", "<M8[s]", "|b1"])
def test_an_array_with_gaps_in_an_object_is_a_block_in_one_piece(dtype: str) -> None:
    whole = np.arange(4 * COUNT).reshape(200, -1).astype(dtype)
    for held in (whole[::2], whole[:, 1::3], whole[::-1], np.broadcast_to(whole[0], (50, 2000))):
        _, back = held_elsewhere(held, held.nbytes)
        assert same(back, np.ascontiguousarray(held))
        assert not back.flags.writeable


def test_small_arrays_in_an_object_are_as_read_only_as_large_ones() -> None:
    held = [np.arange(3), np.arange(6)[::2], np.zeros(2, "M8[s]"), np.zeros((), "m8[s]")]
    back = arrive(*TRUSTING.encode(Holder(held)), TRUSTING).held
    assert same(back, [np.ascontiguousarray(each).reshape(each.shape) for each in held])
    assert not any(each.flags.writeable for each in back)


def test_arrays_without_plain_bytes_and_subclasses_have_numpys_own_way() -> None:
    mask = np.ma.masked_array(np.arange(4), [0, 1, 0, 1])
    for held in (
        np.array([None, "a", 1 << 80], object),
        np.zeros(2, [("a", "O")]),
        np.zeros(3, "V0"),
        np.zeros((0, 3), "M8[s]"),
        np.rec.array(np.zeros(COUNT, "<f8,<i4")),
        mask,
    ):
        back = arrive(*TRUSTING.encode(Holder(held)), TRUSTING).held
        assert (type(back), back.dtype, back.tolist()) == (type(held), held.dtype, held.tolist())


@pytest.mark.parametrize(
    "held",
    [bytes(COUNT), bytearray(b"x" * COUNT), array.array("d", range(COUNT))],
    ids=lambda held: type(held).__name__,
)
def test_long_bytes_and_array_arrays_in_an_object_are_the_block_itself(held: Any) -> None:
    blocks, back = held_elsewhere(held, memoryview(held).nbytes)
    assert any(block.ctypes.data == address(held) for block in blocks)
    assert same(back, held)


def test_a_long_text_in_an_object_is_a_block() -> None:
    for held in ("x" * COUNT, "\u00e9" * COUNT):
        _, back = held_elsewhere(held, len(held.encode()))
        assert back == held


def test_large_bytes_within_subclasses_of_arrays_are_blocks() -> None:
    held = np.ma.masked_array(np.arange(COUNT), np.arange(COUNT) % 2)
    body, blocks = TRUSTING.encode(Holder(held))
    assert len(body) < BODY_BYTES_MAX
    assert {block.nbytes for block in blocks} >= {8 * COUNT, COUNT}
    back = arrive(body, blocks, TRUSTING).held
    assert back.sum() == held.sum()


lengths = st.sampled_from([0, 1, 300, BYTES_INLINE_MAX + 1, FRAME_BYTES - 1, FRAME_BYTES, 200_000])


@given(st.lists(st.tuples(lengths, st.sampled_from("bast")), max_size=8))
@settings(max_examples=examples(50))
def test_bytes_and_texts_of_any_length_in_any_order_come_back(parts: list[tuple[int, str]]) -> None:
    kinds: dict[str, Any] = {
        "b": bytes,
        "a": lambda length: bytearray(b"a" * length),
        "s": lambda length: "s" * length,
        "t": lambda length: tuple(range(length // 10)),
    }
    held = [kinds[kind](length) for length, kind in parts]
    back = arrive(*TRUSTING.encode([Holder(held), 5]), TRUSTING)
    assert same(back[0].held, held)
    assert back[1] == 5


def test_bytes_that_end_like_a_length_are_cut_without_harm() -> None:
    length = FRAME_BYTES + 10
    held = [length.to_bytes(8, "little") * (FRAME_BYTES // 8), bytes(length), "x" * length]
    assert same(arrive(*TRUSTING.encode(Holder(held)), TRUSTING).held, held)


def test_one_object_in_two_places_of_a_pickle_is_one_block_and_one_object_there() -> None:
    large, items = bytes(COUNT), array.array("d", range(COUNT))
    body, blocks = TRUSTING.encode(Holder([large, large, items, items]))
    assert sum(block.nbytes for block in blocks) < 9 * COUNT + BODY_BYTES_MAX
    back = arrive(body, blocks, TRUSTING).held
    assert back[0] is back[1]
    assert back[2] is back[3]


def test_more_memory_than_a_message_may_have_blocks_is_copied_and_not_refused() -> None:
    arrays = [np.full(2, number) for number in range(2 * pickles.BLOCKS_MAX)]
    body, blocks = TRUSTING.encode([Holder(arrays), Holder(bytes(COUNT))])
    assert len(blocks) <= pickles.BLOCKS_MAX + 2
    holder, other = arrive(body, blocks, TRUSTING)
    assert [each.tolist() for each in holder.held] == [each.tolist() for each in arrays]
    assert other.held == bytes(COUNT)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 100])
def test_a_pickle_has_no_more_blocks_than_it_is_given_and_one(room: int) -> None:
    small = list(range(20_000))
    value = [bytes(COUNT), small, np.arange(5), "x" * COUNT, small, bytearray(COUNT), np.arange(6)]
    stream, buffers = pickles.dump(Holder(value), room)
    assert len(buffers) + sum(not isinstance(piece, bytes) for piece in stream) <= room + 1
    assert all(same(*pair) for pair in zip(pickles.load(stream, buffers).held, value, strict=True))


def test_what_a_user_registers_with_copyreg_comes_first(request: pytest.FixtureRequest) -> None:
    import copyreg

    before = arrive(*TRUSTING.encode(Holder(np.arange(3))), TRUSTING).held
    request.addfinalizer(lambda: copyreg.dispatch_table.pop(np.ndarray))
    copyreg.pickle(np.ndarray, lambda value: (list, (value.tolist(),)))  # type: ignore[arg-type]
    assert before.tolist() == [0, 1, 2]
    assert arrive(*TRUSTING.encode(Holder(np.arange(3))), TRUSTING).held == [0, 1, 2]


# -- pandas and pyarrow ----------------------------------------------------------------------------


def test_a_frame_of_pandas_is_blocks_and_arrives_equal() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "number": np.arange(COUNT),
            "price": np.arange(COUNT) / 3,
            "when": pandas.date_range("2013-01-01", periods=COUNT, freq="s"),
            "there": pandas.date_range("2013-01-01", periods=COUNT, freq="s", tz="Europe/Paris"),
            "carrier": pandas.Categorical(["AA", "UA"] * (COUNT // 2)),
            "delay": pandas.array([1, None] * (COUNT // 2), "Int32"),
        },
        index=pandas.RangeIndex(COUNT, name="row"),
    )
    size_bytes = int(frame.memory_usage(index=False).sum())
    body, blocks = TRUSTING.encode(frame)
    assert len(body) < 3 * BODY_BYTES_MAX
    assert size_bytes // 2 < sum(block.nbytes for block in blocks) < size_bytes + COUNT
    back = arrive(body, blocks, TRUSTING)
    pandas.testing.assert_frame_equal(back, frame)
    for column in frame:
        pandas.testing.assert_series_equal(
            arrive(*TRUSTING.encode(frame[column]), TRUSTING), frame[column]
        )
    with pytest.raises(BadArguments, match="allow_pickle=True on both sides"):
        encode(frame)


def test_what_pyarrow_has_is_blocks_and_arrives_equal() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    numbers = pyarrow.array(np.arange(COUNT))
    table = pyarrow.table(
        {"n": numbers, "text": ["text"] * COUNT, "null": [1, None] * (COUNT // 2)}
    )
    for value in (
        table,
        table.to_batches()[0],
        numbers,
        table["text"],
        pyarrow.array([[1, 2], None] * (COUNT // 2)),
        pyarrow.py_buffer(bytes(8 * COUNT)),
    ):
        for wrapped in (value, Holder(value)):
            body, blocks = TRUSTING.encode(wrapped)
            assert len(body) < BODY_BYTES_MAX
            assert sum(block.nbytes for block in blocks) >= 4 * COUNT
            back = arrive(body, blocks, TRUSTING)
            back = back.held if isinstance(back, Holder) else back
            assert type(back) is type(value)
            assert back.equals(value)
    assert same(there_and_back(numbers), np.arange(COUNT))
    assert there_and_back(pyarrow.py_buffer(b"text")).tobytes() == b"text"
    for refused in (table, table["null"].combine_chunks()):
        with pytest.raises(BadArguments, match="cannot be sent"):
            encode(refused)


# -- array.array -----------------------------------------------------------------------------------


@pytest.mark.parametrize("typecode", "bBhHiIlLqQfd")
def test_array_arrays_of_every_type_code_and_size_come_back_as_they_were(typecode: str) -> None:
    for count in (0, 1, 5, BYTES_INLINE_MAX, BYTES_INLINE_MAX + 1):
        value = array.array(typecode, bytes(count * array.array(typecode).itemsize))
        for archive in (Archive(), TRUSTING):
            back = arrive(*archive.encode([value, {"k": value}]), archive)
            assert back == [value, {"k": value}]
            assert (type(back[0]), back[0].typecode) == (array.array, typecode)


def test_the_memory_of_a_long_array_array_is_the_block_itself() -> None:
    value = array.array("i", range(COUNT))
    body, (block,) = encode([value])
    assert len(body) < 100
    assert block.ctypes.data == address(value)
    (back,) = arrive(body, [block])
    back[0] = 7
    assert (back[0], value[0]) == (7, 0), "what arrives is the receiver's"


def test_array_arrays_of_another_byte_order_are_turned() -> None:
    swapped = array.array("i", [1, 2, 3])
    swapped.byteswap()
    other = {"little": "big", "big": "little"}[sys.byteorder]
    sent = ["array", ["i", other, swapped.tobytes()]]
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(CLASS, msgspec.msgpack.encode(sent)))
    assert Decoder().decode(body, []) == array.array("i", [1, 2, 3])


def test_array_arrays_of_characters_are_refused_and_may_be_pickled() -> None:
    value = array.array("w" if "w" in array.typecodes else "u", "text")
    with pytest.raises(BadArguments, match=r"type code '[uw]'.*send value.tounicode\(\)"):
        encode(value)
    assert arrive(*TRUSTING.encode(value), TRUSTING) == value


@pytest.mark.parametrize(
    "fields",
    [
        ["u", "little", b"\xff" * 4],
        ["O", "little", bytes(8)],
        [["i"], "little", bytes(8)],
        ["i", "middle", bytes(8)],
        ["i", "little", bytes(7)],
        ["i", "little", "text"],
        ["i", "little", [1]],
        ["i", "little"],
        5,
    ],
    ids=repr,
)
def test_array_arrays_that_nobody_sent_are_refused(fields: Any) -> None:
    payload = msgspec.msgpack.encode(["array", fields])
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(CLASS, payload))
    with pytest.raises(ArchiveError, match="no array can be made of what was sent"):
        Decoder().decode(body, [])


def test_a_block_is_not_copied_into_many_array_arrays() -> None:
    body, (block,) = encode(np.zeros(8, np.uint8))
    fields = ["array", ["b", "little", msgspec.msgpack.decode(body)]]
    ext = msgspec.msgpack.Ext(CLASS, msgspec.msgpack.encode(fields))
    with pytest.raises(ArchiveError, match="are a ndarray, and not bytes"):
        Decoder().decode(msgspec.msgpack.encode([ext] * 1000), [block])


# -- other objects that export memory --------------------------------------------------------------


class Pair(ctypes.Structure):
    """Two numbers."""

    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_double))


@pytest.mark.parametrize("archive", [Archive(), TRUSTING], ids=["without pickles", "with pickles"])
def test_what_exports_memory_and_cannot_be_pickled_arrives_as_an_array(archive: Archive) -> None:
    matrix = (ctypes.c_double * 3 * COUNT)()
    matrix[5][1] = 7
    pairs = (Pair * COUNT)()
    pairs[5].b = 7
    pages = mmap.mmap(-1, mmap.PAGESIZE * 10)
    pages[:4] = b"text"
    strided = Unpicklable(np.arange(COUNT).reshape(100, -1)[:, ::2])
    for value, expected in (
        (matrix, np.frombuffer(matrix, "<f8").reshape(COUNT, 3)),
        (pairs, np.frombuffer(pairs, Pair)),
        (pages, np.frombuffer(pages, np.uint8)),
        (strided, np.ascontiguousarray(strided.array)),
        (Unpicklable(np.arange(COUNT)), np.arange(COUNT)),
        (Unpicklable(np.array(5.0)), np.array(5.0)),
    ):
        body, blocks = archive.encode([value, 1])
        assert len(body) < 200
        assert len(blocks) == 1
        back, one = arrive(body, blocks, archive)
        assert same(back, expected)
        assert not back.flags.writeable
        assert one == 1


def test_the_memory_of_such_an_object_is_the_block_itself() -> None:
    numbers, strided = (ctypes.c_int32 * COUNT)(), Strided(np.arange(COUNT))
    _, (one, other) = encode([numbers, strided])
    assert one.ctypes.data == ctypes.addressof(numbers)
    assert other.ctypes.data == strided.array.ctypes.data


def test_what_can_be_pickled_keeps_its_type_and_its_memory_is_a_block() -> None:
    value = Strided(np.arange(COUNT))
    body, blocks = TRUSTING.encode([value])
    assert len(body) < BODY_BYTES_MAX
    assert [block.ctypes.data for block in blocks] == [value.array.ctypes.data]
    (back,) = arrive(body, blocks, TRUSTING)
    assert type(back) is Strided
    assert same(back.array, value.array)
    assert same(there_and_back([value]), [value.array]), "and is an array where pickles are not"


class OddBytes(bytes):
    """A subclass would come back as its base."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Strided(np.arange(5), device=(2, 3)), r"on DLPack's device \(2, 3\), not on the CPU"),
        (ctypes.c_int(5), "is of type ctypes.c_int, which cannot be sent"),
        (Pair(1, 2), "Pair, which cannot be sent"),
        (OddBytes(b"text"), "OddBytes, which cannot be sent"),
        ((ctypes.py_object * 2)(), "py_object_Array_2, which cannot be sent: its memory"),
        (pickle.PickleBuffer, "is of type builtins.type"),
        (Strided, "is of type builtins.type"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_array_or_lies_elsewhere_is_refused_with_the_reason(
    value: Any, reason: str
) -> None:
    with pytest.raises(BadArguments, match=rf"the value\[0\] .*{reason}"):
        encode([value])


def test_memory_that_is_gone_is_refused_with_the_reason() -> None:
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    pages.close()
    with pytest.raises(BadArguments, match="its memory cannot be read: ValueError"):
        encode(pages)
    with pytest.raises(BadArguments, match="its memory cannot be read: AttributeError"):
        encode(Strided(None))  # type: ignore[arg-type]


# -- hostile ---------------------------------------------------------------------------------------


def pickled(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.msgpack.Ext(PICKLE, msgspec.msgpack.encode(fields)),
    )


WHOLE = pickle.dumps([1, bytes(COUNT)], protocol=5)


@pytest.mark.parametrize(
    "fields",
    [
        ([2], []),
        ([-1], []),
        ([1 << 64 - 1], []),
        ([0, 0], []),
        ([0], [0]),
        ([0], [1, 1]),
        ([0], [7]),
        ([0], [-1]),
        ([0], [0.0]),
        ([0], [b"x"]),
        ([0], 1),
        ([None], []),
        (["text"], []),
        ([[0]], []),
        (0, []),
        (b"N.", []),
        ([], []),
        ([b"", b""], []),
        ([1], []),
        ([0],),
        ([0], [], []),
        (),
    ],
    ids=repr,
)
def test_a_pickle_with_blocks_that_are_not_there_or_named_twice_is_refused(fields: Any) -> None:
    blocks = [np.frombuffer(WHOLE, np.uint8), np.zeros(8, np.uint8)]
    assert TRUSTING.decode(pickled([0], []), blocks) == [1, bytes(COUNT)]
    with pytest.raises(ArchiveError):
        TRUSTING.decode(pickled(*fields), blocks)


@pytest.mark.parametrize("cut", [0, 1, 10, 1000, FRAME_BYTES, len(WHOLE) - 1])
def test_a_stream_cut_anywhere_is_whole_or_refused(cut: int) -> None:
    one, two = np.frombuffer(WHOLE[:cut], np.uint8), np.frombuffer(WHOLE[cut:], np.uint8)
    assert TRUSTING.decode(pickled([0, 1], []), [one, two]) == [1, bytes(COUNT)]
    assert TRUSTING.decode(pickled([0, b"", 1, b""], []), [one, two]) == [1, bytes(COUNT)]
    with pytest.raises(ArchiveError):
        TRUSTING.decode(pickled([0, b""], []), [one])
    if cut:
        with pytest.raises(ArchiveError):
            TRUSTING.decode(pickled([b"", 0], []), [two])


def test_a_stream_of_an_old_protocol_in_pieces_is_read() -> None:
    whole = pickle.dumps(Holder, protocol=0)
    assert TRUSTING.decode(pickled([whole[:5], whole[5:]], []), []) is Holder
    with pytest.raises(ArchiveError):
        TRUSTING.decode(pickled([whole[:5], b"x"], []), [])


def test_a_buffer_cut_short_is_refused() -> None:
    body, blocks = TRUSTING.encode(Holder([np.arange(COUNT), np.zeros(COUNT, "M8[s]")]))
    for number, block in enumerate(blocks):
        short = [*blocks[:number], block[:-8], *blocks[number + 1 :]]
        with pytest.raises(ArchiveError):
            TRUSTING.decode(body, short)
        with pytest.raises(ArchiveError):
            TRUSTING.decode(body, blocks[:number])
