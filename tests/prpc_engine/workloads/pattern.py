"""Bytes that every process knows, so that contents can be checked wherever they arrive."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from tests.prpc_engine.workloads.sizes import MIB

PATTERN_BYTES = 40 * MIB  # holds the largest payload, 16 MiB, at many offsets
PATTERN = np.frombuffer(np.random.default_rng(0).bytes(PATTERN_BYTES), np.uint8)


def piece(start: int, nbytes: int) -> NDArray[np.uint8]:
    """Those bytes; a view."""
    assert 0 <= start <= start + nbytes <= PATTERN_BYTES
    return PATTERN[start : start + nbytes]


def any_piece(chance: random.Random, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
    """So many bytes from anywhere, and where they begin."""
    start = chance.randrange(PATTERN_BYTES - nbytes)
    return start, piece(start, nbytes)


def mixed(number: int) -> int:
    """What a server makes of a number: no two are alike, and nobody guesses it."""
    return number * 0x9E3779B1 % (1 << 32) ^ 0x55AA55AA
