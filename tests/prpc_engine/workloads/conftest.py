"""What the workloads share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
