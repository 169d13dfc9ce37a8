"""Servers in processes of their own, for tests: started, told to end, killed.

    python -m tests.prpc_engine.processes MASTER NAME TRANSPORT MODE

serves Handlers under NAME until its standard input ends, which the death of the test brings about too. MODE says who drives:
"forever" its main thread, in serve_forever(); "progress" nobody, so that the progress thread has to.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prpc_engine import RpcClient

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0  # a test that waits longer has failed


def wait_until(happened: Callable[[], Any], what: str = "it") -> None:
    """Poll until happened() is true; fail after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come to pass"
        time.sleep(0.002)


def wait_connected(client: RpcClient) -> None:
    """Until what is sent leaves at once: a first call may be answered while the thread that connected still hands on others."""
    wait_until(lambda: all(route.peer is not None for route in client._routes.values()), "the connection")


class ServerProcess:
    """One such process. A context manager; its end is a clean one, unless it was killed before."""

    def __init__(self, master: str, name: str, transport: str, mode: str = "progress", server_id: int = -1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.prpc_engine.processes", master, name, transport, mode, str(server_id)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        ready, _, _ = select.select([self._stdout], [], [], PATIENCE_S)
        if not ready or self._stdout.readline() != b"ready\n":
            self.kill()
            raise AssertionError(f"the server process of {name!r} did not start")

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._close_pipes()

    def end(self) -> int:
        """Tell it to end; its exit code. One that was killed before keeps that code."""
        self._close_pipes()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _close_pipes(self) -> None:
        self._stdin.close()
        self._stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        code = self.end()
        assert code in (0, -signal.SIGKILL), f"the server process ended with {code}"


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
