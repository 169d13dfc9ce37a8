"""Every mutation still has its place: else the nightly run would break nothing, and call it
noticed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.places import MUTATIONS, Mutation
from tests.mutations.simulated import DEFECTS, SEEDS_MAX, Defect, scenario_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", [*MUTATIONS, *DEFECTS], ids=lambda mutation: mutation.name)
def test_it_changes_one_place_into_other_code_that_runs(mutation: Mutation | Defect) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} has changed: look for the promise there, and mutate it anew"
    )
    before, after = ast.parse(text), ast.parse(text.replace(mutation.old, mutation.new))
    assert ast.dump(before) != ast.dump(after)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_tests_are_there(mutation: Mutation) -> None:
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests.split())


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_its_scenario_is_one_that_runs_without_it(defect: Defect) -> None:
    assert callable(scenario_of(defect.scenario))
    module, _, function = defect.scenario.partition(".")
    tests = (ROOT / f"tests/simulation/test_{module}.py").read_text()
    assert f"hold(scenarios.{function}, " in tests
    assert 1 <= defect.seeds <= SEEDS_MAX


def test_no_two_have_one_name() -> None:
    names = [mutation.name for mutation in (*MUTATIONS, *DEFECTS)]
    assert len(set(names)) == len(names)
