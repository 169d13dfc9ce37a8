"""A copy of an array that is to be sent, and perhaps sent again, while its owner changes it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from prpc_engine.node.slab import empty
from shard import ShmFull

# below this, copying an array once more when it is sent costs less than taking a block of the slab
SLAB_BYTES_MIN = 65536


def kept(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy to send, and to send again; a large one where sending it makes no other copy."""
    if array.nbytes >= SLAB_BYTES_MIN:
        try:
            copy = empty(array.shape, array.dtype)
        except ShmFull:
            return array.copy()
        copy[...] = array
        return copy
    return array.copy()
