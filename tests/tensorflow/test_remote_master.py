"""Sessions at a master in another process: of a client that has no server, knows one address, and
comes to what it comes to on the stock protocol.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
from collections.abc import Iterator

import pytest

from tests.program import wait_until
from tests.tensorflow.tasks import Job, TaskProcess, clusters
from tests.tensorflow.test_scenarios import same

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)


@pytest.fixture
def client(job: Job) -> Iterator[TaskProcess]:
    """A process beside the job."""
    with TaskProcess(job.clusters, "client", 0) as process:
        yield process


def check(client: TaskProcess, scenario: str, **keywords: object) -> object:
    stock, ours = (client.do(scenario, one, **keywords) for one in ("grpc", "prpc"))
    assert same(stock, ours), f"stock: {stock}\nours:  {ours}"
    return ours


def test_in_graph_replication_has_equal_losses(client: TaskProcess) -> None:
    losses = check(client, "in_graph", workers=2)
    assert isinstance(losses, list) and len(losses) == 5


def test_a_client_is_in_the_plane_star_whatever_the_variable_says(job: Job) -> None:
    with TaskProcess(job.clusters, "client", 0, {"PRPC_TF_PLANE": "sendrecv"}) as client:
        assert len(client.do("in_graph", "prpc", workers=1)) == 5


@pytest.mark.parametrize(
    "scenario", ["partitioned", "checkpoint", "queue", "dataset", "devices", "containers"]
)
def test_it_means_the_same(client: TaskProcess, scenario: str) -> None:
    check(client, scenario, **({"resource": True} if scenario == "partitioned" else {}))


def test_a_client_trains_as_its_master_does(client: TaskProcess) -> None:
    check(client, "train", optimizer="adagrad", sparse=True, resource=True)


def test_a_loop_of_version_1_runs(client: TaskProcess) -> None:
    check(client, "loop", version=1, resource=True, gradient=False)


def test_a_monitored_session_needs_no_server(client: TaskProcess) -> None:
    assert check(client, "monitored", steps=3) == 3


def test_what_has_no_device_is_at_the_master_and_the_next_client_finds_it(
    job: Job, client: TaskProcess
) -> None:
    name = f"shared{client.pid}"
    assert client.do("without_devices", "prpc", name=name, value=1.0) == [False, [1.0, 1.0]]
    with TaskProcess(job.clusters, "client", 0) as other:
        assert other.do("without_devices", "prpc", name=name, value=2.0) == [True, [3.0, 3.0]]
    assert job.worker().do("without_devices", "prpc", name=name, value=1.0) == [True, [4.0, 4.0]]


def test_grpc_of_the_same_address_is_ours_where_our_server_is(
    job: Job, client: TaskProcess
) -> None:
    place = job.clusters["prpc"]["worker"][0]
    job.worker().do("serves", "prpc")
    assert client.do("at", "prpc", target=f"grpc://{place}") == 3.0
    stock = job.clusters["grpc"]["worker"][0]
    assert client.do("at", "prpc", target=f"grpc://{stock}") == 3.0


def test_a_stock_server_at_the_address_is_named(job: Job, client: TaskProcess) -> None:
    place = job.clusters["grpc"]["worker"][0]
    kind, text = client.do("at", "prpc", target=f"prpc://{place}")
    assert kind == "InvalidArgumentError"
    assert place in text and "protocol='prpc'" in text


def test_nobody_at_the_address_is_told_when_the_time_is_over(client: TaskProcess) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
        kind, text = client.do("at", "prpc", target=f"prpc://{place}", timeout_ms=300)
    assert kind == "DeadlineExceededError"
    assert place in text and "does not answer" in text


def test_localhost_is_one_host_by_each_of_its_names() -> None:
    place = next(iter(clusters(secrets.randbits(32), worker=1)["prpc"]["worker"]))
    port = place.rpartition(":")[2]
    with TaskProcess({"prpc": {"worker": [f"localhost:{port}"]}}, "worker", 0) as worker:
        for host in ("localhost", "127.0.0.1", "[::1]"):
            assert worker.do("is_own", "prpc", target=f"prpc://{host}:{port}")
        assert not worker.do("is_own", "prpc", target=f"prpc://127.0.0.2:{port}")


@pytest.mark.parametrize("target", ["prpc://nowhere", "prpc://", "prpc://host:port"])
def test_a_target_that_is_none_is_refused_by_name(client: TaskProcess, target: str) -> None:
    kind, text = client.do("at", "prpc", target=target, timeout_ms=300)
    assert kind == "InvalidArgumentError"
    assert target.partition("://")[2] in text


def test_metadata_is_of_all_tasks(client: TaskProcess) -> None:
    told = client.do("metadata", "prpc")
    assert "/job:ps/replica:0/task:0/device:CPU:0" in told
    assert "/job:worker/replica:0/task:0/device:CPU:0" in told


def test_of_a_client_that_is_killed_nothing_is_left(job: Job) -> None:
    ps, name = job.tasks["ps", 0], "left"
    with TaskProcess(job.clusters, "client", 0) as client:
        client.begin("begin_waiting", "prpc", name=name)
        wait_until(lambda: ps.do("held", "prpc")["running"] > 0, "the wait at the ps")
        client.kill()
    wait_until(lambda: ps.do("held", "prpc")["running"] == 0, "the end of the wait")
    with TaskProcess(job.clusters, "client", 0) as other:
        assert other.do("taken_after", "prpc", name=name) == 5.0
    for held in ("waiting", "leases", "blocks"):
        wait_until(lambda held=held: ps.do("held", "prpc")[held] == 0, held)  # type: ignore[misc]
