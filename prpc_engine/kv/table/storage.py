"""What values may be stored as: arithmetic, messages and optimizer state are float32 always, values
are rounded at rest.

    float32   as computed
    float16   5 bits of exponent, 10 of fraction: above 65504 a value becomes infinite; numpy
              converts it slowly
    bfloat16  8 bits of exponent as float32, 7 of fraction; needs the package ml_dtypes (extra
              `ml_dtypes`)

Rounding is to the nearest: an update smaller than half a unit in the last place (2**-9 of a
bfloat16) leaves the value as it was. Where many small steps must add up, store float32.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from prpc_engine.errors import ConfigError

STORAGE_NAMES = ("float32", "float16", "bfloat16")


def checked_storage(name: object) -> str:
    """`name`, or ConfigError when it is none of STORAGE_NAMES."""
    if isinstance(name, str) and name in STORAGE_NAMES:
        return name
    raise ConfigError(f"dtype is {name!r}; allowed: {', '.join(STORAGE_NAMES)}")


def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of that name; ConfigError when its package is not there."""
    if name != "bfloat16":
        return np.dtype(name)
    if importlib.util.find_spec("ml_dtypes") is None:
        raise ConfigError(
            "dtype 'bfloat16' needs the package ml_dtypes in every server: "
            "pip install 'prpc-engine[ml_dtypes]'"
        )
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
