"""This process with two devices of the host's memory, and workers beside it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine import remote as rpc
from shard import runtime
from tests.program import Program, wait_until
from tests.prpc_engine.cuda import functions_there as there
from tests.prpc_engine.cuda.on_host import HostDriver, use_host_devices


class Devices:
    """This process with two devices, and workers beside it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.meeting = f"file://{folder / 'meet'}"
        self._stack = stack
        (folder / "gpus").mkdir()
        self.driver: HostDriver = use_host_devices(folder / "gpus", 2)

    def join(
        self,
        device_map: dict[Any, Any] | None = None,
        gpus: str = "gpus",
        count: int = 2,
        anybody: Any = None,
        direct: bool = False,
    ) -> Program:
        """The test as "here", with that map for the other, "there", or that for anybody; `gpus`:
        whose devices it sees; `direct`: RDMA ports may have both's.
        """
        (self.folder / gpus).mkdir(exist_ok=True)
        program = self._stack.enter_context(
            Program(
                "tests.prpc_engine.cuda.worker_on_host",
                *("there", "1", "2", self.meeting, str(self.folder / gpus), "2"),
                *(["direct"] if direct else []),
            )
        )
        options = rpc.Options(gpu_direct=direct)
        if device_map:
            options.set_device_map("there", device_map)
        if anybody:
            options.set_device_map("*", anybody)
        rpc.init_rpc("here", 0, 2, self.meeting, options)
        assert program.read_line() == "up"
        return program


@contextlib.contextmanager
def two_workers(folder: Path) -> Iterator[Devices]:
    """This process as one; join() makes the other."""
    with contextlib.ExitStack() as stack:
        yield Devices(folder, stack)
        rpc.shutdown(graceful=False)
        runtime.put("cuda", None)
        runtime.put("cuda direct", None)
        sys.modules.pop("cupy", None)


def array_of(size: int, device: int = 0, first: int = 0) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.asarray(np.arange(first, first + size, dtype=np.float32))


def sum_of(size: int) -> float:
    return float(np.arange(size, dtype=np.float32).sum())


def nothing_is_taken() -> None:
    def taken() -> int:
        mine: int = rpc.statistics().get("device_taken", 0)
        theirs: int = rpc.rpc_sync("there", there.figures).get("device_taken", 0)
        return mine + theirs

    wait_until(lambda: taken() == 0, "every block's coming back")
