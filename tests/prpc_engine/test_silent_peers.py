"""A peer that vanishes without a word is found within limits.peer_silent_s, and one that is only
busy is not taken for it.

The peer lives in a network namespace of its own, so that the network can be cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from shard import Limits, Node, Reactor, Slab, TcpTransport
from tests.connecting import connect
from tests.network.namespaces import Network, network_or_skip
from tests.program import PATIENCE_S, Program
from tests.prpc_engine.peers import Route

BOUND_S = 1.0


CUTS: dict[str, Callable[[Network], AbstractContextManager[None]]] = {
    "its host is gone": lambda network: network.parted(2),
    "our cable is pulled": lambda network: network.unplugged(1),
    "its answers are lost": lambda network: network.mute(2),
}


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(2) as made:
        yield made


class Caller:
    """Connected to the server in the namespace; the test turns the reactor."""

    def __init__(self, network: Network, bound_s: float) -> None:
        self.server = Program(
            "tests.prpc_engine.silent_server",
            network.address(2),
            str(bound_s),
            prefix=network.prefix(2),
        )
        address = self.server.read_line()
        self.reactor, self.slab = Reactor(time.monotonic), Slab()
        node = Node(secret=b"secret", incarnation=1, limits=Limits(peer_silent_s=bound_s))
        self.connection = connect(TcpTransport(node, self.slab), address, PATIENCE_S)
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
        self.server.end()


@pytest.fixture
def caller(network: Network) -> Iterator[Caller]:
    made = Caller(network, BOUND_S)
    yield made
    made.close()


def assert_lost(call: Call) -> None:
    error = call.error()
    assert isinstance(error, errors.MaybeExecuted)
    assert "it answered nothing for 1 s (limits.peer_silent_s)" in str(error)


@pytest.mark.parametrize("cut", CUTS)
def test_a_call_whose_server_vanishes_while_it_works_is_told(
    network: Network, caller: Caller, cut: str
) -> None:
    """Nothing is under way: the kernel's keepalive finds it."""
    call = caller.ask("wait")
    caller.finished(caller.ask("echo", 2))
    with CUTS[cut](network):
        assert_lost(caller.finished(call))
    assert caller.lost == [caller.peer]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("nbytes", [1, 20_000_000])
def test_a_call_that_is_sent_into_nothing_is_told(
    network: Network, caller: Caller, nbytes: int, cut: str
) -> None:
    """What was sent is not acknowledged: the kernel would try for a quarter of an hour."""
    with CUTS[cut](network):
        assert_lost(caller.finished(caller.ask("echo", np.zeros(nbytes, np.uint8))))


@pytest.mark.slow
def test_a_server_that_works_far_longer_than_the_bound_is_not_lost(network: Network) -> None:
    """Also while so much waits for it that its kernel takes no more; TCP_USER_TIMEOUT would end
    that connection.
    """
    caller = Caller(network, 0.5)
    try:
        work = caller.ask("compute", 2.0)
        waiting = [caller.ask("echo", np.full(20_000_000, number, np.uint8)) for number in range(3)]
        assert caller.finished(work).result() == 2.0
        assert [caller.finished(call).result()[-1] for call in waiting] == [0, 1, 2]
        assert caller.lost == []
    finally:
        caller.close()
