"""One of each of what these tests are about, closed at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shard import Driver, Reactor, ShardGroup, ShmTransport, Slab
from tests.helpers import ManualClock
from tests.shard.processes import PATIENCE_S
from tests.transport_contract import Side, World


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab()
    yield made
    made.close()


@pytest.fixture
def reactor(clock: ManualClock) -> Iterator[Reactor]:
    made = Reactor(clock)
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["parking", "polling"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = Driver(polling=request.param)
    yield made
    made.close()


@pytest.fixture
def group() -> Iterator[ShardGroup]:
    """Two shards that stay down once they are down, and end by themselves however slow the machine
    is.
    """
    with ShardGroup(2, start_method="forkserver", drain_s=PATIENCE_S) as made:
        yield made


@pytest.fixture
def world() -> Iterator[World]:
    made = World(ShmTransport, "shm://")
    yield made
    made.close()


@pytest.fixture
def sides(world: World) -> Iterator[tuple[Side, Side]]:
    """The connector and the acceptor of one connection over shared memory."""
    one, two = world.connect()
    yield one, two
    one.connection.close()
    two.connection.close()
    one.messages.clear()
    two.messages.clear()
