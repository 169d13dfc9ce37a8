"""Aggregator: what every law of merging has in common, and the table of the laws that this process
knows by name.

An aggregator is a value that grows by single values and by other aggregators of its kind, in any
order and any grouping:

    merge_aggregator is commutative and associative (up to the rounding of floats), and a fresh one
    changes nothing

That is what lets every process count alone, merge what it has not sent yet, and send it late. A
kind is known by its name in this table, and by nothing else: what comes over the wire is a name and
plain values, and a name that no class here has is refused. To add one, subclass:

    class Product(Aggregator, kind="product"):
        def __init__(self) -> None: self.value = 1
        def merge_value(self, value): self.value *= value
        def merge_aggregator(self, other): self.value *= other.value
        def serialize(self): return self.value
        def deserialize(self, state): self.value = state
        def try_to_string(self): return str(self.value)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from prpc_engine.accumulator.arithmetic import COUNT_MAX, check_whole
from prpc_engine.errors import BadArguments, ConfigError

KIND_LENGTH_MAX = 64
# of keys that are counted by, so that tables of them have a bound in bytes too
KEY_LENGTH_MAX = 1024
NOT_AVAILABLE = "N/A"  # the text of an aggregator that has seen no value

Self = TypeVar("Self", bound="Aggregator")
_kinds: dict[str, type[Aggregator]] = {}


class Aggregator(ABC):
    """An aggregator is a value that grows by single values and by others of its kind, in any order.

    The base of all kinds of counters: a subclass with kind="..." is known by that name in every
    process; the file's head has an example. Not thread-safe: whoever holds one guards it. Methods
    that take values raise BadArguments and leave the aggregator as it was.
    """

    kind: ClassVar[str] = ""
    # Types whose every value is right as it is: those skip check(), which is most of what a write
    # costs.
    plain: ClassVar[frozenset[type]] = frozenset()

    def __init_subclass__(cls, kind: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind is None:
            return  # a base of several kinds
        if not 1 <= len(kind) <= KIND_LENGTH_MAX:
            raise ConfigError(
                f"aggregator kind {kind!r}: a name of 1 to {KIND_LENGTH_MAX} characters is allowed"
            )
        known = _kinds.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ConfigError(
                f"aggregator kind {kind!r} is {known.__module__}.{known.__qualname__} already: "
                "choose another name"
            )
        cls.kind = kind
        _kinds[kind] = cls

    def parameters(self) -> dict[str, Any]:
        """What to call the class with for one that merges with this: part of what all users of a
        counter must agree on.
        """
        return {}

    def fresh(self: Self) -> Self:
        """One of the same kind and parameters that has seen nothing."""
        return type(self)(**self.parameters())

    def check(self, value: Any) -> Any:
        """The value as merge_values() takes it, which keeps it for a while: arrays are copied.
        Raises BadArguments.
        """
        return value

    def holds_at_once(self, value: Any) -> bool:
        """Whether a checked value is too large to be kept in a list until some more have come."""
        return isinstance(value, np.ndarray)

    def merge_values(self, values: Sequence[Any]) -> None:
        """Take several checked values."""
        for value in values:
            self.merge_value(value)

    @abstractmethod
    def merge_value(self, value: Any) -> None:
        """Take one checked value."""

    @abstractmethod
    def merge_aggregator(self: Self, other: Self) -> None:
        """Take what another one of the same kind and parameters has seen; that one is left as it
        is, and shares no memory.
        """

    @abstractmethod
    def serialize(self) -> Any:
        """The whole state as plain values: None, numbers, str, bytes, lists, tuples, dicts and
        numpy arrays. A copy.
        """

    @abstractmethod
    def deserialize(self, state: Any) -> None:
        """Become what serialize() gave, perhaps in another process: check everything, copy arrays.
        Raises BadArguments.
        """

    @abstractmethod
    def try_to_string(self) -> str | None:
        """The state for people; None when it has seen nothing."""

    def __str__(self) -> str:
        text = self.try_to_string()
        return NOT_AVAILABLE if text is None else text

    def __repr__(self) -> str:
        return f"<{describe(self.kind, self.parameters())}: {self}>"


def describe(kind: str, parameters: Mapping[str, Any]) -> str:
    """How texts name a kind: topk(capacity=10)."""
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in sorted(parameters.items()))})"


def make(kind: object, parameters: object) -> Aggregator:
    """A fresh aggregator of a kind known by name. Raises BadArguments with the names there are."""
    if not isinstance(kind, str) or kind not in _kinds:
        raise BadArguments(
            f"no aggregator of kind {kind!r} is known in this process; "
            f"known are {', '.join(sorted(_kinds))}: import the module "
            "that defines it here too, as no code comes over the wire"
        )
    if not isinstance(parameters, dict):
        raise BadArguments(
            f"the parameters of aggregator {kind!r} are a {type(parameters).__name__}, "
            "a dict is expected"
        )
    try:
        return _kinds[kind](**parameters)
    except (TypeError, ValueError) as error:
        raise BadArguments(
            f"aggregator {kind!r} cannot be made with {parameters}: {error}"
        ) from error


def restored(kind: object, parameters: object, state: Any) -> Aggregator:
    """The aggregator that serialize() of that kind described. Raises BadArguments."""
    aggregator = make(kind, parameters)
    try:
        aggregator.deserialize(state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise BadArguments(f"this is no state of a {kind!r} aggregator: {error}") from error
    return aggregator


def check_number(whose: str, value: Any, finite: bool = False) -> int | float:
    """A number as a Python int or float: bools and numpy scalars too. `finite` refuses infinities,
    and NaN with them.
    """
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if isinstance(value, np.number) and not isinstance(value, np.complexfloating):
        value = value.item()
    if type(value) is not float and type(value) is not int:
        raise BadArguments(f"{whose} takes numbers, not a {type(value).__name__} ({value!r:.80})")
    number: int | float = check_whole(whose, value) if type(value) is int else value
    if finite and not math.isfinite(value):
        raise BadArguments(f"{whose} takes finite numbers, not {value!r}")
    return number


def check_count(whose: str, value: Any) -> int:
    """A whole number of 63 bits."""
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise BadArguments(
            f"{whose}: {value!r:.80} is no count, a whole number from 0 to 2**63 - 1 is expected"
        )
    return value


def check_key(whose: str, value: Any) -> str | int | bytes:
    """What may be counted by: str, bytes, or an int of 64 bits."""
    if type(value) is str or type(value) is bytes:
        if len(value) > KEY_LENGTH_MAX:
            raise BadArguments(
                f"{whose} takes keys of at most {KEY_LENGTH_MAX} characters, not {len(value)}: "
                "count a hash of it"
            )
        if type(value) is str and not value.isascii():
            _check_encodable(whose, value)
        return value
    if isinstance(value, np.integer):
        value = value.item()
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    raise BadArguments(
        f"{whose} takes keys that are str, bytes or ints of 64 bits, not {value!r:.80}"
    )


def _check_encodable(whose: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # a lone surrogate: no message and no snapshot could hold it
        raise BadArguments(
            f"{whose} takes keys that are Unicode text, not {value!r:.80}: {error.reason}"
        ) from error


def check_parameter(
    whose: str, name: str, value: object, least: float, most: float, whole: bool = True
) -> None:
    """A parameter of an aggregator within its bounds. Raises ConfigError."""
    right_type = isinstance(value, int) if whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not right_type or not least <= value <= most:  # type: ignore[operator]
        what = "a whole number" if whole else "a number"
        raise ConfigError(
            f"{whose} with {name}={value!r}: {what} from {least} to {most} is allowed"
        )
