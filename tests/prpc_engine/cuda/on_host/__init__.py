"""CUDA devices that are memory of the host, and arrays on them."""

from __future__ import annotations

import sys
from pathlib import Path

from shard import runtime
from tests.prpc_engine.cuda.on_host.host_driver import HostDriver


def use_host_devices(folder: Path, devices: int) -> HostDriver:
    """From now on they are this process's, with a "cupy" whose arrays lie on them."""
    made = HostDriver(folder, devices)
    runtime.put("cuda", made)
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import cupy  # noqa: F401
    finally:
        sys.path.pop(0)
    return made
