"""A key-value server in a process of its own, whose file system may kill it.

    python -m tests.prpc_engine.kv.checkpoint.processes MASTER CALL

serves until its standard input ends; CALL is the number of the call to the file system at which it
is killed, -1 for none.
"""

from __future__ import annotations

import sys

from prpc_engine import RpcService
from prpc_engine.kv import TableShard
from prpc_engine.kv.checkpoint import methods
from tests.program import PATIENCE_S, Program
from tests.prpc_engine.kv.checkpoint.jobs import FailingFiles


class ServerProcess(Program):
    """One such process, ready."""

    def __init__(self, master: str, killed_at: int = -1) -> None:
        super().__init__("tests.prpc_engine.kv.checkpoint.processes", master, str(killed_at))
        assert self.read_line() == "ready"


def main(master: str, killed_at: str) -> None:
    methods.HOLD_S_MAX = PATIENCE_S  # a busy machine may take longer from enter to cut
    with RpcService(master=master) as service:
        service.create_server("kv", TableShard(None, FailingFiles(int(killed_at))))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
