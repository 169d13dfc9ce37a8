"""The demo's model in PyTorch: the same factorization machine as model.py, with its gradients by
autograd.

    python -m prpc_engine.demo.torch  trains it on tables in two shards, and one process with numpy
                                      beside it; needs torch

What model.py works out by hand is ten lines here; the price is autograd's: a row and a gradient for
each (example, field).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prpc_engine.demo.baseline import train_baseline
from prpc_engine.demo.batches import epoch_batches
from prpc_engine.demo.data import NUMERIC, Examples, Flights, load_flights
from prpc_engine.demo.model import auc
from prpc_engine.demo.settings import ROWS_TABLE, DemoSettings
from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.torch import Embedding, Optimizer
from prpc_engine.master.master import Master
from prpc_engine.service.service import RpcService

DENSE_TABLE = "flights.torch"
SHARDS = 2


class FactorizationMachine(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Keys [n, fields] and numeric features [n, x] to logits [n]."""

    def __init__(self, kv: TableWorker, settings: DemoSettings) -> None:
        super().__init__()
        self.rows = Embedding(
            kv, ROWS_TABLE, settings.row_dim, settings.optimizer, settings.row_initializer
        )
        self.linear = torch.nn.Linear(len(NUMERIC), 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, keys: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        """b + c.x + sum w + (|sum v|^2 - sum |v|^2) / 2: Rendle's lemma 3.1."""
        rows = self.rows(keys)
        weights, embeddings = rows[..., 0], rows[..., 1:]
        pairs = embeddings.sum(1).square().sum(1) - embeddings.square().sum((1, 2))
        logits: torch.Tensor = self.linear(numeric)[:, 0] + weights.sum(1) + pairs / 2
        return logits


def train(
    kv: TableWorker, flights: Flights, settings: DemoSettings, rank: int = 0, workers: int = 1
) -> FactorizationMachine:
    """Train this worker's share of all epochs; the model, whose rows are on the servers."""
    model = FactorizationMachine(kv, settings)
    optimizer = Optimizer(model, kv, DENSE_TABLE, settings.optimizer)
    loss = torch.nn.BCEWithLogitsLoss()
    for epoch in range(settings.epochs):
        for part in epoch_batches(flights.train, settings, epoch, rank, workers):
            optimizer.zero_grad()
            loss(
                model(*_tensors(part, flights.vocabulary)), torch.from_numpy(part.labels)
            ).backward()
            optimizer.step()
    return model


def evaluate(model: FactorizationMachine, flights: Flights) -> float:
    """The AUC of the test set, now."""
    with torch.no_grad():
        return auc(flights.test.labels, model(*_tensors(flights.test, flights.vocabulary)).numpy())


def _tensors(
    examples: Examples, vocabulary: npt.NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(vocabulary[examples.ordinals]), torch.from_numpy(examples.numeric)


def main() -> None:
    """Train the model with PyTorch on tables in shards, and with numpy in this process; print the
    AUC of both.
    """
    flights, settings = load_flights(), DemoSettings()
    with (
        Master() as master,
        RpcService(master.address, shards=SHARDS) as servers,
        RpcService(master.address) as service,
    ):
        TableServer(servers)
        model = train(TableWorker(service, expected_servers=SHARDS), flights, settings)
        print(f"test AUC, torch on {SHARDS} shards:   {evaluate(model, flights):.4f}")
    print(f"test AUC, numpy in one process: {train_baseline(flights, settings).auc:.4f}")


if __name__ == "__main__":
    main()
