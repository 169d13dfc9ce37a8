"""A worker's life: pull the rows of a batch, compute, push their gradients, and do not wait for
what can travel.

    prepare    find the batch's keys
    pull       wait for its rows (asked for while the batch before was computed)
    compute    forward and backward
    push       hand the gradients over; wait only when too many are on their way

A process per role needs no more than this: every worker calls create_tables(), which finds what
another has made, and then runs train() to its end; who wants to know how good it is calls
evaluate() at any time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prpc_engine.demo.batches import epoch_batches
from prpc_engine.demo.data import Flights
from prpc_engine.demo.model import Batch, auc, forward, forward_backward, log_loss, prepare
from prpc_engine.demo.settings import DENSE_TABLE, ROWS_TABLE, DemoSettings
from prpc_engine.kv.client.future import KVFuture
from prpc_engine.kv.client.worker import TableWorker

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Progress:
    """One batch is done. loss: its mean log loss before the step; keys: how many different ones it
    had.

    The four times, in seconds, sum to the batch's, but for what the caller did between two records.
    """

    epoch: int
    examples: int
    keys: int
    loss: float
    prepare_s: float
    pull_s: float
    compute_s: float
    push_s: float


@dataclass(frozen=True)
class Evaluation:
    """auc and mean log loss of all test examples."""

    auc: float
    loss: float


class _Watch:
    """Seconds since the last reset, by the name of what they were spent on."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap was `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def reset(self) -> None:
        self._seconds.clear()
        self._since = time.perf_counter()


def create_tables(kv: TableWorker, settings: DemoSettings) -> None:
    """Make the model's two tables, or find them; ConfigError when they are there with other
    settings.
    """
    kv.create_sparse(ROWS_TABLE, settings.row_dim, settings.optimizer, settings.row_initializer)
    kv.create_dense(
        DENSE_TABLE, settings.dense_shape, settings.optimizer, settings.dense_initializer
    )


def train(
    kv: TableWorker, flights: Flights, settings: DemoSettings, rank: int = 0, workers: int = 1
) -> Iterator[Progress]:
    """Train this worker's share of all epochs, one record a batch; when it ends, all its gradients
    are applied.

    Raises what the calls raise: the first failure of a server ends the training.
    """
    watch = _Watch()
    batches = _prepared(flights, settings, rank, workers)
    pushes: deque[tuple[KVFuture[None], KVFuture[None]]] = deque()
    step = next(batches, None)
    watch.lap("prepare")
    if step is not None:
        asked = _ask(kv, step[1])
    while step is not None:
        epoch, batch = step
        rows, dense = asked[0].result(), asked[1].result()
        watch.lap("pull")
        step = next(batches, None)
        watch.lap("prepare")
        if step is not None and settings.pull_ahead:
            asked = _ask(kv, step[1])
            watch.lap("pull")
        gradients = forward_backward(rows, dense, batch)
        watch.lap("compute")
        pushes.append(
            (
                kv.submit_push(ROWS_TABLE, batch.keys, gradients.rows),
                kv.submit_push(DENSE_TABLE, gradients.dense),
            )
        )
        # at the end all must have arrived
        bound = settings.pushes_in_flight_max if step is not None else 0
        while len(pushes) > bound:
            for push in pushes.popleft():
                push.result()
        watch.lap("push")
        if step is not None and not settings.pull_ahead:
            asked = _ask(kv, step[1])
            watch.lap("pull")
        yield Progress(
            epoch=epoch,
            examples=len(batch),
            keys=len(batch.keys),
            loss=gradients.loss,
            prepare_s=watch.seconds("prepare"),
            pull_s=watch.seconds("pull"),
            compute_s=watch.seconds("compute"),
            push_s=watch.seconds("push"),
        )
        watch.reset()  # what the caller did meanwhile is not ours


def evaluate(kv: TableWorker, test: Batch) -> Evaluation:
    """How good the model is now. test: prepare(flights.test, flights.vocabulary), made once."""
    rows, dense = _ask(kv, test)
    logits, _ = forward(rows.result(), dense.result(), test)
    return Evaluation(auc(test.labels, logits), float(np.mean(log_loss(logits, test.labels))))


def _prepared(
    flights: Flights, settings: DemoSettings, rank: int, workers: int
) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) of all this worker's batches, in order."""
    for epoch in range(settings.epochs):
        for part in epoch_batches(flights.train, settings, epoch, rank, workers):
            yield epoch, prepare(part, flights.vocabulary)


def _ask(kv: TableWorker, batch: Batch) -> tuple[KVFuture[Floats], KVFuture[Floats]]:
    """The batch's rows and the dense weights, on their way."""
    return kv.submit_pull(ROWS_TABLE, batch.keys), kv.submit_pull(DENSE_TABLE)
