"""DI-engine's ShmBuffer and ShmBufferContainer over value_slots.py: arrays in shared memory that a
reader gets whole, or a dict of them that belong together.

    DI-engine's                                     these
    a reader gets half of an array and half of      the newest whole one
    the next one
    fields of a container are read one by one       all of one fill()
    what a child was writing when it was killed     is never seen
    float16                                         is taken, too
    an array without copying is what is there at    is the newest whole one, read-only, until the
    the moment                                      third fill() from then on begins
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.ding.value_slots import LINE_BYTES, SLOTS, ValueSlots
from prpc_engine.errors import BadArguments

Array = npt.NDArray[Any]
# as text, since numpy has several types of one name on some machines
DTYPES = frozenset(
    {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
    | {f"float{bits}" for bits in (16, 32, 64)}
)
DTYPES_ALLOWED = "bool, int8 to int64, uint8 to uint64, float16, float32 and float64 are allowed"


class _Field:
    """One array of a value: where it lies, and as what. `views` has it in each slot."""

    def __init__(self, name: str, dtype: Any, shape: Any) -> None:
        try:
            self.dtype = np.dtype(dtype)
            is_allowed = self.dtype.name in DTYPES and self.dtype.isnative
        except TypeError:
            is_allowed = False
        if not is_allowed:
            raise BadArguments(f"{name} of dtype {dtype!r:.100}: {DTYPES_ALLOWED}")
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(one, int | np.integer) and one >= 0 for one in sizes):
            raise BadArguments(f"{name} of shape {shape!r:.100}: sizes of 0 and more are allowed")
        self.name = name
        self.shape = tuple(map(int, sizes))
        self.views: list[Array] = []

    @property
    def nbytes(self) -> int:
        """Of one slot, whole lines."""
        size = int(self.dtype.itemsize) * math.prod(self.shape)
        return -(-size // LINE_BYTES) * LINE_BYTES

    def lay(self, slots: ValueSlots, offset: int) -> None:
        """It lies there."""
        self.views = [
            np.ndarray(self.shape, self.dtype, buffer=memory, offset=offset)
            for memory in slots.slots
        ]

    def checked(self, array: object) -> Array:
        """What fill() was given for it. Raises BadArguments."""
        if not isinstance(array, np.ndarray):
            raise BadArguments(
                f"{self.name}: a {type(array).__name__} was given to fill(), and a numpy array of "
                f"{self.dtype.name} and shape {self.shape} is expected"
            )
        if array.shape != self.shape:
            try:
                array = np.broadcast_to(array, self.shape)
            except ValueError:
                raise BadArguments(
                    f"{self.name}: an array of shape {array.shape} was given to fill(), and "
                    f"{self.shape}, or what broadcasts to it, is allowed"
                ) from None
        if array.dtype != self.dtype and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise BadArguments(
                f"{self.name}: an array of {array.dtype} was given to fill(), and {self.dtype.name}"
                ", or what converts to it without changing kind, is allowed"
            )
        return array

    def as_asked(self, array: Array, ctype: type | None) -> Any:
        """The array, or a tensor of torch over its memory."""
        torch = sys.modules.get("torch")
        if ctype is not None and torch is not None and ctype is torch.Tensor:
            return torch.from_numpy(array)
        array.flags.writeable = array.flags.owndata
        return array


def _lay(fields: Sequence[_Field], slots: ValueSlots | None = None) -> ValueSlots:
    """These fields one after the other, in memory of their own or there."""
    slots = slots or ValueSlots(sum(field.nbytes for field in fields))
    offset = 0
    for field in fields:
        field.lay(slots, offset)
        offset += field.nbytes
    return slots


def _fill(slots: ValueSlots, fields: Sequence[_Field], arrays: Sequence[Array]) -> None:
    """One value of all fields."""

    def copy_in(slot: int) -> None:
        for field, array in zip(fields, arrays, strict=True):
            np.copyto(field.views[slot], array, casting="same_kind")

    slots.write(copy_in)


def _get(slots: ValueSlots, fields: Sequence[_Field], is_copied: bool) -> list[Array]:
    """The newest whole value of all fields, all of one fill()."""
    if not is_copied:
        slot = slots.latest()
        return [field.views[slot].view() for field in fields]
    found = [np.empty(field.shape, field.dtype) for field in fields]

    def copy_out(slot: int) -> None:
        for field, array in zip(fields, found, strict=True):
            np.copyto(array, field.views[slot])

    slots.read(copy_out)
    return found


class ShmBuffer:
    """An array in shared memory: fill() in one process, get() in another, always whole.

    Made before its processes: fork() takes it along, and so do the arguments of a
    multiprocessing.Process; anything else that pickles it raises RuntimeError. Its memory has no
    name, and goes with the last process that has it, however that ends. It takes two file
    descriptors and three times the array. Any number of processes and threads may fill and get.
    """

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: int | Sequence[int],
        copy_on_get: bool = True,
        ctype: type | None = None,
    ) -> None:
        """Zeros of that dtype (bool, (u)int8 to 64, float16 to 64) and shape.

        copy_on_get  whether get() copies
        ctype        torch.Tensor: get() gives a tensor; else a numpy array

        Raises BadArguments for another dtype or shape, shard.ShmFull without room, and
        shard.ShardError on a machine that is no x86-64.
        """
        field = _Field("ShmBuffer", dtype, shape)
        self.dtype, self.shape = field.dtype.type, field.shape
        self.copy_on_get, self.ctype = copy_on_get, ctype
        self._slots = _lay([field])
        self._fields = [field]

    def fill(self, src_arr: Array) -> None:
        """Replace the array: readers have the old one or this one. `src_arr` has its shape or
        broadcasts to it, and its dtype or one that converts within its kind, as with numpy's
        copyto. Raises BadArguments, and changes nothing then. Waits while another one fills.
        """
        _fill(self._slots, self._fields, [self._fields[0].checked(src_arr)])

    def get(self) -> Any:
        """The array that was filled in last, whole; zeros before the first. A copy, or with
        `copy_on_get=False` the shared memory itself, read-only, which stays as it is until the
        third fill() from now begins. Raises Backpressure where others have replaced it during each
        copy for 10 s.
        """
        (array,) = _get(self._slots, self._fields, self.copy_on_get)
        return self._fields[0].as_asked(array, self.ctype)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "slots": self._slots,
            "dtype": self.dtype,
            "shape": self.shape,
            "copy_on_get": self.copy_on_get,
            "ctype": self.ctype,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._slots = state.pop("slots")
        self.__dict__.update(state)
        self._fields = [_Field("ShmBuffer", self.dtype, self.shape)]
        _lay(self._fields, self._slots)


class ShmBufferContainer:
    """Arrays in shared memory by keys, also nested, or a single one. fill() replaces all of them at
    once, and get() gives those of one fill(). In all else a ShmBuffer, and two descriptors for all
    fields.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        copy_on_get: bool = True,
    ) -> None:
        """dtype and shape: of one array, or dicts of the same keys with those of each, which may be
        dicts themselves. One dtype counts for all fields of a dict of shapes. Raises as ShmBuffer
        does, and BadArguments where the keys differ.
        """
        self._dtype, self._shape = dtype, shape
        self.copy_on_get = copy_on_get
        self._fields = _fields_of("ShmBufferContainer", dtype, shape)
        self._slots = _lay(self._fields)

    def fill(self, src_arr: Any) -> None:
        """Replace all arrays. `src_arr` has the form of `shape`; keys that are not in that are left
        out, and one that lacks is an error. Raises BadArguments, and changes nothing then.
        """
        arrays = _arrays_of("ShmBufferContainer", self._shape, src_arr)
        checked = [field.checked(array) for field, array in zip(self._fields, arrays, strict=True)]
        _fill(self._slots, self._fields, checked)

    def get(self) -> Any:
        """The arrays that were filled in last, in the form of `shape`; copies, or views as those of
        ShmBuffer.get(). Raises Backpressure as that does.
        """
        arrays = _get(self._slots, self._fields, self.copy_on_get)
        found = [
            field.as_asked(array, None) for field, array in zip(self._fields, arrays, strict=True)
        ]
        return _formed(self._shape, iter(found).__next__)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_slots": self._slots,
            "_dtype": self._dtype,
            "_shape": self._shape,
            "copy_on_get": self.copy_on_get,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fields = _fields_of("ShmBufferContainer", self._dtype, self._shape)
        _lay(self._fields, self._slots)


