"""The benchmarks as tests, on tiny sizes. Their processes are forked by one that has imported what
they need: starting Python takes 0.4 s of a core, and a tiny case has dozens of processes.
"""

from __future__ import annotations

import multiprocess
import pytest

from perf.child import START_METHOD

IMPORTED = ["perf.harness", "perf.peers", "prpc_engine.kv", "prpc_engine.cluster"]


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    multiprocess.get_context("forkserver").set_forkserver_preload(IMPORTED)


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD, "forkserver")
