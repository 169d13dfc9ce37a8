"""Any other object, by pickle protocol 5, between two sides that have both agreed to it: reading
one runs the sender's code.

Buffers of a pickle (arrays inside of objects) are blocks of the message, without copy. With
cloudpickle installed, functions and classes that the other side cannot import (lambdas, closures,
those of `__main__`) travel by value.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONSENT = "allow_pickle=True on both sides, between peers who trust each other with running code"


def dump(value: Any) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """The pickle and its buffers.
    Raises ValueError, with the reason, for what cannot be pickled.
    """
    blocks: list[NDArray[np.uint8]] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer's bytes go into the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # with gaps
            return True
        blocks.append(np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8))
        return False

    dumps, has_cloudpickle = _dumps()
    try:
        return dumps(value, protocol=5, buffer_callback=keep), blocks
    except Exception as error:  # an object's own __reduce__ may raise anything
        needed = (
            "; lambdas and what __main__ defines need cloudpickle: "
            "pip install 'prpc-engine[cloudpickle]'"
        )
        more = "" if has_cloudpickle else needed
        raise ValueError(f"it cannot be pickled: {type(error).__name__}: {error}{more}") from error


def load(data: Any, buffers: Sequence[NDArray[np.uint8]]) -> Any:
    """The object. Raises anything: call it for peers with consent only."""
    return pickle.loads(data, buffers=buffers)


def _dumps() -> tuple[Callable[..., bytes], bool]:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps, False
    return cloudpickle.dumps, True
