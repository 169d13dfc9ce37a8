"""Constructors in a process that has no file descriptor left: an error that says what to do, and
nothing left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from prpc_engine import Master, RpcService
from tests.imports import ROOT
from tests.prpc_engine.processes import PATIENCE_S

OURS = ("prpc_engine.errors.", "shard.errors.")


class Echo:
    def echo(self, value: object) -> object:
        return value


@pytest.mark.slow
@pytest.mark.parametrize(
    "thing", ["RpcService", "RpcClient", "Master", "MasterClient", "TableServer", "ShardGroup"]
)
def test_a_constructor_without_descriptors_says_so_and_leaves_nothing(
    master: Master, thing: str
) -> None:
    with RpcService(master.address) as service:
        service.create_server("echo", Echo())
        ran = subprocess.run(
            [sys.executable, "-m", "tests.prpc_engine.at_the_limit", thing, master.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
    attempts = [json.loads(line) for line in ran.stdout.splitlines()]
    assert attempts, ran.stderr
    assert attempts[-1]["error"] == "", "with so many more it works"
    for attempt in attempts[:-1]:
        assert attempt["error"].startswith(OURS), attempt["error"]
        assert "ulimit -n" in attempt["error"]
        assert attempt["after"] == attempt["before"], attempt["error"]
