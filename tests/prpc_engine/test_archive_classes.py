"""Classes of the user's own, registered on both sides: what comes back is of the class, and no name
from the wire is imported.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from prpc_engine import archive
from prpc_engine.archive import ArchiveError, Decoder, encode
from prpc_engine.archive.classes import by_class, by_name
from prpc_engine.archive.wire import CLASS
from prpc_engine.errors import BadArguments, ConfigError
from tests.prpc_engine.archives import there_and_back


@dataclasses.dataclass
class Batch:
    """With an array and defaults."""

    features: NDArray[Any]
    labels: list[int] = dataclasses.field(default_factory=list)
    name: str = "unnamed"


@dataclasses.dataclass(frozen=True)
class Interval:
    """Checks what it is made of, and derives a field."""

    low: int
    high: int
    width: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} above high {self.high}")
        object.__setattr__(self, "width", self.high - self.low)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A struct that holds others."""

    number: int
    of: Interval | None = None


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


class Color(enum.Enum):
    """Members of a value that could not be sent."""

    RED = frozenset({"r"}), print
    BLUE = frozenset({"b"}), print


class Level(enum.IntEnum):
    """Members that are integers."""

    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    """Members that can be combined."""

    READ = 1
    WRITE = 2


class Polynomial:
    """Of no kind that is known: it says itself how."""

    def __init__(self, *factors: float) -> None:
        self.factors = factors

    def __eq__(self, other: object) -> bool:
        return type(other) is Polynomial and self.factors == other.factors

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Each test registers what it needs, and nothing stays."""
    before = dict(by_class), dict(by_name)
    yield
    for table, kept in zip((by_class, by_name), before, strict=True):
        table.clear()
        table.update(kept)  # type: ignore[arg-type]


def test_dataclasses_come_back_with_their_arrays() -> None:
    archive.register(Batch)
    sent = Batch(np.arange(6).reshape(2, 3), [1, 2])
    for wrap in (lambda value: value, lambda value: [value, 1], lambda value: {"k": (value,)}):
        _, blocks = encode(wrap(sent))
        assert np.shares_memory(blocks[0], sent.features)
        assert type(there_and_back(wrap(sent))) is type(wrap(sent))
    back = there_and_back(sent)
    assert (type(back), back.features.tolist(), back.labels, back.name) == (
        Batch,
        [[0, 1, 2], [3, 4, 5]],
        [1, 2],
        "unnamed",
    )


def test_structs_named_tuples_enums_and_flags_come_back() -> None:
    for cls in (Interval, Step, Pair, Color, Level, Rights):
        assert archive.register(cls) is cls
    for value in (
        Interval(2, 5),
        Step(number=3, of=Interval(1, 2)),
        Pair(Pair(1, None), (2,)),
        Color.BLUE,
        Level.HIGH,
        Rights.READ | Rights.WRITE,
        Rights(0),
        {Color.RED: 1, Level.LOW: Pair(1, 2)},
    ):
        back = there_and_back(value)
        assert (type(back), back) == (type(value), value)
    assert there_and_back(Color.RED) is Color.RED


def test_any_class_comes_back_with_pack_and_unpack() -> None:
    archive.register(
        Polynomial,
        name="poly",
        pack=lambda value: value.factors,
        unpack=lambda factors: Polynomial(*factors),
    )
    assert there_and_back([Polynomial(1.0, -2.5)]) == [Polynomial(1.0, -2.5)]


def test_a_class_that_was_made_again_takes_the_place_of_the_old_one() -> None:
    def make() -> type:
        @dataclasses.dataclass
        class Cell:
            value: int

        return Cell

    old, new = archive.register(make()), archive.register(make())
    assert type(there_and_back(new(1))) is new
    with pytest.raises(BadArguments, match="Cell, which cannot be sent"):
        encode(old(1))


def test_an_unregistered_class_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        BadArguments,
        match=r"the value\['b'\] is of type .*Batch.*prpc_engine.register\(Class\) on both sides",
    ):
        encode({"b": Batch(np.zeros(1))})
    archive.register(Interval)

    class Narrow(Interval):
        """A subclass would come back as its base."""

    with pytest.raises(BadArguments, match="Narrow, which cannot be sent"):
        encode(Narrow(1, 2))


class Growing:
    """Adds to `live` as it is packed, or as its text is asked for: as another thread may at that
    moment.
    """

    def __init__(self, live: dict[Any, Any] | set[Any]) -> None:
        self.live = live

    def grow(self) -> str:
        self.live |= type(self.live)([(len(self.live), 0)])  # type: ignore[operator]
        return "growing"

    __repr__ = grow


@pytest.mark.parametrize("kind", [dict, set])
def test_what_another_thread_changes_meanwhile_is_refused(kind: type[Any]) -> None:
    archive.register(Growing, pack=Growing.grow, unpack=str)
    live = kind()
    live |= kind([(Growing(live), 0)])
    for refused in (lambda: encode(live), lambda: archive.encode_arguments((live,))):
        with pytest.raises(
            BadArguments, match=r"cannot be put into a message: .* changed size during iteration"
        ):
            refused()


def test_what_another_thread_changes_as_it_is_refused_is_named_with_its_place() -> None:
    archive.register(Growing, pack=lambda _: 0, unpack=str)
    live: dict[Any, Any] = {}
    live[Growing(live)] = object()
    with pytest.raises(BadArguments, match=r"the value\[growing\] is of type .*object"):
        encode(live)


def test_what_stands_inside_of_a_registered_object_is_named_with_its_place() -> None:
    archive.register(Batch)
    with pytest.raises(BadArguments, match=r"the value\[0\].labels\[1\] is of type .*OrderedDict"):
        encode([Batch(np.zeros(1), [1, collections.OrderedDict()])])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"cls": Polynomial},
            "no dataclass, msgspec.Struct, NamedTuple or Enum: .* pack= .* unpack=",
        ),
        ({"cls": Polynomial, "pack": list}, "only one of pack and unpack"),
        ({"cls": Pair(1, 2)}, "a class is wanted, not Pair"),
        ({"cls": Pair, "name": ""}, "a str of 1 to 256 characters"),
        ({"cls": Pair, "name": "range"}, "the name 'range' belongs to <class 'range'>"),
        ({"cls": range, "name": "other", "pack": list, "unpack": list}, "is registered as 'range'"),
    ],
    ids=["no way", "half a way", "no class", "no name", "a taken name", "two names"],
)
def test_what_cannot_be_registered_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        archive.register(**arguments)


def test_a_dataclass_with_fields_for_its_init_alone_needs_a_way() -> None:
    @dataclasses.dataclass
    class Seeded:
        seed: dataclasses.InitVar[int]

    with pytest.raises(ConfigError, match="InitVar"):
        archive.register(Seeded)


# -- what a hostile peer may send ------------------------------------------------------------------


def named(name: Any, packed: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.msgpack.Ext(CLASS, msgspec.msgpack.encode((name, packed)))
    )


def test_a_class_is_made_by_calling_it_so_that_its_own_checks_hold() -> None:
    name = f"{Interval.__module__}.Interval"
    archive.register(Interval)
    assert Decoder().decode(named(name, {"low": 1, "high": 2}), []) == Interval(1, 2)
    for fields in (
        {"low": 2, "high": 1},
        {"low": 1},
        {"low": 1, "high": 2, "width": 9},
        {"low": 1, "high": 2, "x": 1},
        [1, 2],
        None,
    ):
        with pytest.raises(ArchiveError, match=r"no .*Interval can be made of what was sent"):
            Decoder().decode(named(name, fields), [])


@pytest.mark.parametrize(
    "name",
    [
        "this",
        "antigravity.geohash",
        "os.system",
        "tests.prpc_engine.handlers",
        "",
        5,
        None,
        ["range"],
    ],
)
def test_a_name_that_was_not_registered_is_refused_and_never_imported(name: Any) -> None:
    loaded = set(sys.modules)
    with pytest.raises(
        ArchiveError, match=r"is not registered here: call prpc_engine.register\(Class\)"
    ):
        Decoder().decode(named(name, []), [])
    assert set(sys.modules) == loaded


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("range", [1, 2, 0]),
        ("range", ["a"]),
        ("slice", []),
        ("date", [0, 1, 1]),
        ("date", 7),
        ("datetime", [2013, 1, 1, 0, 0, 0, 0, "UTC", 0]),
        ("time", [25, 0, 0, 0, None, 0]),
        ("timedelta", [1 << 62, 0, 0]),
        ("timezone", [5]),
        ("UUID", b"short"),
        ("Decimal", "number"),
        ("Decimal", 5),
        ("Decimal", "1" * 5000),
    ],
)
def test_fields_that_make_no_such_object_are_refused(name: str, packed: Any) -> None:
    with pytest.raises(ArchiveError, match=f"no {name} can be made"):
        Decoder().decode(named(name, packed), [])
