"""What the variables about cores make of a server of TensorFlow."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.forked import TENSORFLOW
from tests.prpc_engine.cluster.tasks import fresh_host
from tests.prpc_engine.roles import RoleProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)


CORES = len(os.sched_getaffinity(0))


class ForkedRole(RoleProcess):
    """One that needs no Python of its own: it is not pinned, or serves nothing."""

    imports = TENSORFLOW


@pytest.mark.skipif(CORES < 2, reason="two processes of a ps need two cores")
def test_it_polls_and_each_of_its_processes_is_pinned_to_a_core_of_its_own(seed: int) -> None:
    variables = {
        "NETWORK_PS_CORE_NUMBER": "2",
        "PS_ENABLE_POLLING": "1",
        "PS_DISABLE_PIN_CORES": "0",
    }
    with RoleProcess("tensorflow", fresh_host(seed), env=variables) as process:
        told = process.told
    assert (told["processes"], told["polling"], told["lines"]) == (1, True, [])
    cores = [core for kept in told["kept"] for core in kept]
    assert len(cores) == len(set(cores)) == 2


def test_more_processes_than_cores_are_not_made_and_a_line_says_so(seed: int) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "2"}
    with ForkedRole("tensorflow", fresh_host(seed), cores=1, env=variables) as process:
        told = process.told
    assert told["processes"] == 0
    [line] = told["lines"]
    assert line.startswith("NETWORK_PS_CORE_NUMBER='2'") and line.endswith("core: 1")


def test_a_worker_says_that_it_has_no_shards(seed: int) -> None:
    variables = {"NETWORK_WORKER_CORE_NUMBER": "2"}
    with ForkedRole("tensorflow", fresh_host(seed), "worker", env=variables) as process:
        told = process.told
    assert told["processes"] == 0
    [line] = told["lines"]
    assert line.startswith("NETWORK_WORKER_CORE_NUMBER='2'") and "at a ps only" in line


def test_a_number_that_is_none_is_refused(seed: int) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "garbage"}
    with ForkedRole("tensorflow", fresh_host(seed), env=variables) as process:
        assert process.told["error"].startswith("NETWORK_PS_CORE_NUMBER='garbage': ")
