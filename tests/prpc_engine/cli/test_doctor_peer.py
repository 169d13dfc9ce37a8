"""`prpc doctor --peer`: which path a client would take to a node, why not the others, and what the
node is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.cli.checks.peer import compare_clocks, examine_peer, peer_address
from prpc_engine.errors import ConfigError
from prpc_engine.release import VERSION
from tests.held import at
from tests.prpc_engine.cli.test_commands import prpc
from tests.prpc_engine.inside import node_of
from tests.shard.small_memory import run_with_memory

SECRET = "swordfish-swordfish"


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master(secret=SECRET) as master:
        yield master


@pytest.fixture(scope="module")
def service(master: Master) -> Iterator[RpcService]:
    with RpcService(master.address, secret=SECRET) as service:
        service.create_server("test", {"one": lambda: 1})
        yield service


def found(address: str, code: int = 0, **env: str) -> dict[str, str]:
    """What each line of the report says."""
    ran = prpc("doctor", "--json", "--peer", address, PRPC_SECRET=SECRET, **env)
    assert ran.returncode == code, ran.stderr
    return {
        finding["fact"]: f"{finding['verdict']}: {finding['value']}"
        for finding in json.loads(ran.stdout)
    }


def test_a_service_is_reached_by_shared_memory_and_by_tcp_too(service: RpcService) -> None:
    report = found(service.address)
    paths = ["path shm", "path unix", "path tcp", "path verbs"]
    assert list(report) == ["peer", "its version", "its clock", *paths]
    assert report["path verbs"] == "ok: not in PRPC_TRANSPORTS"
    assert re.fullmatch(
        rf"ok: {service.address}: process \d+ of this host; serves test", report["peer"]
    )
    assert re.fullmatch(
        r"ok: [\d.]+ ms (ahead of|behind) ours, give or take [\d.]+ ms", report["its clock"]
    )
    assert re.fullmatch(r"ok: taken: shm://process \d+, round trip \d+ us", report["path shm"])
    assert re.fullmatch(
        r"ok: works, not taken: shm is preferred; unix://process \d+, round trip \d+ us",
        report["path unix"],
    )
    assert re.fullmatch(
        rf"ok: works, not taken: shm is preferred; tcp://{service.address}, round trip \d+ us",
        report["path tcp"],
    )


def test_the_order_and_what_is_forbidden_are_those_of_a_client_here(service: RpcService) -> None:
    report = found(service.address, PRPC_TRANSPORTS="tcp,shm")
    assert report["path tcp"].startswith("ok: taken: tcp://")
    assert report["path shm"].startswith("ok: works, not taken: tcp is preferred")
    assert (
        found(service.address, PRPC_TRANSPORTS="tcp")["path shm"]
        == "ok: forbidden here by PRPC_TRANSPORTS"
    )


@pytest.mark.parametrize("scheme", ["shm", "unix"])
def test_an_address_of_this_host_is_asked_over_its_own_transport(
    service: RpcService, scheme: str
) -> None:
    (address,) = [one for one in node_of(service).addresses if one.startswith(f"{scheme}://")]
    assert found(address, PRPC_TRANSPORTS=scheme)[f"path {scheme}"].startswith(
        f"ok: taken: {scheme}://process "
    )


def test_a_master_is_reached_by_tcp_alone(master: Master) -> None:
    report = found(master.address)
    assert report["peer"].endswith("; serves master")
    assert report["path shm"].startswith("ok: not taken: not offered by tcp://")
    assert report["path tcp"].startswith("ok: taken: ")


@pytest.mark.slow
def test_a_path_that_should_work_and_does_not_is_a_warning_and_not_the_end() -> None:
    """The doctor itself may have no memory for rings."""
    run_with_memory(
        16 << 20,
        """
import json, subprocess, sys
from prpc_engine import Master, RpcService

