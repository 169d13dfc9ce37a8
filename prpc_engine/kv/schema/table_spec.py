"""What a table is: agreed between all workers and servers, sent as a plain dict, compared as a
whole.

Every server is told, with the table, which partition of how many it is. So two workers who count
the servers differently (one came before the last server did) are found out at create_table, and not
by a model that does not learn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from prpc_engine.errors import ConfigError
from prpc_engine.kv.consistency import consistency
from prpc_engine.kv.consistency.consistency import Consistency
from prpc_engine.kv.consistency.paced_table import dense_table, sparse_table
from prpc_engine.kv.table import admission, compression, eviction, initializer, optimizer
from prpc_engine.kv.table.admission import Admission
from prpc_engine.kv.table.compression import Compressor
from prpc_engine.kv.table.eviction import Eviction
from prpc_engine.kv.table.gradients import checked_policy
from prpc_engine.kv.table.initializer import Initializer
from prpc_engine.kv.table.optimizer import Optimizer
from prpc_engine.kv.table.partition import PARTITIONS_MAX
from prpc_engine.kv.table.spec import build, checked_count
from prpc_engine.kv.table.storage import checked_storage, storage_dtype
from prpc_engine.kv.table.table import DenseTable, SparseTable
from shard import runtime

DIM_MAX = 65536  # columns of a sparse row: 256 KiB a key; wider things are dense tensors
# of a dense tensor: 4 TiB; a bound on what one request may make a server allocate
ELEMENTS_MAX = 2**40
TABLE_NAME_BYTES_MAX = 255


@dataclass(frozen=True)
class TableSpec(ABC):
    """One partition of a named table. Raises ConfigError when a value is not allowed."""

    kind: ClassVar[str]
    table: str
    partition: int
    partitions: int
    optimizer: Optimizer
    initializer: Initializer

    def __post_init__(self) -> None:
        try:
            name_bytes = len(self.table.encode()) if isinstance(self.table, str) else 0
        except UnicodeEncodeError:  # a lone surrogate: no message could hold it
            name_bytes = 0
        if not 1 <= name_bytes <= TABLE_NAME_BYTES_MAX:
            raise ConfigError(
                f"table name {self.table!r}: 1 to {TABLE_NAME_BYTES_MAX} bytes of Unicode text are "
                "allowed"
            )
        checked_count(
            f"table {self.table!r}: partitions", self.partitions, at_least=1, at_most=PARTITIONS_MAX
        )
        checked_count(
            f"table {self.table!r}: partition",
            self.partition,
            at_least=0,
            at_most=self.partitions - 1,
        )
        self._settle("optimizer", optimizer.from_spec)
        self._settle("initializer", initializer.from_spec)

    def _settle(self, field: str, checked: Callable[[Any], Any]) -> None:
        """Replace what was given for `field`, an object or its plain form, by what `checked` makes
        of it.
        """
        try:
            object.__setattr__(self, field, checked(getattr(self, field)))
        except ConfigError as error:
            raise ConfigError(f"table {self.table!r}: {error}") from error

    @abstractmethod
    def make(self, clock: Callable[[], float] = runtime.now) -> DenseTable | SparseTable:
        """A new table of this kind. clock: gives seconds, by which
        rows grow old and workers are late.
        """

    def to_dict(self) -> dict[str, Any]:
        """Scalars, strings, lists and dicts only; from_dict() makes an equal spec."""
        plain = {"name": self.kind, **self.__dict__}
        return plain | {
            "optimizer": self.optimizer.to_spec(),
            "initializer": self.initializer.to_spec(),
        }


@dataclass(frozen=True)
class SparseSpec(TableSpec):
    """int64 key -> dtype[dim]. dtype: what values are stored as (storage.py);
    the wire has float32.
    """

    kind = "sparse"
    dim: int
    dtype: str = "float32"
    admission: Admission | None = None
    eviction: Eviction | None = None
    compression: Compressor | None = None
    consistency: Consistency | None = None
    nonfinite: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dim", _plain(self.dim))
        checked_count(f"table {self.table!r}: dim", self.dim, at_least=1, at_most=DIM_MAX)
        self.initializer.check_width(self.dim)
        self._settle("dtype", checked_storage)
        self._settle("nonfinite", checked_policy)
        self._settle("admission", admission.from_spec)
        self._settle("eviction", eviction.from_spec)
        self._settle("compression", compression.from_spec)
        self._settle("consistency", consistency.from_spec)
        if self.compression is not None and self.compression.needs_feedback:
            raise ConfigError(
                f"table {self.table!r}: compression {self.compression.name!r} adds what it leaves "
                "out to the next push, which is done for dense tables only; sparse ones may have: "
                "cast, int8"
            )

    def make(self, clock: Callable[[], float] = runtime.now) -> SparseTable:
        return sparse_table(
            self.table,
            self.consistency,
            self.compression,
            dim=self.dim,
            optimizer=self.optimizer,
            initializer=self.initializer,
            dtype=storage_dtype(self.dtype),
            nonfinite=self.nonfinite,
            admission=self.admission,
            eviction=self.eviction,
            clock=clock,
        )

    def to_dict(self) -> dict[str, Any]:
        own = {
            field: getattr(self, field)
            for field in ("admission", "eviction", "compression", "consistency")
        }
        return super().to_dict() | {
            field: value and value.to_spec() for field, value in own.items()
        }


@dataclass(frozen=True)
class DenseSpec(TableSpec):
    """Rows [begin, end) of a tensor of `shape`, stored as `dtype` (storage.py); one without axes
    counts as one row.
    """

    kind = "dense"
    shape: Sequence[int]
    begin: int
    end: int
    dtype: str = "float32"
    compression: Compressor | None = None
    consistency: Consistency | None = None
    nonfinite: str = "refuse"
    # (name, shape) of what a tensor of one axis is made of, in order: as checkpoints have it
    names: Sequence[Any] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shape, Sequence) or isinstance(self.shape, str):
            raise ConfigError(
                f"table {self.table!r}: shape is {self.shape!r}; a tuple of whole numbers is "
                "allowed"
            )
        object.__setattr__(self, "shape", tuple(map(_plain, self.shape)))
        for extent in self.shape:
            checked_count(
                f"table {self.table!r}: an extent of its shape",
                extent,
                at_least=1,
                at_most=ELEMENTS_MAX,
            )
        if math.prod(self.shape) > ELEMENTS_MAX:
            raise ConfigError(
                f"table {self.table!r}: {math.prod(self.shape)} elements, "
                f"{ELEMENTS_MAX} are allowed"
            )
        checked_count(f"table {self.table!r}: end", self.end, at_least=0, at_most=self.rows)
        checked_count(f"table {self.table!r}: begin", self.begin, at_least=0, at_most=self.end)
        self.initializer.check_width(1)
        self._settle("dtype", checked_storage)
        self._settle("nonfinite", checked_policy)
        object.__setattr__(
            self,
            "names",
            tuple((str(name), tuple(map(_plain, shape))) for name, shape in self.names),
        )
        named = sum(math.prod(shape) for _, shape in self.names)
        if self.names and (self.shape != (named,) or len(dict(self.names)) != len(self.names)):
            raise ConfigError(
                f"table {self.table!r}: names say {named} elements under {len(dict(self.names))} "
                "names; a tensor of one axis, of "
                f"as many elements, and different names are allowed; its shape is {self.shape}"
            )
        self._settle("compression", compression.from_spec)
        self._settle("consistency", consistency.from_spec)

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return self.shape[0] if self.shape else 1

    def make(self, clock: Callable[[], float] = runtime.now) -> DenseTable:
        return dense_table(
            self.table,
            self.consistency,
            self.compression,
            clock,
            shape=(self.end - self.begin, *self.shape[1:]),
            optimizer=self.optimizer,
            initializer=self.initializer,
            begin=self.begin,
            is_assigned_first=bool(self.names),
            dtype=storage_dtype(self.dtype),
            nonfinite=self.nonfinite,
        )

    def to_dict(self) -> dict[str, Any]:
        own = {field: getattr(self, field) for field in ("compression", "consistency")}
        plain = {field: value and value.to_spec() for field, value in own.items()}
        named = {"names": [[name, list(shape)] for name, shape in self.names]}
        return super().to_dict() | {"shape": list(self.shape)} | plain | named

    def stretches(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, begin, end) of each of `names`, in elements of the whole tensor."""
        found, begin = [], 0
        for name, shape in self.names:
            end = begin + math.prod(shape)
            found.append((name, shape, begin, end))
            begin = end
        return found


def check_new(spec: SparseSpec | DenseSpec) -> None:
    """What a table that is made now must not have, though that of an older checkpoint may. Raises
    ConfigError.
    """
    if spec.compression is not None and spec.nonfinite != "refuse":
        raise ConfigError(
            f"table {spec.table!r}: nonfinite={spec.nonfinite!r} with compression "
            f"{spec.compression.name!r}, which carries finite gradients alone; "
            "nonfinite='refuse' is allowed, or no compression"
        )


def _plain(extent: Any) -> Any:
    """numpy's whole numbers, as keys.max() + 1 is one, as Python's: they go into messages and
    manifests.
    """
    return int(extent) if isinstance(extent, np.integer) else extent


TABLES: dict[str, type[TableSpec]] = {"sparse": SparseSpec, "dense": DenseSpec}


def from_dict(spec: object) -> TableSpec:
    """The inverse of to_dict(); ConfigError says what is wrong and what is allowed."""
    return build("table", TABLES, spec)
