"""Tables under a consistency model: those of table.py, whose verbs may wait for other workers
(barrier_scheduler.py).

    ssp   each verb is that of table.py, when it may run
    sync  gradients are decoded and checked when they come, and applied once a step: dense ones
          summed, sparse ones with the keys of all workers; a key that some have not pushed counts
          as zero in their mean. A step is one push to the table.

They are tables in everything else: a checkpoint cuts them like any other. What waits has not been
answered, and is in none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.consistency.barrier_scheduler import BarrierScheduler, Bound, Gradients, Steps
from prpc_engine.kv.consistency.consistency import Consistency, Ssp, Sync
from prpc_engine.kv.consistency.progress import Lag
from prpc_engine.kv.table.checks import check_keys
from prpc_engine.kv.table.compression import Compressor, received
from prpc_engine.kv.table.table import DenseTable, SparseTable
from shard import runtime

Keys = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Paced:
    """What tables under a consistency model add to those of table.py, whichever the model: which
    workers are present, and how far each is behind.
    """

    _pace: BarrierScheduler

    def worker_is_here(self) -> None:
        """A push of the calling worker has come again: it is present, over this connection."""
        self._pace.enter()

    def begin_again(self, error: Exception) -> None:
        """Another table takes the place of this one: verbs that wait fail with that."""
        self._pace.begin_again(error)

    def lags(self) -> dict[int, tuple[str, Lag]]:
        """{present worker: its name, its lag}."""
        return self._pace.lags.lags(self._pace.clock())


class SspDense(Paced, DenseTable):
    """A dense table whose verbs wait for slower workers. Each answers with its value, or a
    Deferred.
    """

    def __init__(self, pace: Bound, **settings: Any) -> None:
        super().__init__(**settings)
        self._pace: Bound = pace

    def pull(self) -> Any:
        return self._pace.pull(super().pull)

    def push(self, *parts: Array) -> Any:
        return self._pace.push(partial(super().push, *parts))

    def push_pull(self, *parts: Array) -> Any:
        return self._pace.push(_both(partial(super().push, *parts), super().pull))


class SspSparse(Paced, SparseTable):
    """A sparse table whose verbs wait for slower workers. Each answers with its value, or a
    Deferred.
    """

    def __init__(self, pace: Bound, **settings: Any) -> None:
        super().__init__(**settings)
        self._pace: Bound = pace

    def pull(self, keys: Keys) -> Any:
        return self._pace.pull(partial(super().pull, keys))

    def push(self, keys: Keys, *parts: Array) -> Any:
        return self._pace.push(partial(super().push, keys, *parts))

    def push_pull(self, keys: Keys, *parts: Array) -> Any:
        return self._pace.push(
            _both(partial(super().push, keys, *parts), partial(super().pull, keys))
        )


class SyncDense(Paced, DenseTable):
    """A dense table that changes once a step, by the gradients of all workers. Its pushes answer
    with a Deferred.
    """

    def __init__(self, pace: Steps, compression: Compressor | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._pace: Steps = pace
        self._wire = compression

    def push(self, *parts: Array) -> Any:
        return self._pace.push(self._apply, lambda: self.version, self._received(parts))

    def push_pull(self, *parts: Array) -> Any:
        return self._pace.push(self._apply, self.pull, self._received(parts))

    def _received(self, parts: tuple[Array, ...]) -> Array:
        grads = received(self._whose, self._wire, parts, self.values.shape)
        # not when it is added to those of others, who would all be refused
        self._guard.check(self._whose, grads)
        return grads

    def _apply(self, pushes: list[Gradients], scale: float) -> None:
        total = pushes[0][0]
        for i, (grads,) in enumerate(pushes[1:]):
            # the first sum is ours, what came is not
            total = np.add(total, grads, out=total if i else None)
        super().push(total if scale == 1 else total * np.float32(scale))


class SyncSparse(Paced, SparseTable):
    """A sparse table that changes once a step, by the gradients of all workers. Its pushes answer
    with a Deferred.
    """

    def __init__(self, pace: Steps, compression: Compressor | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._pace: Steps = pace
        self._wire = compression

    def push(self, keys: Keys, *parts: Array) -> Any:
        return self._pace.push(self._apply, lambda: self.version, *self._received(keys, parts))

    def push_pull(self, keys: Keys, *parts: Array) -> Any:
        return self._pace.push(self._apply, partial(self.pull, keys), *self._received(keys, parts))

    def _received(self, keys: Keys, parts: tuple[Array, ...]) -> Gradients:
        check_keys(self._whose, keys)
        grads = received(self._whose, self._wire, parts, (len(keys), self.dim))
        # not when it is added to those of others, who would all be refused
        self._guard.check(self._whose, grads, keys)
        return keys, grads

    def _apply(self, pushes: list[Gradients], scale: float) -> None:
        keys = np.concatenate([keys for keys, _ in pushes])
        grads = np.concatenate([grads for _, grads in pushes])
        if scale != 1:
            grads *= np.float32(scale)
        super().push(keys, grads)


def dense_table(
    table: str,
    consistency: Consistency | None,
    compression: Compressor | None,
    clock: Callable[[], float] = runtime.now,
    **settings: Any,
) -> DenseTable:
    """A DenseTable(compression=compression, **settings) of that name, in the model that
    `consistency` says. clock: gives seconds, by which a worker is late.
    """
    if isinstance(consistency, Sync):
        return SyncDense(Steps(table, consistency, clock), compression, name=table, **settings)
    if isinstance(consistency, Ssp):
        pace = Bound(table, consistency, clock)
        return SspDense(pace, compression=compression, name=table, **settings)
    return DenseTable(compression=compression, name=table, **settings)


def sparse_table(
    table: str,
    consistency: Consistency | None,
    compression: Compressor | None,
    clock: Callable[[], float] = runtime.now,
    **settings: Any,
) -> SparseTable:
    """A SparseTable(compression=compression, **settings) of that name, in the model that
    `consistency` says. clock: gives seconds, by which rows grow old and a worker is late.
    """
    settings["clock"] = clock
    if isinstance(consistency, Sync):
        return SyncSparse(Steps(table, consistency, clock), compression, name=table, **settings)
    if isinstance(consistency, Ssp):
        pace = Bound(table, consistency, clock)
        return SspSparse(pace, compression=compression, name=table, **settings)
    return SparseTable(compression=compression, name=table, **settings)


def _both(push: Callable[[], object], pull: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        push()
        return pull()

    return run
