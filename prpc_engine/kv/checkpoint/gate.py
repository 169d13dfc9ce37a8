"""A table whose pushes wait, so that all servers can be cut at one moment.

While a TableShard is held its tables stand behind these, in the dicts where its methods look them
up: the path of a push that nobody holds pays nothing for it. Pulls pass: what they see is what the
cut will have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from prpc_engine.kv.table.table import DenseTable, SparseTable, TableStatistics
from prpc_engine.rpc.deferred import Deferred
from shard import CONTEXT, Future

Table = TypeVar("Table", SparseTable, DenseTable)
# answer, who asks, what to run
Waiting = deque[tuple[Deferred, Any, Callable[..., Any], tuple[Any, ...]]]


class HeldTable(Generic[Table]):
    """A held table stands in for a table while its shard is held: pushes wait, pulls pass through.

    push(), push_pull() and assign() return a Deferred at once; release() runs and answers them in
    the order in which they came. Owned by the shard, used in its one thread.
    table: what it stands for. waiting: the queue that all held tables of one shard share.
    """

    def __init__(self, table: Table, waiting: Waiting) -> None:
        self.table: Table = table
        self._waiting = waiting
        self.pull: Callable[..., Any] = table.pull
        self.statistics: Callable[[], TableStatistics] = table.statistics

    @property
    def version(self) -> int:
        """As the table's."""
        return self.table.version

    def push(self, *arrays: Any) -> Deferred:
        """Answered after release()."""
        return self._later(self.table.push, arrays)

    def push_pull(self, *arrays: Any) -> Deferred:
        """Answered after release()."""
        return self._later(self.table.push_pull, arrays)

    def assign(self, values: Any) -> Deferred:
        """Answered after release(). Of a dense table."""
        assert isinstance(self.table, DenseTable)
        return self._later(self.table.assign, (values,))

    def _later(self, function: Callable[..., Any], arrays: tuple[Any, ...]) -> Deferred:
        answer = Deferred()
        self._waiting.append((answer, CONTEXT.value, function, arrays))
        return answer


def release(waiting: Waiting) -> None:
    """Run what waits, in order, each on behalf of who asked for it, and answer it."""
    outer = CONTEXT.value
    try:
        while waiting:
            answer, CONTEXT.value, function, arrays = waiting.popleft()
            if answer.done():
                # its caller gave it up: it has not run, as after a deadline before execution
                continue
            try:
                value = function(*arrays)
            except Exception as error:
                answer.fail(error)
                continue
            if isinstance(value, Deferred):
                _hand_on(value, answer)
            else:
                answer.reply(value)
    finally:
        CONTEXT.value = outer


def _hand_on(inner: Deferred, answer: Deferred) -> None:
    """A table that waits for other workers answers later still: as it does; and it is told when its
    caller gives up.
    """

    def answered(done: Future) -> None:
        error = done.error()
        if error is not None:
            answer.fail(error)
        else:
            answer.reply(done.result())

    inner.when_done(answered)
    answer.when_done(lambda done: inner.cancel())
