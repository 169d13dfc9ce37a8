"""Servers in processes of their own, for tests: started, told to end, killed.

    python -m tests.prpc_engine.processes MASTER NAME TRANSPORT MODE

serves Handlers under NAME until its standard input ends, which the death of the test brings about
too. MODE says who drives: "forever" its main thread, in serve_forever(); "progress" nobody, so that
the progress thread has to.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from tests.program import PATIENCE_S, ROOT, Program, wait_until
from tests.prpc_engine.inside import routes_of

if TYPE_CHECKING:
    from prpc_engine import RpcClient

__all__ = ["PATIENCE_S", "ROOT", "ServerProcess", "serve", "wait_connected", "wait_until"]


def wait_connected(client: RpcClient) -> None:
    """Until what is sent leaves at once: a first call may be answered while the thread that
    connected still hands on others.
    """
    wait_until(
        lambda: all(route.peer is not None for route in routes_of(client).values()),
        "the connection",
    )


class ServerProcess(Program):
    """One such process, that serves."""

    def __init__(
        self, master: str, name: str, transport: str, mode: str = "progress", server_id: int = -1
    ) -> None:
        super().__init__(
            "tests.prpc_engine.processes", master, name, transport, mode, str(server_id)
        )
        assert self.read_line() == "ready"


def serve(master: str, name: str, transport: str, mode: str, server_id: str) -> None:
    """What the process runs."""
    from prpc_engine import RpcService
    from tests.prpc_engine.handlers import Handlers

    with RpcService(master=master, transports=transport.split(",")) as service:
        service.create_server(name, Handlers(service), server_id=int(server_id))
        print("ready", flush=True)
        if mode == "progress":
            sys.stdin.read()
            return

        def close_at_end() -> None:
            sys.stdin.read()
            service.close()

        closer = threading.Thread(target=close_at_end)
        closer.start()
        service.serve_forever()
        closer.join()


if __name__ == "__main__":
    serve(*sys.argv[1:])