def _fields_of(name: str, dtype: Any, shape: Any) -> list[_Field]:
    """In the order of the keys of shape, depth first. Raises BadArguments."""
    if not isinstance(shape, Mapping):
        return [_Field(name, dtype, shape)]
    if isinstance(dtype, Mapping) and dtype.keys() != shape.keys():
        raise BadArguments(
            f"{name}: dtypes of the keys {list(dtype)!r:.200} and shapes of {list(shape)!r:.200}: "
            "the same keys are expected"
        )
    return [
        field
        for key, one in shape.items()
        for field in _fields_of(
            f"{name}[{key!r}]", dtype[key] if isinstance(dtype, Mapping) else dtype, one
        )
    ]


def _arrays_of(name: str, shape: Any, given: Any) -> list[Any]:
    """What was given, in the order of the fields. Raises BadArguments."""
    if not isinstance(shape, Mapping):
        return [given]
    found: list[Any] = []
    for key, one in shape.items():
        try:
            value = given[key]
        except (KeyError, TypeError, IndexError):
            raise BadArguments(
                f"{name}[{key!r}] is missing in the {type(given).__name__} that was given to "
                f"fill(): a dict with the keys {list(shape)!r:.200} is expected"
            ) from None
        found += _arrays_of(f"{name}[{key!r}]", one, value)
    return found


def _formed(shape: Any, taken: Any) -> Any:
    """As `shape`, of arrays that taken() gives one by one."""
    if not isinstance(shape, Mapping):
        return taken()
    found: dict[Hashable, Any] = {key: _formed(one, taken) for key, one in shape.items()}
    return found


assert SLOTS >= 3, "a view stays while two more values are written"
