"""Pytrees of JAX whose leaves live in a table, by their paths. Needs jax (extra `jax`); imported
only when asked for.

    from prpc_engine.kv import jax as kv_jax

    tree = kv_jax.Tree(kv, "model", params, {"name": "adam", "learning_rate": 1e-3})
    for batch in batches:
        params = tree.step(jax.grad(loss)(params, batch))

All leaves are one dense table (parameters.py): a step is one message to each server, and one back.
Gradients are written into the array that is sent, once; what comes back is copied once, as JAX's
arrays may not change and ours do with the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prpc_engine.errors import BadArguments
from prpc_engine.kv.client.parameters import Parameters
from prpc_engine.kv.client.worker import TableWorker
from prpc_engine.kv.table.optimizer import Optimizer


class Tree:
    """A pytree of floating arrays on the servers, which are those of the worker that comes first
    (parameters.py): see pull().

    more: of TableWorker.create_dense (compression, consistency, split_bytes_min, timeout_s).
    """

    def __init__(
        self,
        kv: TableWorker,
        table: str,
        tree: Any,
        optimizer: Optimizer | Mapping[str, Any],
        **more: Any,
    ) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        arrays = {jax.tree_util.keystr(path): jnp.asarray(leaf) for path, leaf in leaves}
        for path, array in arrays.items():
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise BadArguments(
                    f"leaf {path} of {table!r} is {array.dtype}; floating numbers are allowed"
                )
        self._dtypes = [array.dtype for array in arrays.values()]
        start = {path: np.asarray(array, np.float32) for path, array in arrays.items()}
        self.parameters = Parameters(kv, table, start, optimizer, **more)

    def pull(self, *, timeout_s: float | None = None) -> Any:
        """The present values: a tree as it was given."""
        self.parameters.pull(timeout_s=timeout_s)
        return self._tree()

    def assign(self, tree: Any, *, timeout_s: float | None = None) -> None:
        """Make these the values, for all workers: a model that was loaded, say. BadArguments when
        it is not built like them.
        """
        self._write(tree, self.parameters.values, "values")
        self.parameters.assign(timeout_s=timeout_s)

    def step(self, grads: Any, *, timeout_s: float | None = None) -> Any:
        """Push a tree of gradients, and the new values. BadArguments when it is not built like the
        parameters.
        """
        self._write(grads, self.parameters.grads, "gradients")
        self.parameters.step(timeout_s=timeout_s)
        return self._tree()

    def _write(self, tree: Any, into: Mapping[str, Any], what: str) -> None:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if str(structure) != str(self._structure):  # the stubs of treedefs know no comparison
            raise BadArguments(
                f"{what} of {self.parameters.table!r} are {structure}; "
                f"the parameters are {self._structure}"
            )
        for (path, ours), leaf in zip(into.items(), leaves, strict=True):
            if ours.shape != jnp.shape(leaf):
                raise BadArguments(
                    f"{what} of {self.parameters.table!r}: {path} has shape {jnp.shape(leaf)}; "
                    f"its parameter has {ours.shape}"
                )
            if jnp.iscomplexobj(leaf):
                raise BadArguments(
                    f"{what} of {self.parameters.table!r}: {path} is {leaf.dtype}, its parameter "
                    "is real: an imaginary part would be lost; pass jnp.real(...) where that is "
                    "meant"
                )
        for ours, leaf in zip(into.values(), leaves, strict=True):
            ours[...] = leaf

    def _tree(self) -> Any:
        values = zip(self.parameters.values.values(), self._dtypes, strict=True)
        return jax.tree_util.tree_unflatten(
            self._structure, [jnp.array(value, dtype, copy=True) for value, dtype in values]
        )
