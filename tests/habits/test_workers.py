"""A worker of `pytest -n` that crashes costs the test that it ran, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.turns import environment_of_another_run

CRASHES = """
import os

def test_that_crashes_its_worker():
    os._exit(1)
"""
PASSES = """
def test_{number}():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1, 3])
def test_what_a_crashed_worker_had_left_runs_elsewhere(tmp_path: Path, left: int) -> None:
    first = CRASHES + "".join(PASSES.format(number=number) for number in range(left))
    (tmp_path / "test_first.py").write_text(first)
    (tmp_path / "test_second.py").write_text(PASSES.format(number=0))
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-n", "2", f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=ROOT,
        env=environment_of_another_run(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"1 failed, {left + 1} passed" in ran.stdout, ran.stdout
