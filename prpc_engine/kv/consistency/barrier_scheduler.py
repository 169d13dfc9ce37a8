"""Verbs that wait for other workers, as consistency.py decides: `sync` by steps, `ssp` by clocks.

    verb     event                                     becomes
    arrives  sync: a push                              waits, in its worker's queue
    arrives  ssp: its worker may go on                 runs, and is answered in its turn
    arrives  ssp: the worker is too far ahead, or has  waits, in its worker's queue
             another verb that waits
    waits    sync: every worker's queue has a push     runs with the first of each queue
    waits    ssp: the slowest worker came on           runs
    waits    its worker is gone                        waits on as a push: what was sent counts once
                                                       the others come to it (sync), or runs at once
                                                       (ssp); a pull is dropped
    waits    WAIT_SHARE of its caller's time is over   is taken back, and fails with WorkersBehind
    waits    its caller gives it up                    is taken back: it has not run
    waits    the table is restored or reset            the same, and fails with what says so

A worker that has lost its connections is gone after GRACE_S: it may be back. Where its process is
seen to have ended it is gone at once; so each is asked which process it is when it is first met. Of
another host nobody sees that here.

Nobody polls: what lets a verb go on is a push, or the loss of a worker, and both look at the
queues.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from prpc_engine.errors import Backpressure, BadArguments, RpcError
from prpc_engine.kv.consistency.consistency import Clocks, Consistency, Ssp, Sync, WorkersBehind
from prpc_engine.kv.consistency.progress import Lags
from prpc_engine.node.node_info import ABOUT, ABOUT_ROUTE
from prpc_engine.rpc.context import remaining_s
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import calling_peer
from shard import runtime

if TYPE_CHECKING:
    from prpc_engine.rpc.peer import Peer
    from shard import Future, Timer

WAIT_SHARE = 0.9  # of the caller's time: the rest is for the answer that says who is behind
# a worker whose connection was cut is back within some ms; one that died on another host holds
# others up so long
GRACE_S = 1.0
ABOUT_TIMEOUT_S = 30.0  # for a worker to say which process it is: nobody waits for that
WAIT_S_MAX = 600.0  # where a caller sets no deadline
# verbs of one worker: one that sends so many ahead has lost sight of what it waits for
WAITING_MAX = 64
Gradients = tuple[npt.NDArray[Any], ...]  # of one push: (keys, grads) or (grads,)
Apply = Callable[[list[Gradients], float], None]
logger = logging.getLogger("prpc")


class Waiting:
    """A verb in its worker's queue. run: makes its answer; of sync apply, once a step, with the
    grads of all, goes before.

    The table is held from here only: from a Pace, which the connections know, it would outlive a
    restore.
    """

    __slots__ = ("answer", "apply", "grads", "is_push", "queue", "run")

    def __init__(
        self,
        run: Callable[[], Any],
        is_push: bool,
        apply: Apply | None,
        grads: Gradients,
        queue: deque[Waiting],
    ) -> None:
        self.answer = Deferred()
        self.run = run
        self.is_push = is_push
        self.apply = apply
        self.grads = grads
        self.queue: deque[Waiting] | None = queue  # None: it has been taken out


class BarrierScheduler:
    """What the tables below share: the workers of one table in this partition, and the verbs of
    theirs that wait.
    """

    def __init__(
        self, table: str, consistency: Consistency, clock: Callable[[], float] = runtime.now
    ) -> None:
        self._table = table
        self.clock = clock  # gives seconds
        self._consistency = consistency
        self._peers: dict[int, set[Peer]] = {}  # of each worker that has pushed: its connections
        self._missed: dict[int, Timer] = {}  # of each that has lost them all: when it is gone
        # of each that has said so: which process it is (locator.py)
        self._processes: dict[int, str] = {}
        self._queues: dict[int, deque[Waiting]] = {}
        self.clocks = Clocks(consistency.workers)
        self.lags = Lags(self.clocks)

    def enter(self) -> int:
        """The worker whose push is being handled, which becomes present if its connection
        still is.
        """
        peer = calling_peer()
        if peer is None:
            worker, name = 0, "this process"
        else:
            worker, name = peer.connection.peer_incarnation, str(peer.connection.peer)
            peers = self._peers.setdefault(worker, set())
            if peer not in peers:
                # its push was held until now, and meanwhile it went
                if peer.connection.error is not None:
                    return worker
                peers.add(peer)
                peer.when_lost.append(self._lost)
                if worker not in self._processes:
                    self._ask_process(worker, peer)
                missed = self._missed.pop(worker, None)
                if missed is not None:
                    missed.cancel()
        if worker not in self.clocks:
            self.clocks.enter(worker, name, len(self._queues.get(worker, ())))
            self.lags.look_again(self.clock(), self._somebody_waits)
        return worker

    def _ask_process(self, worker: int, peer: Peer) -> None:
        with suppress(RpcError):  # it goes already, or has no room: then it has GRACE_S
            answer = peer.request(ABOUT_ROUTE, ABOUT, method_key(ABOUT), (), ABOUT_TIMEOUT_S, False)
            answer.when_done(partial(self._has_said, worker))

    def _has_said(self, worker: int, answer: Future) -> None:
        if answer.error() is None and worker in self._peers:
            self._processes[worker] = answer.result()["process"]
        # failpoint: barrier.said

    def _lost(self, peer: Peer) -> None:
        worker = peer.connection.peer_incarnation
        peers = self._peers[worker]
        peers.discard(peer)
        if not peers:
            name = str(peer.connection.peer)
            grace_s = 0.0 if runtime.process_is_gone(self._processes.get(worker, "")) else GRACE_S
            self._missed[worker] = peer.reactor.call_later(
                grace_s, lambda: self._gone(worker, name)
            )

    def _gone(self, worker: int, name: str) -> None:
        del self._missed[worker], self._peers[worker]
        self._processes.pop(worker, None)
        self.clocks.leave(worker)
        logger.warning("%s is gone: table %r waits for it no longer", name, self._table)
        self._left(worker)
        self.lags.look_again(self.clock(), self._somebody_waits)

    def _pushed(self, worker: int) -> None:
        self.clocks.tick(worker)
        self.lags.pushed(worker, self.clock())

    @property
    def _somebody_waits(self) -> bool:
        return any(self._queues.values())

    def _left(self, worker: int) -> None:
        """Go on without it."""
        raise NotImplementedError

    def _wait(
        self,
        worker: int,
        run: Callable[[], Any],
        is_push: bool,
        apply: Apply | None = None,
        grads: Gradients = (),
    ) -> Waiting:
        """Put a verb into its worker's queue."""
        queue = self._queues.setdefault(worker, deque())
        if len(queue) >= WAITING_MAX:
            raise Backpressure(
                f"table {self._table!r}: {len(queue)} verbs of this worker wait for "
                f"{self.clocks.behind()} already, and no more "
                "may; wait for some of them before the next"
            )
        verb = Waiting(run, is_push, apply, grads, queue)
        queue.append(verb)
        return verb

    def _bounded(self, worker: int, verb: Waiting) -> Deferred:
        """The answer of a verb that has to wait, with its bound."""
        peer = calling_peer()
        if peer is None:
            self._taken_back(worker, verb)
            raise BadArguments(
                f"table {self._table!r}: it waits for {self.clocks.behind()}, "
                "and there is only this process"
            )
        left_s = remaining_s(self.clock)
        after_s = WAIT_S_MAX if left_s is None else WAIT_SHARE * left_s
        timer = peer.reactor.call_later(after_s, lambda: verb.answer.fail(self._behind(after_s)))

        def is_over(answer: object) -> None:
            timer.cancel()
            if verb.queue is not None:
                self._taken_back(worker, verb)

        verb.answer.when_done(is_over)
        self.lags.look(self.clock(), True)
        return verb.answer

    def _behind(self, waited_s: float) -> WorkersBehind:
        return WorkersBehind(
            f"table {self._table!r} ({self._consistency}): waited {waited_s:.3g} s for "
            f"{self.clocks.behind()}; it has not run: "
            "see what they do, or give a larger timeout_s"
        )

    def begin_again(self, error: Exception) -> None:
        """Another table takes the place of this one: verbs that wait here fail with that error."""
        for queue in list(self._queues.values()):
            for verb in list(queue):
                verb.answer.fail(error)

    def _taken_back(self, worker: int, verb: Waiting) -> None:
        assert verb.queue is not None
        verb.queue.remove(verb)
        verb.queue = None
        self.lags.look_again(self.clock(), self._somebody_waits)


