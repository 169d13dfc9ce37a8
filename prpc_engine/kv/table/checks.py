"""What may be passed as keys and as gradients: checked at the worker before anything is sent, and
again where it lands.

The server checks too, since a request need not come from our worker; one file says it for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments


def check_keys(whose: str, keys: object) -> npt.NDArray[np.int64]:
    """`keys` if it is int64[n], of a subclass of ndarray as a plain one, else BadArguments.
    `whose` ("push to table 'clicks'") begins the message.
    """
    if isinstance(keys, np.ndarray) and keys.dtype == np.int64 and keys.ndim == 1:
        return np.asarray(keys)
    raise BadArguments(f"{whose}: keys are {describe(keys)}; a numpy array int64[n] is allowed")


def check_grads(whose: str, grads: object, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """`grads` if it is float32 of exactly `shape`, of a subclass of ndarray as a plain one, else
    BadArguments.
    """
    if isinstance(grads, np.ndarray) and grads.dtype == np.float32 and grads.shape == tuple(shape):
        return np.asarray(grads)
    raise BadArguments(
        f"{whose}: grads are {describe(grads)}; a numpy array float32{list(shape)} is allowed"
    )


def describe(value: object) -> str:
    """Dtype and shape of an array, the type of anything else: float64[3, 4], a list."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
