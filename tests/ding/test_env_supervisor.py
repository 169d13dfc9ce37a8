"""DI-engine's EnvSupervisor on our Supervisor and buffers: its own tests, and a child that is
killed. DI-engine is PyPI's.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.ding.test_ditask import Launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ding") is None, reason="DI-engine is not installed"
)
# those that do not sleep for long
CHOSEN = "Compatible and (naive or reset_error or renew or properties)"

KILLED = """
import multiprocessing
import gym
from ding.envs import DingEnvWrapper
from ding.envs.env_manager import EnvSupervisor
import tests.ding.replacing

envs = EnvSupervisor(
    env_fn=[lambda: DingEnvWrapper(gym.make("CartPole-v0"))] * 3, max_try=2, step_timeout=60
)
envs.seed(0)
envs.launch()
actions = {one: envs.action_space.sample() for one in range(3)}
envs.step(actions)
(doomed,) = (one for one in multiprocessing.active_children() if one.name.endswith("_1"))
doomed.kill()
doomed.join()
steps = envs.step(actions)
told = [bool(one.info.get("abnormal", False)) for one in steps]
print("told", told, steps[1].info.err)
told = [bool(one.info.get("abnormal", False)) for one in envs.step(actions)]
print("then", told, envs.ready_obs_id, envs.ready_obs.shape)
envs.close()
"""


def test_di_engines_own_tests_of_it_pass(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("ding")  # of what is in it, its import would be asked for
    assert spec is not None
    assert spec.origin is not None
    tests = Path(spec.origin).parent / "envs" / "env_manager" / "tests" / "test_env_supervisor.py"
    options = ["-p", "no:cacheprovider", "-p", "tests.ding.replacing", "-c", "/dev/null"]
    options += ["--rootdir", str(tmp_path), "-k", CHOSEN, str(tests)]
    with Launch(tmp_path, 1, sys.executable, "-m", "pytest", "-q", *options) as launch:
        assert launch.end() == 0, launch.said[-5000:]
    assert "10 passed" in launch.said_plainly()


def test_an_environment_whose_process_is_killed_is_reset_and_goes_on(tmp_path: Path) -> None:
    with Launch(tmp_path, 1, sys.executable, "-c", KILLED) as launch:
        assert launch.end() == 0, launch.said[-5000:]
    said = launch.said_plainly()
    told = r"told \[False, True, False\] .*child 1 \(process \d+\) was ended by SIGKILL"
    assert re.search(told, said), said[-3000:]
    assert "then [False, False, False] [0, 1, 2] (3, 4)" in said, said[-3000:]
