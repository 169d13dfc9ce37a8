"""A job of real processes for all tests of this folder: importing TensorFlow takes longer than most
of them.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Iterator

import pytest

from tests.tensorflow.tasks import Job

TESTS_MAX = 6  # of a job's processes: those to come would take longer than new ones
_job: Job | None = None
_tests = 0


@pytest.fixture(scope="session")
def job(_started_once: None) -> Iterator[Job]:
    """Two ps and two workers, with the stock protocol and with ours."""
    global _job
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'")
    shards = os.environ.get("PRPC_TEST_TF_SHARDS")  # all tests, with so many processes a ps
    env = {"NETWORK_PS_CORE_NUMBER": shards} if shards else None
    _job = Job(secrets.randbits(32), env, ps=2, worker=2)
    yield _job
    _job.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Between two tests, and not in a fixture: what is left behind by none of them is made here."""
    global _tests
    if _job is not None and "job" in getattr(item, "fixturenames", ()):
        _tests += 1
        if _tests % TESTS_MAX == 0:
            _job.renew()
