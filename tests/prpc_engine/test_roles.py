"""What the variables about shards, polling and cores make of each kind of server, in processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, NodeConfig, RpcService
from prpc_engine.errors import ConfigError
from prpc_engine.kv import ElasticServer
from prpc_engine.service import cores
from tests.program import ROOT, UNTIL_S
from tests.prpc_engine.cluster.tasks import fresh_host
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.roles import RoleProcess

CORES = sorted(os.sched_getaffinity(0))[:2]
VARIABLES = (
    "NETWORK_PS_CORE_NUMBER",
    "NETWORK_WORKER_CORE_NUMBER",
    "PS_ENABLE_POLLING",
    "WORKER_ENABLE_POLLING",
    "PS_DISABLE_PIN_CORES",
    "WORKER_DISABLE_PIN_CORES",
    "PRPC_SHARDS",
    "PRPC_ENABLE_POLLING",
    "PRPC_PIN_CORES",
)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two cores are told apart")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, "PRPC_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the locks that keep two nodes from one core


@pytest.fixture
def master() -> Iterator[str]:
    with Master() as master:
        yield master.address


@pytest.fixture
def arguments(master: str, seed: int) -> dict[str, str]:
    """What comes after each role."""
    return {
        **dict.fromkeys(("service", "tables", "elastic"), master),
        **dict.fromkeys(("ps", "worker"), fresh_host(seed)),
    }


def all_of(role: str, count: str) -> dict[str, str]:
    """Shards, polling and pinning, as that role reads them."""
    if role == "service":
        return {"PRPC_SHARDS": count, "PRPC_ENABLE_POLLING": "1", "PRPC_PIN_CORES": "1"}
    prefix = "WORKER" if role == "worker" else "PS"
    return {
        f"NETWORK_{prefix}_CORE_NUMBER": count,
        f"{prefix}_ENABLE_POLLING": "1",
        f"{prefix}_DISABLE_PIN_CORES": "0",
    }


@pytest.mark.slow
@pytest.mark.parametrize("role", ["service", "tables", "ps", "worker"])
def test_shards_polling_and_pinning_are_as_the_variables_say(
    role: str, arguments: dict[str, str]
) -> None:
    with RoleProcess(role, arguments[role], env=all_of(role, "2")) as process:
        told = process.told
    assert (told["shards"], told["processes"]) == (2, 2)
    assert told["polling"]
    assert told["spinning"]
    assert sorted(told["kept"]) == [[core] for core in CORES], "each on a core of its own"
    assert told["lines"] == []


@pytest.mark.parametrize("role", ["service", "tables", "elastic", "ps", "worker"])
def test_without_shards_the_thread_that_serves_polls_and_is_pinned(
    role: str, arguments: dict[str, str]
) -> None:
    variables = all_of(role, "0" if role == "service" else "1")
    with RoleProcess(role, arguments[role], env=variables) as process:
        told = process.told
    assert (told["shards"], told["polling"]) == (0, True)
    [kept] = told["kept"]
    assert len(kept) == 1
    assert set(kept) <= set(CORES)
    assert told["lines"] == []


@pytest.mark.slow
@pytest.mark.parametrize("role", ["service", "tables", "ps"])
def test_a_number_above_the_cpuset_is_clamped_and_one_line_says_so(
    role: str, arguments: dict[str, str]
) -> None:
    variables = {"PRPC_SHARDS": "8"} if role == "service" else {"NETWORK_PS_CORE_NUMBER": "8"}
    with RoleProcess(role, arguments[role], cores=2, env=variables) as process:
        told = process.told
    assert told["processes"] == 2
    [line] = told["lines"]
    [name] = variables
    assert line.startswith(f"{name}='8'")
    assert "the cpuset of this process has 2 cores: there will be 2" in line


def test_a_process_with_one_core_has_one_shard_of_eight(arguments: dict[str, str]) -> None:
    with RoleProcess("service", arguments["service"], cores=1, env={"PRPC_SHARDS": "8"}) as process:
        assert process.told["processes"] == 1
        assert len(process.told["lines"]) == 1


@pytest.mark.parametrize(
    ("role", "name"),
    [
        *[("service", name) for name in all_of("service", "")],
        *[(role, name) for role in ("tables", "ps", "worker") for name in all_of(role, "")],
        ("elastic", "NETWORK_PS_CORE_NUMBER"),
        ("tables", "PRPC_SHARDS"),
        ("ps", "PRPC_PIN_CORES"),
    ],
)
def test_garbage_is_refused_by_name(role: str, name: str, arguments: dict[str, str]) -> None:
    with RoleProcess(role, arguments[role], env={name: "garbage"}) as process:
        assert process.told["error"].startswith(f"{name}='garbage': ")


def test_without_any_variable_nothing_has_shards_polls_or_is_pinned_in_a_process(
    arguments: dict[str, str],
) -> None:
    for role, argument in arguments.items():
        with RoleProcess(role, argument, env={}) as process:
            told = process.told
        assert (told["shards"], told["polling"]) == (0, False)
        assert told["kept"] == [CORES]
        assert told["lines"] == []


@pytest.mark.slow
def test_shards_that_are_told_not_to_be_pinned_are_not(arguments: dict[str, str]) -> None:
    variables = {"PRPC_SHARDS": "1", "PRPC_PIN_CORES": "0"}
    with RoleProcess("service", arguments["service"], env=variables) as process:
        assert process.told["kept"] == [CORES]
    with RoleProcess("service", arguments["service"], env={"PRPC_SHARDS": "1"}) as process:
        assert [len(kept) for kept in process.told["kept"]] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["tables", "ps"])
@pytest.mark.parametrize("default", [{}, {"PS_DISABLE_PIN_CORES": "1"}])
def test_shards_of_a_role_are_not_pinned_by_default_nor_where_the_default_is_said(
    role: str, default: dict[str, str], arguments: dict[str, str]
) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "2", **default}
    with RoleProcess(role, arguments[role], env=variables) as process:
        assert process.told["kept"] == [CORES, CORES]
        assert process.told["lines"] == []


def test_one_core_has_no_shards_of_a_role_and_the_line_says_so(arguments: dict[str, str]) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "100"}
    with RoleProcess("tables", arguments["tables"], cores=1, env=variables) as process:
        assert process.told["processes"] == 0
        [line] = process.told["lines"]
    assert line.endswith("has 1 cores: there will be none, its own process answers")


@pytest.mark.parametrize(("shards", "what"), [(0, "the thread that serves"), (1, "shards")])
def test_a_host_without_free_cores_says_what_is_not_bound(
    shards: int,
    what: str,
    master: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cores, "temporary_folder", lambda: tmp_path)
    usable = len(os.sched_getaffinity(0))
    with (
        contextlib.closing(cores.take_cores(usable)),
        RpcService(master, shards=shards, pin_cores=True),
    ):
        [line] = [record.getMessage() for record in caplog.records if record.name == "shard"]
    assert line.startswith(f"no cores to bind {what} to: 1 asked for, 0 of the {usable} usable")


def test_elastic_tables_say_why_they_have_no_shards(arguments: dict[str, str]) -> None:
    variables = {"NETWORK_PS_CORE_NUMBER": "2"}
    with RoleProcess("elastic", arguments["elastic"], env=variables) as process:
        told = process.told
    assert told["processes"] == 0
    [line] = told["lines"]
    assert line.startswith(
        "NETWORK_PS_CORE_NUMBER='2': 2 shards are asked for, and there are none: "
    )
    assert "elastic tables have none" in line


@pytest.mark.slow
def test_elastic_tables_go_on_without_the_shards_that_a_variable_of_all_nodes_asks_for(
    arguments: dict[str, str],
) -> None:
    variables = {"PRPC_SHARDS": "2", "PRPC_PIN_CORES": "1"}
    with RoleProcess("elastic", arguments["elastic"], env=variables) as process:
        told = process.told
    assert (told["shards"], told["processes"]) == (0, 0)
    assert [len(kept) for kept in told["kept"]] == [1], "the thread that serves has a core now"
    [line] = told["lines"]
    assert line.startswith("PRPC_SHARDS='2': 2 shards are asked for, and there are none: ")
    assert "elastic tables have none" in line


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["shards=1", "config=NodeConfig.load(shards=1)"])
def test_elastic_tables_refuse_shards_that_the_program_asks_for(master: str, passed: str) -> None:
    how: dict[str, Any] = (
        {"config": NodeConfig.load(shards=1)} if "config" in passed else {"shards": 1}
    )
    with (
        RpcService(master, **how) as service,
        pytest.raises(ConfigError, match="the service has 1 shards, none is allowed"),
    ):
        ElasticServer(service, partitions=1)


def test_elastic_tables_leave_shards_alone_that_serve_something(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_SHARDS", "1")
    with RpcService(master) as service:
        service.create_server("plain", Plain, sharded=True)
        with pytest.raises(ConfigError, match="the service has 1 shards, none is allowed"):
            ElasticServer(service, partitions=1)
        client = service.create_client("plain", 1)
        assert client.call("echo", 5) == 5


@pytest.mark.slow
@pytest.mark.parametrize("role", ["RpcService(master.address)", "Server"])
def test_a_script_without_a_guard_is_told_of_it_and_of_the_variable_that_asks_for_shards(
    role: str, tmp_path: Path, seed: int
) -> None:
    script = tmp_path / "script.py"
    making = f"p.Server({{'ps': ['{fresh_host(seed)}:7001']}})" if role == "Server" else f"p.{role}"
    script.write_text(f"import prpc_engine as p\nwith p.Master() as master, {making}: pass\n")
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PRPC_SHARDS": "1"},
        capture_output=True,
        text=True,
        timeout=UNTIL_S,
        check=False,
    )
    assert ran.returncode == 1
    [last] = ran.stderr.splitlines()[-1:]
    assert 'that script does its work under `if __name__ == "__main__":`' in last
    assert last.endswith("(count of shards: 1, from PRPC_SHARDS='1')")
    assert "a shard of it imports the script: make it under" in ran.stderr


@pytest.mark.slow
def test_a_role_that_comes_after_the_shards_says_so(arguments: dict[str, str]) -> None:
    variables = {"PRPC_SHARDS": "1", "NETWORK_PS_CORE_NUMBER": "2"}
    with RoleProcess("tables", arguments["tables"], env=variables) as process:
        told = process.told
    assert told["processes"] == 1
    [line] = told["lines"]
    assert line.startswith("NETWORK_PS_CORE_NUMBER='2': this service has shards already")


@pytest.mark.slow
def test_one_core_of_a_role_goes_before_the_shards_of_all_nodes_or_comes_too_late_and_says_so(
    arguments: dict[str, str],
) -> None:
    variables = {"PRPC_SHARDS": "2", "NETWORK_PS_CORE_NUMBER": "1"}
    with RoleProcess("ps", arguments["ps"], env=variables) as process:
        assert (process.told["shards"], process.told["lines"]) == (0, [])
    with RoleProcess("tables", arguments["tables"], env=variables) as process:
        assert process.told["shards"] == 2
        [line] = process.told["lines"]
    assert line.startswith("NETWORK_PS_CORE_NUMBER='1': this service has shards already")


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_a_node_of_pslite_polls_and_is_pinned_and_says_that_it_has_no_shards(
    role: str, seed: int
) -> None:
    job = {
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_PS_ROOT_URI": fresh_host(seed),
        "DMLC_PS_ROOT_PORT": "7000",
    }
    prefix = "WORKER" if role == "worker" else "PS"
    variables = {**job, "DMLC_ROLE": role, **all_of(role, "2")}
    wrong = {**job, "DMLC_ROLE": role, f"{prefix}_DISABLE_PIN_CORES": "garbage"}
    with RoleProcess("pslite", env=wrong) as process:
        assert process.told["error"].startswith(f"{prefix}_DISABLE_PIN_CORES='garbage': ")
    if role == "scheduler":
        with RoleProcess("pslite", env=variables) as process:
            told = process.told
        assert (told["shards"], told["polling"], told["kept"]) == (0, False, [CORES])
        return
    with (
        RoleProcess("pslite", env={**job, "DMLC_ROLE": "scheduler"}),
        RoleProcess("pslite", env=variables) as process,
    ):
        told = process.told
    assert (told["shards"], told["polling"]) == (0, True)
    assert [len(kept) for kept in told["kept"]] == [1]
    [line] = told["lines"]
    assert line.startswith(f"NETWORK_{prefix}_CORE_NUMBER='2': a {role} of ps-lite has no shards")
