"""What the report of transitions rests on: arguments speak of transitions that there are, and name
files that there are; three tables that are asked beside their owners; and that looking changes
nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.simulation import run_once
from tests.imports import ROOT
from tests.simulation.scenarios_calls import calls
from tests.simulation.scenarios_jobs import places
from tests.simulation.transitions import Report, all_transitions, taken
from tests.simulation.untaken import ARGUED
from tests.turns import environment_of_another_run


def test_each_argument_is_of_a_transition_that_there_is() -> None:
    every = all_transitions()
    assert not set(ARGUED) - set(every)
    stale = {title: set(ARGUED[title]) - set(every[title]) for title in ARGUED}
    assert not any(stale.values()), stale


def test_each_argument_is_one_line_and_names_tests_that_there_are() -> None:
    for pairs in ARGUED.values():
        for why in pairs.values():
            assert why and "\n" not in why
            for path in re.findall(r"tests/[\w/]+\.py", why):
                assert (ROOT / path).is_file(), path


def test_a_run_that_is_watched_is_the_same_run() -> None:
    plain = run_once(calls, 3)
    with taken() as found:
        watched = run_once(calls, 3)
    assert (watched.digest, watched.error) == (plain.digest, "")
    titles = {title for title, _, _ in found}
    assert {"A connection", "A call at its caller", "A number of a sender"} <= titles
    with taken() as nothing:
        pass
    assert not nothing, "nobody is watched any more"


def test_tables_that_nobody_asks_are_asked_beside_their_owners() -> None:
    with taken() as found:
        assert not run_once(places, 1).error
    assert {
        ("A call at its caller", "waiting", "entered"),
        ("A call at its caller", "sending", "sent"),
        ("A call at its caller", "in flight", "reply"),
        ("A call at its caller", "in flight", "cancelled"),
        ("A call marked once, at its server", "unknown", "asked"),
        ("A call marked once, at its server", "running", "replied"),
        ("A number of a sender", "new", "arrives"),
    } <= found


def test_a_transition_that_is_neither_taken_nor_argued_is_named() -> None:
    report = Report()
    assert ("A call at its caller", "waiting", "entered") in report.open()
    report.add([["A call at its caller", "waiting", "entered"], ["A door", "open", "shut"]])
    assert ("A call at its caller", "waiting", "entered") not in report.open()
    assert report.unknown() == [("A door", "open", "shut")]
    lines = report.lines()
    assert "A call at its caller: 2 of 6 states reached, 1 of " in "\n".join(lines)
    assert "  waiting, given up: NEITHER TAKEN NOR ARGUED" in lines
    assert "  in fork, attached: argued: simulated processes do not fork; " in "\n".join(lines)
    assert lines[-1] == "A door, open, shut: TAKEN, AND IN NO TABLE"


@pytest.mark.slow
def test_a_run_that_leaves_one_open_writes_its_report_and_fails_where_that_is_asked(
    tmp_path: Path,
) -> None:
    file = tmp_path / "transitions.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/simulation/test_linearizability.py", f"--transitions={file}"]
    alone = environment_of_another_run()
    for more, wanted in (([], 0), (["--all-transitions"], 1)):
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == wanted, done.stdout + done.stderr
        assert "A connection: 0 of 6 states reached, 0 of 33 transitions taken" in done.stdout
    assert "A connection: 0 of 6 states reached" in file.read_text()