def _answered(verb: Waiting) -> bool:
    """Run it; whether that went well."""
    verb.queue = None
    try:
        value = verb.run()
    except Exception as error:
        verb.answer.fail(error)
        return False
    verb.answer.reply(value)
    return True


class Bound(BarrierScheduler):
    """Lets verbs of an ssp table run while their worker is at most `bound` pushes ahead of the
    slowest one, and holds those of a faster worker until the slowest comes on. Owned by one
    table; in the reactor's thread.

    pull() and push() return what run() returns, or a Deferred; that fails with WorkersBehind when
    too much of its caller's time is over.
    """

    def __init__(
        self, table: str, consistency: Ssp, clock: Callable[[], float] = runtime.now
    ) -> None:
        super().__init__(table, consistency, clock)
        self._bound = consistency.bound

    def pull(self, run: Callable[[], Any]) -> Any:
        """What run() returns: now, or in a Deferred."""
        peer = calling_peer()
        worker = peer.connection.peer_incarnation if peer is not None else 0
        if self._may(worker):
            return run()
        return self._bounded(worker, self._wait(worker, run, False))

    def push(self, run: Callable[[], Any]) -> Any:
        """The same, and the worker's clock goes on by one."""
        worker = self.enter()
        if not self._may(worker):
            return self._bounded(worker, self._wait(worker, run, True))
        value = run()
        if worker in self.clocks:
            self._tick(worker)
        return value

    def _may(self, worker: int) -> bool:
        return not self._queues.get(worker) and self.clocks.lead(worker) <= self._bound

    def _tick(self, worker: int) -> None:
        slowest = self.clocks.slowest
        self._pushed(worker)
        if self.clocks.slowest != slowest:
            self._go_on()
            self.lags.look(self.clock(), self._somebody_waits)

    def _go_on(self) -> None:
        """Run what may run now; that may let others run."""
        moved = True
        while moved:
            moved = False
            for worker, queue in list(self._queues.items()):
                while queue and self.clocks.lead(worker) <= self._bound:
                    verb = queue.popleft()
                    if _answered(verb) and verb.is_push:
                        self._pushed(worker)
                    moved = True
                if not queue:
                    self._queues.pop(worker, None)

    def _left(self, worker: int) -> None:
        for verb in self._queues.pop(worker, ()):
            if verb.is_push:
                _answered(verb)
            else:
                verb.queue = None
                verb.answer.cancel()
        self._go_on()


