"""Calls and tables over a real verbs device, between processes: what goes wrong there, and what
becomes of those that wait.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import MaybeExecuted, NotSent
from prpc_engine.kv import TableWorker
from prpc_engine.rpc.paths import FAILURES_MAX
from tests.program import Program
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until
from tests.rdma.guest import GUEST
from tests.rdma.inside import (
    CALLS,
    client_of,
    connection_of,
    connections_of,
    fail,
    registrations_of,
    transports_of,
)
from tests.rdma.port import chosen_port

MIB = 1 << 20
# on a machine with real adapters none is removed; in the guest, which .ci/run makes, it runs
needs_guest = pytest.mark.skipif(
    GUEST not in os.environ, reason="it makes and removes a device: python -m tests.rdma.guest run"
)

# what a process begins once, at the first calls, is not of the test that happens to be first
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master("127.0.0.1:0") as master:
        yield master


@pytest.fixture(scope="module")
def server(master: Master) -> Iterator[ServerProcess]:
    with ServerProcess(master.address, "test", "verbs,tcp") as process:
        with client_of(master) as (_, client):
            client.call("echo", 1)
        yield process


def test_calls_and_arrays_of_every_size_go_over_verbs(
    master: Master, server: ServerProcess
) -> None:
    with client_of(master) as (service, client):
        assert client.call("echo", {"one": [1, "two"]}) == {"one": [1, "two"]}
        for nbytes in (1, 1000, 20_000, MIB + 1, 16 * MIB):
            array = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
            assert np.array_equal(client.call("echo", array), array)
        futures = [client.submit("add", number, 1) for number in range(300)]
        assert [future.result() for future in futures] == list(range(1, 301))
        assert transports_of(service) == {"verbs"}
        (rail,) = connection_of(service).rails()
        assert (rail.port, rail.reads > 0) == (str(chosen_port()), True)


def test_nothing_is_registered_for_a_message(master: Master, server: ServerProcess) -> None:
    with client_of(master) as (service, client):
        array = np.ones(MIB, np.uint8)
        for _ in range(20):  # the slab grows to what is in use at a time
            client.call("first_and_last", array)
            client.call("first_and_last", array[:30_000])
        before = registrations_of(connection_of(service))
        for number in range(CALLS // 2):
            assert client.call("echo", number) == number
            assert client.call("first_and_last", array[: 30_000 + number % 300]) == (1.0, 1.0)
        assert registrations_of(connection_of(service)) == before


def test_tables_are_pulled_and_pushed_over_verbs(master: Master) -> None:
    with (
        Program("tests.rdma.table_server", master.address) as process,
        RpcService(master.address, transports=["verbs"]) as service,
    ):
        assert process.read_line() == "ready"
        kv = TableWorker(service)
        kv.create_sparse("rows", dim=64, optimizer={"name": "sgd", "learning_rate": 1.0})
        keys = np.arange(20_000)
        for _ in range(3):
            kv.push("rows", keys, np.ones((len(keys), 64), np.float32))
        assert (kv.pull("rows", keys) == -3.0).all()
        kv.create_dense("whole", (4096, 1024), {"name": "add"})
        added = kv.push_pull("whole", np.full((4096, 1024), 0.5, np.float32))  # of 16 MiB
        assert (added == 0.5).all()
        assert transports_of(service) == {"verbs"}


def test_a_polling_service_calls_as_well(master: Master, server: ServerProcess) -> None:
    with client_of(master, polling=True) as (_, client):
        assert [client.call("add", number, 1) for number in range(50)] == list(range(1, 51))


def test_a_server_that_is_killed_ends_its_calls_by_name_and_leaves_nothing(master: Master) -> None:
    with (
        ServerProcess(master.address, "killed", "verbs") as process,
        client_of(master, "killed") as (service, client),
    ):
        array = np.ones(32 * MIB, np.uint8)
        client.call("echo", 1)
        futures = [client.submit("echo", array) for _ in range(4)]
        process.kill()
        for future in futures:
            with pytest.raises((MaybeExecuted, NotSent), match="verbs://"):
                future.result(PATIENCE_S)
        del array
        slab = node_of(service).slab
        wait_until(lambda: not slab.statistics().leases, "leases that came back")


def test_a_client_that_is_killed_while_it_is_read_from_takes_nothing_with_it(
    master: Master, server: ServerProcess
) -> None:
    pid = os.fork()
    if not pid:  # a process of its own from here on, with a node of its own
        with contextlib.suppress(BaseException), client_of(master) as (_, client):
            futures = [client.submit("echo", np.ones(8 * MIB, np.uint8)) for _ in range(8)]
            futures[0].result()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with client_of(master) as (_, client):
        assert client.call("first_and_last", np.arange(MIB, dtype=np.float32)) == (0.0, MIB - 1.0)


def test_a_queue_pair_that_fails_ends_its_calls_and_the_next_one_has_another(
    master: Master, server: ServerProcess
) -> None:
    with client_of(master) as (service, client):
        for _ in range(3):
            client.call("echo", 1)
            failed = connection_of(service)
            future = client.submit("echo", np.ones(8 * MIB, np.uint8))
            fail(failed)
            with pytest.raises((MaybeExecuted, NotSent)):
                future.result(PATIENCE_S)
            assert client.call("echo", 2) == 2
            assert connection_of(service) is not failed


def test_tcp_takes_over_once_verbs_has_failed_too_often(
    master: Master, server: ServerProcess
) -> None:
    with client_of(master, transports=("verbs", "tcp")) as (service, client):
        for number in range(FAILURES_MAX):
            assert client.call("echo", number) == number
            assert transports_of(service) == {"verbs"}
            lost = connection_of(service)
            fail(lost)
            wait_until(lambda lost=lost: lost.error is not None, "the end of the connection")
        assert client.call("echo", 7) == 7
        assert transports_of(service) == {"tcp"}


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> str:
    """The network device of an RDMA device of its own, which processes made from now on use."""
    kind, network = os.environ[GUEST], "spare0"
    for command in (
        f"ip link add {network} type dummy",
        f"ip link set {network} address 02:00:0a:4d:09:01 mtu 4200 up",
        f"ip addr add 10.77.9.1/24 dev {network}",
        f"rdma link add spare type {kind} netdev {network}",
    ):
        subprocess.run(command.split(), check=True)
    monkeypatch.setenv("PRPC_VERBS_DEVICE", "spare")
    return network


@needs_guest
def test_a_device_that_is_removed_ends_its_calls_by_name_and_tcp_takes_over(
    master: Master, spare: str
) -> None:
    """Its removal waits until nobody uses it."""
    removal = call_while_removed(master, spare)
    gc.collect()
    assert removal.wait(PATIENCE_S) == 0


def call_while_removed(master: Master, network: str) -> subprocess.Popen[bytes]:
    both = ("verbs", "tcp")
    with (
        ServerProcess(master.address, "removed", ",".join(both)),
        client_of(master, "removed", both) as (service, client),
    ):
        array = np.ones(4 * MIB, np.uint8)
        assert np.array_equal(client.call("echo", array), array)
        assert [rail.port for rail in connection_of(service).rails()] == ["spare:1"]
        futures = [client.submit("echo", array) for _ in range(4)]
        removal = subprocess.Popen(["ip", "link", "del", network])
        for future in futures:  # of which some may have been answered
            with contextlib.suppress(MaybeExecuted, NotSent):
                assert np.array_equal(future.result(PATIENCE_S), array)
        wait_until(lambda: not connections_of(service), "the end of the connection")
        assert np.array_equal(client.call("echo", array), array)
        assert transports_of(service) == {"tcp"}
        del array
        slab = node_of(service).slab
        wait_until(lambda: not slab.statistics().leases, "leases that came back")
        return removal


def test_a_fork_takes_nothing_from_its_parent(master: Master, server: ServerProcess) -> None:
    with client_of(master) as (service, client):
        array = np.arange(MIB, dtype=np.float32)
        assert client.call("first_and_last", array) == (0.0, MIB - 1.0)
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                client.call("echo", 1, timeout_s=1.0)
            # as an interpreter ends: what is left is collected
            del client, service
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.call("first_and_last", array) == (0.0, MIB - 1.0)
        assert transports_of(service) == {"verbs"}
