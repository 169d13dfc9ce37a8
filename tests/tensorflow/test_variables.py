"""What the variables about cores make of a server of TensorFlow."""

from __future__ import annotations

import importlib.util

import pytest

from tests.forked import TENSORFLOW
from tests.prpc_engine.cluster.tasks import fresh_host
from tests.prpc_engine.roles import RoleProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)


def test_it_polls_is_pinned_and_says_why_it_has_no_shards(seed: int) -> None:
    variables = {
        "NETWORK_PS_CORE_NUMBER": "2",
        "PS_ENABLE_POLLING": "1",
        "PS_DISABLE_PIN_CORES": "0",
    }
    with RoleProcess("tensorflow", fresh_host(seed), env=variables) as process:
        told = process.told
    assert (told["shards"], told["polling"]) == (0, True)
    assert [len(kept) for kept in told["kept"]] == [1]
    [line] = told["lines"]
    assert line.startswith("NETWORK_PS_CORE_NUMBER='2'")
    assert "a server of TensorFlow has no shards" in line


class ForkedRole(RoleProcess):
    """One that needs no Python of its own: it serves nothing, so its cores do not matter."""

    is_forked = True
    imports = TENSORFLOW


def test_a_number_that_is_none_is_refused(seed: int) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "garbage"}
    with ForkedRole("tensorflow", fresh_host(seed), env=variables) as process:
        assert process.told["error"].startswith("NETWORK_PS_CORE_NUMBER='garbage': ")
