"""Requests that are not answered in the turn they arrive in, at a server with few places, a short
queue and little room for answers, which closes and comes again (docs/guides/calls.md).

request       what it promises                                      how it is checked
plain, once   runs once at most; an answer: it has run once         runs counted outside of all
any           NotSent and Rejected: not at all                       processes, by number
any           ends by its deadline; a cancelled one at once          virtual time
a handler     that has begun ends: with an answer, or cancelled;     begun and ended handlers of
               its `finally` runs to its end, which may wait          processes that live
a server      has no more tasks than it may                          counted by the handlers
at the end    nothing waits, nothing runs, all places are free       statistics() of the server

What handlers do before they wait for the first time, waits as well: they call another process from
there, and are given up meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prpc_engine import Bounds, Deferred, RpcClient, RpcService, errors, once
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime, sleep
from tests.simulation.jobs import (
    SLACK_S,
    Deadlines,
    begin,
    begin_master,
    in_threads,
    run_to_the_end,
)

UNTIL_S = 6.0
CONNECT_S = 30.0
SETTLED_S = 4.0  # after the faults, for handlers that clean up
ECHO_S = 0.5  # of a call that a handler makes
TIMEOUTS_S = (0.1, 0.3, 2.0)
BOUNDS = Bounds(tasks_max=2, queue_calls_max=4, answers_max=1, answers_bytes_max=800)
LARGE = "x" * 300  # more than a quarter of those bytes: an answer that is not kept
KINDS = ("task", "deferred", "task_once", "large_once", "deferred_once", "large_once", "items")
FAULTS = Rates(cut=0.3, reset=3.0, kill=0.2, crash=0.0, stop=0.2, slow=0.3, clock=0.1)
SERVER = "server"


@dataclass
class Seen:
    """What handlers have done: outside of all processes."""

    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    open: dict[tuple[str, int], Process] = field(default_factory=dict)  # begun, not ended: where
    tasks: Counter[str] = field(default_factory=Counter)  # coroutines of a server's life
    wrong: list[str] = field(default_factory=list)


class Working:
    """One life of the server."""

    def __init__(self, seen: Seen, process: Process, life: str, echo: RpcClient) -> None:
        self._seen, self._process, self._life, self._echo = seen, process, life, echo
        self._chance = process.chance.random
        self.owed: list[tuple[float, Deferred]] = []

    def _begin(self, kind: str, number: int) -> None:
        self._seen.ran[kind, number] += 1
        if self._chance() < 0.5:  # in its first step
            with contextlib.suppress(errors.RpcError):
                self._echo.call("echo", number, timeout_s=ECHO_S)

    async def _wait(self, kind: str, number: int) -> None:
        seen = self._seen
        seen.open[kind, number] = self._process
        seen.tasks[self._life] += 1
        if seen.tasks[self._life] > BOUNDS.tasks_max:
            seen.wrong.append(f"{seen.tasks[self._life]} tasks run in {self._life}")
        try:
            self._begin(kind, number)
            if self._chance() < 0.8:
                await sleep(0.4 * self._chance())
        except GeneratorExit:  # of a process that was killed
            raise
        except BaseException:
            await self._clean_up(kind, number)
            raise
        else:
            await self._clean_up(kind, number)

    async def _clean_up(self, kind: str, number: int) -> None:
        try:
            if self._chance() < 0.5:
                await sleep(0.6 * self._chance())
        finally:  # cut once more, perhaps
            self._seen.tasks[self._life] -= 1
            del self._seen.open[kind, number]

    def _later(self, kind: str, number: int) -> Deferred:
        self._begin(kind, number)
        answer = Deferred()
        answer.ends_with_caller = self._chance() < 0.5
        if self._chance() < 0.3:
            answer.on_cancel = lambda error: answer.reply(number)
        due = runtime.monotonic() + 0.4 * self._chance()  # others may run in it, and pay
        self.owed.append((due, answer))
        return answer

    def pay(self) -> None:
        """Answer what is due."""
        now = runtime.monotonic()
        due = [each for each in self.owed if each[0] <= now]
        self.owed = [each for each in self.owed if each[0] > now]
        for _, answer in due:
            answer.reply(None)

    async def task(self, number: int) -> None:
        await self._wait("task", number)

    def deferred(self, number: int) -> Deferred:
        return self._later("deferred", number)

    @once
    async def task_once(self, number: int) -> None:
        await self._wait("task_once", number)

    @once
    def deferred_once(self, number: int) -> Deferred:
        return self._later("deferred_once", number)

    @once
    async def large_once(self, number: int) -> str:
        await self._wait("large_once", number)
        return LARGE

    async def items(self, number: int) -> AsyncIterator[int]:
        await self._wait("items", number)
        for item in range(3):
            yield item
            await sleep(0.1 * self._chance())


def places(simulation: Simulation) -> None:
    """Two processes of three threads ask more than the server has places for, and give up early."""
    each, threads = 10, 3
    seen = Seen()
    deadlines = Deadlines(simulation)
    outcomes: dict[tuple[str, int], BaseException | None] = {}
    statistics: list[Any] = []
    over: list[bool] = []

    def echo(ours: RpcService, process: Process) -> None:
        async def answer(number: int) -> int:
            await sleep(0.4 * runtime.random() ** 2)
            return number

        ours.create_server("echo", {"echo": answer})
        ours.serve_forever()

    def serve(ours: RpcService, process: Process) -> None:
        client = ours.create_client("echo", 1, timeout_s=CONNECT_S)
        lives = 0
        while True:
            working = Working(seen, process, f"{process.number}.{lives}", client)
            server = ours.create_server("working", working, bounds=BOUNDS)
            until_s = simulation.now + 1.0 + 2.0 * process.chance.random()
            while over or simulation.now < until_s or simulation.now > UNTIL_S:
                runtime.sleep(0.02)
                working.pay()
                if over and simulation.now > over_s[0]:
                    statistics.append(server.statistics())
                    return
            # the last ones are cut, in the queue too
            server.close(drain_s=0.3 * process.chance.random())
            runtime.sleep(0.2 * process.chance.random())
            for _, answer in working.owed:
                answer.reply(None)
            lives += 1

    def ask(client: RpcClient, process: Process, kind: str, number: int) -> None:
        timeout_s = TIMEOUTS_S[int(process.chance.random() * len(TIMEOUTS_S))]
        error: BaseException | None = None
        gives_up = process.chance.random() < 0.4
        with deadlines.watch(f"{kind} {number}", timeout_s):
            try:
                if kind == "items":
                    with client.stream(kind, number, timeout_s=timeout_s) as stream:
                        for _ in stream:
                            if gives_up:
                                break
                elif gives_up:
                    future = client.submit(kind, number, timeout_s=timeout_s)
                    runtime.sleep(0.3 * process.chance.random())
                    future.cancel()
                    error = future.error()
                else:
                    client.call(kind, number, timeout_s=timeout_s)
            except errors.RpcError as failed:
                error = failed
        outcomes[kind, number] = error

    def caller(at: int, ours: RpcService, process: Process) -> None:
        client = ours.create_client("working", 1, timeout_s=CONNECT_S)

        def work(thread: int) -> None:
            for index in range(each):
                number = (at * threads + thread) * each + index
                ask(client, process, KINDS[number % len(KINDS)], number)
                runtime.sleep(0.2 * process.chance.random())

        in_threads([partial(work, thread) for thread in range(threads)])

    over_s: list[float] = []
    begin_master(simulation)
    begin(simulation, "echo", echo)
    begin(simulation, SERVER, serve)
    callers = [begin(simulation, f"caller{n}", partial(caller, n)) for n in range(2)]
    simulation.let_loose(FAULTS, UNTIL_S, may_end=(SERVER,))
    run_to_the_end(simulation, callers, UNTIL_S + CONNECT_S + each * 3.0)
    over_s.append(max(simulation.now, UNTIL_S) + SETTLED_S)
    over.append(True)
    done = simulation.run(lambda: bool(statistics), SETTLED_S + UNTIL_S + SLACK_S)
    assert done, "the server has not come to its end"
    assert not seen.wrong, seen.wrong
    assert not deadlines.late, deadlines.late
    (left,) = statistics
    assert (left.tasks, left.queued) == (0, 0), left
    still = {key: where.name for key, where in seen.open.items() if not where.is_dead}
    assert not still, f"these handlers have not ended: {still}"
    assert len(outcomes) == 2 * threads * each
    for (kind, number), error in outcomes.items():
        times = seen.ran[kind, number]
        told = f"{kind} {number} has run {times} times, and ended with {error!r}"
        assert times <= 1, told
        if error is None and kind != "items":
            assert times == 1, told
        if isinstance(error, errors.NotSent | errors.Rejected) and not isinstance(
            error, errors.Forgotten
        ):
            assert times == 0, told
        assert not isinstance(error, errors.RemoteError), told


SCENARIOS = (places,)
