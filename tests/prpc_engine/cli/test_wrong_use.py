"""Whatever is asked of a command, and whatever becomes of its output: one line that says what to
do, and never a traceback.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from prpc_engine import Master, cli
from prpc_engine.master.client import MasterClient
from tests.program import run_to_end, wait_until
from tests.prpc_engine.cli.test_commands import ROOT, TIMEOUT_S, started_prpc

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
INT_OF_MANY_DIGITS = "9" * 5000


class Ran(NamedTuple):
    """What became of a command in this process: what it raises is no line, but a failure of the
    test.
    """

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    def ran(*arguments: str, **env: str) -> Ran:
        for name in ("PRPC_SECRET", "PRPC_SECRET_FILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return Ran(cli.main(arguments), *capsys.readouterr())

    return ran


def check_one_line(ran: Ran | subprocess.CompletedProcess[str], code: int, said: str) -> None:
    assert (ran.returncode, ran.stderr.count("\n")) == (code, 1), ran.stderr
    assert ran.stderr.startswith("prpc: ")
    assert said in ran.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_an_option_that_is_not_there_is_wrong_usage(run: Callable[..., Ran], command: str) -> None:
    needed = {
        "top": ["127.0.0.1:1"],
        "bench": ["ring"],
        "endpoint-map": ["make"],
        "launch": ["-s", "1", "-w", "1"],
        "completion": ["bash"],
    }
    ran = run(command, *needed.get(command, []), "--no-such-option")
    usage, error = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert usage.startswith(f"Usage: prpc {command} ")
    assert error.startswith(f"prpc {command}")
    assert "No such option '--no-such-option'" in error


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["docter"], "'doctor'"),
        (["--versio"], "'--version'"),
        (["gc", "--dry-rum"], "'--dry-run'"),
        (["endpoint-map", "mak"], "'make'"),
        (["endpoint-map", "make", "--ps-host", "a:1"], "'--ps-hosts'"),
        (["launch", "-s", "1", "-w", "1", "--timeout", "4", "--", "true"], "'--timeout-s'"),
    ],
)
def test_a_misspelt_or_shortened_word_is_wrong_usage_and_says_which_is_meant(
    run: Callable[..., Ran], arguments: list[str], meant: str
) -> None:
    ran = run(*arguments)
    usage, error = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert usage.startswith("Usage: prpc ")
    assert "Did you mean" in error
    assert meant in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top"], "HOST:PORT"),
        (["top", "h:1", "--interval", "often"], "often"),
        (["demo", "--epochs", INT_OF_MANY_DIGITS], "--epochs"),
        (["launch", "-s", "two", "-w", "1"], "two"),
        (["launch", "-s", INT_OF_MANY_DIGITS, "-w", "1"], "-s"),
        (["run"], "SCRIPT"),
        (["run", "--workers", "1.5", "x.py"], "1.5"),
        (["endpoint-map"], "<part>"),
        (["endpoint-map", "check", "--timeout", "soon"], "soon"),
    ],
)
def test_an_argument_of_another_type_is_wrong_usage(
    run: Callable[..., Ran], arguments: list[str], said: str
) -> None:
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "nowhere"], "host:port expected"),
        (["top", "h:1", "--interval", "nan"], "--interval nan: 0.1 to"),
        (["top", "h:1", "--secret-file", "/nowhere"], "'/nowhere' cannot be read: No such file"),
        (["top", "h:1", "--secret-file", "/"], "'/' cannot be read: it is a folder"),
        (
            ["top", "h:1", "--secret-file", "/dev/zero"],
            "'/dev/zero' cannot be read: it is a device",
        ),
        (["doctor", "--secret-file", "x"], "--secret-file is for --peer alone"),
        (["doctor", "--peer", "x"], "host:port expected"),
        (
            ["doctor", "--peer", "h:1", "--secret-file", "/dev/null"],
            "'/dev/null' cannot be read: it is a device",
        ),
        (["master", "--bind", "h:-1"], "port '-1' is no number"),
        (["master", "--bind", "0.0.0.0:0"], "without a secret of the job"),
        (["demo", "--json", "/nowhere/x"], "/nowhere/x: it cannot be written: No such file"),
        (["demo", "--kill-server", "--servers", "1"], "at least 2 servers"),
        (["launch", "-s", "1", "-w", "1", "--", "/"], "'/' cannot be run: Permission denied"),
        (
            ["launch", "-s", "1", "-w", "1", "--timeout-s", "nan", "--", "true"],
            "a job of nan seconds",
        ),
        (["run", "/nowhere.py"], "'/nowhere.py' is not there"),
        (["run", "/"], "'/' is not there"),
        (["endpoint-map", "make", "--ps-hosts", "a:1", "-o", ""], "is not a file's name"),
        (["endpoint-map", "make", "--ps-hosts", "a:1", "-o", "/"], "is not a file's name"),
        (
            ["endpoint-map", "make", "--ps-hosts", "a:1", "-o", "/nowhere/x"],
            "cannot be written: No such file",
        ),
        (["endpoint-map", "make", "--hosts", "n[1-999999999]"], "more than 65536 nodes"),
        (["endpoint-map", "check", "--dir", "/nowhere"], "/nowhere is no folder"),
        (["endpoint-map", "check", "--timeout", "nan"], "--timeout=nan"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line(
    run: Callable[..., Ran], arguments: list[str], said: str
) -> None:
    check_one_line(run(*arguments), cli.WRONG_USAGE, said)


@pytest.fixture
def closed() -> Iterator[str]:
    """An address at which nobody listens, and which nobody is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("command", [["top"], ["doctor", "--peer"]])
