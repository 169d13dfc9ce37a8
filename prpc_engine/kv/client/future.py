"""One verb in flight to several servers: done when all have answered.

The answers become one value at result(), in the thread that asks for it, so that nobody's reactor
merges arrays.

A push of a table with a consistency waits in each partition for the other workers, and each takes
it back by its own clock: where the last worker comes just then, some have applied it and others
have not.

    applied by       taken back by   then
    none             all             WorkersBehind: it has not run
    some             the others      it is sent to these again: the workers that it waited for have
                                     come, as the first ones show
    some, when its   the others      MaybeExecuted, which names them
    deadline passes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from prpc_engine.errors import (
    DeadlineExceeded,
    MaybeExecuted,
    NotSent,
    Rejected,
    RemoteError,
    RpcError,
)
from prpc_engine.kv.client.partition_client import PartitionRequest
from prpc_engine.kv.consistency.consistency import WorkersBehind
from prpc_engine.kv.consistency.epochs import Outdated, RowsLost, is_remote
from prpc_engine.settings.config import check_timeout
from shard import runtime

Value = TypeVar("Value")


class PartFuture(Protocol):
    """What rounds of calls need of the future of one request to one partition: the future of a
    call, or a PartitionRequest.
    """

    def done(self) -> bool:
        """Whether it has a value or an error."""

    def result(self, timeout_s: float | None = None) -> Any:
        """The value; raises the call's error, or a TimeoutError when it is not there in time."""

    def __await__(self) -> Generator[Any, None, Any]:
        """result() for a task."""


class KVFuture(Generic[Value]):
    """What TableWorker's submit_ verbs return. One user asks for the result, as often as wanted.

    parts: one request to each partition; those that are sent again take the places of the first.
    """

    def __init__(
        self, parts: list[PartitionRequest], assemble: Callable[[list[Any]], Value]
    ) -> None:
        self._parts = parts
        self._assemble = assemble
        self._divided: MaybeExecuted | None = None  # what its deadline left it as

    def done(self) -> bool:
        """Whether every server has answered, or will not."""
        return all(part.done() for part in self._parts)

    def result(self, timeout_s: float | None = None) -> Value:
        """The merged answer, at most `timeout_s` seconds from now; None leaves it to the deadlines
        of the calls.

        Raises the error of the first server that failed, in order of server id; WorkersBehind,
        RowsLost and EpochChanged as themselves. The other servers' parts are not undone: a push
        that raised may have reached some of them; but for WorkersBehind, when it has reached none.
        """
        until = math.inf
        if timeout_s is not None:
            check_timeout(timeout_s)
            until = runtime.monotonic() + timeout_s
        try:
            try:
                answers = self._answers(until)
            except RemoteError as error:
                if not self._is_divided(error):
                    raise
                for part in self._united():
                    with suppress(RpcError):  # _united() looks at it
                        part.result(_left_s(until))
                answers = self._answers(until)
        except RpcError as error:
            raise self._failed(error) from error.__cause__
        return self._assemble(answers)

    def __await__(self) -> Generator[Any, None, Value]:
        try:
            try:
                answers = yield from self._awaited()
            except RemoteError as error:
                if not self._is_divided(error):
                    raise
                for part in self._united():
                    with suppress(RpcError):
                        yield from part.__await__()
                answers = yield from self._awaited()
        except RpcError as error:
            raise self._failed(error) from error.__cause__
        return self._assemble(answers)

    def _answers(self, until: float) -> list[Any]:
        if until == math.inf:
            return [part.result() for part in self._parts]
        return [part.result(_left_s(until)) for part in self._parts]

    def _awaited(self) -> Generator[Any, None, list[Any]]:
        answers = []
        for part in self._parts:
            answers.append((yield from part.__await__()))
        return answers

    def _is_divided(self, error: RemoteError) -> bool:
        """Whether that error may be of some partitions of a push, while others have applied it."""
        return (
            len(self._parts) > 1
            and bool(self._parts[0].sequence)
            and is_remote(error, WorkersBehind)
        )

    def _united(self) -> Iterator[PartitionRequest]:
        """Send a push again to those that took it back while others applied it: yields each part
        that has to be settled first. Raises MaybeExecuted when the deadline passes before all have
        applied it.
        """
        late: list[int] = []
        while True:
            yield from self._parts.copy()
            errors = [part.error() for part in self._parts]
            for number in late:
                error = errors[number]
                if isinstance(error, DeadlineExceeded):
                    raise self._half_run(late, str(error)) from error
            late = [number for number, part in enumerate(self._parts) if part.is_taken_back()]
            if errors.count(None) + len(late) < len(errors) or len(late) in (0, len(errors)):
                return
            for number in late:
                part = self._parts[number]
                try:
                    again = part.lane.push_again(part)
                except RpcError as error:
                    raise self._half_run(late, str(error)) from error
                if again is None:
                    raise self._half_run(late, str(errors[number]))
                self._parts[number] = again

    def _half_run(self, late: Sequence[int], why: str) -> MaybeExecuted:
        first, others = list[str](), list[str]()
        for number, part in enumerate(self._parts):
            (others if number in late else first).append(str(part.lane))
        self._divided = MaybeExecuted(
            f"a push was applied by {', '.join(first)}, and not by {', '.join(others)}: called "
            f"again it would be applied twice by the former. Last: {why}"
        )
        return self._divided

    def _failed(self, error: RpcError) -> Exception:
        """What the caller gets. What this worker did for parts that have not run is undone."""
        for part in self._parts:
            undo = part.undo
            if undo is not None and _has_not_run(part.error()):
                part.undo = None
                undo()
        if self._divided is not None:
            return self._divided
        return self._named(error) if isinstance(error, RemoteError) else error

    def _named(self, error: RemoteError) -> Exception:
        """What a table raises for its callers to catch, as what it was there."""
        failed = [part for part in self._parts if part.error() is error]
        if is_remote(error, WorkersBehind):
            for part in self._parts:
                other = part.error()
                if part.sequence and isinstance(other, RpcError) and not part.is_taken_back():
                    # it may have run there
                    return self._named(other) if isinstance(other, RemoteError) else other
            return WorkersBehind(error.remote_message)
        if failed and is_remote(error, RowsLost):
            return RowsLost(f"{failed[0].lane}: {error.remote_message}")
        if failed and is_remote(error, Outdated):
            return failed[0].lane.outdated(error.remote_message)
        return error


def _left_s(until: float) -> float | None:
    return None if until == math.inf else max(0.0, until - runtime.monotonic())


def _has_not_run(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, NotSent | Rejected) or is_remote(error, WorkersBehind)
    )


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
