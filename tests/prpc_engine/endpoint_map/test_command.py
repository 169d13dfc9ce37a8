"""`prpc endpoint-map`: what it writes, what it finds, and its exit codes."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prpc_engine import cli
from prpc_engine.cli import probe
from prpc_engine.cli.probe import ProbeAnswer, probe_all
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import parse_tf_config
from prpc_engine.settings.endpoint_map import EndpointMap, data_endpoints
from tests.prpc_engine.cli.test_commands import prpc
from tests.prpc_engine.endpoint_map.goldens import golden, golden_lines
from tests.prpc_engine.processes import PATIENCE_S

TF_CONFIG = json.dumps(
    {
        "cluster": {
            "chief": ["Chief.example:2222"],
            "ps": ["ps0:2222", "ps1:2222"],
            "worker": {"0": "w0:2222", "4": "[fd00::4]:2222"},
        },
        "task": {"type": "ps", "index": 0},
    }
)
SLURM = {"SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_TASKS_PER_NODE": "2(x3),1"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment without any cluster."""
    for name in ("TF_CONFIG", "PRPC_ENDPOINT_MAP", "TF_SEASTAR_ENDPOINT_MAP_PATH", *SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# make

MADE: dict[str, tuple[list[str], dict[str, str]]] = {
    "make_tf_config.txt": ([], {"TF_CONFIG": TF_CONFIG}),
    "make_host_flags.txt": (
        [
            "--ps_hosts",
            "ps0:2222,ps1:2222",
            "--worker-hosts",
            "10.0.0.1:2222",
            "--port-offset",
            "1111",
        ],
        {},
    ),
    "make_slurm.txt": (["--slurm"], SLURM),
    "make_hosts.txt": (
        [
            "--hosts",
            "a,b[1-2]",
            "--tasks-per-node",
            "2",
            "--base-port",
            "5000",
            "--port-offset",
            "-100",
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_a_map_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, environ = MADE[name]
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert cli.main(["endpoint-map", "make", *arguments]) == cli.OK
    assert capsys.readouterr().out == golden(name)


def test_what_is_made_fits_the_cluster_it_was_made_for() -> None:
    cluster = parse_tf_config(TF_CONFIG).cluster
    endpoints = data_endpoints(cluster, EndpointMap.parse(golden("make_tf_config.txt"), "made"))
    assert endpoints.addresses == data_endpoints(cluster, None, 1000).addresses
    assert not endpoints.unused


def test_a_file_is_replaced_as_a_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / ".endpoint_map"
    file.write_text("old")
    assert cli.main(["endpoint-map", "make", "--hosts", "a", "-o", ".endpoint_map"]) == cli.OK
    assert file.read_text() == "a:2222=a:3222\n"
    assert os.listdir(here) == [".endpoint_map"]
    assert capsys.readouterr().out == ".endpoint_map: 1 tasks\n"


BAD_MAKE: dict[str, tuple[list[str], dict[str, str]]] = {
    "no cluster": ([], {}),
    "empty cluster": ([], {"TF_CONFIG": "{}"}),
    "bad TF_CONFIG": ([], {"TF_CONFIG": '{"cluster": {"ps": ["p"]}}'}),
    "two clusters": (["--hosts", "a", "--worker-hosts", "b:1"], {}),
    "no Slurm": (["--slurm"], {}),
    "bad nodes": (["--hosts", "a[1-"], {}),
    "bad counts": (["--slurm"], {**SLURM, "SLURM_TASKS_PER_NODE": "many"}),
    "counts for other nodes": (["--slurm"], {**SLURM, "SLURM_TASKS_PER_NODE": "2"}),
    "no tasks on a node": (["--hosts", "a", "--tasks-per-node", "0"], {}),
    "tasks per node of host flags": (["--worker-hosts", "a:1", "--tasks-per-node", "2"], {}),
    "a host twice": (["--hosts", "a,a"], {}),
    "base port": (["--hosts", "a", "--base-port", "70000"], {}),
    "port above the last": (["--hosts", "a", "--base-port", "65535", "--tasks-per-node", "2"], {}),
    "offset 0": (["--hosts", "a", "--port-offset", "0"], {}),
    "offset too small": (["--hosts", "a", "--port-offset", "1", "--tasks-per-node", "2"], {}),
    "offset too large": (["--hosts", "a", "--port-offset", "65000"], {}),
    "no folder": (["--hosts", "a", "-o", "nowhere/.endpoint_map"], {}),
}


@pytest.mark.parametrize("case", BAD_MAKE)
def test_what_cannot_be_made_is_one_line(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, environ = BAD_MAKE[case]
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert cli.main(["endpoint-map", "make", *arguments]) == cli.WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"prpc: {golden_lines('make_errors.txt')[case]}\n"
    assert not os.listdir()


# check


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of 127.0.0.1 where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """One where nobody does, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_check_says_who_answers(here: Path, listening: int, closed: int) -> None:
    (here / ".endpoint_map").write_text(f"127.0.0.1:{listening}=localhost:{closed}\n")
    ran = prpc("endpoint-map", "check", "--dir", str(here), "--timeout", "10")
    assert ran.returncode == cli.FAILED, ran.stderr
    control, data, summary = ran.stdout.splitlines()
    assert control == f"control 127.0.0.1:{listening}  answers at 127.0.0.1"
    assert data.startswith(f"data    localhost:{closed}  ")
    assert "127.0.0.1: Connection refused" in data
    assert summary == f"{here}/.endpoint_map: 1 tasks, 2 addresses: 1 answer, 1 do not"


def test_check_succeeds_when_all_answer(
    here: Path, listening: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / ".endpoint_map").write_text(f"127.0.0.1:{listening}=localhost:{listening}\n")
    assert cli.main(["endpoint-map", "check"]) == cli.OK
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("1 tasks, 2 addresses: 2 answer, 0 do not")
    )


def test_check_without_probing_looks_up_names(
    here: Path, closed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / ".endpoint_map"
    file.write_text(f"127.0.0.1:{closed}=127.0.0.2:{closed}\n")
    assert cli.main(["endpoint-map", "check", "--no-probe"]) == cli.OK
    assert f"data    127.0.0.2:{closed}  resolves to 127.0.0.2\n" in capsys.readouterr().out
    file.write_text(f"127.0.0.1:{closed}=a..b:{closed}\n")  # no name that any DNS could have
    assert cli.main(["endpoint-map", "check", "--no-probe"]) == cli.FAILED
    assert f"data    a..b:{closed}  does not resolve: " in capsys.readouterr().out


def test_check_holds_the_map_against_tf_config(
    here: Path, listening: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"ps": [f"127.0.0.1:{listening}"]}}))
    file = here / ".endpoint_map"
    file.write_text(f"old:1=old:2\n127.0.0.1:{listening}=localhost:{listening}\n")
    assert cli.main(["endpoint-map", "check"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}:1: old:1 is the address of no task in TF_CONFIG"
    assert not any("old:2" in line for line in lines[1:])
    file.write_text("old:1=old:2\n")
    assert cli.main(["endpoint-map", "check"]) == cli.WRONG_USAGE
    assert capsys.readouterr().err.startswith(
        f"prpc: {file} has no line for ps 0 (127.0.0.1:{listening}): "
    )


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (
            [],
            None,
            "/.endpoint_map is not there: `prpc endpoint-map make -o .endpoint_map` writes one, "
            "--dir names another folder",
        ),
        (
            ["--dir", "nowhere"],
            None,
            "/nowhere is no folder; the one that holds .endpoint_map is expected",
        ),
        (
            ["--dir", "."],
            None,
            "/.endpoint_map is not there; make one with `prpc endpoint-map make`",
        ),
        (
            [],
            "h:1",
            "/.endpoint_map:1: 'h:1' is no entry: control host:port=data host:port expected, "
            "such as ps0:2222=ps0:3333",
        ),
        (
            [],
            "# none yet\n",
            "/.endpoint_map has no line for any task: control host:port=data host:port expected, ",
        ),
        (
            [],
            "a:1=c:3\nb:2=c:3\n",
            "/.endpoint_map:2: data of entry 1 goes to c:3, and so does that of entry 0 (",
        ),
        (
            [],
            "a:1=b:2\nb:2=c:3\n",
            "/.endpoint_map:1: data of entry 0 goes to b:2, the control address of entry 1: ",
        ),
        (["--timeout", "0"], "", "--timeout=0: more than 0 and at most 60 seconds are allowed"),
        (["--timeout", "nan"], "", "--timeout=nan: more than 0 and at most 60 seconds are allowed"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    arguments: list[str],
    text: str | None,
    said: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (here / ".endpoint_map").write_text(text)
    assert cli.main(["endpoint-map", "check", *arguments]) == cli.WRONG_USAGE
    assert said in capsys.readouterr().err


def test_a_tf_config_without_a_cluster_is_nothing_to_hold_a_map_against(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / ".endpoint_map").write_text("a:1=a:2\n")
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert cli.main(["endpoint-map", "check"]) == cli.WRONG_USAGE
    assert capsys.readouterr().err.startswith(
        "prpc: TF_CONFIG='{}' has no cluster to hold the map against: "
    )


# Probing


def test_a_host_that_swallows_everything_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        filling = [socket.socket() for _ in range(4)]  # more than wait to be accepted
        try:
            for each in filling:
                each.setblocking(False)
                each.connect_ex(place)
            assert select.select([full], [], [], PATIENCE_S)[0], "one of them waits to be accepted"
            address = Address(*place)
            assert probe_all([address], 0.05, connect=True) == {
                address: ProbeAnswer(False, "127.0.0.1: no answer in 0.05 s")
            }
        finally:
            for each in filling:
                each.close()


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(*args: object, **kinds: object) -> list[object]:
        asked.set()
        release.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(probe, "RESOLVE_S_MAX", 0.01)
    monkeypatch.setattr(probe.socket, "getaddrinfo", hang)
    address = Address("a", 1)
    assert probe_all([address], 0.01, connect=True) == {
        address: ProbeAnswer(False, "the resolver does not answer")
    }
    assert asked.wait(PATIENCE_S)  # else it would ask the real one, once this test is over
    release.set()


def test_many_are_asked_at_a_time_and_told_in_order(listening: int) -> None:
    addresses = [
        Address("127.0.0.1", listening),
        *(Address(f"127.0.1.{host}", listening) for host in range(1, 200)),
    ]
    answers = probe_all(addresses, 5.0, connect=True)
    assert list(answers) == addresses
    assert [answer.ok for answer in answers.values()] == [True] + [False] * 199


def test_what_is_no_file_is_written_to_and_a_link_stays_one(here: Path) -> None:
    make = ["endpoint-map", "make", "--ps-hosts", "a:1", "-o"]
    (here / "link").symlink_to(here / "real")
    os.mkfifo(here / "pipe")
    assert cli.main([*make, "link"]) == cli.OK
    assert (here / "link").is_symlink()
    written = (here / "real").read_text()
    assert cli.main([*make, "pipe"]) == cli.WRONG_USAGE  # nobody reads it
    reader = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert cli.main([*make, "pipe"]) == cli.OK
        assert os.read(reader, 1 << 16).decode() == written
    finally:
        os.close(reader)
    assert (here / "pipe").is_fifo()
    assert sorted(path.name for path in here.iterdir()) == ["link", "pipe", "real"]
