"""One zygote a module, and none of its children after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.zygote import Zygote


@pytest.fixture(scope="module")
def zygote_of_module(_started_once: None) -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.fixture
def zygote(zygote_of_module: Zygote) -> Iterator[Zygote]:
    """Starts processes to be killed."""
    yield zygote_of_module
    zygote_of_module.end_all()
