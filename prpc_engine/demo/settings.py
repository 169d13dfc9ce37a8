"""What the demo trains with: one set of numbers for the workers and for the baseline that they are
held against.
"""

from __future__ import annotations

from dataclasses import dataclass

from prpc_engine.demo.data import NUMERIC
from prpc_engine.kv.table.initializer import Constant, Initializer, Uniform
from prpc_engine.kv.table.optimizer import Adagrad, Optimizer
from prpc_engine.kv.table.spec import checked_count, checked_number

ROWS_TABLE = "flights.rows"
DENSE_TABLE = "flights.dense"


@dataclass(frozen=True)
class DemoSettings:
    """The values were chosen by the baseline's own curve, for one purpose: that it has flattened at
    the end.

    Asynchronous workers take the same steps from slightly older values, so where the curve still
    climbs steeply they trail the baseline, and where it is flat they meet it. 4096 examples a batch
    make 64 batches an epoch. Gradients are means over the batch, some 1e-3 an element: beside an
    initial_accumulator of 0.1 Adagrad would never adapt and only crawl, hence 1e-5 (test AUC after
    the first epoch 0.70 instead of 0.65). initial_scale must not be 0: where all embeddings are 0,
    so are their gradients.
    """

    epochs: int = 5
    batch_examples: int = 4096
    embedding_dim: int = 8
    learning_rate: float = 0.05
    initial_accumulator: float = 1e-5
    initial_scale: float = 0.05
    seed: int = 1
    # gradients on their way hide the round trip; more of them only grow older
    pushes_in_flight_max: int = 2
    # ask for the next batch's rows before computing this one: one step older, no waiting
    pull_ahead: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_examples", "embedding_dim"):
            checked_count(f"demo: {name}", getattr(self, name), at_least=1, at_most=2**31 - 1)
        for name in ("seed", "pushes_in_flight_max"):
            checked_count(f"demo: {name}", getattr(self, name), at_least=0, at_most=2**31 - 1)
        checked_number("demo: initial_scale", self.initial_scale, above=0)
        _ = self.optimizer  # checks its own

    @property
    def row_dim(self) -> int:
        """Columns of a key's row: its weight, then its embedding."""
        return 1 + self.embedding_dim

    @property
    def dense_shape(self) -> tuple[int]:
        """The bias, then a weight for each numeric feature."""
        return (1 + len(NUMERIC),)

    @property
    def optimizer(self) -> Optimizer:
        """Of both tables."""
        return Adagrad(self.learning_rate, self.initial_accumulator)

    @property
    def row_initializer(self) -> Initializer:
        """Weights begin at 0, embeddings at random."""
        return Uniform([0.0] + [self.initial_scale] * self.embedding_dim, self.seed)

    @property
    def dense_initializer(self) -> Initializer:
        """Zeros."""
        return Constant()
