"""`prpc config`: what holds, where it comes from, and what is wrong with it; and what the doctor
makes of that.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from prpc_engine import cli
from prpc_engine.cli import settings
from prpc_engine.cli.checks.host import Host
from prpc_engine.cli.checks.settings import settings as settings_check
from prpc_engine.settings import layers
from prpc_engine.settings.layers import Found
from shard import Limits
from tests.prpc_engine.cli.test_commands import prpc

ROOT = Path(__file__).parents[3]
CLUSTER = json.dumps({"cluster": {"ps": ["h:1"], "worker": ["h:2", "h:3"]}})


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        *settings._ENGINE,
        *settings.SECRET_VARIABLES,
        *(name for one in settings.IN_SECTIONS.values() for name in one.names),
        "PRPC_CONFIG",
        "TF_CONFIG",
        "PRPC_PS_CORE_NUMBER",
        "NETWORK_PS_CORE_NUMBER",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], code: int = cli.OK) -> dict[str, list[str]]:
    """name -> [value, origin]."""
    assert cli.main(["config", "--json"]) == code
    return {
        one["name"]: [one["value"], one["origin"]] for one in json.loads(capsys.readouterr().out)
    }


def test_without_anything_set_all_is_by_default_and_every_limit_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = told(capsys)
    assert {origin for _, origin in found.values()} == {"default"}
    assert found["node.transports"][0] == "shm, unix, tcp"
    for field in dataclasses.fields(Limits):
        assert found[f"limits.{field.name}"][0] == str(field.default)


def test_what_a_process_of_each_role_gets_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "usable_cores", lambda: [0, 1])
    found = told(capsys)
    for role in ("ps", "worker"):
        assert found[f"shards.count of {role}"] == ["0", "default"]
        assert found[f"shards.polling of {role}"] == ["False", "default"]
        assert found[f"shards.pin_cores of {role}"] == ["False", "default"]
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "100")
    monkeypatch.setenv("PRPC_SHARDS", "1")
    monkeypatch.setenv("PS_DISABLE_PIN_CORES", "0")
    found = told(capsys)
    by = "NETWORK_PS_CORE_NUMBER='100'"
    assert found["shards.count of ps"] == ["2", f"{by}: clamped to 2 of 2 cores"]
    assert found["shards.pin_cores of ps"] == ["True", "PS_DISABLE_PIN_CORES='0'"]
    assert found["shards.count of worker"] == ["1", "PRPC_SHARDS='1'"]
    monkeypatch.setattr(layers, "usable_cores", lambda: [0])
    assert told(capsys)["shards.count of ps"][0] == "0", "one core is the process itself"


def test_limits_that_somebody_breaks_as_they_are_told_are_told_as_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, limits_of = tmp_path / "own.toml", settings.limits_of

    def read_before(found: Mapping[str, Found]) -> Limits:
        limits = limits_of(found)
        file.write_text("[limits]\nconnections_per_peer = 'none'\n")
        return limits

    file.write_text("[limits]\nconnections_per_peer = 3\n")
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    monkeypatch.setattr(settings, "limits_of", read_before)
    assert told(capsys)["limits.connections_per_peer"] == ["3", f"{file}: [limits]"]


def test_each_setting_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[limits]\nconnections_per_peer = 3\n[transport]\ntcp_checksum = true\n"
        "[shards]\ncount = 1\n"
    )
    environment = {
        "PRPC_CONFIG": str(file),
        "PRPC_TRANSPORTS": "tcp",
        "PRPC_ENABLE_POLLING": "1",
        "PRPC_SECRET": "swordfish-swordfish",
        "NETWORK_PS_CORE_NUMBER": "8",
        "TF_CONFIG": CLUSTER,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["config"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert not any("swordfish" in line for line in lines)
    rows = [re.split("  +", line) for line in lines]
    assert ["node.transports", "tcp", "PRPC_TRANSPORTS='tcp'"] in rows
    found = told(capsys)
    assert found["shards.count"] == ["1", f"{file}: [shards]"]
    assert found["shards.polling"] == ["True", "PRPC_ENABLE_POLLING='1'"]
    assert found["shards.pin_cores"] == ["each shard stays on one core", "default"]
    assert found["secret"] == ["set", "PRPC_SECRET"]
    assert found["limits.connections_per_peer"] == ["3", f"{file}: [limits]"]
    assert found["limits.ring_bytes"][1] == "default"
    assert found["transport.tcp_checksum"] == ["True", f"{file}: [transport]"]
    assert found["cores of ps"] == [
        "3",
        "NETWORK_PS_CORE_NUMBER='8': min(8, 3 tasks in the cluster)",
    ]
    assert found["data goes by rule"][0] == "exchange"
    (tmp_path / ".endpoint_map").write_text("h:1=h:11\nh:2=h:12\nh:3=h:13\n")
    assert told(capsys)["data goes by rule"][0] == "file"


WRONG = {
    "PRPC_TRANSPORTS": "rdma",
    "PRPC_SLAB_BYTES_MAX": "few",
    "PRPC_HUGE_PAGES": "maybe",
    "PRPC_DEBUG_LEASES": "maybe",
    "PRPC_ENABLE_POLLING": "maybe",
    "PRPC_SHARDS": "some",
    "PRPC_PIN_CORES": "maybe",
    "PRPC_CONFIG": "/nowhere.toml",
    "PRPC_SECRET_FILE": "/nowhere",
    "PRPC_TLS_CERT": "/nowhere.pem",
    "NETWORK_PS_CORE_NUMBER": "0",
    "TF_CONFIG": "{",
}


NEVER_EMPTY = [
    "PRPC_DEBUG_LEASES",
    "PRPC_ENABLE_POLLING",
    "PRPC_PIN_CORES",
    "PRPC_SECRET",
    "PRPC_SECRET_FILE",
    "PRPC_TLS_CA",
    "PRPC_TLS_CERT",
    "PRPC_TLS_KEY",
]
REFUSED = [*WRONG.items(), *((name, "") for name in NEVER_EMPTY)]


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_what_makes_no_sense_is_a_line_and_the_rest_is_told(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert cli.main(["config"]) == cli.WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith(f"prpc: {name}")
    assert captured.err.count("\n") == 1
    assert len([line for line in captured.out.splitlines() if re.search(r"  -  +", line)]) == 1
    assert len(captured.out.splitlines()) > 15


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_the_doctor_says_so_too(name: str, text: str) -> None:
    ran = prpc("doctor", "--json", **{name: text})
    assert ran.returncode == cli.FAILED, ran.stderr
    assert [
        name in finding["value"]
        for finding in json.loads(ran.stdout)
        if finding["verdict"] == "bad"
    ] == [True]


@pytest.mark.parametrize(
    "command", [["top", "127.0.0.1:1"], ["master"], ["doctor", "--peer", "127.0.0.1:1"]]
)
@pytest.mark.parametrize("name", ["PRPC_DEBUG_LEASES", "PRPC_HUGE_PAGES", "PRPC_ENABLE_POLLING"])
def test_commands_that_need_the_engine_refuse_it_in_a_line(command: list[str], name: str) -> None:
    ran = prpc(*command, **{name: "maybe"})
    assert ran.returncode == cli.WRONG_USAGE
    assert ran.stderr.startswith(f"prpc: {name}='maybe': ")
    assert ran.stderr.count("\n") == 1


def test_a_variable_that_nothing_reads_is_told_with_the_one_that_may_be_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORT", "tcp")
    monkeypatch.setenv("SEASTAR_CORE_NUMBER", "4")
    assert cli.main(["config"]) == cli.OK
    assert capsys.readouterr().err.splitlines() == [
        "prpc: nothing reads PRPC_TRANSPORT: is PRPC_TRANSPORTS meant?",
        "prpc: SEASTAR_CORE_NUMBER has no effect, it was for grpc+seastar",
    ]
    warned = [finding.fact for finding in settings_check(Host()) if finding.verdict == "warn"]
    assert warned == ["variable PRPC_TRANSPORT", "variable SEASTAR_CORE_NUMBER"]


def test_every_variable_in_the_code_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        path.read_text()
        for room in ("prpc_engine", "shard")
        for path in (ROOT / room).rglob("*.py")
    ]
    names = {name for text in sources for name in re.findall(r"\"(PRPC_[A-Z_]+)\"", text)}
    assert len(names) > 20
    for name in names:
        monkeypatch.setenv(name, "x")
    assert settings.unread() == {}
