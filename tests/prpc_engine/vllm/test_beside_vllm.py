"""The same scenario over vLLM's own queue, where vLLM is installed, and over ours: a program sees
the same.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.program import ROOT, UNTIL_S

OURS = "prpc_engine.vllm"
THEIRS = "vllm.distributed.device_communicators.shm_broadcast"


def run(module: str) -> list[Any]:
    """What the scenario says; what else a library prints is none of it."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.prpc_engine.vllm.scenario", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=UNTIL_S,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line[:1] in '["{']
    return [json.loads(line) for line in lines]


def test_the_scenario_ends_as_it_should_over_ours() -> None:
    steps = run(OURS)
    assert len(steps) == 7
    first, second = steps[1:3]
    assert first == second
    assert first[-2:] == ["to all", [True, False]]
    assert steps[3] == [True, False]
    assert steps[4] == steps[5] == [0, 1, 2, 3, [False, True]]


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: 336 MB and what it needs, for this file alone",
)
def test_a_program_sees_the_same_over_vllms_own() -> None:
    assert run(THEIRS) == run(OURS)
