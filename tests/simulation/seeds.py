"""Which seeds a scenario is run with: as many as PRPC_TEST_SEEDS says, from PRPC_TEST_FIRST_SEED
on; or the one of `pytest --seed`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prpc_engine.simulation import RunOutcome, explore, run_once
from prpc_engine.simulation.explore import Scenario

# Of a scenario that takes 0.2 s a seed: others have more or fewer, for about the same time.
SEEDS = int(os.environ.get("PRPC_TEST_SEEDS", "2"))
FIRST_SEED = int(os.environ.get("PRPC_TEST_FIRST_SEED", "0"))


def hold(scenario: Scenario, request: pytest.FixtureRequest, share: float = 1.0) -> None:
    """The scenario holds under each of the seeds; share: times their number, for one that takes
    longer, or not so long.
    A seed that fails is made small, and its timeline kept where PRPC_TEST_TIMELINES says.
    """
    folder = os.environ.get("PRPC_TEST_TIMELINES")
    keep = Path(folder) / request.node.name if folder else None
    only = request.config.getoption("--seed")
    if only is not None:
        outcome = run_once(scenario, only, keep=keep)
        assert not outcome.error, describe(outcome)
        return
    seeds = range(FIRST_SEED, FIRST_SEED + max(1, int(SEEDS * share)))
    failures = explore(scenario, seeds, keep=keep, failures_max=1)
    assert not failures, "\n".join(f"{each}\n{describe(each.least)}" for each in failures)


def describe(outcome: RunOutcome) -> str:
    """What failed."""
    return f"seed {outcome.seed}, {outcome.virtual_s:.3f} s: {outcome.error}\n{outcome.text}"
