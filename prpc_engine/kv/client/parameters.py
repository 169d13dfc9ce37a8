"""The parameters of a model by name, in one dense table: numpy as it is, and what torch.py and
jax.py stand on.

    flat    | conv.weight       | conv.bias | head.weight  |  float32, one array for all values and
                                                              one for all gradients
    values  {"conv.weight": view, "conv.bias": view, ...}     so a step is one message to each
                                                              server, and one back

    parameters = Parameters(kv, "model", {"w": w, "b": b}, {"name": "adam", "learning_rate": 1e-3})
    while ...:
        loss, parameters.grads["w"][:], parameters.grads["b"][:] =
        forward_backward(parameters.values, batch) parameters.step()

The table holds the values themselves. They are those of the worker that comes first, which assigns
them under a lock at the master; all others take what is there, and so does a worker that comes
after a restore. Should the first one die in the middle, the next one assigns all of its own. Names
and shapes are in the table's spec: workers with others are refused, and a file of a checkpoint,
opened with safetensors, has the values by these names, and the optimizer's state as
"optimizer/...".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.client.future import KVFuture
from prpc_engine.kv.client.worker import TableWorker
from prpc_engine.kv.table.checks import describe
from prpc_engine.kv.table.optimizer import Optimizer

Floats = npt.NDArray[np.float32]


class Parameters:
    """Parameters keep a model's values by name in one dense table, and train them there.

    `values` and `grads` are views by name: read the one, write the other. One user at a time.

    start: arrays of any floating dtype; float32 is kept. Of a table that has values already only
    names and shapes count. more: of create_dense (dtype, compression, consistency, nonfinite,
    split_bytes_min, timeout_s). Raises BadArguments for arrays of other dtypes; ConfigError when
    other workers have other names or shapes.
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
            raise BadArguments(
                f"parameters {table!r}: there are none; at least one array is needed"
            )
        self.kv = kv
        self.table = table
        self._values: Floats = np.concatenate(
            [array.reshape(-1) for array in arrays.values()], dtype=np.float32, casting="same_kind"
        )
        self._grads = np.zeros_like(self._values)
        self.values = self._views(self._values, arrays)
        self.grads = self._views(self._grads, arrays)
        try:
            kv.create_dense(
                table,
                self._values.shape,
                optimizer,
                names={name: array.shape for name, array in arrays.items()},
                **more,
            )
        except ConfigError as error:
            raise ConfigError(
                f"parameters {table!r}: other workers may have other names, shapes or settings; "
                f"{error}"
            ) from error
        self.begin(timeout_s=more.get("timeout_s"))

    def begin(self, *, timeout_s: float | None = None) -> None:
        """Take the values of the table, or make `values` the table's where it has none: at the
        start, and after a reset().
        """
        with self.kv.alone(f"values of {zlib.crc32(self.table.encode()):08x}", timeout_s):
            found = self.kv.pull_versioned(self.table, timeout_s=timeout_s)
            if min(found.versions.values()):
                self.take(found.values)
            else:
                self.kv.assign(self.table, self._values, timeout_s=timeout_s)

    def pull(self, *, timeout_s: float | None = None) -> None:
        """Put the present values into `values`."""
        self.take(self.kv.pull(self.table, timeout_s=timeout_s))

    def assign(self, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Make `values`, or those of these names, the table's for all workers; take the others from
        it.
        """
        wanted = (
            self._values if names is None else self.kv.pull(self.table, timeout_s=timeout_s).copy()
        )
        views = self._views(wanted, self.values)
        changed = [
            name for name in (names or ()) if not np.array_equal(views[name], self.values[name])
        ]
        for name in changed:
            views[name][...] = self.values[name]
        if names is None or changed:  # what another worker has assigned is not assigned again
            self.kv.assign(self.table, wanted, timeout_s=timeout_s)
        self.take(wanted)

    def step(self, *, timeout_s: float | None = None) -> None:
        """Push `grads`, which are the caller's to change again, and put the new values into
        `values`.
        """
        self.take(self.submit_step(timeout_s=timeout_s).result())

    def submit_step(self, *, timeout_s: float | None = None) -> KVFuture[Floats]:
        """step() without waiting: hand its result to take()."""
        return self.kv.submit_push_pull(self.table, self._grads, timeout_s=timeout_s)

    def take(self, pulled: Floats) -> None:
        """What a pull of the table gave becomes `values`."""
        np.copyto(self._values, pulled)

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
    raise BadArguments(
        f"parameter {name!r} is {describe(given)}; an array of float16, "
        "float32 or float64 is allowed"
    )
