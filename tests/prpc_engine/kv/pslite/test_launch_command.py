"""`prpc launch` as a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.cli import main
from tests.prpc_engine.processes import PATIENCE_S, wait_until

NODE = """
import os, pathlib, sys
path = pathlib.Path(sys.argv[1], os.environ["DMLC_ROLE"] + "".join(sys.argv[2:]))
with path.open("a") as file:
    file.write("x")
sys.exit(int(os.environ["DMLC_ROLE"] == "server" and path.stat().st_size >= 3) * 5)
"""

AGAIN = """
import os, pathlib, sys
if os.environ["DMLC_ROLE"] == "worker":
    attempt = os.environ["DMLC_NUM_ATTEMPT"]
    with pathlib.Path(sys.argv[1], "worker").open("a") as file:
        file.write(attempt)
    sys.exit(0 if attempt == "2" else 254)
"""

PAUSE = (
    "import os, pathlib, signal, sys; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); "
    "signal.pause()"
)


def runs(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text()) for path in folder.iterdir()}


def test_it_runs_every_role_and_repeats_until_the_first_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = ["launch", "-s", "1", "-w", "2", "--timeout-s", "60", "--repeat"]
    assert main([*job, "2", "--", sys.executable, "-c", NODE, str(tmp_path)]) == 0
    assert runs(tmp_path) == {"scheduler": 2, "server": 2, "worker": 4}
    assert main([*job, "9", "--", sys.executable, "-c", NODE, str(tmp_path)]) == 5
    assert "run 1 of 9: server 0 ended with 5" in capfd.readouterr().err
    assert runs(tmp_path)["server"] == 3


def test_one_that_asks_for_it_is_started_again_so_often_and_told_its_attempt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = ["launch", "-s", "1", "-w", "1", "--timeout-s", "60", "--restarts"]
    assert main([*job, "2", "--", sys.executable, "-c", AGAIN, str(tmp_path)]) == 0
    assert (tmp_path / "worker").read_text() == "012"
    assert "worker 0 ended with 254; attempt 2 begins; restarts left: 0" in capfd.readouterr().err
    assert main([*job, "1", "--", sys.executable, "-c", AGAIN, str(tmp_path)]) == 254
    assert (tmp_path / "worker").read_text() == "01201"


def test_several_customers_are_one_process_that_is_told_its_role(tmp_path: Path) -> None:
    assert (
        main(
            [
                "launch",
                "-s",
                "1",
                "-w",
                "3",
                "--customers",
                "--",
                sys.executable,
                "-c",
                NODE,
                str(tmp_path),
            ]
        )
        == 0
    )
    assert runs(tmp_path) == {"schedulerscheduler": 1, "serverserver": 1, "workerworker": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-s", "0", "-w", "1", "--", "true"], "0 servers: 1 to"),
        (["-s", "1", "-w", "1"], "no command to run"),
        (
            ["-s", "1", "-w", "1", "--repeat", "0", "--", "true"],
            "--repeat=0: a whole number from 1",
        ),
        (
            ["-s", "1", "-w", "1", "--timeout-s", "inf", "--", "true"],
            "a job of inf seconds: more than 0 and at most",
        ),
        (
            ["-s", "1", "-w", "1", "--timeout-s", "-1", "--", "true"],
            "a job of -1.0 seconds: more than 0 and at most",
        ),
        (["-s", "1", "-w", "1", "--restarts", "-1", "--", "true"], "-1 restarts: 0 to"),
        (
            ["-s", "1", "-w", "1", "--", "/no/such/command"],
            "'/no/such/command' cannot be run: No such file",
        ),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param([], id="itself"),
        pytest.param(["sh", "-c", '"$0" "$@"; true'], id="of a shell"),
        pytest.param(
            ["sh", "-c", 'trap \'\' TERM; "$0" "$@"; true'],
            id="of a shell that ignores SIGTERM",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launcher_that_is_killed_leaves_no_process_behind(
    tmp_path: Path, wrapper: list[str]
) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "prpc_engine.cli",
            "launch",
            "-s",
            "1",
            "-w",
            "1",
            "--",
            *wrapper,
            sys.executable,
            "-c",
            PAUSE,
            str(tmp_path),
        ]
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "three processes")
    launcher.kill()
    launcher.wait(PATIENCE_S)
    for path in tmp_path.iterdir():
        wait_until(
            lambda pid=path.name: not os.path.exists(f"/proc/{pid}/exe"), "the end of a process"
        )
