"""examples/rl_cartpole.py runs as its first lines say, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.imports import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None, reason="needs pip install 'prpc-engine[rl]'"
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["prpc", "multiprocessing"])
def test_actors_play_and_the_learner_trains(way: str) -> None:
    ran = subprocess.run(
        [sys.executable, "examples/rl_cartpole.py", "--over", way, "--seconds", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = re.search(rf"{way} +(\d+) steps/s +episodes of (\d+) steps", ran.stdout)
    assert found is not None, ran.stdout
    assert int(found[1]) > 0
    assert int(found[2]) > 0
    assert "Traceback" not in ran.stderr
