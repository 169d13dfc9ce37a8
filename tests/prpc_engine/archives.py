"""What the tests of the archive share: a journey as between two processes, what "the same" means,
and values of all kinds.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

import numpy as np
from hypothesis import strategies as st

from prpc_engine.archive import Archive, Decoder, encode
from prpc_engine.archive.wire import DEPTH_MAX


def arrive(body: bytes, blocks: Any, decoder: Decoder | Archive | None = None) -> Any:
    """As at the other end: read-only blocks of its own, and a body that is a view."""
    own = [np.frombuffer(block.tobytes(), np.uint8) for block in blocks]
    return (decoder or Decoder()).decode(memoryview(body), own)


def there_and_back(value: Any) -> Any:
    return arrive(*encode(value))


def same(one: Any, two: Any) -> bool:
    """Equal, of the same types all the way down; nan is nan."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return (
            len(one) == len(two)
            and all(map(same, one, two))
            and all(map(same, one.values(), two.values()))
        )
    if isinstance(one, set | frozenset):
        return sorted(map(_canonical, one), key=repr) == sorted(map(_canonical, two), key=repr)
    if isinstance(one, slice):
        return same([one.start, one.stop, one.step], [two.start, two.stop, two.step])
    if isinstance(one, float | complex | decimal.Decimal | np.generic):
        return repr(one) == repr(two)
    if isinstance(one, np.ndarray):
        alike = (one.dtype, one.dtype.str, one.shape) == (two.dtype, two.dtype.str, two.shape)
        return (
            alike
            and one.flags.f_contiguous == two.flags.f_contiguous
            and one.tobytes() == two.tobytes()
        )
    return bool(one == two)


def _canonical(item: Any) -> tuple[str, Any]:
    """Equal for sets of the same members of the same types, whatever their order."""
    if isinstance(item, frozenset):
        return "frozenset", sorted(map(_canonical, item), key=repr)
    if isinstance(item, tuple):
        return "tuple", list(map(_canonical, item))
    return type(item).__name__, repr(item)


zones = st.none() | st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(
    datetime.timezone
)
numbers = st.integers(-(1 << 500), 1 << 500)
hashable_scalars = (
    st.none()
    | st.booleans()
    | numbers
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=200)
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
    | st.builds(range, numbers, numbers, numbers.filter(bool))
)
hashable = st.recursive(
    hashable_scalars.filter(
        lambda value: not (isinstance(value, decimal.Decimal) and value.is_snan())
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=5,
)
DTYPES = [
    "?",
    "i1",
    "u1",
    "<i2",
    ">i2",
    "<u4",
    ">u4",
    "<i8",
    ">i8",
    "<f2",
    "<f4",
    ">f4",
    "<f8",
    ">f8",
    "<c8",
    ">c16",
    "<f16",
]
DTYPES += ["<U5", ">U3", "S7", "<M8[ns]", ">M8[us]", "<m8[s]", "<M8[D]", "V5"]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of every plain dtype, few dimensions, in C or Fortran order."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = int(np.prod(shape, dtype=int))
    array = np.frombuffer(np.arange(count * dtype.itemsize, dtype="u1").tobytes(), "u1")
    if dtype.kind == "U":
        filled = np.arange(count).astype(dtype)
    elif dtype.kind == "b":
        filled = (array % 2).view(dtype)
    else:
        filled = array.view(dtype) if count else np.empty(0, dtype)
    return np.array(filled.reshape(shape), order=draw(st.sampled_from("CF")))


leaves = (
    hashable_scalars
    | arrays()
    | st.builds(slice, numbers, st.none() | numbers, st.text(max_size=3))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(hashable, inner, max_size=5)
        | st.sets(hashable, max_size=5)
        | st.frozensets(hashable, max_size=5)
    ),
    max_leaves=30,
)
ONE_OF_EACH: list[Any] = [
    None,
    True,
    -5,
    1 << 100,
    1.5,
    2 - 3j,
    "text",
    b"bytes",
    (1, (2,)),
    [1, [2]],
    {"a": 1, (1, 2): [3], 1 << 70: 4, b"k": 5, None: 6, 1.5: 7},
    {1, "a", (2, 3)},
    frozenset({b"x", frozenset()}),
    range(1, 10, 2),
    slice(None, 3),
    datetime.date(2013, 1, 31),
    datetime.datetime(2013, 1, 31, 5, 6, 7, 8, fold=1),
    datetime.datetime(2013, 1, 31, tzinfo=datetime.timezone.utc),
    datetime.time(23, 59, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "name")),
    datetime.timedelta(-1, 2, 3),
    datetime.timezone.utc,
    uuid.UUID(int=1 << 100),
    decimal.Decimal("-0.10"),
    decimal.Decimal("sNaN"),
    np.float32(1.5),
    np.arange(6, dtype=">i2").reshape(2, 3),
]


def deep(wrap: Any, depth: int = DEPTH_MAX) -> Any:
    """A value inside of so many containers."""
    value: Any = "bottom"
    for _ in range(depth):
        value = wrap(value)
    return value
