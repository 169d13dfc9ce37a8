"""Versions beside values, at the server: [version, values] of one moment, which may come later."""

from __future__ import annotations

from typing import Any, Protocol

from prpc_engine.rpc.deferred import Deferred
from shard import Future


class HasVersion(Protocol):
    """What with_version() needs of a table: the number of pushes that it has applied."""

    @property
    def version(self) -> int:
        """Pushes applied to it, of all workers."""


def with_version(table: HasVersion, values: Any) -> Deferred | list[Any]:
    """What a verb of the table has just answered, with its version; for a Deferred, a Deferred.

    A table answers in the turn in which it reads, and callbacks run then: so both are of one
    moment.
    """
    if not isinstance(values, Deferred):
        return [table.version, values]
    both = Deferred()

    def answered(done: Future) -> None:
        error = done.error()
        if error is not None:
            both.fail(error)
        else:
            both.reply([table.version, done.result()])

    values.when_done(answered)
    both.when_done(lambda done: values.cancel())
    return both
