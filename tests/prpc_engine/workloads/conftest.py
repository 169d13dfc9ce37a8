"""What the workloads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from prpc_engine import Master


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
