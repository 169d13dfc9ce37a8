"""How tests are spread over the workers of `pytest -n`: by file, the files that take longest first.

By file, because what a file's tests share is made once. The longest first, because a worker that
is left alone with one at the end is what all others then wait for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# Seconds, on two quiet cores, of the files that take longest; a figure that is wrong costs some
# seconds of the run, and no test.
LONG_FILES_S: dict[str, int] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: two a core, because half of most tests' time is waiting."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Whatever `--dist` says."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the files are in their order already
    return LoadFileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of workers alone: without them the order is that of the files' names."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -LONG_FILES_S.get(item.nodeid.partition("::")[0], 0))
