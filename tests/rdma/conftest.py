"""In the guest a device that is missing is a failure; anywhere else these tests need one."""

from __future__ import annotations

import os

import pytest

from shard import verbs_ports, verbs_refusal
from shard.transport.verbs_device import IWARP
from tests.rdma.guest import GUEST, RXE, SIW

OF_IWARP = "test_iwarp.py"
OF_BOTH = ("test_calls.py", "test_soak.py")  # the other files are of RoCE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = verbs_refusal()
    links = set() if why is not None else {port.link for port in verbs_ports() if not port.fault}
    has = {SIW: IWARP in links, RXE: bool(links - {IWARP})}
    made_for = os.environ.get(GUEST, "")
    if made_for and not has[made_for]:
        faults = "; ".join(f"{port}: {port.fault}" for port in verbs_ports() if port.fault)
        raise pytest.UsageError(
            f"the guest was made for its RDMA device, and has none: {why or faults}"
        )
    for item in items:
        if "tests/rdma/" not in item.path.as_posix():
            continue
        link = SIW if item.path.name == OF_IWARP else RXE
        if not has[link] and not (item.path.name in OF_BOTH and any(has.values())):
            kind = "iWARP" if link == SIW else "InfiniBand or RoCE"
            item.add_marker(
                pytest.mark.skip(
                    reason=f"no RDMA device of {kind} here ({why or 'others are there'}); "
                    f"python -m tests.rdma.guest --link {link} run has one"
                )
            )
