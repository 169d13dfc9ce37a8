"""Whether the kernel knows the way to a host on its link: hosts that are there, that are not, and
gateways, over IPv4 and IPv6.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from shard.transport.neighbour import NeighbourSearch, NeighbourState
from tests.network.namespaces import Network, network_or_skip, run
from tests.prpc_engine.processes import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None,
        reason="makes network namespaces: needs root and ip",
    ),
]
OURS, THEIRS, NOBODY = "fd00:9::1", "fd00:9::2", "fd00:9::99"
OUR_LINK, THEIR_LINK, NO_LINK = "fe80::9:1", "fe80::9:2", "fe80::9:99"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip(2) as made:
        for host, addresses in ((1, (OURS, OUR_LINK)), (2, (THEIRS, THEIR_LINK))):
            for address in addresses:  # without looking whether another host has it, for a second
                run(
                    *("ip", *(["-n", made.namespace(host)] if host > 1 else []), "address", "add"),
                    *(f"{address}/64", "dev", made.card(host), "nodad"),
                )
        yield made


def found(network: Network, own: str, wanted: str) -> tuple[NeighbourState, NeighbourState, str]:
    """At first, at last, and what is said of one that is not found."""
    search = NeighbourSearch(network.card(1), ip_address(own), ip_address(wanted))
    with contextlib.closing(search):
        first = search.state()
        wait_until(lambda: search.state() is not NeighbourState.SOUGHT, "the end of the search")
        return first, search.state(), search.why()


def test_a_host_that_answers_is_found(network: Network) -> None:
    for own, wanted in (
        (network.address(1), network.address(2)),
        (OURS, THEIRS),
        (OUR_LINK, THEIR_LINK),
    ):
        assert found(network, own, wanted)[1] is NeighbourState.KNOWN
        # and is known from then on
        assert found(network, own, wanted)[0] is NeighbourState.KNOWN


def test_a_host_that_does_not_answer_is_named_at_its_device(network: Network) -> None:
    for own, wanted in (
        (network.address(1), network.address(99)),
        (OURS, NOBODY),
        (OUR_LINK, NO_LINK),
    ):
        first, last, why = found(network, own, wanted)
        assert (first, last) == (NeighbourState.SOUGHT, NeighbourState.FAILED)
        assert f"{wanted} answers no " in why
        assert network.card(1) in why


def test_of_a_host_beyond_a_gateway_the_gateway_is_looked_for(network: Network) -> None:
    beyond = "198.18.7.7"
    for gateway, expected in ((2, NeighbourState.KNOWN), (98, NeighbourState.FAILED)):
        by = network.address(gateway)
        run("ip", "route", "replace", f"{beyond}/32", "via", by, "dev", network.card(1))
        _, last, why = found(network, network.address(1), beyond)
        assert last is expected
        assert f"{beyond} (by way of {by})" in why
    run("ip", "route", "delete", f"{beyond}/32")


def test_an_entry_that_somebody_made_is_enough(network: Network) -> None:
    run(
        *("ip", "neighbour", "replace", network.address(97), "lladdr", "02:00:00:00:00:61"),
        *("dev", network.card(1)),
    )
    assert found(network, network.address(1), network.address(97))[0] is NeighbourState.KNOWN


def test_nothing_is_waited_for_where_there_is_nothing_to_learn(network: Network) -> None:
    for own, wanted in (
        (network.address(1), network.address(1)),  # of this host
        (OURS, OURS),
        (network.address(1), THEIRS),  # between two families there is no way
        ("203.0.113.1", network.address(99)),  # none of our addresses
    ):
        assert found(network, own, wanted)[0] is NeighbourState.KNOWN
    search = NeighbourSearch("none0", ip_address(OURS), ip_address(THEIRS))
    assert search.state() is NeighbourState.KNOWN
    search.close()
