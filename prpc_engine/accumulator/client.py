"""AccumulatorClient: one thread that sends the counters of this process to the servers, and the
verbs that read them back.

    counters --collect--> outbox of each server --push--> server  names are spread over the servers
                                                                  by their CRC-32

The thread wakes when a counter is full or due, moves what is new into the outboxes, and pushes one
batch to each server that has answered the last. A server that does not answer keeps its batch; it
is pushed again, with the same number, after a delay that doubles up to RETRY_S_MAX, while new
values merge into what is pending. Writers never wait for any of this.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.accumulator import snapshot_file
from prpc_engine.accumulator.aggregator import Aggregator, restored
from prpc_engine.accumulator.counter import Counter, CounterSet, check_name, default_counters
from prpc_engine.accumulator.outbox import WriteBatch, WriteOutbox
from prpc_engine.accumulator.window import UNKNOWN
from prpc_engine.client.client import RpcClient
from prpc_engine.client.retry import AT_ONCE
from prpc_engine.rpc.call import Call
from prpc_engine.service.service import RpcService
from prpc_engine.settings.config import check_timeout
from shard import ShardError

logger = logging.getLogger("prpc")

SERVICE_NAME = "accumulator"
TIMEOUT_S = 30.0  # of a verb: long for a call, short for a person
SERVERS_MAX = 1024
PUSH_TIMEOUT_S = 5.0  # a server that takes longer to merge a few hundred aggregates is in trouble
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
CLOSE_TIMEOUT_S = 5.0  # at close(), for servers that do not answer
MIN_ASK_S = 1.0  # when waiting for values took all the time: those who live answer at once
IDLE_S_MAX = 3600.0  # without counters there is nothing to wake for

# did not run, or may run twice: ask again
NOT_RUN = (errors.NotSent, errors.UnknownService, errors.MaybeExecuted)
Failure = (errors.RpcError, ShardError)  # what a call may end with


@dataclass(frozen=True)
class AccumulatorStatistics:
    """Values (writes) of this process, and what became of them. acknowledged + waiting + dropped:
    all that were collected.
    """

    acknowledged: int = 0
    waiting: int = 0
    dropped: int = 0  # refused by a server, not to be merged, or given up at close()
    pushes: int = 0  # answered
    failures: int = 0  # pushes that were not, each to be tried again
    duplicates: int = 0  # pushes that the server had counted before
    restarts: int = 0  # servers that were found to have begun anew
    pushes_lost: int = 0  # that a server had acknowledged and, restarted, knew no more
    failure: str | None = None  # the last one, None when all servers answered their last push


def _client_of(service: RpcService, name: str, servers: int, timeout_s: float) -> RpcClient:
    """A client that knows the servers 0 to servers - 1, and no others: by its id a name's server is
    the same in every process, also while some of them are dead. Raises NoServer, ConfigError."""
    check_timeout(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        client = service.create_client(
            name, servers, max(0.0, deadline_s - time.monotonic()), retry=AT_ONCE
        )
        known = client.server_ids
        missing = sorted(set(range(servers)) - set(known))
        more = [server_id for server_id in known if server_id >= servers]
        if not missing and not more:
            return client
        client.close()
        if more:
            raise errors.ConfigError(
                f"servers={servers!r}, and {name!r} has the servers {list(known)}: "
                "clients of another number look for counters "
                "elsewhere; give all clients the number that there are, with ids from 0 on"
            )
        if time.monotonic() >= deadline_s:
            raise errors.NoServer(
                f"{name!r} has the servers {list(known)}, and {missing} did not appear within "
                f"{timeout_s} s: start them, with server_id={missing[0]} where others run"
            )
        time.sleep(RETRY_S_MIN)


def ask_all(
    client: RpcClient, server_ids: Iterable[int], method: str, args: Sequence[Any], timeout_s: float
) -> tuple[dict[int, Any], dict[int, Exception]]:
    """Call all of these servers at once: the answers, and the failures, by server id."""
    calls: dict[int, Call] = {}
    answers: dict[int, Any] = {}
    failed: dict[int, Exception] = {}
    for server_id in server_ids:
        try:
            calls[server_id] = client.submit_to(server_id, method, *args, timeout_s=timeout_s)
        except Failure as error:
            failed[server_id] = error
    for server_id, call in calls.items():
        try:
            answers[server_id] = call.result()
        except Failure as error:
            failed[server_id] = error
    return answers, failed


class Snapshot(dict[str, Aggregator]):
    """{name: aggregator}, sorted by name. `missing`: what could not be had, and why; empty when it
    is whole.
    """

    def __init__(self, counters: Iterable[tuple[str, Aggregator]], missing: dict[str, str]) -> None:
        super().__init__(counters)
        self.missing = missing


@dataclass
class _Server:
    """One server as the sender sees it."""

    server_id: int
    outbox: WriteOutbox = field(default_factory=WriteOutbox)
    epoch: int = 0  # 0: never heard of
    retry_at_s: float = 0.0
    retry_s: float = RETRY_S_MIN
    failure: str | None = None


class AccumulatorClient:
    """An accumulator client sends the counters of this process to the servers, and reads them back.

    Thread-safe; a context manager; close() before the RpcService it was made with. It sends in a
    thread of its own: who writes to a counter never waits for that.

    service    an open RpcService
    servers    how many accumulator servers there are, with the ids 0 to servers - 1: the same
               number in every process, since it decides which has which name
    name       what they are called
    counters   which counters to send: those of the process unless given. One client sends a set at
               a time
    timeout_s  for the servers to appear

    Raises NoServer when one of them is missing, ConfigError when there are more, or another client
    sends these counters.
    """

    def __init__(
        self,
        service: RpcService,
        servers: int = 1,
        name: str = SERVICE_NAME,
        counters: CounterSet = default_counters,
        timeout_s: float = 10.0,
    ) -> None:
        if (
            isinstance(servers, bool)
            or not isinstance(servers, int)
            or not 1 <= servers <= SERVERS_MAX
        ):
            raise errors.ConfigError(
                f"servers={servers!r}: a whole number from 1 to {SERVERS_MAX} is allowed"
            )
        self._service, self._name, self.counters = service, name, counters
        self._client = _client_of(service, name, servers, timeout_s)
        self._servers = [_Server(server_id) for server_id in range(servers)]
        self._identity, self._incarnation = secrets.randbits(62), secrets.randbits(62)
        self._pushes = self._failures = self._duplicates = self._restarts = self._pushes_lost = 0
        self._lock = threading.Lock()  # of the outboxes, and of moving aggregates into them
        self._settled = threading.Condition(self._lock)
        # A queue, not an event: its put() may interrupt itself, in a finalizer or a signal handler
        # that writes.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False
        self._close_by_s: float | None = None
        self._under_way: tuple[Call, ...] = ()  # pushes that the sender waits for
        self._pid = os.getpid()
        counters.attach(self, self._wake)
        self._thread = threading.Thread(target=self._run, name="prpc-accumulator", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # what was written last is sent, although nobody closed us

    # -- verbs -------------------------------------------------------------------------------------

    def try_read(self, name: str, timeout_s: float = TIMEOUT_S) -> Aggregator | None:
        """What the server has of a counter, None when it has none of that name.

        That is what has been flushed by all processes; wait_empty() first to see one's own last
        writes in it.
        """
        check_name(name)
        answer = self._ask(self._server_of(name), "read", name, timeout_s=timeout_s)
        return None if answer is None else restored(*answer)

    def read(self, name: str, timeout_s: float = TIMEOUT_S) -> Aggregator:
        """As try_read(). Raises Rejected when there is none of that name."""
        found = self.try_read(name, timeout_s)
        if found is None:
            raise errors.Rejected(
                f"server {self._server_of(name).server_id} of {self._name!r} has no counter "
                f"{name!r}: "
                "it appears with its first flush"
            )
        return found

    def reset(self, *names: str, timeout_s: float = TIMEOUT_S) -> None:
        """Begin these counters anew, after what was written in this process before. Raises as
        wait_empty().
        """
        self._change("reset", names, timeout_s)

    def erase(self, *names: str, timeout_s: float = TIMEOUT_S) -> None:
        """Forget these counters, after what was written in this process before; the next flush
        makes them again.
        """
        self._change("erase", names, timeout_s)

    def _change(self, method: str, names: Sequence[str], timeout_s: float) -> None:
        for name in names:
            check_name(name)
        self._drain(timeout_s)
        for server in self._servers:
            here = [name for name in names if self._server_of(name) is server]
            if here:
                self._ask(server, method, here, timeout_s=timeout_s)
        for name in names:
            counter = self.counters.get(name)
            if counter is not None:
                counter.refusal = None

    def erase_all(self, timeout_s: float = TIMEOUT_S) -> None:
        """Forget every counter on every server, after what was written in this process before."""
        self._drain(timeout_s)
        for server in self._servers:
            self._ask(server, "erase_all", timeout_s=timeout_s)
        for counter in self.counters.all():
            counter.refusal = None

    def snapshot(self, timeout_s: float = TIMEOUT_S) -> Snapshot:
        """Every counter of every server by name, and in `.missing` what could not be had.

        What this process wrote before is in it, and what others had acknowledged before. A push of
        any process to a server is in it whole or not at all; between two servers, or the counters
        on them, there is no common moment.

        A server that does not answer, or a counter that cannot be told, takes nothing from the
        others: `.missing` names it, and a warning of the log does. Half of `timeout_s` is for
        values of this process to be acknowledged. Raises Closed.
        """
        check_timeout(timeout_s)
        missing: dict[str, str] = {}
        deadline_s = time.monotonic() + timeout_s
        try:
            self._drain(timeout_s / 2)
        except errors.DeadlineExceeded as error:
            missing["values of this process"] = str(error)
        answers, failed = self._ask_all("fetch", "read_all", deadline_s=deadline_s)
        missing |= {
            f"server {server_id} of {self._name!r}": str(error)
            for server_id, error in failed.items()
        }
        found: dict[str, Aggregator] = {}
        for packed in answers:
            states, untold = snapshot_file.unpacked(packed)
            missing |= {f"counter {name!r}": reason for name, reason in untold.items()}
            for name, kind, parameters, state in states:
                try:
                    found[name] = restored(kind, parameters, state)
                except Exception as error:  # an aggregator may be anybody's, and unknown here
                    missing[f"counter {name!r}"] = f"{type(error).__name__}: {error}"
        if missing:
            logger.warning(
                "the snapshot of %r lacks %s",
                self._name,
                "; ".join(f"{what}: {why}" for what, why in missing.items()),
            )
        return Snapshot(sorted(found.items()), missing=missing)

    def wait_empty(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until everything written in this process before is acknowledged: merged at its
        server, or refused.

        Not in a handler, which would keep the very reactor waiting that brings the answer.

        Raises DeadlineExceeded with what is missing, BadArguments when values could not be merged
        or a server refuses a counter of ours, Closed.
        """
        self._drain(timeout_s)
        lost = [loss for one in self.counters.all() if (loss := one.take_loss()) is not None]
        refused = [
            f"{one.name!r}: {refusal}"
            for one in self.counters.all()
            if (refusal := one.refusal) is not None
        ]
        if lost:
            raise errors.BadArguments("; ".join([*lost, *refused]))
        if refused:
            raise errors.BadArguments(
                f"{len(refused)} counters are refused, and what is written to them is lost: "
                f"{'; '.join(refused)}"
            )

    def _drain(self, timeout_s: float) -> None:
        check_timeout(timeout_s)
        with self._settled:
            self._check_open()
            self._collect(self.counters.all(), time.monotonic())
            marks = [(server, server.outbox.mark()) for server in self._servers]
            self._wake()

            def settled() -> bool:
                return self._close_by_s is not None or all(
                    server.outbox.is_settled(mark) for server, mark in marks
                )

            if not self._settled.wait_for(settled, timeout_s):
                raise errors.DeadlineExceeded(
                    f"{sum(server.outbox.waiting for server in self._servers)} values were not "
                    f"acknowledged by {self._name!r} "
                    f"within {timeout_s} s; they are kept, and tried again: "
                    f"{self._last_failure() or 'no server refused them'}"
                )
            self._check_open()

    def statistics(self) -> AccumulatorStatistics:
        """A snapshot."""
        with self._lock:
            return AccumulatorStatistics(
                acknowledged=sum(server.outbox.acknowledged for server in self._servers),
                waiting=sum(server.outbox.waiting for server in self._servers),
                dropped=sum(server.outbox.dropped for server in self._servers)
                + sum(one.dropped for one in self.counters.all()),
                pushes=self._pushes,
                failures=self._failures,
                duplicates=self._duplicates,
                restarts=self._restarts,
                pushes_lost=self._pushes_lost,
                failure=self._last_failure(),
            )

    def _last_failure(self) -> str | None:
        return next(
            (server.failure for server in self._servers if server.failure is not None), None
        )

    # -- asking ------------------------------------------------------------------------------------

    def _server_of(self, name: str) -> _Server:
        return self._servers[zlib.crc32(name.encode()) % len(self._servers)]

    def _ask(self, server: _Server, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a server, again when it cannot have run: while it is being restarted, say. All verbs
        may run twice.
        """
        check_timeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check_open()
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._client.call_to(server.server_id, method, *args, timeout_s=left_s)
            except NOT_RUN:
                if time.monotonic() + RETRY_S_MIN >= deadline_s:
                    raise
                time.sleep(RETRY_S_MIN)
                self._look_up()

    def _ask_all(
        self, method: str, *args: Any, deadline_s: float
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Call all servers at once, and those again for which it cannot have run, until the
        deadline: answers, and failures.
        """
        answers: list[Any] = []
        failed: dict[int, Exception] = {}
        left = [server.server_id for server in self._servers]
        while left:
            self._check_open()
            done, errors_now = ask_all(
                self._client, left, method, args, max(MIN_ASK_S, deadline_s - time.monotonic())
            )
            answers += done.values()
            failed = {
                server_id: error for server_id, error in failed.items() if server_id not in done
            } | errors_now
            left = [one for one, error in errors_now.items() if isinstance(error, NOT_RUN)]
            if left and time.monotonic() + RETRY_S_MIN >= deadline_s:
                break
            if left:
                time.sleep(RETRY_S_MIN)
                self._look_up()
        return answers, failed

    def _look_up(self) -> None:
        """Have the master asked anew who serves: a restarted server has another address, and its
        old id. Waits for nothing, as the master may stand still, too; the next try, or the one
        after that, finds what it says."""
        self._client.servers_changed()

    def _check_open(self) -> None:
        if self._close_by_s is not None:
            raise errors.Closed("this AccumulatorClient was closed here")
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this AccumulatorClient was made in process {self._pid}: "
                f"make one in the fork {os.getpid()}"
            )

    # -- sending: the thread -----------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._wakes.put(None)

    def _run(self) -> None:
        while True:
            now_s = time.monotonic()
            with self._settled:
                close_by_s = self._close_by_s
                if close_by_s is not None and now_s >= close_by_s:
                    return
                self._collect(
                    self.counters.due(now_s) if close_by_s is None else self.counters.all(), now_s
                )
                batches = self._batches(now_s)
                retry_s = self._next_retry_s()
            if batches:
                self._push(batches)
            elif close_by_s is not None:
                if retry_s is None:
                    return
                self._wait_for_wake(min(close_by_s, retry_s) - now_s)
            else:
                dues_s = [
                    due_s for due_s in (self.counters.next_due_s(), retry_s) if due_s is not None
                ]
                self._wait_for_wake(min(dues_s, default=now_s + IDLE_S_MAX) - now_s)

    def _wait_for_wake(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Empty):  # then something is due
            self._wakes.get(timeout=max(0.0, timeout_s))
        self._woken = False  # before looking: what fills up from here on wakes us again

    def _collect(self, counters: Sequence[Counter], now_s: float) -> None:
        """With the lock held."""
        for counter in counters:
            taken = counter.take(now_s)
            if taken is not None:
                self._server_of(counter.name).outbox.add(counter, *taken)

    def _batches(self, now_s: float) -> list[tuple[_Server, WriteBatch]]:
        """What to push now. With the lock held."""
        ready = [
            (server, server.outbox.head()) for server in self._servers if server.retry_at_s <= now_s
        ]
        return [(server, batch) for server, batch in ready if batch is not None]

    def _next_retry_s(self) -> float | None:
        """When a server is next to be told of what waits for it; None: nothing waits. With the lock
        held.
        """
        return min(
            (server.retry_at_s for server in self._servers if server.outbox.waiting), default=None
        )

    def _push(self, batches: Sequence[tuple[_Server, WriteBatch]]) -> None:
        """To all servers at once; then see what each says."""
        close_by_s = self._close_by_s
        timeout_s = PUSH_TIMEOUT_S
        if close_by_s is not None:
            timeout_s = max(0.0, min(timeout_s, close_by_s - time.monotonic()))
        calls: list[tuple[_Server, WriteBatch, Call]] = []
        for server, batch in batches:
            try:
                entries = [entry.to_wire() for entry in batch.entries]
            except Exception as error:  # an aggregator may be anybody's; the sender must survive it
                self._failed(server, batch, errors.BadArguments(f"{type(error).__name__}: {error}"))
                continue
            arguments = (
                self._identity,
                self._incarnation,
                server.outbox.sequence,
                batch.maybe_applied,
                server.epoch,
                entries,
            )
            try:
                call = self._client.submit_to(
                    server.server_id, "push", *arguments, timeout_s=timeout_s
                )
            except Failure as error:
                self._failed(server, batch, error)
            else:
                calls.append((server, batch, call))
        self._under_way = tuple(call for _, _, call in calls)
        for server, batch, call in calls:
            try:
                action, epoch, lost, refused = call.result()
            except (*Failure, TypeError, ValueError) as error:  # or what is no answer to a push
                self._failed(server, batch, error)
            else:
                self._answered(server, batch, action, epoch, lost, refused)

    def _answered(
        self,
        server: _Server,
        batch: WriteBatch,
        action: str,
        epoch: int,
        lost: int,
        refused: dict[int, str],
    ) -> None:
        with self._settled:
            if server.epoch not in (0, epoch):
                self._restarts += 1
                self._pushes_lost += lost
                logger.warning(
                    "accumulator server %d of %r was restarted: %d pushes of this process that it "
                    "had acknowledged are lost",
                    server.server_id,
                    self._name,
                    lost,
                )
            server.epoch, server.retry_at_s, server.retry_s, server.failure = (
                epoch,
                0.0,
                RETRY_S_MIN,
                None,
            )
            self._pushes += 1
            self._duplicates += action == "duplicate"
            if action == UNKNOWN:
                self._drop(
                    server,
                    batch,
                    "too many other clients pushed before this push was tried again: "
                    "it may have been counted",
                )
            else:
                server.outbox.answered(refused)
                for position, reason in refused.items():
                    logger.warning(
                        "counter %r was refused: %s", batch.entries[position].counter.name, reason
                    )
            self._settled.notify_all()

    def _failed(self, server: _Server, batch: WriteBatch, error: BaseException) -> None:
        with self._settled:
            self._failures += 1
            server.failure = str(error)
            # refused before it ran, and so it would be next time
            if isinstance(error, errors.BadArguments):
                if not server.outbox.split_head():
                    self._drop(server, batch, str(error))
                    self._settled.notify_all()
                return
            if not isinstance(error, (errors.NotSent, errors.Rejected)):
                batch.maybe_applied = True
            server.retry_at_s = time.monotonic() + server.retry_s
            server.retry_s = min(2 * server.retry_s, RETRY_S_MAX)
            if isinstance(error, errors.Closed) and self._close_by_s is not None:
                self._close_by_s = 0.0  # the service is gone: nothing will be sent any more
        if isinstance(error, (errors.NotSent, errors.UnknownService)):
            self._look_up()

    def _drop(self, server: _Server, batch: WriteBatch, reason: str) -> None:
        logger.warning(
            "%d values of %d counters are dropped: %s",
            sum(e.writes for e in batch.entries),
            len(batch.entries),
            reason,
        )
        server.outbox.drop_head(reason)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> int:
        """Send what was written, and stop: how many values were given up because no server took
        them within `timeout_s`.

        They are logged, too. Counters stay, and what is written to them from now on waits for the
        next client.
        """
        check_timeout(timeout_s)
        if self._pid != os.getpid():
            return 0  # in a fork there is no thread to stop, and the values are the parent's
        with self._settled:
            if self._close_by_s is not None:
                return 0
            self._close_by_s = time.monotonic() + timeout_s
            self._settled.notify_all()
        self._wakes.put(None)
        self._thread.join(timeout_s)
        # pushes from before close(), which may take longer than this does; others end in time
        for call in self._under_way:
            call.cancel()
        self._thread.join()
        with self._lock:
            # what the sender had no time to look at is given up, too
            self._collect(self.counters.all(), time.monotonic())
        self.counters.detach()
        atexit.unregister(self.close)
        with self._lock:
            lost = sum(server.outbox.drop_all() for server in self._servers)
        if lost:
            logger.warning(
                "%d values were dropped: %s did not take them: %s",
                lost,
                self._name,
                self._last_failure(),
            )
        return lost

    def __enter__(self) -> AccumulatorClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
