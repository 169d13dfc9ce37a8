"""Seeds, servers that a module's tests share, and what each test adds to the line that a run ends
with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.network.caller import Caller
from tests.network.echo_server import EchoServer
from tests.network.proxy import Proxy
from tests.network.tally import PROPERTY, TALLY

# how many random courses each such test takes; of what is the same eight times over, all at night
SEEDS_OF_A_CHANGE = 3
SEEDS = int(os.environ.get("PRPC_NETWORK_SEEDS", SEEDS_OF_A_CHANGE))
IS_NIGHT = SEEDS > SEEDS_OF_A_CHANGE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`one_seed`: a test for each of SEEDS seeds from PRPC_TEST_SEED on, or from 1; its name shows
    it.
    """
    if "one_seed" in metafunc.fixturenames:
        first = int(os.environ.get("PRPC_TEST_SEED") or 1)
        metafunc.parametrize(
            "one_seed", range(first, first + SEEDS), ids=lambda seed: f"seed{seed}"
        )


@pytest.fixture(autouse=True)
def _tallied(request: pytest.FixtureRequest) -> Iterator[None]:
    before = TALLY.counts.copy()
    yield
    request.node.user_properties.append((PROPERTY, dict(TALLY.counts - before)))


@pytest.fixture(scope="module")
def echo(_started_once: None) -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@pytest.fixture(scope="module")
def hasty(_started_once: None) -> Iterator[EchoServer]:
    """One that soon gives a handshake up. That of a client that does nothing wrong may be too slow
    for it on a busy machine.
    """
    with EchoServer(handshake_s=1.0) as server:
        yield server


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[Proxy]:
    with Proxy(echo.where) as made:
        yield made


@pytest.fixture
def caller() -> Iterator[Caller]:
    with Caller() as made:
        yield made
