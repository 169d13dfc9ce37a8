"""A master a test; one farm of processes a module, and none of its processes after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prpc_engine import Master
from prpc_engine.client import dispatcher
from prpc_engine.master import session
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm


@pytest.fixture
def master() -> Iterator[Master]:
    with Master() as made:
        yield made


@pytest.fixture
def patient_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed calls are repeated because a server says that they may be, however late it says so."""
    monkeypatch.setattr(dispatcher, "DESCRIBE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def patient_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks the master what it answers at once is answered, however late."""
    monkeypatch.setattr(session, "ANSWER_S", PATIENCE_S)


@pytest.fixture(scope="module")
def farm_of_module(_started_once: None) -> Iterator[Farm]:
    with Farm() as farm:
        yield farm


@pytest.fixture
def farm(farm_of_module: Farm) -> Iterator[Farm]:
    """Starts processes, and kills what a test left running."""
    yield farm_of_module
    farm_of_module.end_all()
