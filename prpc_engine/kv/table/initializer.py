"""The first value of a row, from its key alone.

A fresh row must not depend on which server holds it, on the order in which keys appear or on how
many servers there
are: so there is no generator with a state, and each element is a hash of (seed, key, column). It
follows that a row
which nobody has pushed to need not be stored: whoever asks can be told its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table.mix import GOLDEN_GAMMA, mix64
from prpc_engine.kv.table.spec import build, checked_count, checked_number

SEED_MAX = 2**63 - 1
# float32 holds 24 bits: every value below 2**24 is exact, so all machines agree to the last bit
_KEPT_BITS = 24


class Initializer(ABC):
    """The settings of one way to begin: frozen, comparable, and back and forth to a plain dict."""

    name: ClassVar[str]

    @abstractmethod
    def rows(self, keys: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
        """The first value of each key: int64[n] -> a new float32[n, width]."""

    @abstractmethod
    def check_width(self, width: int) -> None:
        """Raise ConfigError when rows of `width` columns cannot be made."""

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal initializer."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Constant(Initializer):
    """Rows start with `value` in every element. ConfigError unless that is a finite number."""

    name = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        checked_number("initializer 'constant': value", self.value)

    def rows(self, keys: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
        return np.full((len(keys), width), self.value, np.float32)

    def check_width(self, width: int) -> None:
        return


@dataclass(frozen=True)
class Uniform(Initializer):
    """Even over [-scale, scale): standard deviation scale / sqrt(3). `scale` is one number, or one
    for each column.
    """

    name = "uniform"
    scale: float | Sequence[float]
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.scale, Sequence) and not isinstance(self.scale, str):
            scale = tuple(
                checked_number("initializer 'uniform': scale", each, at_least=0)
                for each in self.scale
            )
            # frozen: a list off the wire becomes comparable here
            object.__setattr__(self, "scale", scale)
        else:
            checked_number("initializer 'uniform': scale", self.scale, at_least=0)
        checked_count("initializer 'uniform': seed", self.seed, at_least=0, at_most=SEED_MAX)

    def rows(self, keys: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
        # (seed, key) names a splitmix64 generator ...
        stream = mix64(np.array([self.seed], np.int64)) ^ mix64(keys)
        counter = np.arange(width, dtype=np.uint64) * GOLDEN_GAMMA
        # ... whose outputs are the columns
        bits = mix64(stream[:, None] + counter) >> np.uint64(64 - _KEPT_BITS)
        values = bits.astype(np.float32)
        values *= np.float32(2.0 ** (1 - _KEPT_BITS))
        values -= np.float32(1.0)
        values *= np.asarray(self.scale, np.float32)
        return values

    def check_width(self, width: int) -> None:
        if isinstance(self.scale, Sequence) and len(self.scale) != width:
            raise ConfigError(
                f"initializer 'uniform': {len(self.scale)} scales for rows of {width} columns; "
                f"one number, or {width} of them are allowed"
            )


INITIALIZERS: dict[str, type[Initializer]] = {"constant": Constant, "uniform": Uniform}


def from_spec(spec: object) -> Initializer:
    """{"name": "uniform", "scale": 0.01, "seed": 7} -> Uniform(0.01, 7); ConfigError lists what is
    allowed.
    """
    return build("initializer", INITIALIZERS, spec)