if __name__ == "__main__":
    with Master() as master, RpcService(master.address) as service:
        program = "import tests.shard.small_memory as small, prpc_engine.cli as cli; "
        program += "small.bound_memory(4096); raise SystemExit(cli.main("
        program += f"['doctor', '--json', '--peer', '{service.address}']))"
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        shm, unix, tcp, _verbs = json.loads(ran.stdout)[-4:]
        assert [path["verdict"] for path in (shm, unix, tcp)] == ["warn", "ok", "ok"], ran.stdout
        assert shm["value"].startswith("failed: no memory for a segment"), shm
        assert unix["value"].startswith("taken: "), unix
        assert tcp["value"].startswith("works, not taken: unix is preferred; "), tcp
""",
    )


def test_a_service_that_sends_others_to_every_address_is_bad_and_what_to_do_is_said(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no way to the master is known
    monkeypatch.setattr("prpc_engine.service.service.address_facing", lambda *_: None)
    with RpcService(master.address, bind="0.0.0.0:0", secret=SECRET) as service:
        port = service.address.rpartition(":")[2]
        report = found(f"127.0.0.1:{port}", 1)
        assert report["its address"] == f"bad: tcp://0.0.0.0:{port}"
        assert report["path tcp"].startswith(
            "ok: works, not taken: shm is preferred; tcp://127.0.0.1"
        )


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nowhere",
        "host:http",
        "host:0",
        "tcp://host",
        "shm://host/0",
        "unix://host/0",
        "http://host:80",
        "a b:1",
    ],
)
def test_what_is_no_address_is_wrong_usage_and_named(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address: "):
        peer_address(address)
    ran = prpc("doctor", "--peer", address)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(r"prpc: '.*' is no address: .*\n", ran.stderr)


def test_nobody_at_the_address_and_another_secret_are_one_line_each(
    service: RpcService, tmp_path: Path
) -> None:
    nobody = prpc("doctor", "--peer", "127.0.0.1:1")
    assert nobody.returncode == 1
    assert (
        nobody.stderr
        == "prpc: 127.0.0.1:1 cannot be reached: tcp: nobody listens at tcp://127.0.0.1:1: "
        "Connection refused\n"
    )
    wrong = tmp_path / "wrong"
    wrong.write_text("mackerel-mackerel\n")
    refused = prpc(
        "doctor", "--peer", service.address, "--secret-file", str(wrong), PRPC_SECRET=SECRET
    )
    assert refused.returncode == 1
    assert "does not hold the same secret" in refused.stderr
    assert "mackerel" not in refused.stderr


def test_the_secret_may_come_from_a_file(service: RpcService, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    ran = prpc("doctor", "--peer", service.address, "--secret-file", str(file))
    assert ran.returncode == 0, ran.stderr
    assert SECRET not in ran.stdout
    missing = prpc("doctor", "--peer", service.address, "--secret-file", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "none' cannot be read: No such file" in missing.stderr
    alone = prpc("doctor", "--secret-file", str(file))
    assert alone.returncode == 2


def test_another_version_and_another_time_are_warnings(master: Master) -> None:
    def be_another(about: dict[str, Any]) -> None:
        about["version"] = "9.9.9"
        about["time_s"] -= 3600.0

    with at("doctor.answered", be_another):
        findings = list(examine_peer(master.address, SECRET.encode()))
    report = {finding.fact: finding for finding in findings}
    assert report["its version"].verdict == report["its clock"].verdict == "warn"
    assert f"this is prpc {VERSION}" in report["its version"].advice


def test_an_answer_that_took_long_is_no_difference_of_the_clocks() -> None:
    late, other = compare_clocks(10.0, 10.0, 14.0), compare_clocks(14.1, 10.0, 12.0)
    assert (late.verdict, late.value) == ("ok", "2000.0 ms behind ours, give or take 2000.0 ms")
    assert (other.verdict, other.value) == (
        "warn",
        "3100.0 ms ahead of ours, give or take 1000.0 ms",
    )
