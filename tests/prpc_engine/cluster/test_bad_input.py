"""What users do wrong, and what they read then: golden/errors.txt. HOST stands for the address that
a test runs at.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster import Duplicate
from prpc_engine.cluster.control import Facts, check_task
from prpc_engine.cluster.server import State
from prpc_engine.errors import BadArguments, Closed, ConfigError, RpcError
from prpc_engine.settings.address import Address
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host

GOLDEN = dict(
    line.split(": ", 1)
    for line in (Path(__file__).parent / "golden/errors.txt").read_text().splitlines()
)
PS0, WORKER0 = "/job:ps/task:0", "/job:worker/task:0"
CLUSTER = {"ps": ["h:1", "h:2"], "worker": {"0": "h:3", "2": "h:4"}}


@pytest.fixture
def host(seed: int) -> str:
    return fresh_host(seed)


@pytest.mark.parametrize(
    ("case", "make"),
    [
        ("protocol typo", lambda: Server(CLUSTER, "ps", 0, protocol="grpc+++")),
        ("no cluster", lambda: Server()),
        ("empty cluster", lambda: Server({})),
        ("unknown job", lambda: Server(CLUSTER, "chief", 0)),
        ("evaluator", lambda: Server(CLUSTER, "evaluator", 0)),
        ("unknown task", lambda: Server(CLUSTER, "worker", 1)),
        ("which job", lambda: Server(CLUSTER)),
        ("which task", lambda: Server(CLUSTER, "worker")),
        ("other hosts", lambda: Server({"worker": ["h:1"]})),
        ("index no number", lambda: Server(CLUSTER, "worker", "0")),  # type: ignore[arg-type]
        ("index with fraction", lambda: Server(CLUSTER, "worker", 2.0)),  # type: ignore[arg-type]
        ("config a dict", lambda: Server(CLUSTER, "ps", 0, config={"tensor_fuse": True})),  # type: ignore[arg-type]
        ("bound of tensors", lambda: ServerConfig(tensors_max=0)),
        ("fuse no switch", lambda: ServerConfig(tensor_fuse="yes")),  # type: ignore[arg-type]
        ("secret no text", lambda: Server(CLUSTER, "ps", 0, config=ServerConfig(secret=5))),  # type: ignore[arg-type]
        ("limits a dict", lambda: Server(CLUSTER, "ps", 0, config=ServerConfig(limits={}))),  # type: ignore[arg-type]
        ("tls a path", lambda: Server({"ps": ["localhost:1"]}, config=ServerConfig(tls="x.pem"))),  # type: ignore[arg-type]
        ("transports no list", lambda: Server(CLUSTER, "ps", 0, config=ServerConfig(transports=5))),  # type: ignore[arg-type]
    ],
)
def test_what_a_server_is_not_made_of(case: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value) == GOLDEN[case]


@pytest.mark.parametrize("name", ["PRPC_DEBUG_LEASES", "PRPC_ENABLE_POLLING", "PRPC_HUGE_PAGES"])
def test_a_variable_of_the_engine_that_makes_no_sense_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ConfigError, match=f"{name}='maybe'"):
        Server({"local": ["127.0.0.1:0"]})


def test_a_task_without_an_entry_in_the_endpoint_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".endpoint_map").write_text("h:1=h:5\nh:2=h:6\nh:3=h:7\n")
    monkeypatch.setenv("TF_SEASTAR_ENDPOINT_MAP_PATH", str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        Server(CLUSTER, "worker", 2)
    assert str(raised.value).replace(str(tmp_path), "FOLDER") == GOLDEN["own entry missing"]


def test_a_port_that_is_taken_names_task_and_address_and_leaves_the_server_new(host: str) -> None:
    cluster = cluster_at(host, worker=1)
    server = Server(cluster, start=False)
    with socket.create_server((host, 2222)), pytest.raises(RpcError) as raised:
        server.start()
    assert (
        f"{type(raised.value).__name__} {raised.value}".replace(host, "HOST")
        == GOLDEN["port taken"]
    )
    assert server.state is State.NEW
    server.start()
    server.stop()


@pytest.mark.parametrize(
    ("case", "use"),
    [
        ("recv from an unknown job", lambda s: s.recv("k", source="/job:pss/task:0", step=0)),
        (
            "send to an unknown task",
            lambda s: s.send("k", np.zeros(1), to="/job:worker/task:7", step=0),
        ),
        ("no device", lambda s: s.recv("k", source="ps:0", step=0)),
        ("no key", lambda s: s.send("", np.zeros(1), to=WORKER0, step=0)),
        ("no step", lambda s: s.recv("k", source=PS0, step=-1)),
        ("no whole step", lambda s: s.send("k", np.zeros(1), to=WORKER0, step=1.0)),
        ("no device, a list", lambda s: s.send("k", np.zeros(1), to=[WORKER0], step=0)),
        ("no tensor", lambda s: s.send("k", object(), to=WORKER0, step=0)),
        ("dead or not", lambda s: s.send("k", None, to=WORKER0, step=0)),
        ("no keys", lambda s: s.recv_many([], source=PS0, step=0)),
        ("keys no list", lambda s: s.recv_many(5, source=PS0, step=0)),
        ("join not a number", lambda s: s.join(float("nan"))),
        ("no timeout", lambda s: s.recv("k", source=PS0, step=0, timeout_s=-1)),
    ],
)
def test_what_a_server_does_not_do(case: str, use: Callable[[Server], Any], host: str) -> None:
    with (
        Server(cluster_at(host, ps=1, worker=2), "worker", 0) as server,
        pytest.raises(RpcError) as raised,
    ):
        use(server)
    assert f"{type(raised.value).__name__} {raised.value}" == GOLDEN[case]


def test_rows_of_different_lengths_are_no_tensor() -> None:
    with (
        Server({"local": ["127.0.0.1:0"]}) as server,
        pytest.raises(
            BadArguments, match=r"'k' is list, no tensor: an array of numbers is expected; "
        ),
    ):
        server.send("k", [[1], [1, 2]], to="/job:local/task:0", step=0)


def test_duplicates_are_refused_here_and_there(host: str) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with Server(cluster, "ps", 0) as ps, Server(cluster, "worker", 0) as worker:
        ps.send("k", np.zeros(1), to=WORKER0, step=0)
        with pytest.raises(Duplicate) as sent:
            ps.send("k", np.zeros(1), to=WORKER0, step=0)
        assert str(sent.value) == GOLDEN["sent twice"]
        worker.recv("k", source=PS0, step=0)
        with pytest.raises(Duplicate) as received:
            worker.recv("k", source=PS0, step=0)
        assert str(received.value) == GOLDEN["received twice"]


def test_two_tasks_with_different_clusters_both_say_so(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Server(cluster_at(host, ps=1, worker=2), "ps", 0),
        Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker,
        pytest.raises(ConfigError) as raised,
    ):
        worker.recv("k", source=PS0, step=0)
    assert _without_fingerprints(str(raised.value)) == GOLDEN["cluster mismatch"]
    # a stall of the engine is told, too
    told = [record.getMessage() for record in caplog.records if record.name == "prpc"]
    assert list(map(_without_fingerprints, told)) == [GOLDEN["cluster mismatch, there"]]


def test_two_tasks_that_find_data_by_different_rules_say_so(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with Server(cluster, "ps", 0):
        monkeypatch.setenv("PRPC_DATA_PORT_OFFSET", "1000")
        with Server(cluster, "worker", 0) as worker, pytest.raises(ConfigError) as raised:
            worker.recv("k", source=PS0, step=0)
    assert _without_fingerprints(str(raised.value)) == GOLDEN["rule mismatch"]


def test_an_address_that_leads_to_another_task() -> None:
    facts = Facts("plan", "/job:ps/task:1", 1, ("shm://x",))
    with pytest.raises(ConfigError) as raised:
        check_task(facts, PS0, Address("h", 1))
    assert str(raised.value) == GOLDEN["another task answers"]


def test_before_start_and_after_stop(host: str) -> None:
    server = Server(cluster_at(host, worker=1), start=False)
    for case in ("not started", "stopped"):
        for use in (server.join, lambda: server.send("k", np.zeros(1), to=WORKER0, step=0)):
            if case == "stopped" and use == server.join:
                assert server.join()
                continue
            with pytest.raises(Closed) as raised:
                use()
            assert str(raised.value) == GOLDEN[case]
        server.stop()
    with pytest.raises(Closed, match="was stopped here"):
        server.start()


def test_tf_config_says_who_one_is(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "cluster": {**cluster_at(host, worker=2), "chief": [f"{host}:2230"]},
        "task": {"type": "worker", "index": 1},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with Server(protocol="grpc++") as server:
        facts = server.server_def
        assert (facts.job_name, facts.task_index, facts.cluster.num_tasks("worker")) == (
            "worker",
            1,
            2,
        )
        assert server.target == f"prpc://{host}:2223"
        assert not server.join(timeout_s=0.0)


def test_a_cluster_of_one_takes_any_port_and_numpy_s_numbers_of_steps() -> None:
    with Server({"local": ["127.0.0.1:0"]}) as server:
        assert not server.target.endswith(":0")
        server.send("k", np.zeros(2), to="/job:local/task:0", step=np.int64(0))  # type: ignore[arg-type]
        assert server.recv("k", source="/job:local/task:0", step=0) is not None


def _without_fingerprints(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{12}\b", "PRINT", text)
