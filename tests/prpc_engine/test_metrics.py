"""What a scraper reads of a service under real calls."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prpc_engine import Master, RpcClient, RpcService, Server, errors, metrics
from prpc_engine.service.serving import RpcServer
from tests.ports import hold_port
from tests.prpc_engine.handlers import Handlers, Plain
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until

SHORT_S = 0.05  # for a shard that does not answer
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class World(NamedTuple):
    """A service whose calls go to another process and to itself, timed."""

    service: RpcService
    there: RpcClient
    here: RpcClient
    transport: str  # to the other process


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        Master() as master,
        ServerProcess(master.address, "there", request.param),
        RpcService(master=master.address, transports=[request.param], timing=True) as service,
    ):
        service.create_server("a/b", Handlers(service), server_id=7)
        there = service.create_client("there", timeout_s=PATIENCE_S)
        there.call("echo", 0)  # a peer is there from the first call on
        yield World(service, there, service.create_client("a/b"), request.param)


def scrape(server: metrics.MetricsServer) -> Samples:
    """What stands at /metrics: the value for each name with its labels."""
    with urllib.request.urlopen(
        f"http://{server.host}:{server.port}/metrics", timeout=PATIENCE_S
    ) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def scrape_all(server: metrics.MetricsServer) -> Samples:
    """The same, once every shard has answered in time."""
    found: Samples = {}

    def all_up() -> bool:
        nonlocal found
        found = scrape(server)
        return value(found, "prpc_shard_up") == 2

    wait_until(all_up, "an answer of each shard")
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    """The sum of those samples that have these labels."""
    matching = [
        one
        for (called, with_labels), one in found.items()
        if called == name and labels.items() <= dict(with_labels).items()
    ]
    assert matching, f"no {name} with {labels}"
    return sum(matching)


def test_a_scrape_shows_the_calls_that_were_made(world: World) -> None:
    with metrics.serve(world.service, 0) as server:
        before = scrape(server)
        for number in range(10):
            assert world.there.call("echo", number) == number
            assert world.here.call("add", number, 1) == number + 1
        with pytest.raises(errors.RemoteError):
            world.here.call("boom", "x")
        with pytest.raises(errors.UnknownMethod):
            world.here.call("no_such_method")
        with pytest.raises(errors.BadArguments):
            world.here.call("add")
        world.there.call("echo", bytes(100_000))
        waiting = world.here.submit("nap", PATIENCE_S)
        world.here.call("echo", 0)  # the nap began before
        found = scrape(server)
        waiting.cancel()

    def grew(name: str, **labels: str) -> float:
        return value(found, name, **labels) - value(before, name, **labels)

    mine = {"service": "a/b", "server_id": "7"}
    # ten, one that raised, one with bad arguments, a nap, an echo
    assert grew("prpc_server_requests_total", **mine) == 14
    assert grew("prpc_server_failures_total", **mine) == 1
    assert value(found, "prpc_server_refused_total", reason="unknown_method", **mine) == 1
    assert value(found, "prpc_server_refused_total", reason="bad_arguments", **mine) == 1
    assert value(found, "prpc_server_tasks", **mine) == 1
    assert value(found, "prpc_server_queued", **mine) == 0
    assert (
        value(found, "prpc_server_repeated_total", **mine)
        == value(found, "prpc_server_forgotten_total", **mine)
        == 0
    )
    assert grew("prpc_peer_requests_total", transport=world.transport) >= 11
    # the nap; a heartbeat may be on its way to the master
    assert value(found, "prpc_peer_in_flight", transport="memory") == 1
    assert grew("prpc_peer_sent_bytes_total", transport=world.transport) > 100_000
    assert grew("prpc_peer_received_bytes_total", transport=world.transport) > 100_000
    assert value(found, "prpc_peer_late_replies_total") == 0
    assert value(found, "prpc_client_servers", service="there", client="1", state="well") == 1
    assert value(found, "prpc_client_servers", service="a/b", client="2", state="ejected") == 0
    assert value(found, "prpc_client_retries_total", service="a/b") == 0
    assert value(found, "prpc_slab_limit_bytes") > 0
    assert value(found, "prpc_node_rank") == world.service.rank
    assert value(found, "process_open_fds") > 0


def test_handlers_times_are_a_histogram_of_their_method(world: World) -> None:
    for _ in range(20):
        world.here.call("echo", 0)
    world.here.call("nap", 0.02)
    with metrics.serve(world.service, 0) as server:
        found = scrape(server)
    name = "prpc_server_handler_seconds"
    assert value(found, f"{name}_count", method="echo") == 20
    assert value(found, f"{name}_count", method="nap") == 1
    assert 0.02 <= value(found, f"{name}_sum", method="nap") < PATIENCE_S
    by_bound = {
        float(dict(labels)["le"]): one
        for (called, labels), one in found.items()
        if ("method", "nap") in labels and "le" in dict(labels)
    }
    taken_s = value(found, f"{name}_sum", method="nap")
    assert by_bound == {bound: float(bound > taken_s) for bound in by_bound}
    assert len(by_bound) > 20
    assert value(found, "prpc_server_slow_calls_total", method="echo") == 0
    # never called: no series yet
    assert not [labels for _, labels in found if ("method", "add") in labels]


def test_a_server_that_ejects_is_seen_in_the_balancers_states() -> None:
    with Master() as master, RpcService(master=master.address) as service:
        with ServerProcess(master.address, "gone", "tcp", server_id=0) as process:
            client = service.create_client("gone", timeout_s=PATIENCE_S)
            client.call("echo", 0)
            process.kill()
        with pytest.raises(errors.RpcError):
            client.call("echo", 0, timeout_s=1)
        registry = CollectorRegistry()
        metrics.register(service, registry)
        states = {
            state: registry.get_sample_value(
                "prpc_client_servers", {"service": "gone", "client": "1", "state": state}
            )
            for state in metrics.STATES
        }
        assert sum(states.values()) <= 1
        assert (
            registry.get_sample_value(
                "prpc_client_ejections_total", {"service": "gone", "client": "1"}
            )
            is not None
        )


class Sharded(NamedTuple):
    """A service with a server in each of two shards, one more of that name in its own process, and
    who calls them.
    """

    service: RpcService
    server: RpcServer
    client: RpcClient


@pytest.fixture
def sharded() -> Iterator[Sharded]:
    with Master() as master, RpcService(master=master.address, shards=2, timing=True) as service:
        server = service.create_server("test", Plain, sharded=True)
        service.create_server("test", Plain(), server_id=7)
        with service.create_client("test", 3, PATIENCE_S) as client:
            yield Sharded(service, server, client)


@pytest.mark.slow
def test_each_shard_is_there_under_its_number_and_all_of_a_service_in_one_sum(
    sharded: Sharded,
) -> None:
    calls = {0: 3, 1: 5, 7: 2}
    with metrics.serve(sharded.service, 0) as server:
        before = scrape_all(server)
        for server_id, count in calls.items():
            for number in range(count):
                assert sharded.client.call_to(server_id, "echo", number) == number
        with pytest.raises(errors.UnknownMethod):
            sharded.client.call_to(1, "no_such_method")
        found = scrape_all(server)
    for server_id, shard in (("0", "0"), ("1", "1"), ("7", "")):
        mine = {"service": "test", "server_id": server_id, "shard": shard}
        assert value(found, "prpc_server_requests_total", **mine) == calls[int(server_id)]
        assert (
            value(found, "prpc_server_handler_seconds_count", method="echo", **mine)
            == calls[int(server_id)]
        )
        assert value(found, "prpc_slab_limit_bytes", shard=shard) > 0
    assert value(found, "prpc_server_refused_total", shard="1", reason="unknown_method") == 1
    assert value(found, "prpc_service_requests_total", service="test") == sum(calls.values())
    assert value(found, "prpc_service_refused_total", service="test", reason="unknown_method") == 1
    for shard in ("0", "1"):
        assert (
            value(found, "prpc_shard_up", shard=shard)
            == value(found, "prpc_shard_starts_total", shard=shard)
            == 1
        )
        assert (
            value(found, "prpc_shard_turns_total", shard=shard)
            > value(before, "prpc_shard_turns_total", shard=shard) - 1
        )
        assert value(found, "prpc_peer_received_bytes_total", shard=shard) > 0
    whole = sharded.server.statistics()
    assert (whole.requests, whole.refused, whole.timings["echo"].calls) == (
        8,
        {"unknown_method": 1},
        8,
    )


@pytest.mark.slow
def test_a_shard_that_is_busy_is_told_from_one_that_answers_and_the_sum_does_not_fall(
    sharded: Sharded, tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    sharded.client.call_to(0, "echo", 1)
    assert sharded.service.figures_of_shards(PATIENCE_S)[0].error == ""
    reader = sharded.service._servers.reader
    assert reader is not None
    busy = sharded.client.submit_to(0, "read_fifo", str(path), timeout_s=PATIENCE_S)
    with path.open("w") as gate:  # once the handler reads it
        first, _ = sharded.service.figures_of_shards(SHORT_S)
        asked = reader._asked[0]
        assert first.error == "it has not answered yet: a handler keeps it"
        assert first.last is not None
        assert first.last.servers["test/0"].requests == 1
        wait_until(
            lambda: sharded.service.figures_of_shards(SHORT_S)[1].now is not None,
            "the answer of the other shard",
        )
        assert reader._asked[0] is asked, "it is not asked again before it has answered"
        registry = CollectorRegistry()
        metrics.register(sharded.service, registry)
        assert registry.get_sample_value("prpc_shard_up", {"shard": "0"}) == 0
        wait_until(lambda: registry.get_sample_value("prpc_shard_up", {"shard": "1"}) == 1)
        assert registry.get_sample_value("prpc_service_requests_total", {"service": "test"}) == 1
        gate.write("go on")
    assert busy.result(PATIENCE_S) == "go on"
    wait_until(lambda: registry.get_sample_value("prpc_shard_up", {"shard": "0"}) == 1)
    wait_until(
        lambda: registry.get_sample_value("prpc_service_requests_total", {"service": "test"}) == 2
    )


@pytest.mark.slow
def test_what_a_dead_shard_did_stays_in_the_sum(sharded: Sharded) -> None:
    registry = CollectorRegistry()
    metrics.register(sharded.service, registry)
    for server_id in (0, 1, 7):
        sharded.client.call_to(server_id, "echo", 1)
    wait_until(
        lambda: registry.get_sample_value("prpc_service_requests_total", {"service": "test"}) == 3
    )
    os.kill(sharded.service.figures_of_shards()[0].process.pid, signal.SIGKILL)
    wait_until(
        lambda: "shard 0" in sharded.service.figures_of_shards()[0].error, "the end of the shard"
    )
    assert registry.get_sample_value("prpc_shard_up", {"shard": "0"}) == 0
    assert registry.get_sample_value("prpc_service_requests_total", {"service": "test"}) == 3
    assert sharded.server.statistics().requests == 2


@pytest.mark.slow
def test_the_bytes_of_a_dead_shards_connections_stay_in_the_figures_after_its_restart(
    sharded: Sharded,
) -> None:
    registry = CollectorRegistry()
    metrics.register(sharded.service, registry)

    def all_of(name: str, **labels: str) -> float:
        found = [
            sample
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name
        ]
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    def received() -> float:
        return all_of("prpc_transport_received_bytes_total", shard="0")

    def served() -> float:
        return all_of("prpc_service_requests_total", service="test")

    for _ in range(3):
        sharded.client.call_to(0, "echo", b"x" * 100_000)
    wait_until(lambda: received() > 300_000 and served() == 3, "all that the shard did")
    before, connections = received(), all_of("prpc_transport_connections_ended_total", shard="0")
    os.kill(sharded.service.figures_of_shards()[0].process.pid, signal.SIGKILL)
    wait_until(lambda: all_of("prpc_shard_up", shard="0") == 0, "the end of the shard")
    assert received() >= before
    wait_until(lambda: all_of("prpc_shard_up", shard="0") == 1, "its restart")
    assert received() >= before
    assert all_of("prpc_transport_connections_ended_total", shard="0") > connections
    assert served() == sharded.server.statistics().requests == 3
    assert all_of("prpc_server_requests_total", shard="0") == 0, "that of its new instance"
    wait_until(lambda: _answers(sharded.client, 0), "its way back")
    wait_until(lambda: received() >= before + 100_000 and served() == 4, "what it does now")


def _answers(client: RpcClient, server_id: int) -> bool:
    try:
        return bool(client.call_to(server_id, "echo", b"x" * 100_000))
    except errors.RpcError:
        return False


def test_one_registry_reads_one_service_until_it_is_taken_back() -> None:
    with (
        Master() as master,
        RpcService(master=master.address) as one,
        RpcService(master=master.address) as two,
    ):
        registry = CollectorRegistry()
        collector = metrics.register(one, registry)
        assert registry.get_sample_value("prpc_node_rank") == one.rank
        with pytest.raises(errors.ConfigError, match="registry of its own"):
            metrics.register(two, registry)
        registry.unregister(collector)
        metrics.register(two, registry)
        assert registry.get_sample_value("prpc_node_rank") == two.rank


def test_names_follow_the_rules_and_a_closed_service_has_none_of_them() -> None:
    registry = CollectorRegistry()
    with Master() as master, RpcService(master=master.address) as service:
        service.create_server("test", Handlers(service))
        service.create_client("test").call("echo", 0)
        metrics.register(service, registry)
        # the strict form, which refuses what breaks the rules
        text = generate_latest(registry).decode()
        assert (
            text.count("# HELP prpc_")
            == text.count("# TYPE prpc_")
            == len({*[line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]})
        )
    assert generate_latest(registry).decode() == "# EOF\n"


@pytest.mark.parametrize("source", [None, 5, "x", RpcService])
def test_what_has_no_metrics_is_refused_at_once(source: Any) -> None:
    said = "^metrics of .*: an RpcService or a Server of a cluster is allowed$"
    with pytest.raises(errors.ConfigError, match=said):
        metrics.serve(source, 0)
    with pytest.raises(errors.ConfigError, match=said):
        metrics.register(source, CollectorRegistry())


def test_what_is_closed_has_no_metrics_to_be_read() -> None:
    with Master() as master, RpcService(master=master.address) as service:
        pass
    task = Server({"worker": ["127.0.0.1:0"]}, "worker", 0, start=False)
    metrics.register(task, CollectorRegistry())  # which it has once it is started
    task.stop()
    for source, kind in ((service, "RpcService"), (task, "Server")):
        said = f"^metrics of this {kind}, which was closed here: an open one is allowed$"
        with pytest.raises(errors.Closed, match=said):
            metrics.serve(source, 0)
        with pytest.raises(errors.Closed, match=said):
            metrics.register(source, CollectorRegistry())


def test_what_others_could_read_is_served_only_when_asked_for() -> None:
    with Master() as master, RpcService(master=master.address) as service:
        for host in ("0.0.0.0", "::", "", "example.invalid", "10.0.0.1"):
            with pytest.raises(errors.ConfigError, match="expose=True"):
                metrics.serve(service, 0, host)
        with metrics.serve(service, 0, "0.0.0.0", expose=True) as server:
            assert server.host == "0.0.0.0"
            with pytest.raises(errors.AddressInUse, match=f"0.0.0.0:{server.port}"):
                metrics.serve(service, server.port, "0.0.0.0", expose=True)
        # no host has it
        with pytest.raises(errors.ConfigError, match=r"cannot serve metrics at 192\.0\.2\.1"):
            metrics.serve(service, 0, "192.0.2.1", expose=True)
        with pytest.raises(errors.ConfigError, match="port"):
            metrics.serve(service, 70000)


def test_a_closed_server_answers_no_more() -> None:
    with Master() as master, RpcService(master=master.address) as service, hold_port() as held:
        server = metrics.serve(service, held.getsockname()[1])  # where nobody else will answer
        assert scrape(server)
        server.close()
        server.close()
        with pytest.raises(urllib.error.URLError):
            scrape(server)


def test_a_scraper_that_resets_its_connection_is_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "prpc")
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        metrics.serve(service, 0) as server,
    ):
        with socket.create_connection((server.host, server.port), PATIENCE_S) as scraper:
            scraper.sendall(b"GET /metrics HT")
            at_once = struct.pack("ii", 1, 0)  # close() sends a reset
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        wait_until(lambda: "a scraper at 127.0.0.1 got no metrics: " in caplog.text, "the reset")
        assert "ConnectionResetError" in caplog.text
        assert scrape(server), "the next one is answered"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_connection_that_asks_nothing_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        metrics.serve(service, 0) as server,
        socket.create_connection((server.host, server.port), PATIENCE_S) as scraper,
    ):
        assert scraper.recv(1) == b""
        assert scrape(server), "the next one is answered"
    assert "Traceback" not in capfd.readouterr().err


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        pytest.raises(errors.ConfigError, match="pip install"),
    ):
        metrics.register(service)
