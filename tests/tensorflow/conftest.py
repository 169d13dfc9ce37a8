"""A job of real processes for all tests of this folder: importing TensorFlow takes longer than most
of them.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterator

import pytest

from tests.tensorflow.tasks import Job


@pytest.fixture(scope="session")
def job(_started_once: None) -> Iterator[Job]:
    """Two ps and two workers, with the stock protocol and with ours."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'")
    found = Job(secrets.randbits(32), ps=2, worker=2)
    yield found
    found.close()
