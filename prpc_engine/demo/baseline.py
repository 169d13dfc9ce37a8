"""The yardstick: the same model, batches and optimizer in one process, straight on the tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prpc_engine.demo.batches import epoch_batches
from prpc_engine.demo.data import FIELDS, Flights
from prpc_engine.demo.model import auc, forward, forward_backward, log_loss, prepare
from prpc_engine.demo.settings import DemoSettings
from prpc_engine.kv.table.table import DenseTable, SparseTable


@dataclass(frozen=True)
class BaselineReport:
    """auc, test_loss: on the test set at the end. losses:
    of each batch before its step, in order.
    """

    auc: float
    test_loss: float
    examples: int
    train_s: float
    losses: tuple[float, ...]

    @property
    def examples_per_s(self) -> float:
        """Training only: loading and evaluating do not count."""
        return self.examples / self.train_s


def train_baseline(
    flights: Flights, settings: DemoSettings, after_batch: Callable[[], object] = lambda: None
) -> BaselineReport:
    """Train for settings.epochs and evaluate once. after_batch() may raise to end it."""
    rows = SparseTable(settings.row_dim, settings.optimizer, settings.row_initializer)
    dense = DenseTable(settings.dense_shape, settings.optimizer, settings.dense_initializer)
    losses, examples = [], 0
    started = time.perf_counter()
    for epoch in range(settings.epochs):
        for part in epoch_batches(flights.train, settings, epoch):
            batch = prepare(part, flights.vocabulary)
            gradients = forward_backward(rows.pull(batch.keys), dense.values, batch)
            rows.push(batch.keys, gradients.rows)
            dense.push(gradients.dense)
            losses.append(gradients.loss)
            examples += len(batch)
            after_batch()
    train_s = time.perf_counter() - started
    test = prepare(flights.test, flights.vocabulary)
    logits, _ = forward(rows.pull(test.keys), dense.values, test)
    test_loss = float(np.mean(log_loss(logits, test.labels)))
    return BaselineReport(auc(test.labels, logits), test_loss, examples, train_s, tuple(losses))


def trivial_auc(flights: Flights) -> float:
    """Test AUC of scoring each flight by how often those of its scheduled hour were late in the
    training set.
    """
    hour = FIELDS.index("hour")
    size = len(flights.vocabulary)
    counts = np.bincount(flights.train.ordinals[:, hour], minlength=size)
    late = np.bincount(flights.train.ordinals[:, hour], flights.train.labels, size)
    rates = late / np.maximum(counts, 1)
    return auc(flights.test.labels, rates[flights.test.ordinals[:, hour]].astype(np.float32))
