"""One verb in flight to several servers: done when all have answered.

The answers become one value at result(), in the thread that asks for it, so that nobody's reactor
merges arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from prpc_engine.errors import RemoteError
from prpc_engine.kv.client.partition_client import PartitionRequest
from prpc_engine.kv.consistency.consistency import WorkersBehind
from prpc_engine.kv.consistency.epochs import Outdated, RowsLost, is_remote
from prpc_engine.settings.config import check_timeout
from shard import runtime

Value = TypeVar("Value")


class PartFuture(Protocol):
    """What a KVFuture needs of the future of one request to one partition: the future of a call, or
    a PartitionRequest.
    """

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
        """The merged answer, at most `timeout_s` seconds from now; None leaves it to the deadlines
        of the calls.

        Raises the error of the first server that failed, in order of server id; WorkersBehind,
        RowsLost and EpochChanged as themselves. The other servers' parts are not undone: a push
        that raised may have reached some of them.
        """
        try:
            if timeout_s is None:
                return self._assemble([part.result() for part in self._parts])
            check_timeout(timeout_s)
            until = runtime.monotonic() + timeout_s
            return self._assemble(
                [part.result(max(0.0, until - runtime.monotonic())) for part in self._parts]
            )
        except RemoteError as error:
            raise self._named(error) from error.__cause__

    def __await__(self) -> Generator[Any, None, Value]:
        answers = []
        try:
            for part in self._parts:
                answers.append((yield from part.__await__()))
        except RemoteError as error:
            raise self._named(error) from error.__cause__
        return self._assemble(answers)

    def _named(self, error: RemoteError) -> Exception:
        """What a table raises for its callers to catch, as what it was there."""
        if is_remote(error, WorkersBehind):
            return WorkersBehind(error.remote_message)
        failed = [
            part
            for part in self._parts
            if isinstance(part, PartitionRequest) and part.error() is error
        ]
        if failed and is_remote(error, RowsLost):
            return RowsLost(f"{failed[0].lane}: {error.remote_message}")
        if failed and is_remote(error, Outdated):
            return failed[0].lane.outdated(error.remote_message)
        return error


def partitions_of(parts: Sequence[PartitionRequest]) -> list[int]:
    """Which were asked."""
    return [part.lane.partition for part in parts]


def finish(future: KVFuture[Value], parts: Sequence[PartitionRequest]) -> Value:
    """The result, for a caller whose arrays were sent as they are: they are not sent again once
    this returns.
    """
    try:
        return future.result()
    except BaseException:  # an interrupt, say
        for part in parts:
            part.give_up()
        raise