class Steps(BarrierScheduler):
    """sync. A worker's clock is the pushes that it has sent; `base` of the clocks is the steps
    applied when all were gone.
    """

    def __init__(
        self, table: str, consistency: Sync, clock: Callable[[], float] = runtime.now
    ) -> None:
        super().__init__(table, consistency, clock)
        self._is_mean = consistency.reduce == "mean"
        self._applied = 0

    def push(self, apply: Apply, run: Callable[[], Any], *grads: npt.NDArray[Any]) -> Deferred:
        """Answered with run() once apply(the gradients of all workers, scale) has been called, with
        these among them.
        """
        worker = self.enter()
        verb = self._wait(worker, run, True, apply, grads)
        if worker in self.clocks:
            self._pushed(worker)
        self._go_on()
        if verb.queue is not None:
            return self._bounded(worker, verb)
        self.lags.look(self.clock(), self._somebody_waits)
        return verb.answer

    def _go_on(self) -> None:
        while self.clocks.slowest > self._applied:
            self._step()

    def _step(self) -> None:
        taken = [queue.popleft() for queue in self._queues.values() if queue]
        self._applied += 1
        error: Exception | None = None
        apply = taken[0].apply
        assert apply is not None
        try:
            apply([verb.grads for verb in taken], 1 / len(taken) if self._is_mean else 1.0)
        except Exception as raised:
            error = raised
        for verb in taken:
            if error is None:
                _answered(verb)
            else:
                verb.queue = None
                verb.answer.fail(error)
        self._queues = {worker: queue for worker, queue in self._queues.items() if queue}

    def _left(self, worker: int) -> None:
        self._go_on()
        if not len(self.clocks):  # nobody will come to what is left, and all of it was sent
            while any(self._queues.values()):
                self._step()
            self.clocks.base = self._applied

    def _taken_back(self, worker: int, verb: Waiting) -> None:
        if worker in self.clocks:
            self.clocks.tick(worker, -1)
        super()._taken_back(worker, verb)
