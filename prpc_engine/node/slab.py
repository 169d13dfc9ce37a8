"""The slab of this process: where empty() makes arrays, and where ordinary ones are copied to when
they are sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from prpc_engine import errors
from prpc_engine.settings.config import check_environment, slab_bytes_max
from shard import ShmFull, Slab, runtime


def default_slab() -> Slab:
    """One for all services of the process; PRPC_SLAB_BYTES_MAX bounds it. A process made by fork()
    gets its own. Raises ConfigError.
    """
    return runtime.own("slab", _new_slab)


def _new_slab() -> Slab:
    check_environment()
    return Slab(slab_bytes_max())


def use_slab(slab: Slab) -> None:
    """In a shard: empty() and its node share the shard's own slab."""
    runtime.put("slab", slab)


def empty(
    shape: int | np.integer[Any] | tuple[int, ...], dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """An uninitialised array in shared memory, C-ordered and 64-byte aligned: sending it to a
    process on this host costs the same whatever its size.

    What is sent is the memory itself, of the whole array or of a contiguous part of it that has
    more than 16 KiB: what you write into it after sending it is what the receiver may see. Smaller
    parts, strided ones and ordinary arrays are copied when they are sent. Raises ShmFull,
    TypeError for dtypes that hold Python objects, and at first ConfigError for PRPC_SLAB_BYTES_MAX
    and its kin that make no sense.
    """
    try:
        # np.prod() of a shape is one of numpy's numbers
        return default_slab().empty(int(shape) if isinstance(shape, np.integer) else shape, dtype)
    except ShmFull as error:
        raise errors.ShmFull(str(error)) from error
