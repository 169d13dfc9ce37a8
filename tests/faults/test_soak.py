"""What half a minute of every kind of load, with a shard killed every few seconds, leaves behind:
nothing that grows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.flatness import grew
from tests.faults.soak import SAMPLES, Tally

ROOT = Path(__file__).parents[2]
SOAK_S = float(os.environ.get("PRPC_SOAK_S", "30"))
PATIENCE_S = 180.0  # for starting, settling and ending, beyond the soak itself
FLAT = [5.0, 40.0, 30.0, 20.0] * (SAMPLES // 4)


@pytest.mark.slow
def test_memory_descriptors_threads_and_leases_stay_flat_and_every_call_is_accounted_for(
    seed: int, tell: Callable[[str], None]
) -> None:
    """In a process of its own: what it holds is then its own, too. It ends with 0 when all held
    that soak.py promises.
    """
    soak = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--seconds", str(SOAK_S), "--seed", str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SOAK_S + PATIENCE_S,
        check=False,
    )
    tell(soak.stdout)
    assert soak.returncode == 0, soak.stdout


def test_a_series_that_only_moves_up_and_down_did_not_grow() -> None:
    assert not grew(FLAT, bound=0.0)


def test_what_grows_during_warm_up_alone_did_not_grow() -> None:
    assert not grew([float(min(number, SAMPLES // 3)) for number in range(SAMPLES)], bound=0.0)


def test_a_leak_that_is_small_beside_the_noise_is_seen_once_it_is_past_the_bound() -> None:
    leaking = [value + 0.3 * number for number, value in enumerate(FLAT)]
    assert grew(leaking, bound=5.0)
    assert not grew(leaking, bound=7.0)


def test_too_few_samples_say_nothing() -> None:
    assert not grew([], bound=0.0)
    assert not grew([1.0, 2.0], bound=0.0)


def test_a_call_that_never_ended_is_named() -> None:
    tally = Tally()
    tally.submitted.update(plain=3, error=1)
    tally.completed.update(plain=1, error=1)
    tally.lost.update(plain=1)
    assert tally.complaints() == ["plain: 1 calls unaccounted"]
