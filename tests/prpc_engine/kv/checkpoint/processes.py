"""A key-value server in a process of its own, whose file system may kill it.

    python -m tests.prpc_engine.kv.checkpoint.processes MASTER CALL

serves until its standard input ends; CALL is the number of the call to the file system at which it is killed, -1 for none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prpc_engine import RpcService
from prpc_engine.kv import TableShard
from tests.prpc_engine.kv.checkpoint.jobs import FailingFiles

ROOT = Path(__file__).parents[4]
PATIENCE_S = 30.0


@contextmanager
def server_process(master: str, killed_at: int = -1) -> Iterator[subprocess.Popen[str]]:
    """One such process, ready; ended at the end."""
    command = [sys.executable, "-m", "tests.prpc_engine.kv.checkpoint.processes", master, str(killed_at)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE_S)


def main(master: str, killed_at: str) -> None:
    with RpcService(master=master) as service:
        service.create_server("kv", TableShard(None, FailingFiles(int(killed_at))))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
