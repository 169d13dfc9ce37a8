"""A peer that vanishes without a word is found within limits.peer_silent_s, and one that is only busy is not taken for it.

The peer lives in a network namespace of its own, behind a pair of virtual cards, so that the network can be cut.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine.call import Call
from prpc_engine.message import method_key
from prpc_engine.peer import Peer
from shard import Limits, Node, Reactor, Slab, TcpTransport
from tests.prpc_engine.peers import Route
from tests.prpc_engine.processes import PATIENCE_S, ROOT

BOUND_S = 1.0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Network:
    """A namespace, its card, ours, and an address at each end."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.name, self.ours, self.theirs = f"prpc{pid}", f"prpc{pid}o", f"prpc{pid}t"
        base = f"10.{200 + pid % 50}.{pid // 50 % 250}"
        self.our_host, self.their_host = f"{base}.1", f"{base}.2"

    def build(self) -> None:
        """Raises OSError where this is not possible."""
        ip("netns", "add", self.name)
        ip("link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns", self.name)
        ip("address", "add", f"{self.our_host}/24", "dev", self.ours)
        ip("link", "set", self.ours, "up")
        ip("-n", self.name, "address", "add", f"{self.their_host}/24", "dev", self.theirs)
        ip("-n", self.name, "link", "set", self.theirs, "up")

    def remove(self) -> None:
        for arguments in (("link", "delete", self.ours), ("netns", "delete", self.name)):
            subprocess.run(["ip", *arguments], capture_output=True, check=False)

    def cut_there(self) -> None:
        """As if its host had lost power."""
        ip("-n", self.name, "link", "set", self.theirs, "down")

    def cut_here(self) -> None:
        """As if our cable was pulled."""
        ip("link", "set", self.ours, "down")

    def swallow_answers(self) -> None:
        """What we send arrives, nothing comes back."""
        ip("-n", self.name, "route", "add", "blackhole", f"{self.our_host}/32")


CUTS: list[Callable[[Network], None]] = [Network.cut_there, Network.cut_here, Network.swallow_answers]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.remove()


class Caller:
    """Connected to the server in the namespace; the test turns the reactor."""

    def __init__(self, network: Network, bound_s: float) -> None:
        command = ["ip", "netns", "exec", network.name, sys.executable, "-m", "tests.prpc_engine.silent_server"]
        self.process = subprocess.Popen(
            [*command, network.their_host, str(bound_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        assert self.process.stdout is not None
        address = self.process.stdout.readline().decode().strip()
        self.reactor, self.slab = Reactor(time.monotonic), Slab()
        node = Node(secret=b"secret", incarnation=1, limits=Limits(peer_silent_s=bound_s))
        self.connection = TcpTransport(node, self.slab).connect(address, PATIENCE_S)
        self.lost: list[Peer] = []
        self.peer = Peer(self.connection, self.reactor, None, {}, self.lost.append)
        self.connection.attach(self.reactor)
        assert self.finished(self.ask("echo", 1)).result() == 1

    def ask(self, method: str, *args: Any) -> Call:
        return self.peer.request(Route(), method, method_key(method), args, None, False)

    def finished(self, call: Call) -> Call:
        deadline = time.monotonic() + PATIENCE_S
        while not call.done():
            assert time.monotonic() < deadline, "it hangs"
            if not self.reactor.poll(time.monotonic()):
                self.reactor.park(0.05)
        return call

    def close(self) -> None:
        self.connection.close()
        self.reactor.close()
        self.slab.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def caller(network: Network) -> Iterator[Caller]:
    made = Caller(network, BOUND_S)
    yield made
    made.close()


def assert_lost(call: Call) -> None:
    error = call.error()
    assert isinstance(error, errors.MaybeExecuted)
    assert "it answered nothing for 1 s (limits.peer_silent_s)" in str(error)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_a_call_whose_server_vanishes_while_it_works_is_told(
    network: Network, caller: Caller, cut: Callable[[Network], None]
) -> None:
    """Nothing is under way: the kernel's keepalive finds it."""
    call = caller.ask("wait")
    caller.finished(caller.ask("echo", 2))
    cut(network)
    assert_lost(caller.finished(call))
    assert caller.lost == [caller.peer]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
@pytest.mark.parametrize("nbytes", [1, 20_000_000])
def test_a_call_that_is_sent_into_nothing_is_told(
    network: Network, caller: Caller, nbytes: int, cut: Callable[[Network], None]
) -> None:
    """What was sent is not acknowledged: the kernel would try for a quarter of an hour."""
    cut(network)
    assert_lost(caller.finished(caller.ask("echo", np.zeros(nbytes, np.uint8))))


def test_a_server_that_works_far_longer_than_the_bound_is_not_lost(network: Network) -> None:
    """Also while so much waits for it that its kernel takes no more; TCP_USER_TIMEOUT would end that connection."""
    caller = Caller(network, 0.5)
    try:
        work = caller.ask("compute", 2.0)
        waiting = [caller.ask("echo", np.full(20_000_000, number, np.uint8)) for number in range(3)]
        assert caller.finished(work).result() == 2.0
        assert [caller.finished(call).result()[-1] for call in waiting] == [0, 1, 2]
        assert caller.lost == []
    finally:
        caller.close()
