"""Defects of orders of events, each put back by one change of a file, and the scenario of the
simulation that finds it by its seeds alone.

    python -m tests.mutations.simulated SCENARIO FIRST AFTER

runs that scenario of this tree with the seeds from FIRST on, up to AFTER and without it, until one
fails: then it prints that seed, and what failed. Exit code: 0 one failed, NONE_FAILED none did.
`python -m tests.mutations.run --simulation` does so for each defect, in a copy of the tree in which
`old` is `new`.

A scenario knows nothing of these defects: all are among those that .ci/run runs, as they are.
`seeds` says how many it took when the defect was put into this table; another figure is no failure,
as any change of the engine shifts what a seed draws.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from prpc_engine.simulation import run_once
from prpc_engine.simulation.explore import Scenario

SEEDS_MAX = 2000
NONE_FAILED = 3  # 1 is Python's own, where it could not run


class Defect(NamedTuple):
    """`old` stands once in `file`, which is relative to the root; `scenario` is a module of
    tests/simulation without its `scenarios_`, a dot and a function.
    """

    name: str
    file: str
    old: str
    new: str
    scenario: str
    seeds: int


DEFECTS: tuple[Defect, ...] = ()


def scenario_of(name: str) -> Scenario:
    """The function behind a name such as calls.streams."""
    module, _, function = name.partition(".")
    scenario: Scenario = getattr(
        importlib.import_module(f"tests.simulation.scenarios_{module}"), function
    )
    return scenario


def main(arguments: list[str]) -> int:
    """See the file's head."""
    name, first, after = arguments
    scenario = scenario_of(name)
    for seed in range(int(first), int(after)):
        outcome = run_once(scenario, seed)
        if outcome.error:
            print(f"{seed} {outcome.error}")
            return 0
    return NONE_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
