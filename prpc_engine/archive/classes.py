"""Classes that may travel: each was registered by name on both sides, so that no name from the wire
is ever imported.

    kind                          travels as               is rebuilt by
    dataclass, msgspec.Struct     {field: value}           calling the class: its __post_init__
                                                           checks what a peer sends
    NamedTuple                    [value, ...]             calling the class
    Enum                          the member's name        looking the name up
    Flag                          its number               calling the class
    any other, with pack, unpack  what `pack` makes of it  `unpack` of that
    range, slice, date, datetime, time, timedelta, timezone, UUID, Decimal, array: known from the
    start, under names of their own

A subclass of a registered class is a class of its own. Fields are not checked against their
annotations.
"""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import operator
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from prpc_engine.archive.items import pack_items, unpack_items
from prpc_engine.errors import ConfigError

NAME_LENGTH_MAX = 256
DECIMAL_LENGTH_MAX = 4096  # characters; Python turns no more into an int either
ClassT = TypeVar("ClassT", bound=type)


@dataclasses.dataclass(frozen=True)
class ClassEntry:
    """One class that may travel. `pack` gives a value of other types that may, `unpack`
    takes it.
    """

    cls: type
    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


by_class: dict[type, ClassEntry] = {}
by_name: dict[str, ClassEntry] = {}


def register(
    cls: ClassT,
    *,
    name: str | None = None,
    pack: Callable[[Any], Any] | None = None,
    unpack: Callable[[Any], Any] | None = None,
) -> ClassT:
    """Let objects of exactly this class travel; both sides must do so. Gives the class back: usable
    as a decorator.

    `name` is what both sides call it, by default its module and qualified name (a class of a script
    that is run is `__main__.Name` there: give it a name). `pack` and `unpack` go together and are
    needed for classes other than those in the table above. Raises ConfigError for those without,
    and when the name belongs to another class.

    `unpack`, and a class that is called, run in the reactor in the middle of reading a message:
    they must not make calls or wait, since messages that come meanwhile may take the place of the
    one being read.
    """
    if (pack is None) != (unpack is None):
        raise ConfigError(f"register({cls!r}) with only one of pack and unpack: give both or none")
    if not isinstance(cls, type):
        raise ConfigError(f"register({cls!r}): a class is wanted, not {type(cls).__name__}")
    if pack is None or unpack is None:
        pack, unpack = _ways_of(cls)
    if name is None:
        name = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise ConfigError(
            f"register({cls!r}, name={name!r}): a str of 1 to {NAME_LENGTH_MAX} characters is "
            "allowed"
        )
    other = by_name.get(name)
    if other is not None and (other.cls.__module__, other.cls.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ConfigError(
            f"the name {name!r} belongs to {other.cls!r}: register {cls!r} under another with name="
        )
    before = by_class.get(cls)
    if before is not None and before.name != name:
        raise ConfigError(
            f"{cls!r} is registered as {before.name!r}: it cannot have the name {name!r}, too"
        )
    if other is not None:
        # the same class, made again: a module reloaded, a notebook's cell run again
        by_class.pop(other.cls, None)
    by_name[name] = by_class[cls] = ClassEntry(cls, name, pack, unpack)
    return cls


def _ways_of(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return operator.attrgetter("_value_"), cls
    if issubclass(cls, enum.Enum):
        return operator.attrgetter("_name_"), cls.__members__.__getitem__
    if issubclass(cls, msgspec.Struct):
        return _pack_fields(cls.__struct_fields__), lambda fields: cls(**fields)
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return list, lambda values: cls(*values)
    if dataclasses.is_dataclass(cls):
        init_var = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
        fields: dict[str, Any] = cls.__dataclass_fields__
        if any(field._field_type is init_var for field in fields.values()):
            raise ConfigError(
                f"{cls!r} has an InitVar, which is gone after __init__: "
                "register it with pack= and unpack="
            )
        return _pack_fields(
            tuple(field.name for field in dataclasses.fields(cls) if field.init)
        ), lambda fields: cls(**fields)
    raise ConfigError(
        f"{cls!r} is no dataclass, msgspec.Struct, NamedTuple or Enum: "
        "register it with pack= (what to send of an object) and unpack= (the object made of that)"
    )


def _pack_fields(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    def pack(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    return pack


# -- known from the start --------------------------------------------------------------------------


def _pack_zone(zone: datetime.tzinfo | None) -> Any:
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError(
            f"its time zone is a {type(zone).__module__}.{type(zone).__qualname__}, "
            "whose rules the other side may lack: "
            "send value.astimezone(datetime.timezone.utc)"
        )
    return zone


def _pack_datetime(value: datetime.datetime) -> Any:
    zone = _pack_zone(value.tzinfo)
    day = [value.year, value.month, value.day]
    return [*day, value.hour, value.minute, value.second, value.microsecond, zone, value.fold]


def _pack_time(value: datetime.time) -> Any:
    return [
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        _pack_zone(value.tzinfo),
        value.fold,
    ]


def _unpack_time(fields: list[Any]) -> datetime.time:
    *clock, fold = fields
    return datetime.time(*clock, fold=fold)


def _unpack_datetime(fields: list[Any]) -> datetime.datetime:
    *clock, fold = fields
    return datetime.datetime(*clock, fold=fold)


def _pack_timezone(value: datetime.timezone) -> Any:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [offset] if name == datetime.timezone(offset).tzname(None) else [offset, name]


def _pack_decimal(value: decimal.Decimal) -> str:
    text = str(value)
    if len(text) > DECIMAL_LENGTH_MAX:
        raise ValueError(
            f"it is a Decimal of {len(text)} characters, at most {DECIMAL_LENGTH_MAX} are allowed"
        )
    return text


def _unpack_decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str or len(text) > DECIMAL_LENGTH_MAX:
        raise ValueError(
            f"Decimal of {len(text)} characters, at most {DECIMAL_LENGTH_MAX} are allowed"
        )
    return decimal.Decimal(text)


for _cls, _pack, _unpack in (
    (range, lambda value: [value.start, value.stop, value.step], lambda fields: range(*fields)),
    (slice, lambda value: [value.start, value.stop, value.step], lambda fields: slice(*fields)),
    (
        datetime.date,
        lambda value: [value.year, value.month, value.day],
        lambda fields: datetime.date(*fields),
    ),
    (datetime.datetime, _pack_datetime, _unpack_datetime),
    (datetime.time, _pack_time, _unpack_time),
    (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda fields: datetime.timedelta(*fields),
    ),
    (datetime.timezone, _pack_timezone, lambda fields: datetime.timezone(*fields)),
    (uuid.UUID, operator.attrgetter("bytes"), lambda data: uuid.UUID(bytes=data)),
    (decimal.Decimal, _pack_decimal, _unpack_decimal),
    (array.array, pack_items, unpack_items),
):
    register(_cls, name=_cls.__name__, pack=_pack, unpack=_unpack)
