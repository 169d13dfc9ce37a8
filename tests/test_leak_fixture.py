"""The leak check of tests/leaks.py finds each kind of leak, names it, and lets a clean test
pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# it makes names in /dev/shm, which tests beside it would be blamed for
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parent.parent

# Run by a pytest of its own, since each of these must fail.
LEAKY = """
import atexit, multiprocessing, os, secrets, socket, subprocess, sys, threading, time
from pathlib import Path

import tests.leaks

kept = []
made = []
LETTERS = str.maketrans("0123456789", "ghijklmnop")  # so that no number is in the name
FOREIGN = "not-ours-" + secrets.token_hex(8).translate(LETTERS)


@atexit.register
def remove_what_was_made():
    for path in made:
        path.unlink(missing_ok=True)  # another job's sweep may have taken it: its pid is nobody's


def make_in_shm(name):
    path = Path("/dev/shm") / name
    path.write_bytes(b"x")
    made.append(path)


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_process():
    kept.append(subprocess.Popen(SLEEPER))


def test_grandchild():
    script = f"import subprocess; subprocess.run({SLEEPER!r})"
    child = subprocess.Popen([sys.executable, "-c", script])
    kept.append(child)
    while not list(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()):
        os.sched_yield()


def test_zombie():
    child = subprocess.Popen([sys.executable, "-c", ""])
    kept.append(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_segment_of_ours():
    make_in_shm(f"prpc.{os.getuid()}.{os.environ['PRPC_JOB']}.{os.getpid()}.1.abc")


def test_shared_memory_of_another_kind():
    make_in_shm(f"not-ours-{os.getpid()}")


def test_shared_memory_that_is_open():
    path = Path("/dev/shm") / f"{FOREIGN}-open"
    kept.append(path.open("wb"))
    made.append(path)


def test_shared_memory_that_another_program_makes_meanwhile_is_not_ours():
    make_in_shm(f"{FOREIGN}-other")


def test_socket():
    kept.append(socket.socket())


def test_pipe():
    kept.append(os.pipe())


def test_thread():
    threading.Thread(target=threading.Event().wait, name="prpc-progress", daemon=True).start()


def test_after_all_these_a_clean_test_passes():
    assert True


def test_a_child_that_is_on_its_way_out_is_waited_for():
    tests.leaks.GRACE_S = 60.0
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0.1,))
    process.start()


def test_a_segment_of_another_job_is_not_ours():
    make_in_shm(f"prpc.{os.getuid()}.otherjob.1.1.abc{os.getpid()}")
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaky")
    (folder / "test_leaky.py").write_text(LEAKY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.leaks",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-c",
        os.devnull,
    ]
    env = dict(os.environ, PYTHONPATH=str(ROOT), PRPC_TEST_GRACE_S="0.3", COLUMNS="200")
    ran = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("test_process", "time.sleep(600)"),
        ("test_grandchild", "subprocess.run"),
        ("test_zombie", "nobody waited for it"),
        ("test_segment_of_ours", "/dev/shm/prpc."),
        ("test_shared_memory_of_another_kind", "/dev/shm/not-ours-"),
        ("test_shared_memory_that_is_open", "-open"),
        ("test_socket", "descriptor of socket:"),
        ("test_pipe", "descriptor of pipe:"),
        ("test_thread", "thread prpc-progress"),
    ],
)
def test_a_leak_fails_the_test_and_is_named(report: str, test: str, named: str) -> None:
    section = report.partition(f"_ ERROR at teardown of {test} _")[2].partition("\n_____")[0]
    assert "left behind:" in section, report
    assert named in section


def test_a_leaked_grandchild_is_named_beside_its_parent(report: str) -> None:
    section = report.partition("_ ERROR at teardown of test_grandchild _")[2].partition("\n_____")[
        0
    ]
    assert section.count("process ") >= 2


@pytest.mark.parametrize(
    "test",
    [
        "test_after_all_these_a_clean_test_passes",
        "test_a_child_that_is_on_its_way_out_is_waited_for",
        "test_a_segment_of_another_job_is_not_ours",
        "test_shared_memory_that_another_program_makes_meanwhile_is_not_ours",
    ],
)
def test_a_test_that_leaves_nothing_passes(report: str, test: str) -> None:
    assert f"ERROR at teardown of {test}" not in report
    assert f"::{test}" in report


def test_leaked_children_are_killed(report: str) -> None:
    assert "9 errors" in report.splitlines()[-1]
    # in the summary again, where CI is set
    leaked = set(re.findall(r"^  process (\d+): ", report, re.MULTILINE))
    assert len(leaked) == 4
    assert not [pid for pid in leaked if Path(f"/proc/{pid}").exists()]
