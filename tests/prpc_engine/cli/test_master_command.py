"""`prpc master` as a user sees it: its first line, its end, its errors."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from prpc_engine.master.client import MasterClient
from tests.prpc_engine.cli.test_commands import prpc
from tests.prpc_engine.master_processes import MasterProcess


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(number: signal.Signals) -> None:
    with MasterProcess() as master:
        with MasterClient(master.address) as client:
            assert client.count_up("a") == 0
        assert master.end(number) == (130 if number == signal.SIGINT else 0)


def test_ended_and_started_again_it_goes_on(tmp_path: Path) -> None:
    for expected in range(2):
        with MasterProcess(tmp_path) as master, MasterClient(master.address) as client:
            assert client.generate_id("a") == expected


def test_what_keeps_it_from_serving_is_one_line(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as master:
        taken = prpc("master", "--journal", str(tmp_path))
        assert (taken.returncode, taken.stdout) == (1, "")
        assert taken.stderr.startswith(
            f"prpc: another master serves from {tmp_path}: pid {master.process.pid}"
        )
        bound = prpc("master", "--bind", master.address)
        assert bound.returncode == 1
        assert bound.stderr.count("\n") == 1
    wrong = prpc("master", "--bind", "nowhere")
    assert wrong.returncode == 2
    assert "host:port expected" in wrong.stderr
