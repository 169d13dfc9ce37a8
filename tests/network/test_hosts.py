"""Three hosts and a network that fails: nothing hangs, the healthy host goes on, and what comes
back is used again by itself.

Master and clients are on host 1, a server each on hosts 2 and 3.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
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
from tests.network.tally import TALLY
from tests.prpc_engine.inside import dispatcher_of, entries_of
from tests.prpc_engine.processes import PATIENCE_S, ROOT, wait_connected, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None,
        reason="makes network namespaces: needs root and ip",
    ),
]

ARRAY_BYTES = 3_000_000
SILENT_S = 1.0  # limits.peer_silent_s of all
LEASE_S = 30.0  # of sessions: longer than any cut
# Outlives the time in which a silent host is not known to be lost.
STEADY = RetryPolicy(attempts_max=8, unsent_max=40)
Cut = Callable[[Network, int], AbstractContextManager[None]]
CUTS: list[Cut] = [
    Network.parted,
    Network.unplugged,
    Network.mute,
    Network.deaf,
    Network.without_address,
]


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
    """Of the session of the server on host 3."""
    return LEASE_S


@pytest.fixture
def world(network: Network, lease_s: float) -> Iterator[World]:
    limits = Limits(peer_silent_s=SILENT_S)
    here = f"{network.address(1)}:0"
    with (
        Master(here, secret=SECRET, limits=limits) as master,
        serving(network, master, 2, LEASE_S),
        serving(network, master, 3, lease_s),
        RpcService(master.address, bind=here, secret=SECRET, limits=limits) as service,
        service.create_client(NAME, 2, PATIENCE_S, retry=STEADY) as client,
    ):
        assert {client.call_to(host, "where") for host in (2, 3)} == {2, 3}
        wait_connected(client)
        yield World(network, service, client)
    # Who still tries to connect gives up by itself, after CONNECT_TIMEOUT_S at the latest.
    wait_until(lambda: not dispatcher_of(client).connectors, "the end of connectors")


def targets(service: RpcService) -> dict[int, int]:
    """What the master says: servers, and the numbers they have as long as their sessions last."""
    return {entry.server_id: entry.target for entry in entries_of(service, NAME, 0, PATIENCE_S)}


def answers_again(client: RpcClient, host: int) -> bool:
    try:
        return bool(client.call_to(host, "where", timeout_s=1.0) == host)
    except errors.RpcError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_calls_to_a_host_that_is_cut_off_are_told_others_go_on_and_it_is_used_again(
    world: World, cut: Cut
) -> None:
    """Its session outlives this: it keeps its rank and its server."""
    network, service, client = world
    before = targets(service)
    held = [client.submit_to(2, "hold", timeout_s=None) for _ in range(3)]
    client.call_to(2, "where")
    with cut(network, 2):
        late = client.submit_to(2, "where", timeout_s=0.2)
        elsewhere = [client.submit("where", timeout_s=PATIENCE_S) for _ in range(20)]
        assert isinstance(
            late.error(PATIENCE_S), errors.DeadlineExceeded | errors.MaybeExecuted | errors.NotSent
        )
        for call in held:
            assert isinstance(call.error(PATIENCE_S), errors.MaybeExecuted), (
                "it has no deadline: the silence ended it"
            )
        assert {call.result(PATIENCE_S) for call in elsewhere} == {3}
        with pytest.raises((errors.NotSent, errors.DeadlineExceeded)):
            client.call_to(2, "where", timeout_s=0.3)
    wait_until(lambda: answers_again(client, 2), "the way back")
    assert {client.call_to(host, "where", timeout_s=PATIENCE_S) for host in (2, 3)} == {2, 3}
    assert targets(service) == before


@pytest.mark.slow
def test_the_host_of_master_and_clients_is_cut_off_from_all_and_finds_them_as_they_were(
    world: World,
) -> None:
    network, service, client = world
    before = targets(service)
    held = client.submit("hold", timeout_s=None)
    with network.parted(1):
        calls = [client.submit("where", timeout_s=0.5) for _ in range(10)]
        for call in calls:
            assert isinstance(
                call.error(PATIENCE_S),
                errors.DeadlineExceeded | errors.MaybeExecuted | errors.NotSent,
            )
        assert isinstance(held.error(PATIENCE_S), errors.MaybeExecuted)
    for host in (2, 3):
        wait_until(lambda host=host: answers_again(client, host), "the way back")  # type: ignore[misc]
    assert targets(service) == before


class TestShortLease:
    @pytest.fixture
    def lease_s(self) -> float:
        return 3.0  # on a busy machine it must not end before the network is cut

    @pytest.mark.slow
    def test_a_session_that_is_not_heard_for_longer_than_its_lease_expires_and_is_made_again(
        self, world: World
    ) -> None:
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
        self._threads = [
            threading.Thread(target=self._run, args=(which,)) for which in range(threads)
        ]

    def _run(self, which: int) -> None:
        for number in itertools.count(which * 1_000_003):
            if self._stop.is_set():
                return
            sent = pattern(number, ARRAY_BYTES)
            try:
                crc, back = self._client.call("checked", sent, timeout_s=PATIENCE_S)
            except (errors.MaybeExecuted, errors.NotSent) as error:  # it was told, and goes on
                TALLY.ended(error, True)
                continue
            is_right = crc == checksum(sent) == checksum(back)
            TALLY.ended(None, is_right)
            if not is_right:
                self.wrong.append(f"array {number}")
            self._right[which] += 1

    def goes_on(self) -> None:
        """Wait until each thread had arrays answered that it sent after now."""
        before = list(self._right)
        wait_until(
            lambda: all(now > then + 1 for now, then in zip(self._right, before, strict=True)),
            "more traffic",
        )

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.mark.slow
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


@pytest.mark.slow
def test_large_packets_that_vanish_end_calls_by_name_while_small_ones_and_others_go_on(
    world: World,
) -> None:
    """An MTU black hole: the handshake and every small message pass, an array's packets never do,
    and nobody says so.
    """
    network, service, client = world
    before = targets(service)
    sent = pattern(1, ARRAY_BYTES)

    def comes_back(host: int) -> bool:
        try:
            crc, back = client.call_to(host, "checked", sent, timeout_s=PATIENCE_S)
        except (errors.MaybeExecuted, errors.NotSent) as error:
            TALLY.ended(error, True)
            return False
        TALLY.ended(None, crc == checksum(sent) == checksum(back))
        return bool(crc == checksum(sent) == checksum(back))

    assert comes_back(2)
    with network.black_hole(2, 600):
        # Before the load: behind another array on its lane it would not leave at all, and end with
        # NotSent.
        sending = client.submit_to(2, "checked", sent, timeout_s=3 * SILENT_S)
        with Load(client, threads=1) as load:
            lost = sending.error(PATIENCE_S)
            assert isinstance(lost, errors.MaybeExecuted | errors.DeadlineExceeded), repr(lost)
            TALLY.ended(lost, True)
            wait_until(lambda: answers_again(client, 2), "small calls over a new connection")
            assert comes_back(3)
    wait_until(lambda: comes_back(2), "arrays again")
    assert load.wrong == []
    assert targets(service) == before


@pytest.fixture
def elsewhere(network: Network) -> Iterator[str]:
    """A master on host 3, in a process of its own: its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRPC_SECRET": SECRET}
    command = [
        *network.prefix(3),
        sys.executable,
        "-m",
        "prpc_engine.cli",
        "master",
        "--bind",
        f"{network.address(3)}:0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip().removeprefix("serving at ")
        process.terminate()


@pytest.mark.slow
def test_two_hosts_that_cannot_reach_each_other_while_both_reach_the_third(
    network: Network, elsewhere: str
) -> None:
    """The master hears both, so the server stays listed: calls to it end by name, the others go on,
    and it is used again.
    """
    limits = {"peer_silent_s": SILENT_S}
    with (
        Serving(network.prefix(2), 2, elsewhere, limits, bind=f"{network.address(2)}:0"),
        Serving(network.prefix(3), 3, elsewhere, limits, bind=f"{network.address(3)}:0"),
        RpcService(
            elsewhere, bind=f"{network.address(1)}:0", secret=SECRET, limits=Limits(**limits)
        ) as service,
        service.create_client(NAME, 2, PATIENCE_S, retry=STEADY) as client,
    ):
        assert {client.call_to(host, "where") for host in (2, 3)} == {2, 3}
        before = targets(service)
        held = {host: client.submit_to(host, "hold", timeout_s=None) for host in (2, 3)}
        client.call_to(2, "where")
        with network.parted_pair(1, 2):
            assert isinstance(held[2].error(PATIENCE_S), errors.MaybeExecuted)
            assert {client.call("where", timeout_s=PATIENCE_S) for _ in range(20)} == {3}
            with pytest.raises((errors.NotSent, errors.DeadlineExceeded)):
                client.call_to(2, "where", timeout_s=0.3)
            assert targets(service) == before, "both are heard where the master is"
        wait_until(lambda: answers_again(client, 2), "the way back")
        assert not held[3].done(), "what goes elsewhere is left alone"
        assert targets(service) == before
    wait_until(lambda: not dispatcher_of(client).connectors, "the end of connectors")
