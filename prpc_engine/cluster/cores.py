"""The cores that a task keeps its communication threads or shards on, where its DISABLE_PIN_CORES is 0 (network.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shard import CoreLocks

CORES_FOLDER = Path(tempfile.gettempdir()) / "prpc-cpuset"  # of the locks that keep two tasks of this host from one core


def take_cores(count: int) -> CoreLocks:
    """So many that no other task of this host has; none, and a warning, where there are not so many. Whoever asks closes it."""
    return CoreLocks.take(count, CORES_FOLDER)
