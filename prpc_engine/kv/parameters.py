"""The parameters of a model by name, in one dense table: numpy as it is, and what torch.py and jax.py stand on.

    flat    | conv.weight       | conv.bias | head.weight      |     float32, one array for all values and one for all gradients
    values  {"conv.weight": view, "conv.bias": view, ...}            so a step is one message to each server, and one back

    parameters = Parameters(kv, "model", {"w": w, "b": b}, {"name": "adam", "learning_rate": 1e-3})
    while ...:
        loss, parameters.grads["w"][:], parameters.grads["b"][:] = forward_backward(parameters.values, batch)
        parameters.step()

The table holds what training has added to the values that the model started with; those stay with the workers, which must start
alike: with the same seed, or from the same file. A checksum of names, shapes and values in the spec of a second table, of one
element, makes the servers refuse a worker that does not. So nobody has to come first, and who joins late starts like the others.
A formula that pulls values to zero (FTRL's l1) pulls them to where they started.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.checks import describe
from prpc_engine.kv.future import KVFuture
from prpc_engine.kv.optimizer import Optimizer
from prpc_engine.kv.worker import TableWorker

Floats = npt.NDArray[np.float32]
CHECKSUM_MASK = 2**24 - 1  # what a float32 holds exactly


class Parameters:
    """See the file's head. `values` and `grads` are views by name: read the one, write the other. One user at a time.

    start: arrays of any floating dtype; float32 is kept. more: of create_dense (compression, consistency, split_bytes_min,
    timeout_s). Raises BadArguments for arrays of other dtypes; ConfigError when other workers started with other values.
    """

    def __init__(
        self,
        kv: TableWorker,
        table: str,
        start: Mapping[str, npt.ArrayLike],
        optimizer: Optimizer | Mapping[str, Any],
        **more: Any,
    ) -> None:
        arrays = {name: _floating(name, array) for name, array in start.items()}
        if not arrays:
            raise BadArguments(f"parameters {table!r}: there are none; at least one array is needed")
        self.kv = kv
        self.table = table
        self._start: Floats = np.concatenate(
            [array.reshape(-1) for array in arrays.values()], dtype=np.float32, casting="same_kind"
        )
        self._values = self._start.copy()
        self._grads = np.zeros_like(self._start)
        self.values = self._views(self._values, arrays)
        self.grads = self._views(self._grads, arrays)
        self._agree({name: array.shape for name, array in arrays.items()})
        kv.create_dense(table, self._start.shape, optimizer, **more)

    def pull(self, *, timeout_s: float | None = None) -> None:
        """Put the present values into `values`."""
        self.take(self.kv.pull(self.table, timeout_s=timeout_s))

    def step(self, *, timeout_s: float | None = None) -> None:
        """Push `grads`, which are the caller's to change again, and put the new values into `values`."""
        self.take(self.submit_step(timeout_s=timeout_s).result())

    def submit_step(self, *, timeout_s: float | None = None) -> KVFuture[Floats]:
        """step() without waiting: hand its result to take()."""
        return self.kv.submit_push_pull(self.table, self._grads, timeout_s=timeout_s)

    def take(self, added: Floats) -> None:
        """What a pull of the table gave becomes `values`: one pass over them, and no copy besides."""
        np.add(self._start, added, out=self._values)

    def _agree(self, shapes: dict[str, tuple[int, ...]]) -> None:
        checksum = zlib.crc32(self._start.tobytes(), zlib.crc32(repr(shapes).encode())) & CHECKSUM_MASK
        try:
            self.kv.create_dense(f"{self.table}.start", (), {"name": "add"}, {"name": "constant", "value": float(checksum)})
        except ConfigError as error:
            raise ConfigError(
                f"parameters {self.table!r}: other workers started with other names, shapes or values: give all of them the "
                f"same seed, or load the same file before this; {error}"
            ) from error

    @staticmethod
    def _views(flat: Floats, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Floats]:
        ends = np.cumsum([array.size for array in arrays.values()])
        return {
            name: flat[end - array.size : end].reshape(array.shape)
            for (name, array), end in zip(arrays.items(), ends.tolist(), strict=True)
        }


def _floating(name: str, array: npt.ArrayLike) -> npt.NDArray[Any]:
    given = np.asarray(array)
    if given.dtype.kind == "f" and given.dtype.itemsize <= 8:
        return given
    raise BadArguments(f"parameter {name!r} is {describe(given)}; an array of float16, float32 or float64 is allowed")
