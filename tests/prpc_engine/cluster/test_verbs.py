"""What a task's log says about what it did, and about an .endpoint_map that was changed
under it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Server
from prpc_engine.cluster import TaskUnreachable, server
from prpc_engine.cluster.verbs import TensorVerbs
from prpc_engine.errors import ConfigError
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host, rule_environment
from tests.prpc_engine.processes import wait_until

WORKER0, PS0 = "/job:worker/task:0", "/job:ps/task:0"


def test_rates_are_of_what_happened_since_and_name_no_verb_that_did_not() -> None:
    verbs = TensorVerbs(send=3, abort=1)
    before = verbs.copy()
    assert verbs.rates_since(before, 60.0) == ""
    verbs.send += 150
    verbs.fused += 3
    assert verbs.rates_since(before, 60.0) == "2.5 send/s, 0.05 fused/s"


def test_the_log_says_from_time_to_time_what_a_task_does(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.05)
    caplog.set_level(logging.INFO, "prpc")
    with Server(cluster_at(fresh_host(seed), worker=1)) as task:
        for key in "ab":
            task.send(key, np.array(1), to=WORKER0, step=0)
        task.recv_many(["a", "b"], source=WORKER0, step=0)
        wait_until(lambda: sum(rates_in(caplog.text, "send")) == 2)
        wait_until(lambda: sum(rates_in(caplog.text, "answer")) == 1)


def rates_in(text: str, verb: str) -> list[float]:
    """What the lines so far say, times the period: how often it was counted."""
    return [round(float(rate) * 0.05, 3) for rate in re.findall(rf"([0-9.]+) {verb}/s", text)]


def test_a_task_that_was_started_with_a_changed_map_is_refused_and_the_change_is_named(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    for name, value in rule_environment("file", cluster, tmp_path).items():
        monkeypatch.setenv(name, value)
    with Server(cluster, "worker", 0) as worker:
        file = tmp_path / ".endpoint_map"
        file.write_text(file.read_text().replace("3333", "3444"))
        with (
            Server(cluster, "ps", 0),
            pytest.raises(ConfigError, match="do not have the same cluster"),
        ):
            worker.recv("weights", source=PS0, step=0)
        wait_until(lambda: f"hot reload refused: {file} has changed in line 1" in caplog.text)


@pytest.mark.parametrize("patience_s", [0.0, 0.2])
def test_a_map_that_was_changed_is_refused_by_name_once(
    patience_s: float,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However soon attempts are given up: after the first one, too."""
    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    for name, value in rule_environment("file", cluster, tmp_path).items():
        monkeypatch.setenv(name, value)
    with Server(cluster, "worker", 0, start=False) as worker:
        worker.settings = replace(worker.settings, connection_timeout_s=patience_s)
        worker.start()
        file = tmp_path / ".endpoint_map"
        file.write_text(file.read_text().replace("3333", "3444"))
        for _ in range(2):
            with pytest.raises(TaskUnreachable):
                worker.recv("weights", source=PS0, step=0)
    told = [
        record.getMessage()
        for record in caplog.records
        if "hot reload refused" in record.getMessage()
    ]
    assert told == [
        f"hot reload refused: {file} has changed in line 1 since this task started; "
        "the job goes on with the addresses that it "
        "started with. Restart all of its tasks to use others"
    ]
