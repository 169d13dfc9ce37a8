"""Every mutation still has its place: else the nightly run would break nothing, and call it
noticed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.places import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_changes_one_place_into_other_code_that_runs(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} has changed: look for the promise there, and mutate it anew"
    )
    before, after = ast.parse(text), ast.parse(text.replace(mutation.old, mutation.new))
    assert ast.dump(before) != ast.dump(after)
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests.split())


def test_no_two_have_one_name() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
