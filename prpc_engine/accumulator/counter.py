"""The counters of one process: where writes go, long before anything is sent.

A write is an append to a list, which is atomic: any number of threads write at once, without a
lock. Every FOLD_COUNT values the thread that fills the list merges them into the counter's
aggregate; when another thread is doing that, it goes on writing. The sender takes the aggregate and
leaves a fresh one, so what waits is bounded by the number of counters, however long
no server answers: values are merged, not queued.

    write -> values (a list) -> aggregate -> take() -> the outbox of a server
             any thread         whoever      sender
                                fills it

Nothing here reads a clock or sends: `wake` tells the client that a counter is full, `now_s` is
given.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from prpc_engine.accumulator.aggregator import Aggregator, describe
from prpc_engine.errors import BadArguments, ConfigError, is_number
from shard import runtime

logger = logging.getLogger("prpc")

FLUSH_COUNT = 1024
FLUSH_COUNT_MAX = 1 << 40
FLUSH_S = 1.0  # a person who looks once a second sees every counter move
FLUSH_S_MIN, FLUSH_S_MAX = 0.001, 3600.0
FOLD_COUNT = 1024  # values in the list: enough to merge them at a few ns each, at most some 50 KB
# In the list while another thread merges: beyond it, and with an array, a writer waits for that
# thread, FOLD_WAIT_S at most, as it may be itself (a signal handler, or a finalizer, that writes in
# the middle of a merge).
VALUES_MAX = 64 * FOLD_COUNT
FOLD_WAIT_S = 1.0
NAMES_MAX = 65536
NAME_LENGTH_MAX = 256


class Counter:
    """One name in this process. write() and flush() from any thread; take() from the client that
    sends.
    """

    def __init__(
        self,
        name: str,
        aggregator: Aggregator,
        flush_count: int,
        flush_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.name = name
        self.kind, self.parameters = aggregator.kind, aggregator.parameters()
        self.flush_count, self.flush_s = flush_count, flush_s
        # when it is sent although it is not full; the client's clock
        self.due_s: float | None = None
        self.full = False
        self.refusal: str | None = None  # why the server does not take it; None once it does
        self.dropped = 0  # values that could not be merged here
        self._loss: str | None = None  # what wait_empty() is to say of those
        self._loss_told = True  # whether a writer has heard of it
        self._aggregate = aggregator.fresh()
        self._unsent = 0  # values in it
        self._plain = aggregator.plain
        self._values: list[Any] = []
        # as those, but of values that came when the lock was not to be had
        self._large: deque[Any] = deque()
        self._fold_count = min(flush_count or FOLD_COUNT, FOLD_COUNT)
        self._lock = runtime.Lock()  # of the aggregate
        self._wake = wake

    def write(self, value: Any) -> None:
        """Count one value.

        Raises BadArguments for a value that does not fit, when values of the batch that this one
        completes would overflow (those are not counted, the others are: none is to be written
        again), and when the server has refused this counter.
        """
        if type(value) not in self._plain:
            value = self._aggregate.check(value)
            if self._aggregate.holds_at_once(value):
                self._merge_at_once(value)
                return
        values = self._values
        values.append(value)
        if len(values) >= self._fold_count:
            self._fold()

    def flush(self) -> None:
        """Have it sent now, without waiting for that."""
        self.full = True
        self._wake()
        self._check_refusal()

    def take(self, now_s: float) -> tuple[Aggregator, int] | None:
        """What was written since the last time and the number of values; None for nothing. Next due
        `flush_s` later.
        """
        with self._lock:
            self.full = False
            self.due_s = now_s + self.flush_s
            self._merge_waiting()
            if not self._unsent:
                return None
            taken = self._aggregate, self._unsent
            self._aggregate, self._unsent = self._aggregate.fresh(), 0
            return taken

    def tighten(self, flush_count: int, flush_s: float) -> None:
        """A second user of the name wants it sent at least this often."""
        counts = [count for count in (self.flush_count, flush_count) if count]
        self.flush_count, self.flush_s = min(counts, default=0), min(self.flush_s, flush_s)
        self._fold_count = min(self.flush_count or FOLD_COUNT, FOLD_COUNT)
        self.due_s = None

    def forget(self) -> None:
        """In the child of a fork: what was written before belongs to the parent, which sends it."""
        self._lock = runtime.Lock()  # one that another thread held has nobody to release it here
        self._values, self._large, self._aggregate, self._unsent = (
            [],
            deque(),
            self._aggregate.fresh(),
            0,
        )

    # -- merging -----------------------------------------------------------------------------------

    def _fold(self) -> None:
        values, lock = self._values, self._lock
        # again after the release: who found the lock taken has gone on
        while len(values) >= self._fold_count:
            if not lock.acquire(blocking=False) and (
                len(values) < VALUES_MAX or not lock.acquire(timeout=FOLD_WAIT_S)
            ):
                return
            try:
                self._merge_waiting()
            finally:
                lock.release()
        self._see_whether_full()

    def _merge_at_once(self, value: Any) -> None:
        if not self._lock.acquire(timeout=FOLD_WAIT_S):
            self._large.append(value)
            return
        try:
            self._merge_waiting()
            self._aggregate.merge_value(value)
            self._unsent += 1
            # a number after an array: looked at, and refused, where it is written
            self._plain = frozenset()
        finally:
            self._lock.release()
        self._see_whether_full()

    def _see_whether_full(self) -> None:
        if self.flush_count and self._unsent >= self.flush_count and not self.full:
            self.full = True
            self._wake()
        self._check_refusal()

    def _merge_waiting(self) -> None:
        """With the lock held."""
        values = self._values
        count = len(values)  # more may be appended from here on; they stay
        if count:
            batch = values[:count]
            del values[:count]
            self._merge(batch)
        while self._large:
            self._merge([self._large.popleft()])

    def _merge(self, values: list[Any]) -> None:
        """Take all values but those that cannot be merged: they are counted as dropped, and its
        writers are told.
        """
        aggregate = self._aggregate
        # Aggregator's own takes one after the other, as below
        if type(aggregate).merge_values is not Aggregator.merge_values:
            try:
                aggregate.merge_values(values)
                self._unsent += len(values)
                return
            except BadArguments:
                pass  # and took none: below we find out which they are
            except Exception as error:
                # an aggregator may be anybody's: what it raises must not look as if nothing was
                # lost
                self.lose(len(values), error)
                return
        lost, why = 0, None
        for value in values:
            try:
                aggregate.merge_value(value)
                self._unsent += 1
            except Exception as error:
                lost, why = lost + 1, error
        if why is not None:
            self.lose(lost, why)

    def lose(self, writes: int, error: Exception) -> None:
        """So many values cannot be merged in this process."""
        self.dropped += writes
        self._loss = (
            f"counter {self.name!r} dropped {writes} values: {type(error).__name__}: {error}"
        )
        self._loss_told = False
        logger.warning("%s", self._loss)

    def take_loss(self) -> str | None:
        """What was lost since this was last asked; its writers need not hear of it any more."""
        loss, self._loss, self._loss_told = self._loss, None, True
        return loss

    def _check_refusal(self) -> None:
        loss = self._loss  # once: another thread may take it
        if loss is not None and not self._loss_told:
            self._loss_told = True
            # who writes is not who lost: a retry would count what is counted
            raise BadArguments(f"{loss}; all others so far are counted: write none of them again")
        refusal = self.refusal  # once: the server may take it again meanwhile
        if refusal is not None:
            raise BadArguments(
                f"counter {self.name!r} is refused, and what is written to it is lost: {refusal}"
            )


class CounterSet:
    """The counters of a process by name; there is one that all share, `default_counters`.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._lock = runtime.Lock()  # of which counters there are: any thread makes them
        self.client: Any = None  # who sends them, an AccumulatorClient
        self.wake: Callable[[], None] = _nobody_sends  # what that wants to be told with
        _all_sets.add(self)

    def attach(self, client: object, wake: Callable[[], None]) -> None:
        """`client` sends these counters from now on. Raises ConfigError when another one does."""
        with self._lock:
            if self.client is not None:
                raise ConfigError(
                    "these counters have a client: close it first, or give the new one a "
                    "CounterSet of its own"
                )
            self.client, self.wake = client, wake

    def detach(self) -> None:
        """Nobody sends them any more; what is written waits."""
        with self._lock:
            self.client, self.wake = None, _nobody_sends

    def counter(
        self, name: str, aggregator: Aggregator, flush_count: int, flush_s: float
    ) -> Counter:
        """The counter of that name, made when there is none. Raises ConfigError where it is of
        another kind.
        """
        check_name(name)
        if (
            isinstance(flush_count, bool)
            or not isinstance(flush_count, int)
            or not 0 <= flush_count <= FLUSH_COUNT_MAX
        ):
            raise ConfigError(
                f"flush_count={flush_count!r}: a whole number from 0 (by time only) "
                f"to {FLUSH_COUNT_MAX} is allowed"
            )
        if not is_number(flush_s) or not FLUSH_S_MIN <= flush_s <= FLUSH_S_MAX:
            raise ConfigError(
                f"flush_s={flush_s!r:.100}: {FLUSH_S_MIN} to {FLUSH_S_MAX} seconds are allowed"
            )
        with self._lock:
            there = self._counters.get(name)
            if there is None:
                if len(self._counters) >= NAMES_MAX:
                    raise ConfigError(
                        f"counter {name!r} is one more than the {NAMES_MAX} allowed: "
                        "count keys with KeyedAvg or TopK"
                    )
                there = self._counters[name] = Counter(
                    name, aggregator, flush_count, flush_s, self._woken
                )
            elif (there.kind, there.parameters) != (aggregator.kind, aggregator.parameters()):
                raise ConfigError(
                    f"counter {name!r} is {describe(there.kind, there.parameters)} in this "
                    "process, and "
                    f"{describe(aggregator.kind, aggregator.parameters())} was asked for: "
                    "use another name"
                )
            else:
                there.tighten(flush_count, flush_s)
        self.wake()  # for the first time it is due
        return there

    def _woken(self) -> None:
        self.wake()

    def get(self, name: str) -> Counter | None:
        """The counter of that name, if there is one."""
        return self._counters.get(name)

    def all(self) -> list[Counter]:
        """Every counter, oldest first."""
        return list(self._counters.values())

    def due(self, now_s: float) -> list[Counter]:
        """Those to be sent now: full ones, and those that were sent `flush_s` ago or longer. New
        ones begin to wait.
        """
        found = []
        for counter in self.all():
            due_s = counter.due_s  # once, here and below: tighten() clears it in any thread
            if due_s is None:
                counter.due_s = due_s = now_s + counter.flush_s
            if counter.full or due_s <= now_s:
                found.append(counter)
        return found

    def next_due_s(self) -> float | None:
        """When the next one is due, None while there are none that wait."""
        return min(
            (due_s for counter in self.all() if (due_s := counter.due_s) is not None), default=None
        )

    def forget(self) -> None:
        """In the child of a fork: see Counter.forget(). No client sends this set here."""
        self._lock = runtime.Lock()  # the parent's may be held by a thread that is not here
        self.client, self.wake = None, _nobody_sends
        for counter in self.all():
            counter._wake = self._woken
            counter.forget()


def check_name(name: object) -> None:
    """A counter's name is a short str that can be printed. Raises ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"counter name {name!r:.80}: a str of 1 to {NAME_LENGTH_MAX} printable characters is "
            "allowed"
        )


def _nobody_sends() -> None:
    """Until a client does, what is written is merged and kept."""


def _forget_after_fork() -> None:
    for counters in list(_all_sets):
        counters.forget()


_all_sets: weakref.WeakSet[CounterSet] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_after_fork)
default_counters = CounterSet()
