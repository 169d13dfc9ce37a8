"""Workers of tables in processes of their own, for tests: told what to do a line at a time, and
killed.

    python -m tests.prpc_engine.kv.workers MASTER SERVERS

A line on standard input is JSON: [[verb of TableWorker, arguments...], keywords]; lists given to
pull and push are arrays. It is answered by a line: {"value": ...} or {"error": text}. The end of
standard input ends it, so that it does not outlive the test.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from prpc_engine import RpcService
from prpc_engine.errors import RpcError
from prpc_engine.kv import TableWorker
from tests.program import PATIENCE_S, Program


class WorkerProcess(Program):
    """One such process."""

    def __init__(self, master: str, servers: int) -> None:
        super().__init__("tests.prpc_engine.kv.workers", master, str(servers))

    def begin(self, *request: Any, **more: Any) -> None:
        """Have it do something; answer() says how it went."""
        self.write_line(json.dumps([request, more]))

    def answer(self) -> Any:
        """What the oldest request begun gave; AssertionError with the text of its error."""
        answer = json.loads(self.read_line())
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["value"]

    def do(self, *request: Any, **more: Any) -> Any:
        """begin() and answer()."""
        self.begin(*request, **more)
        return self.answer()


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
