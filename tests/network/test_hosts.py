"""Three hosts and a network that fails: nothing hangs, the healthy host goes on, and what comes back is used again by itself.

Master and clients are on host 1, a server each on hosts 2 and 3.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

import pytest

from prpc_engine import Master, RetryPolicy, RpcClient, RpcService, errors
from shard import Limits
from tests.network.namespaces import Network, network_or_skip
from tests.network.server import NAME, SECRET, Serving, checksum, pattern
from tests.prpc_engine.processes import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: needs root and ip"),
]

ARRAY_BYTES = 3_000_000
SILENT_S = 1.0  # limits.peer_silent_s of all
# Outlives the time in which a silent host is not known to be lost.
STEADY = RetryPolicy(attempts_max=8, unsent_max=40)
Cut = Callable[[Network, int], AbstractContextManager[None]]
CUTS: list[Cut] = [Network.parted, Network.unplugged, Network.mute, Network.deaf, Network.without_address]


class World(NamedTuple):
    network: Network
    service: RpcService
    client: RpcClient


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(3) as made:
        yield made


def serving(network: Network, master: Master, host: int, lease_s: float) -> Serving:
    bind = f"{network.address(host)}:0"
    limits = {"peer_silent_s": SILENT_S}
    return Serving(network.prefix(host), host, master.address, limits, bind=bind, lease_s=lease_s)


@pytest.fixture
def lease_s() -> float:
    """Of the servers' sessions."""
    return 30.0


@pytest.fixture
def world(network: Network, lease_s: float) -> Iterator[World]:
    limits = Limits(peer_silent_s=SILENT_S)
    here = f"{network.address(1)}:0"
    with (
        Master(here, secret=SECRET, limits=limits) as master,
        serving(network, master, 2, lease_s),
        serving(network, master, 3, lease_s),
        RpcService(master.address, bind=here, secret=SECRET, limits=limits) as service,
        service.create_client(NAME, 2, PATIENCE_S, retry=STEADY) as client,
    ):
        assert {client.call_to(host, "where") for host in (2, 3)} == {2, 3}
        yield World(network, service, client)
    # Who still tries to connect gives up by itself, after CONNECT_TIMEOUT_S at the latest.
    wait_until(lambda: not any(one.name.startswith("prpc-connect") for one in threading.enumerate()), "the end of connectors")


def targets(service: RpcService) -> dict[int, int]:
    """What the master says: servers, and the numbers they have as long as their sessions last."""
    return {entry.server_id: entry.target for entry in service._lookup(NAME, 0, PATIENCE_S)}


def answers_again(client: RpcClient, host: int) -> bool:
    try:
        return bool(client.call_to(host, "where", timeout_s=1.0) == host)
    except errors.RpcError:
        return False


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_calls_to_a_host_that_is_cut_off_are_told_others_go_on_and_it_is_used_again(world: World, cut: Cut) -> None:
    """Its session outlives this: it keeps its rank and its server."""
    network, service, client = world
    before = targets(service)
    held = [client.submit_to(2, "hold", timeout_s=None) for _ in range(3)]
    client.call_to(2, "where")
    with cut(network, 2):
        late = client.submit_to(2, "where", timeout_s=0.2)
        elsewhere = [client.submit("where", timeout_s=PATIENCE_S) for _ in range(20)]
        assert isinstance(late.error(PATIENCE_S), errors.DeadlineExceeded | errors.MaybeExecuted | errors.NotSent)
        for call in held:
            assert isinstance(call.error(PATIENCE_S), errors.MaybeExecuted), "it has no deadline: the silence ended it"
        assert {call.result(PATIENCE_S) for call in elsewhere} == {3}
        with pytest.raises((errors.NotSent, errors.DeadlineExceeded)):
            client.call_to(2, "where", timeout_s=0.3)
    wait_until(lambda: answers_again(client, 2), "the way back")
    assert {client.call_to(host, "where", timeout_s=PATIENCE_S) for host in (2, 3)} == {2, 3}
    assert targets(service) == before


def test_the_host_of_master_and_clients_is_cut_off_from_all_and_finds_them_as_they_were(world: World) -> None:
    network, service, client = world
    before = targets(service)
    held = client.submit("hold", timeout_s=None)
    with network.parted(1):
        calls = [client.submit("where", timeout_s=0.5) for _ in range(10)]
        for call in calls:
            assert isinstance(call.error(PATIENCE_S), errors.DeadlineExceeded | errors.MaybeExecuted | errors.NotSent)
        assert isinstance(held.error(PATIENCE_S), errors.MaybeExecuted)
    for host in (2, 3):
        wait_until(lambda host=host: answers_again(client, host), "the way back")  # type: ignore[misc]
    assert targets(service) == before


class TestShortLease:
    @pytest.fixture
    def lease_s(self) -> float:
        return 0.5

    def test_a_session_that_is_not_heard_for_longer_than_its_lease_expires_and_is_made_again(self, world: World) -> None:
        network, service, client = world
        before = targets(service)
        with network.parted(3):
            wait_until(lambda: list(targets(service)) == [2], "the end of the lease")
            assert client.call("where", timeout_s=PATIENCE_S) == 2
        wait_until(lambda: list(targets(service)) == [2, 3], "the new session")
        assert targets(service)[2] == before[2]
        wait_until(lambda: answers_again(client, 3), "the way back")


class Load:
    """Threads that send arrays and get them back, to any server, until the end of the context."""

    def __init__(self, client: RpcClient, threads: int) -> None:
        self.wrong: list[str] = []
        self._client = client
        self._right = [0] * threads
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(which,)) for which in range(threads)]

    def _run(self, which: int) -> None:
        for number in itertools.count(which * 1_000_003):
            if self._stop.is_set():
                return
            sent = pattern(number, ARRAY_BYTES)
            try:
                crc, back = self._client.call("checked", sent, timeout_s=PATIENCE_S)
            except (errors.MaybeExecuted, errors.NotSent):  # it was told, and goes on
                continue
            if crc != checksum(sent) or checksum(back) != crc:
                self.wrong.append(f"array {number}")
            self._right[which] += 1

    def goes_on(self) -> None:
        """Wait until each thread had arrays answered that it sent after now."""
        before = list(self._right)
        wait_until(lambda: all(now > then + 1 for now, then in zip(self._right, before, strict=True)), "more traffic")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def test_bulk_goes_on_with_the_right_bytes_while_mtu_and_links_change(world: World) -> None:
    network, _, client = world
    with Load(client, threads=2) as load:
        for mtu in (600, 9000, 1500):
            network.set_mtu(mtu)
            load.goes_on()
        for host in (2, 3):
            with network.unplugged(host):
                pass
            load.goes_on()
        with network.parted(2):
            load.goes_on()
        load.goes_on()
    assert load.wrong == []
