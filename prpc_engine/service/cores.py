"""The cores that a task keeps its communication threads or shards on, where its DISABLE_PIN_CORES
is 0 (network.py).
"""

from __future__ import annotations

from pathlib import Path

from prpc_engine.temporary import temporary_folder
from shard import CoreLocks


def locks_folder() -> Path:
    """Of the locks that keep two tasks of this host from one core."""
    return temporary_folder() / "prpc-cpuset"


def take_cores(shards: int) -> CoreLocks:
    """One for each shard, or without shards one for the thread that serves, which no other task of
    this host has; none, and a warning, where there are not so many. Whoever asks closes it.
    """
    what = "shards" if shards else "the thread that serves"
    return CoreLocks.take(shards or 1, locks_folder(), what=what)
