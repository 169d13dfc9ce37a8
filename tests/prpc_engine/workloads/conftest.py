"""One farm a module, and none of its processes after a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from prpc_engine import Master
from tests.prpc_engine.workloads.farm import Farm


@pytest.fixture(scope="module")
def farm_of_module(_started_once: None) -> Iterator[Farm]:
    with Farm() as farm:
        yield farm


@pytest.fixture
def farm(farm_of_module: Farm) -> Iterator[Farm]:
    """Starts processes, and kills what a test left running."""
    yield farm_of_module
    farm_of_module.end_all()


@pytest.fixture
def master() -> Iterator[Master]:
    with Master() as one:
        yield one


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line of figures past pytest's capture."""

    def say(text: str) -> None:
        with capfd.disabled():
            print(f"\n  {text}", end="")

    return say
