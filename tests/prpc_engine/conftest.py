"""A master a test; one farm of processes a module, and none of its processes after a test; shards
that start by a fork.
"""

from __future__ import annotations

from collections.abc import Iterator

import multiprocess
import multiprocess.forkserver
import pytest

from prpc_engine import Master
from prpc_engine.client import dispatcher
from prpc_engine.master import session
from shard import ShardGroup
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm

# The last of them because pytest is this process's main module, which each process of a group
# imports.
IN_SHARDS = ["prpc_engine", "tests.prpc_engine.handlers", "pytest"]


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


@pytest.fixture
def forked_shards(_started_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of services are forked from a Python that has imported what they need, in place of
    starting their own. Their environment is that of the first test of this process that asks.
    """
    multiprocess.get_context("forkserver").set_forkserver_preload(IN_SHARDS)
    with pytest.MonkeyPatch.context() as while_it_starts:
        # numpy would start threads, which no fork takes along
        while_it_starts.setenv("OPENBLAS_NUM_THREADS", "1")
        multiprocess.forkserver.ensure_running()
    assert ShardGroup.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(ShardGroup.__init__.__kwdefaults__, "start_method", "forkserver")
