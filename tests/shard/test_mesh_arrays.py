"""Arrays between processes of a group: by reference where they live in a slab, whole in any case,
given back when dropped.
"""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

from shard import DEFAULT_LIMITS, BackpressureError, Limits, LocalProtocolError, ShardGroup
from shard.group.payload import ARRAYS, encode
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S

# float64: 1 MiB, far more than travels within a record, and the very size of a block
COUNT = 1 << 17
DTYPES = [
    "?",
    "i1",
    "u8",
    "f2",
    "f4",
    "c16",
    "g",
    "U5",
    "S3",
    "M8[s]",
    "m8[ms]",
    ">i4",
    "O",
    [("a", "i4"), ("b", "f8")],
]


def test_arrays_cross_with_their_values_whatever_their_size(group: ShardGroup) -> None:
    for count in (1, 100, 1_000_000):
        assert group.submit_to(0, functions.mean, np.full(count, 3.0)).result(PATIENCE_S) == 3
        for function in (functions.ramp, functions.ramp_in_slab):
            array = group.submit_to(1, function, count).result(PATIENCE_S)
            assert array.dtype == np.float64
            assert array[-1] == count - 1


@pytest.mark.parametrize("count", [0, 3, COUNT])
def test_arrays_of_every_dtype_arrive_as_they_were_sent(group: ShardGroup, count: int) -> None:
    for dtype in DTYPES:
        array = np.zeros(count, np.dtype(dtype))  # type: ignore[call-overload]
        array[count // 2 :] = np.ones(count - count // 2).astype(array.dtype)
        echoed = group.submit_to(0, same, array).result(PATIENCE_S)
        assert (echoed.dtype, echoed.shape) == (array.dtype, array.shape)
        assert (echoed == array).all(), dtype


def same(value: object) -> object:
    return value


LAYOUTS = {
    "no dimension": np.array(7.5),
    "every other": np.arange(COUNT, dtype=np.float64)[::2],
    "by columns": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "view of a view": np.arange(60_000.0).reshape(200, 300).T[3:, ::7],
    "masked": np.ma.masked_array(np.arange(5.0), mask=[0, 1, 0, 1, 0]),
    "empty": np.zeros((3, 0, 5)),
}


def test_arrays_of_every_layout_arrive_as_they_were_sent(group: ShardGroup) -> None:
    for name, array in LAYOUTS.items():
        echoed = group.submit_to(1, same, array).result(PATIENCE_S)
        assert type(echoed) is type(array), name
        assert (echoed.dtype, echoed.shape) == (array.dtype, array.shape), name
        assert (echoed == array).all(), name
        one, word, two = group.submit_to(1, same, [array, "and", array]).result(PATIENCE_S)
        assert (one == array).all() and word == "and" and (two == array).all(), name


STRIDES = {
    "every other": lambda array: array[::2],
    "backwards": lambda array: array[::-1],
    "broadcast": lambda array: np.broadcast_to(array[:1000], (500, 1000)),
    "columns": lambda array: array.reshape(512, -1).T[3:, ::7],
    "a window": lambda array: array.reshape(512, -1)[2:500, 3:200],
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("home", ["slab", "heap"])
def test_arrays_of_any_strides_go_as_blocks_that_are_written_once(
    group: ShardGroup, name: str, home: str
) -> None:
    array = group.slab.empty(COUNT, np.float64) if home == "slab" else np.empty(COUNT)
    array[:] = np.arange(COUNT)
    view = STRIDES[name](array)
    form, payload, blocks = encode((view,), group.slab)
    assert (form, len(payload) < 200, [block.nbytes for block in blocks]) == (
        ARRAYS,
        True,
        [view.nbytes],
    )
    assert group.slab.block_of(blocks[0]) is not None, "the only copy lies where it is lent from"
    del blocks
    nested = encode(([view, {"and": view[1:]}],), group.slab)
    assert len(nested[1]) < 1000, "no array is written into a pickle"
    del nested
    assert (group.submit_to(0, same, view).result(PATIENCE_S) == view).all()
    one, two = group.submit_to(1, same, [view, (view[1:],)]).result(PATIENCE_S)
    assert (one == view).all() and (two[0] == view[1:]).all()
    del one, two
    gc.collect()
    assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0
    group.submit_to(1, functions.index).result(PATIENCE_S)
    del view, array
    group.slab.release(group.slab.allocate(64))  # which looks at what was dropped
    assert group.slab.statistics().used_bytes == 0, "nothing stays lent"


def test_every_array_is_read_only_where_it_arrives_small_or_large_whatever_its_strides(
    group: ShardGroup,
) -> None:
    for count in (4, 1000, COUNT):
        whole = np.arange(count, dtype=np.float64)
        for sent in (
            whole,
            whole[::2],
            whole[::-1],
            whole.reshape(2, -1).T,
            whole.astype([("a", "f8")])[::2],
        ):
            for value in (sent, [sent], {"in": sent}):
                assert not group.submit_to(0, functions.is_writable_within, value).result(
                    PATIENCE_S
                ), (count, value)
                result = group.submit_to(0, same, value).result(PATIENCE_S)
                array = (
                    result[0]
                    if isinstance(result, list)
                    else result["in"]
                    if isinstance(result, dict)
                    else result
                )
                assert not array.flags.writeable, (count, value)


def test_values_larger_than_any_message_cross_both_ways(group: ShardGroup) -> None:
    count = DEFAULT_LIMITS.body_bytes_max + 1000
    assert group.submit_to(0, functions.length, bytes(count)).result(PATIENCE_S) == count
    assert group.submit_to(0, functions.length, "x" * count).result(PATIENCE_S) == count
    assert group.submit_to(0, functions.length, [bytes(count), 1]).result(PATIENCE_S) == 2
    data, text = group.submit_to(1, functions.texts, count // 2).result(PATIENCE_S)
    assert (len(data), text[-1]) == (count // 2, "é")
    array = group.submit_to(1, functions.strided, count // 4).result(PATIENCE_S)
    assert (array == np.arange(count // 4)[::-2]).all()
    batch = bytes(count)
    assert group.submit_to(0, lambda: len(batch)).result(PATIENCE_S) == count
    gc.collect()
    assert group.submit_to(0, functions.leases).result(PATIENCE_S) == (0, 0)


def test_a_group_has_the_limits_that_it_is_given() -> None:
    limits = Limits(blocks_bytes_max=1 << 20, ring_bytes=1 << 16)
    with ShardGroup(1, start_method="forkserver", limits=limits) as group:
        assert group.submit_to(0, functions.mean, np.ones(1 << 16)).result(PATIENCE_S) == 1.0
        with pytest.raises(LocalProtocolError, match="1048576 allowed"):
            group.submit_to(0, functions.mean, np.ones(1 << 18))
        error = group.submit_to(0, functions.ramp, 1 << 18).error(PATIENCE_S)
        assert isinstance(error, LocalProtocolError)
    with pytest.raises(TypeError, match="Limits"):
        ShardGroup(1, limits={"blocks_max": 1})  # type: ignore[arg-type]


def test_large_arrays_are_read_only_where_they_arrive(group: ShardGroup) -> None:
    assert not group.submit_to(0, functions.is_writable, np.zeros(COUNT)).result(PATIENCE_S)
    assert not group.submit_to(0, functions.ramp, COUNT).result(PATIENCE_S).flags.writeable


def test_an_array_of_a_shards_slab_comes_as_its_memory(group: ShardGroup) -> None:
    array = group.submit_to(0, functions.make_in_slab, COUNT, 1.0).result(PATIENCE_S)
    assert array[0] == array[-1] == 1.0
    group.submit_to(0, functions.fill, 2.0).result(PATIENCE_S)
    assert array[0] == array[-1] == 2.0, "the owner wrote, the borrower sees it"
    assert group.submit_to(0, functions.leases).result(PATIENCE_S) == (1, array.nbytes)


def test_an_array_between_two_shards_goes_as_its_memory(group: ShardGroup) -> None:
    group.submit_to(0, functions.lend_to, 1, COUNT, 1.0).result(PATIENCE_S)
    group.submit_to(0, functions.fill, 2.0).result(PATIENCE_S)
    assert group.submit_to(1, functions.kept_values).result(PATIENCE_S) == [2.0]
    assert group.submit_to(0, functions.leases).result(PATIENCE_S) == (1, COUNT * 8)


def test_an_ordinary_array_is_copied_when_it_is_sent(group: ShardGroup) -> None:
    array = np.full(COUNT, 1.0)
    group.submit_to(0, functions.keep, array).result(PATIENCE_S)
    array[:] = 2.0
    assert group.submit_to(0, functions.kept_values).result(PATIENCE_S) == [1.0]


def test_an_array_that_was_dropped_goes_back_to_its_owner(group: ShardGroup) -> None:
    array = group.submit_to(0, functions.make_in_slab, COUNT, 1.0).result(PATIENCE_S)
    part = array.reshape(64, -1)[3:5]
    del array
    gc.collect()
    assert group.submit_to(0, functions.leases).result(PATIENCE_S) == (1, COUNT * 8), (
        "a view keeps it"
    )
    del part
    gc.collect()
    assert group.submit_to(0, functions.leases).result(PATIENCE_S) == (0, 0)


def test_an_array_that_a_shard_dropped_goes_back_before_its_answer(group: ShardGroup) -> None:
    array = np.full(COUNT, 1.0)
    assert group.submit_to(0, functions.mean, array).result(PATIENCE_S) == 1.0
    assert group.statistics().application.leases_lent == 0
    group.submit_to(0, functions.keep, array).result(PATIENCE_S)
    figures = group.statistics().application
    assert (figures.leases_lent, figures.slab_bytes) == (1, array.nbytes)
    group.submit_to(0, functions.drop_all).result(PATIENCE_S)
    assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0
    assert group.statistics().application.leases_lent == 0


def test_an_array_that_is_handed_on_arrives_whole(group: ShardGroup) -> None:
    for count in (10, COUNT):
        array = group.submit_to(1, functions.fetch_from, 0, count, 3.0).result(PATIENCE_S)
        assert (array.shape, array.dtype) == ((count,), np.float64)
        assert (array == 3.0).all()
    group.submit_to(0, functions.fill, 4.0).result(PATIENCE_S)
    assert (array == 3.0).all(), "shard 1 handed on a copy: what it borrowed is not its own to lend"


def test_arrays_stay_readable_after_the_group_is_closed(group: ShardGroup) -> None:
    array = group.submit_to(0, functions.make_in_slab, COUNT, 5.0).result(PATIENCE_S)
    group.close()
    assert (array == 5.0).all()


def test_every_call_ends_although_results_find_no_room_on_their_way_back() -> None:
    limits = Limits(outbox_messages_max=100, ring_bytes=4096)
    calls = []
    with ShardGroup(1, start_method="forkserver", limits=limits) as group:
        with contextlib.suppress(BackpressureError):
            while True:
                calls.append(group.submit_to(0, len, b"x" * 1000))
        errors = [call.error(PATIENCE_S) for call in calls]
    assert len(errors) > 100
    assert {type(error) for error in errors} <= {type(None), BackpressureError}
