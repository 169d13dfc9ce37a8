"""In the guest a device that is missing is a failure; anywhere else these tests need one."""

from __future__ import annotations

import os

import pytest

from shard import verbs_ports, verbs_refusal
from tests.rdma.guest import GUEST


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = verbs_refusal()
    if why is None and verbs_ports():
        return
    if os.environ.get(GUEST):
        raise pytest.UsageError(f"the guest was made for its RDMA device, and has none: {why}")
    skip = pytest.mark.skip(
        reason=f"no RDMA device here ({why}); python -m tests.rdma.guest run has one"
    )
    for item in items:
        if "tests/rdma/" in item.path.as_posix():
            item.add_marker(skip)
