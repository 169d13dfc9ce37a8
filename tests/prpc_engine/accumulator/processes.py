"""Writers and servers in processes of their own, for tests.

python -m tests.prpc_engine.accumulator.processes server MASTER [SNAPSHOT]    serves until its standard input ends
python -m tests.prpc_engine.accumulator.processes writer MASTER RANK          writes (i + 1) * (RANK + 1) for i < WRITES, and ends
    python -m tests.prpc_engine.accumulator.processes careless MASTER             writes once, and ends without closing anything
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.prpc_engine.processes import PATIENCE_S, ROOT

WRITES = 1000
FLUSH_COUNT = 10
SNAPSHOT_S = 0.02
NEVER_S = 3600.0  # a flush_s that no test waits for


class Process:
    """One of them. A context manager, which ends it; one that was killed before is fine."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.prpc_engine.accumulator.processes", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def wait_until_ready(self) -> None:
        """It has said so."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self.process.stdout.close()
        assert code in (0, -signal.SIGKILL)


def serve(master: str, snapshot: str | None = None) -> None:
    """What a server runs."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import AccumulatorServer

    path = None if snapshot is None else Path(snapshot)
    with RpcService(master=master) as service, AccumulatorServer(service, snapshot_path=path, snapshot_s=SNAPSHOT_S):
        print("ready", flush=True)
        sys.stdin.read()


def write(master: str, rank: str) -> None:
    """What a writer runs."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import Accumulator, AccumulatorClient, Max, Min, Sum

    with RpcService(master=master) as service, AccumulatorClient(service, timeout_s=PATIENCE_S):
        total, largest, smallest = (
            Accumulator(name, law, FLUSH_COUNT) for name, law in (("sum", Sum), ("max", Max), ("min", Min))
        )
        for i in range(WRITES):
            value = (i + 1) * (int(rank) + 1)
            total.write(value)
            largest.write(value)
            smallest.write(value)


def write_and_leave(master: str) -> None:
    """What a writer runs that does not close what it opened."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import Accumulator, AccumulatorClient, Sum

    AccumulatorClient(RpcService(master=master), timeout_s=PATIENCE_S)
    Accumulator("sum", Sum, flush_count=0, flush_s=3600).write(7)


if __name__ == "__main__":
    {"server": serve, "writer": write, "careless": write_and_leave}[sys.argv[1]](*sys.argv[2:])
