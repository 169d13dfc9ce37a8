"""Accumulator: a counter that all processes of a job write to, each for itself, under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from prpc_engine.accumulator.aggregator import Aggregator, describe
from prpc_engine.accumulator.client import TIMEOUT_S, AccumulatorClient
from prpc_engine.accumulator.counter import FLUSH_COUNT, FLUSH_S, CounterSet, default_counters
from prpc_engine.errors import BadArguments, Closed, ConfigError

Kind = TypeVar("Kind", bound=Aggregator)


class Accumulator(Generic[Kind]):
    """A handle on a counter; there may be many on one name, in one process and in all of them.

    name         the same anywhere is the same counter
    aggregator   how values merge: a class (Sum) or an instance with parameters (Histogram(0.001)),
                 the same everywhere
    flush_count  values after which what was written here is sent; 0: by time only
    flush_s      seconds after which it is sent although it is less
    counters     the set it belongs to: that of the process unless given

    Writing needs no AccumulatorClient; what is written before there is one is merged, kept, and
    sent by the first. Raises ConfigError for a name that this process uses with another aggregator.
    """

    write: Callable[[Any], None]
    """Count one value, from any thread: about 0.1 us for a number, and never a wait for the
    network.

    Raises BadArguments for a value that does not fit, which is not counted; for one that completes
    a batch of a counter that the server refuses; and, once, when values that may be of earlier
    writes could not be merged. Those are dropped and all others are counted, so no write is to be
    repeated; AccumulatorClient.wait_empty() tells of them, too.
    """

    def __init__(
        self,
        name: str,
        aggregator: Kind | type[Kind],
        flush_count: int = FLUSH_COUNT,
        flush_s: float = FLUSH_S,
        counters: CounterSet = default_counters,
    ) -> None:
        law = aggregator() if isinstance(aggregator, type) else aggregator
        if not isinstance(law, Aggregator) or not law.kind:
            raise ConfigError(
                f"aggregator={aggregator!r}: a subclass of Aggregator with a kind is allowed, "
                "or an instance of one"
            )
        self.name = name
        self._law = law
        self._counters = counters
        self._counter = counters.counter(name, law, flush_count, flush_s)
        self.write = self._counter.write  # no call between the caller and the list

    def flush(self) -> None:
        """Have what was written sent at once, without waiting for that. Raises BadArguments when
        the server refuses it, and as write() does for values that could not be merged.
        """
        self._counter.flush()

    def try_read(self, timeout_s: float = TIMEOUT_S) -> Kind | None:
        """What the server has: an aggregator of ours to keep. None before anything arrived there.

        That is what all processes have flushed. Raises BadArguments when the counter is of another
        kind there, Closed when this process has no open AccumulatorClient, and the errors of a
        call.
        """
        found = self._client().try_read(self.name, timeout_s)
        if found is None:
            return None
        return self._as_ours(found)

    def read(self, timeout_s: float = TIMEOUT_S) -> Kind:
        """As try_read(). Raises Rejected before anything arrived there."""
        return self._as_ours(self._client().read(self.name, timeout_s))

    def try_read_to_string(self, timeout_s: float = TIMEOUT_S) -> str | None:
        """The text of try_read(); None also for an aggregator that has seen no value."""
        found = self.try_read(timeout_s)
        return None if found is None else found.try_to_string()

    def read_to_string(self, timeout_s: float = TIMEOUT_S) -> str:
        """The text of read()."""
        return str(self.read(timeout_s))

    read_string = read_to_string

    def reset(self, timeout_s: float = TIMEOUT_S) -> None:
        """Begin anew at the server, after what was written in this process before."""
        self._client().reset(self.name, timeout_s=timeout_s)

    def erase(self, timeout_s: float = TIMEOUT_S) -> None:
        """Forget it at the server, after what was written in this process before; the next flush
        makes it again.
        """
        self._client().erase(self.name, timeout_s=timeout_s)

    def _client(self) -> AccumulatorClient:
        client = self._counters.client
        if client is None:
            raise Closed(
                f"counter {self.name!r}: this process has no open AccumulatorClient; make one first"
            )
        assert isinstance(client, AccumulatorClient)
        return client

    def _as_ours(self, found: Aggregator) -> Kind:
        if not isinstance(found, type(self._law)) or found.parameters() != self._law.parameters():
            raise BadArguments(
                f"counter {self.name!r} is {describe(found.kind, found.parameters())} at its "
                "server and "
                f"{describe(self._law.kind, self._law.parameters())} here: use another name, "
                "or erase it first"
            )
        return found

    def __repr__(self) -> str:
        return f"Accumulator({self.name!r}, {describe(self._law.kind, self._law.parameters())})"
