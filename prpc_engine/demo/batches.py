"""Who computes which examples: one shuffled order an epoch, dealt out batch by batch.

The order depends on (seed, epoch) alone, so the workers together see exactly the batches that one
process would.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prpc_engine.demo.data import Examples
from prpc_engine.demo.settings import DemoSettings


def epoch_batches(
    examples: Examples, settings: DemoSettings, epoch: int, rank: int = 0, workers: int = 1
) -> Iterator[Examples]:
    """The batches number rank, rank + workers, ... of the epoch; the last of all may be short, none
    is left out.
    """
    assert 0 <= rank < workers
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(examples))
    size = settings.batch_examples
    for begin in range(rank * size, len(order), workers * size):
        yield examples.take(order[begin : begin + size])
