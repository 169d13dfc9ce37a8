"""Masters and clients in processes of their own, for tests: started, stopped, killed, started again.

    python -m tests.prpc_engine.master_processes ADDRESS LEASE_S

is a client that runs one command a line of its standard input (a Python expression of `client`) and prints the value's repr; it
ends with its input.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.prpc_engine.processes import PATIENCE_S, ROOT


class _Process:
    """One process that we talk to by lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def read_line(self) -> str:
        ready, _, _ = select.select([self.stdout], [], [], PATIENCE_S)
        line = self.stdout.readline() if ready else ""
        if not line:
            self.kill()
            raise AssertionError(f"process {self.process.args!r} said nothing")
        return line.strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._close_pipes()

    def end(self, number: signal.Signals | None = None) -> int:
        """Tell it to end; its exit code."""
        if number is not None:
            self.signal(number)
        self._close_pipes()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _close_pipes(self) -> None:
        self.stdin.close()
        self.stdout.close()


class MasterProcess(_Process):
    """`prpc master`. A context manager."""

    def __init__(self, journal: Path | None = None, bind: str = "127.0.0.1:0") -> None:
        self._journal = journal
        with_journal = [] if journal is None else ["--journal", str(journal), "--no-sync"]
        super().__init__("prpc_engine.cli", "master", "--bind", bind, *with_journal)
        self.address = self.read_line().removeprefix("serving at ")

    def again(self) -> MasterProcess:
        """Another one at the same address, on the same journal."""
        return MasterProcess(self._journal, self.address)

    def __enter__(self) -> MasterProcess:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM)
        else:
            self._close_pipes()


class ClientProcess(_Process):
    """A MasterClient called `client`, that does as it is told. A context manager."""

    def __init__(self, address: str, lease_s: float = 5.0) -> None:
        super().__init__("tests.prpc_engine.master_processes", address, str(lease_s))
        assert self.read_line() == "ready"

    def begin(self, expression: str) -> None:
        """Let it begin; read_line() has the repr, once there."""
        self.stdin.write(expression + "\n")
        self.stdin.flush()

    def do(self, expression: str) -> str:
        """The repr of an expression's value, or of the error it raised."""
        self.begin(expression)
        return self.read_line()

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)  # it may have been stopped
            self.end()
        else:
            self._close_pipes()


def main(address: str, lease_s: str) -> None:
    """What a ClientProcess runs."""
    from prpc_engine.master.client import CommInfo, MasterClient

    with MasterClient(address, lease_s=float(lease_s), label=f"client {os.getpid()}") as client:
        names: dict[str, Any] = {"client": client, "CommInfo": CommInfo}
        print("ready", flush=True)
        for line in sys.stdin:
            try:
                value = repr(eval(line, names))
            except Exception as error:
                value = repr(error)
            print(value.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
