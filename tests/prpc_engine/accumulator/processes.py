"""Writers and servers in processes of their own, for tests.

python -m tests.prpc_engine.accumulator.processes COMMAND

server MASTER [SNAPSHOT]    serves until its standard input ends
server-without-end MASTER SNAPSHOT    as server, and closes nothing then; saves at its end alone
server-in-main MASTER SNAPSHOT        as server-without-end, and its main thread serves until it is
                                      killed
writer MASTER RANK          writes (i + 1) * (RANK + 1) for i < WRITES, and ends
careless MASTER             writes once, and ends without closing anything
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.program import PATIENCE_S, Program

WRITES = 1000
FLUSH_COUNT = 10
SNAPSHOT_S = 0.02
NEVER_S = 3600.0  # a flush_s that no test waits for


class Process(Program):
    """One of them."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("tests.prpc_engine.accumulator.processes", *arguments)

    def wait_until_ready(self) -> None:
        """It has said so."""
        assert self.read_line() == "ready"


def serve(master: str, snapshot: str | None = None) -> None:
    """What a server runs."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import AccumulatorServer

    path = None if snapshot is None else Path(snapshot)
    with (
        RpcService(master=master) as service,
        AccumulatorServer(service, snapshot_path=path, snapshot_s=SNAPSHOT_S),
    ):
        print("ready", flush=True)
        sys.stdin.read()


def serve_without_end(master: str, snapshot: str) -> None:
    """What a server runs that ends as it happens to."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import AccumulatorServer

    AccumulatorServer(RpcService(master=master), snapshot_path=snapshot, snapshot_s=NEVER_S)
    print("ready", flush=True)
    sys.stdin.read()


def serve_in_main(master: str, snapshot: str) -> None:
    """What a server runs that ends by a signal."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import AccumulatorServer

    service = RpcService(master=master)
    AccumulatorServer(service, snapshot_path=snapshot, snapshot_s=NEVER_S)
    print("ready", flush=True)
    service.serve_forever()


def write(master: str, rank: str) -> None:
    """What a writer runs."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import Accumulator, AccumulatorClient, Max, Min, Sum

    with (
        RpcService(master=master) as service,
        AccumulatorClient(service, timeout_s=PATIENCE_S) as client,
    ):
        total, largest, smallest = (
            Accumulator(name, law, FLUSH_COUNT)
            for name, law in (("sum", Sum), ("max", Max), ("min", Min))
        )
        for i in range(WRITES):
            value = (i + 1) * (int(rank) + 1)
            total.write(value)
            largest.write(value)
            smallest.write(value)
        assert client.close(PATIENCE_S) == 0  # however late the server takes them


def write_and_leave(master: str) -> None:
    """What a writer runs that does not close what it opened."""
    from prpc_engine import RpcService
    from prpc_engine.accumulator import Accumulator, AccumulatorClient, Sum

    AccumulatorClient(RpcService(master=master), timeout_s=PATIENCE_S)
    Accumulator("sum", Sum, flush_count=0, flush_s=3600).write(7)


COMMANDS = {
    "server": serve,
    "server-without-end": serve_without_end,
    "server-in-main": serve_in_main,
    "writer": write,
    "careless": write_and_leave,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
