"""Workers of tables in processes of their own, for tests: told what to do a line at a time, and killed.

    python -m tests.prpc_engine.kv.workers MASTER SERVERS

A line on standard input is JSON: [[verb of TableWorker, arguments...], keywords]; lists given to pull and push are arrays. It is
answered by a line: {"value": ...} or {"error": text}. The end of standard input ends it, so that it does not outlive the test.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from prpc_engine import RpcService
from prpc_engine.errors import RpcError
from prpc_engine.kv import TableWorker
from tests.prpc_engine.processes import PATIENCE_S

ROOT = Path(__file__).parents[3]


class WorkerProcess:
    """One such process. A context manager."""

    def __init__(self, master: str, servers: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.prpc_engine.kv.workers", master, str(servers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def begin(self, *request: Any, **more: Any) -> None:
        """Have it do something; answer() says how it went."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([request, more]).encode() + b"\n")
        self.process.stdin.flush()

    def has_answered(self, within_s: float = 0) -> bool:
        """Whether answer() will not wait."""
        return bool(select.select([self.process.stdout], [], [], within_s)[0])

    def answer(self) -> Any:
        """What the oldest request begun gave; AssertionError with the text of its error."""
        assert self.has_answered(PATIENCE_S), "the worker process does not answer"
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["value"]

    def do(self, *request: Any, **more: Any) -> Any:
        """begin() and answer()."""
        self.begin(*request, **more)
        return self.answer()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if kind is not None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


def _array(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    array = np.array(value)
    return array.astype(np.int64 if array.dtype.kind == "i" else np.float32)


def _main(master: str, servers: int) -> None:
    with RpcService(master=master) as service:
        kv = TableWorker(service, expected_servers=servers, timeout_s=PATIENCE_S)
        for line in sys.stdin:
            (verb, *arguments), more = json.loads(line)
            if not verb.startswith("create"):
                arguments = list(map(_array, arguments))
            try:
                value = getattr(kv, verb)(*arguments, **more)
                answer = {"value": value.tolist() if isinstance(value, np.ndarray) else value}
            except RpcError as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