def test_nobody_at_an_address_is_said_in_a_line(
    run: Callable[..., Ran], command: list[str], closed: str
) -> None:
    check_one_line(run(*command, closed), cli.FAILED, closed)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PRPC_SECRET_FILE", "it is a device"),
        ("PRPC_CONFIG", "it is a device"),
        ("PRPC_TLS_KEY", "it is a device"),
    ],
)
def test_a_file_without_an_end_is_one_line(
    run: Callable[..., Ran], variable: str, said: str
) -> None:
    both = {"PRPC_TLS_CERT": "/dev/zero"} if "TLS" in variable else {}
    check_one_line(run("master", **both, **{variable: "/dev/zero"}), cli.WRONG_USAGE, said)


@pytest.mark.parametrize("command", [["config"], ["doctor"]])
def test_a_path_that_is_no_text_is_shown_as_it_can_be(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe")
    path.write_text("a secret that is long enough")
    path.chmod(0o600)
    ran = started_prpc(*command, PRPC_SECRET_FILE=str(path), LC_ALL="C.UTF-8")
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert "PRPC_SECRET_FILE" in ran.stdout


def without_output(*arguments: str) -> subprocess.CompletedProcess[str]:
    """It has no standard output at all."""
    return subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "prpc_engine.cli", *arguments],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


PRINTING: Sequence[list[str]] = (
    ["version"],
    ["version", "--json"],
    ["config"],
    ["doctor"],
    ["gc", "--dry-run"],
    ["--help"],
    ["--version"],
    ["endpoint-map", "make", "--ps-hosts", "a:1"],
)


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_output_that_finds_no_room_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        ran = run_to_end(
            "prpc_engine.cli",
            *arguments,
            env=os.environ,
            timeout_s=TIMEOUT_S,
            stdout=full.fileno(),
        )
    check_one_line(ran, cli.FAILED, "No space left on device; ")
    assert "the output" in ran.stderr, "and says where there is none"


@pytest.mark.parametrize("arguments", PRINTING[:6], ids=" ".join)
def test_a_command_without_an_output_works(arguments: list[str]) -> None:
    ran = without_output(*arguments)
    assert (ran.returncode, ran.stderr) == (cli.OK, "")


# -- Ctrl-C ----------------------------------------------------------------------------------------


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, as a terminal gives it; none of its processes outlives the
    block.
    """
    command = [sys.executable, "-m", "prpc_engine.cli", *arguments]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def check_interrupted(process: subprocess.Popen[str]) -> None:
    """Ctrl-C goes to all processes that the terminal shows."""
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in told, told
    assert process.returncode == cli.INTERRUPTED


def test_ctrl_c_ends_top_in_a_line() -> None:
    with Master() as master, started("top", master.address, "--json", "--interval", "0.1") as top:
        assert top.stdout is not None
        assert top.stdout.readline()
        check_interrupted(top)


@pytest.mark.parametrize("command", [["top"], ["doctor", "--peer"]])
def test_ctrl_c_ends_what_waits_for_a_peer_that_says_nothing(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_S)
        with started(*command, f"127.0.0.1:{silent.getsockname()[1]}") as waiting:
            connected, _ = silent.accept()
            with connected:
                check_interrupted(waiting)


def is_connecting(pid: int) -> bool:
    return any(
        one.status == psutil.CONN_SYN_SENT for one in psutil.Process(pid).net_connections("tcp")
    )


def test_ctrl_c_ends_a_check_of_hosts_that_swallow_everything(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        filling = [socket.socket() for _ in range(4)]  # more than wait to be accepted
        try:
            for each in filling:
                each.setblocking(False)
                each.connect_ex(place)
            (tmp_path / ".endpoint_map").write_text(f"127.0.0.1:{place[1]}=127.0.0.1:9\n")
            with started(
                "endpoint-map", "check", "--dir", str(tmp_path), "--timeout", "60"
            ) as check:
                wait_until(
                    lambda: check.poll() is not None or is_connecting(check.pid), "its connecting"
                )
                check_interrupted(check)
        finally:
            for each in filling:
                each.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "-s", "1", "-w", "1", "--", "sh", "-c", "echo up; exec sleep 1000"],
        ["master"],
        ["bench", "ring", "--quick"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_ends_what_runs_for_long(arguments: list[str], tmp_path: Path) -> None:
    with started(*arguments) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        check_interrupted(running)


@pytest.mark.parametrize(
    "value", ["", "[]", "{}", '{"rank": "x", "addresses": []}', '{"rank": 7, "addresses": []}']
)
def test_what_a_member_has_put_into_the_tree_in_place_of_a_shard_is_a_line_of_top(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Master() as master, MasterClient(master.address) as member:
        member.tree_node_add("/_shard_/x\x1b[2J", value)
        assert cli.main(["top", master.address, "--once", "--interval", "0.1"]) == cli.OK
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert (
        "/_shard_/x\\x1b[2J holds what no shard has put there" in said
        or "rank 7, shard: it has no address" in said
    )
