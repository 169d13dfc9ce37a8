"""Masters and clients in processes of their own, for tests: started, stopped, killed, started
again.

    python -m tests.prpc_engine.master_processes ADDRESS LEASE_S

is a client that runs one command a line of its standard input (a Python expression of `client`) and
prints the value's repr; it ends with its input.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ports import address_of, hold_port
from tests.program import Program


class MasterProcess(Program):
    """`prpc master`. Once it was killed its port is kept for the next one."""

    end_signal = signal.SIGTERM

    def __init__(self, journal: Path | None = None, port: socket.socket | None = None) -> None:
        self._journal = journal
        self._port = port or hold_port()
        with_journal = [] if journal is None else ["--journal", str(journal), "--no-sync"]
        super().__init__(
            "prpc_engine.cli", "master", "--bind", address_of(self._port), *with_journal
        )
        self.address = self.read_line().removeprefix("serving at ")

    def again(self) -> MasterProcess:
        """Another one at the same address, on the same journal."""
        return MasterProcess(self._journal, self._port)

    def end(self, number: signal.Signals | None = None) -> int:
        self._port.close()
        return super().end(number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._port.close()
        super().__exit__(kind, error, traceback)


class ClientProcess(Program):
    """A MasterClient called `client`, that does as it is told."""

    def __init__(self, address: str, lease_s: float = 5.0) -> None:
        super().__init__("tests.prpc_engine.master_processes", address, str(lease_s))
        assert self.read_line() == "ready"

    def begin(self, expression: str) -> None:
        """Let it begin; read_line() has the repr, once there."""
        self.write_line(expression)

    def do(self, expression: str) -> str:
        """The repr of an expression's value, or of the error it raised."""
        self.begin(expression)
        return self.read_line()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGCONT)  # it may have been stopped
        super().__exit__(kind, error, traceback)


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
