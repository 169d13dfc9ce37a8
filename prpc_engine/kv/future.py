"""One verb in flight to several servers: done when all have answered.

The answers become one value at result(), in the thread that asks for it, so that nobody's reactor merges arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from prpc_engine.errors import RemoteError
from prpc_engine.kv.consistency import WorkersBehind

Value = TypeVar("Value")


class PartFuture(Protocol):
    """What is used of the future of one call."""

    def done(self) -> bool:
        """Whether it has a value or an error."""

    def result(self, timeout_s: float | None = None) -> Any:
        """The value; raises the call's error, or a TimeoutError when it is not there in time."""

    def __await__(self) -> Generator[Any, None, Any]:
        """result() for a task."""


class KVFuture(Generic[Value]):
    """What TableWorker's submit_ verbs return. One user asks for the result, as often as wanted."""

    def __init__(self, parts: Sequence[PartFuture], assemble: Callable[[list[Any]], Value]) -> None:
        self._parts = parts
        self._assemble = assemble

    def done(self) -> bool:
        """Whether every server has answered, or will not."""
        return all(part.done() for part in self._parts)

    def result(self, timeout_s: float | None = None) -> Value:
        """The merged answer, at most `timeout_s` seconds from now; None leaves it to the deadlines of the calls.

        Raises the error of the first server that failed, in order of server id; WorkersBehind as itself. The other servers'
        parts are not undone: a push that raised may have reached some of them.
        """
        try:
            if timeout_s is None:
                return self._assemble([part.result() for part in self._parts])
            until = time.monotonic() + timeout_s
            return self._assemble([part.result(max(0.0, until - time.monotonic())) for part in self._parts])
        except RemoteError as error:
            raise _named(error) from error.__cause__

    def __await__(self) -> Generator[Any, None, Value]:
        answers = []
        try:
            for part in self._parts:
                answers.append((yield from part.__await__()))
        except RemoteError as error:
            raise _named(error) from error.__cause__
        return self._assemble(answers)


def _named(error: RemoteError) -> Exception:
    """What a table raises for its callers to catch, as what it was there."""
    is_behind = error.type_name.rpartition(".")[2] == WorkersBehind.__name__
    return WorkersBehind(error.remote_message) if is_behind else error
