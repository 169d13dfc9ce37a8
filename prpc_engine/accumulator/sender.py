"""CounterSender: a coroutine that sends the counters of this process to the servers.

    counters --collect--> outbox of each server --push--> server  names are spread over the servers
                                                                  by their CRC-32

The sender wakes when a counter is full or due, moves what is new into the outboxes, and pushes one
batch to each server that has answered the last. A server that does not answer keeps its batch; it
is pushed again, with the same number, after a delay that doubles up to RETRY.max_s, while new
values merge into what is pending (flushing.py). Writers never wait for any of this.

    state    event                          next
    round    nothing to push                rests
    round    something to push              under way
    under    all pushes have ended          round, which sees what each has brought
      way
    rests    woken, or something is due     round
    any      close()                        the same in a hurry, until nothing waits or the time is
                                            over; then it ends

The sender is a coroutine of the control loop: it rests and awaits answers there. Its rounds merge
and encode, and so run aggregators of the application's own: they run in threads that may compute,
and from close() on in the thread that closes. The interpreter ends the other threads before it
calls what closes us.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.accumulator.counter import Counter, CounterSet
from prpc_engine.accumulator.flushing import RETRY, PushTarget, rest_s
from prpc_engine.accumulator.outbox import WriteBatch
from prpc_engine.accumulator.window import UNKNOWN
from prpc_engine.client.client import RpcClient
from prpc_engine.rpc.call import Call
from prpc_engine.settings.config import check_timeout
from shard import (
    ClosedError,
    Driver,
    Future,
    ShardError,
    Task,
    control_loop,
    run_blocking,
    runtime,
    sleep,
)

logger = logging.getLogger("prpc")

PUSH_TIMEOUT_S = 5.0  # a server that takes longer to merge a few hundred aggregates is in trouble
END_TIMEOUT_S = 5.0  # for the sender to end after close()'s time: a round may be under way
Failure = (errors.RpcError, ShardError)  # what a call may end with
# a push that has ended: its answer, or the error
Outcome = tuple[PushTarget, WriteBatch, Any, Exception | None]


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


class CounterSender:
    """A counter sender moves what is written to counters to the servers that hold them.

    Owned by an AccumulatorClient. Any thread may call. servers: how many; client: which asks them,
    and is the owner's; driver: who turns its reactor. The owner attaches the counters, and close()
    detaches them. States: the table at the file's head.
    """

    def __init__(
        self, client: RpcClient, driver: Driver, name: str, servers: int, counters: CounterSet
    ) -> None:
        self._client, self._driver, self._name, self._counters = client, driver, name, counters
        self.servers = [PushTarget(server_id) for server_id in range(servers)]
        self._identity, self._incarnation = runtime.randbits(62), runtime.randbits(62)
        self._pushes = self._failures = self._duplicates = self._restarts = self._pushes_lost = 0
        # Of the outboxes, and of moving aggregates into them: threads that wait for their values,
        # and those of the sender's rounds, do so at the same time. Never held in the control loop.
        self._lock = runtime.Lock()
        self._waiting: list[tuple[list[tuple[PushTarget, int]], Future]] = []  # for those marks
        # Done: the sender is to look. A future, not an event: completing it may interrupt itself,
        # in a finalizer or a signal handler that writes.
        self._awake = Future()
        self._close_by_s: float | None = None
        # From close() on: what the thread that closes is to do next for the sender, and who is to
        # be told what that returned.
        self._asked = Future(self._driver)
        self._outcomes: list[Outcome] = []  # that the next round sees to
        self._under_way: tuple[Call, ...] = ()  # pushes that the sender waits for
        self._pid = os.getpid()
        self._task: Task | None = None

    def start(self) -> None:
        """The counters are to call wake()."""
        self._task = control_loop().spawn(self._send())

    def check_open(self) -> None:
        """Raises Closed when it is, and in a fork."""
        if self._close_by_s is not None:
            raise errors.Closed("this AccumulatorClient was closed here")
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this AccumulatorClient was made in process {self._pid}: "
                f"make one in the fork {os.getpid()}"
            )

    def look_up(self) -> None:
        """Have the master asked anew who serves: a restarted server has another address, and its
        old id. Waits for nothing, as the master may stand still, too; the next try, or the one
        after that, finds what it says."""
        self._client.servers_changed()

    def server_of(self, name: str) -> PushTarget:
        """That which has the counter of that name."""
        return self.servers[zlib.crc32(name.encode()) % len(self.servers)]

    def drain(self, timeout_s: float) -> None:
        """Wait until everything written before is acknowledged, or dropped. Raises
        DeadlineExceeded, Closed.
        """
        check_timeout(timeout_s)
        self.check_open()
        settled = Future(self._driver)
        with self._lock:
            # failpoint: sender.draining
            self._collect(self._counters.all(), runtime.monotonic())
            marks = [(server, server.outbox.mark()) for server in self.servers]
            self._waiting.append((marks, settled))
            self._tell_settled()
        self.wake()
        try:
            settled.result(timeout_s)
        except ClosedError:
            raise errors.Closed("the service of this AccumulatorClient was closed here") from None
        except TimeoutError:
            with self._lock:
                self._waiting = [each for each in self._waiting if each[1] is not settled]
                raise errors.DeadlineExceeded(
                    f"{sum(server.outbox.waiting for server in self.servers)} values were not "
                    f"acknowledged by {self._name!r} "
                    f"within {timeout_s} s; they are kept, and tried again: "
                    f"{self._last_failure() or 'no server refused them'}"
                ) from None
        self.check_open()

    def _tell_settled(self) -> None:
        """Those that wait for what has been answered, or for nothing any more. With the lock
        held.
        """
        waiting, self._waiting = self._waiting, []
        for marks, settled in waiting:
            if self._close_by_s is not None or all(
                server.outbox.is_settled(mark) for server, mark in marks
            ):
                # in the reactor: who waits may have it parked
                self._driver.reactor.call_soon(partial(settled.set_result, None))
            else:
                self._waiting.append((marks, settled))

    def statistics(self) -> AccumulatorStatistics:
        """A snapshot."""
        with self._lock:
            return AccumulatorStatistics(
                acknowledged=sum(server.outbox.acknowledged for server in self.servers),
                waiting=sum(server.outbox.waiting for server in self.servers),
                dropped=sum(server.outbox.dropped for server in self.servers)
                + sum(one.dropped for one in self._counters.all()),
                pushes=self._pushes,
                failures=self._failures,
                duplicates=self._duplicates,
                restarts=self._restarts,
                pushes_lost=self._pushes_lost,
                failure=self._last_failure(),
            )

    def _last_failure(self) -> str | None:
        return next((server.failure for server in self.servers if server.failure is not None), None)

    # -- sending: in the control loop --------------------------------------------------------------

    def wake(self) -> None:
        """There is something to send. From anywhere: a finalizer, or a signal handler."""
        self._awake.set_result(None)

    async def _send(self) -> None:
        while True:
            # before it looks: what fills up from here on wakes us again
            self._awake = Future()
            try:
                pushes, pause_s = await self._aside(self._round)
            except RuntimeError:  # no thread is to be had, or the interpreter ends: close() comes
                await self._rest(RETRY.first_s)
                continue
            except Exception:  # a bug: what was counted must not be lost by it
                logger.exception("counters were not sent to %r; they are kept", self._name)
                await self._rest(RETRY.max_s)
                continue
            if pushes:
                self._under_way = tuple(call for _, _, call in pushes)
                for push in pushes:
                    self._outcomes.append(await _outcome(*push))
            elif pause_s is None:
                return
            else:
                await self._rest(pause_s)

    async def _rest(self, seconds: float) -> None:
        """Until it is woken, and no longer than that."""
        awake = self._awake

        async def wake() -> None:
            await sleep(seconds)
            awake.set_result(None)

        timer = control_loop().spawn(wake())
        try:
            await awake
        finally:
            timer.cancel()

    async def _aside(self, function: Callable[[], Any]) -> Any:
        """Its result, in a thread that may compute, and in the one that closes once there is
        one.
        """
        if self._close_by_s is None:
            return await run_blocking(function)
        done = Future()
        self._asked.set_result((function, done))
        return await done

    # -- sending: a round, in another thread -------------------------------------------------------

    def _round(self) -> tuple[list[tuple[PushTarget, WriteBatch, Call]], float | None]:
        """What has ended is seen to, and what is new is pushed: (server, batch, call). When there
        is nothing: seconds to rest, or None at the end.
        """
        while self._outcomes:
            self._ended(*self._outcomes.pop(0))
        now_s = runtime.monotonic()
        with self._lock:
            close_by_s = self._close_by_s
            if close_by_s is not None and now_s >= close_by_s:
                return [], None
            self._collect(
                self._counters.due(now_s) if close_by_s is None else self._counters.all(), now_s
            )
            batches = self._batches(now_s)
            # failpoint: sender.looking
            pause_s = rest_s(now_s, close_by_s, self._counters.next_due_s(), self.servers)
        if batches:  # where none of them can be sent, look again at once
            return self._push(batches), 0.0
        return [], pause_s

    def _collect(self, counters: Sequence[Counter], now_s: float) -> None:
        """With the lock held."""
        for counter in counters:
            taken = counter.take(now_s)
            if taken is not None:
                self.server_of(counter.name).outbox.add(counter, *taken)

    def _batches(self, now_s: float) -> list[tuple[PushTarget, WriteBatch]]:
        """What to push now. With the lock held."""
        ready = [(server, server.batch(now_s)) for server in self.servers]
        return [(server, batch) for server, batch in ready if batch is not None]

    def _push(
        self, batches: Sequence[tuple[PushTarget, WriteBatch]]
    ) -> list[tuple[PushTarget, WriteBatch, Call]]:
        """To all servers at once; those that are under way."""
        close_by_s = self._close_by_s
        timeout_s = PUSH_TIMEOUT_S
        if close_by_s is not None:
            timeout_s = max(0.0, min(timeout_s, close_by_s - runtime.monotonic()))
        calls: list[tuple[PushTarget, WriteBatch, Call]] = []
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
        return calls

    def _ended(
        self, server: PushTarget, batch: WriteBatch, answer: Any, error: Exception | None
    ) -> None:
        if error is None:
            try:
                action, epoch, lost, refused = answer
            except (TypeError, ValueError) as wrong:  # what is no answer to a push
                error = wrong
        if error is None:
            self._answered(server, batch, action, epoch, lost, refused)
        else:
            self._failed(server, batch, error)

    def _answered(
        self,
        server: PushTarget,
        batch: WriteBatch,
        action: str,
        epoch: int,
        lost: int,
        refused: dict[int, str],
    ) -> None:
        with self._lock:
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
            server.answered(epoch)
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
            self._tell_settled()

    def _failed(self, server: PushTarget, batch: WriteBatch, error: BaseException) -> None:
        with self._lock:
            self._failures += 1
            # refused before it ran, and so it would be next time
            if isinstance(error, errors.BadArguments):
                server.failure = str(error)
                if not server.outbox.split_head():
                    self._drop(server, batch, str(error))
                    self._tell_settled()
                return
            if not isinstance(error, (errors.NotSent, errors.Rejected)):
                batch.maybe_applied = True
            server.failed(str(error), runtime.monotonic())
            if isinstance(error, errors.Closed) and self._close_by_s is not None:
                self._close_by_s = 0.0  # the service is gone: nothing will be sent any more
        if isinstance(error, (errors.NotSent, errors.UnknownService)):
            self.look_up()

    def _drop(self, server: PushTarget, batch: WriteBatch, reason: str) -> None:
        logger.warning(
            "%d values of %d counters are dropped: %s",
            sum(e.writes for e in batch.entries),
            len(batch.entries),
            reason,
        )
        server.outbox.drop_head(reason)

    # -- the end, in the thread that closes --------------------------------------------------------

    def close(self, timeout_s: float) -> int:
        """Send what was written, for so many seconds at most: how many values were given up."""
        if self._pid != os.getpid():
            return 0  # in a fork nothing is sent, and the values are the parent's
        with self._lock:
            if self._close_by_s is not None:
                return 0
            self._close_by_s = close_by_s = runtime.monotonic() + timeout_s
            self._tell_settled()
        task = self._task
        assert task is not None, "it was started"
        task.when_done(lambda _: self._asked.set_result(None))
        self.wake()
        self._serve(task, close_by_s)
        # pushes from before close(), which may take longer than this does; others end in time
        for call in self._under_way:
            call.cancel()
        self._serve(task, close_by_s + END_TIMEOUT_S)
        task.schedule(task.cancel)  # where a round does not end
        with self._lock:
            # what the sender had no time to look at is given up, too
            self._collect(self._counters.all(), runtime.monotonic())
        self._counters.detach()
        with self._lock:
            lost = sum(server.outbox.drop_all() for server in self.servers)
        if lost:
            logger.warning(
                "%d values were dropped: %s did not take them: %s",
                lost,
                self._name,
                self._last_failure(),
            )
        return lost

    def _serve(self, task: Task, until_s: float) -> None:
        """Do what the sender's task asks for, until it has ended or the time is over."""
        while not task.done():
            try:
                asked = self._asked.result(max(0.0, until_s - runtime.monotonic()))
            except (TimeoutError, ShardError):  # or the service is closed
                return
            if asked is None:
                return
            function, done = asked
            self._asked = Future(self._driver)  # before it can ask for more
            try:
                done.set_result(function())
            except BaseException as error:  # the sender hears of it, and ends
                done.set_error(error)
                if not isinstance(error, Exception):
                    raise


async def _outcome(server: PushTarget, batch: WriteBatch, call: Call) -> Outcome:
    """Of a push."""
    try:
        return server, batch, await call, None
    except Exception as error:  # what the call ended with
        return server, batch, None, error
