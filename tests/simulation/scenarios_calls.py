"""Calls under faults: each ends in time and as its kind promises (docs/guides/calls.md).

operation      what it promises                                     how it is checked
plain          at most once; NotSent and Rejected: not at all       runs counted outside of all
idempotent     an answer is right; it may run more than once         processes, by number
once           an answer: it has run exactly once
hedged         as idempotent; a plain method is not hedged          plain ones count at most once
any call       ends by its deadline; a cancelled one at once         virtual time
               with Cancelled, unless it was answered before
a callback     is called once for each future that has ended         counted; compared with the end
                                                                      that result() tells
rolling        servers that close politely, without other faults,    every plain call is answered,
               lose no call                                          and has run once
nested         a handler may call back into its caller's process     the depth that comes back
comings        close() ends soon whatever goes on, and all calls     virtual time; whether close()
               of it; Closed comes to no other                        had begun
stream out     items in order, each once; it ends without an error   the items, of which some
               only behind its last item; its handler begins once    are large
stream in      the handler gets items in order, each once; its       what the handler saw
               iteration ends without an error only after end()
streams        their handlers end once nobody reads, or sends,       begun and ended handlers of
               long before their deadline                            processes that live
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prpc_engine import HedgePolicy, RpcClient, RpcService, errors, idempotent, incoming, once
from prpc_engine.simulation import Process, Rates, Simulation
from shard import CancelledError, runtime, sleep
from shard.transport.laned_connection import BULK_BYTES_MIN
from tests.simulation.jobs import (
    SLACK_S,
    Deadlines,
    begin,
    begin_master,
    in_threads,
    run_to_the_end,
    service,
)

TIMEOUT_S = 2.0
UNTIL_S = 6.0  # of the nemesis
PAUSE_S = 0.4  # between two calls of a thread, at most
CLOSE_S = 5.0  # for what close() waits for
CONNECT_S = 30.0  # for a client to find its servers at first
SERVERS = ("server0", "server1")
FAULTS = Rates(cut=0.4, reset=1.0, kill=0.5, stop=0.2, slow=0.3, clock=0.1, crash=0.1)

Outcomes = dict[tuple[str, int], BaseException | None]


class Counting:
    """A server that counts how often each request has run. `ran` is the test's: outside of all
    processes.
    """

    def __init__(self, ran: Counter[tuple[str, int]]) -> None:
        self._ran = ran

    def plain_call(self, number: int) -> int:
        self._ran["plain_call", number] += 1
        return number

    async def plain_task(self, number: int) -> int:
        self._ran["plain_task", number] += 1
        await sleep(0.3 * runtime.random() ** 2)
        return number

    @idempotent
    def idempotent_call(self, number: int) -> int:
        self._ran["idempotent_call", number] += 1
        return number

    @idempotent
    async def idempotent_task(self, number: int) -> int:
        self._ran["idempotent_task", number] += 1
        await sleep(0.3 * runtime.random() ** 2)
        return number

    @once
    def once_call(self, number: int) -> int:
        self._ran["once_call", number] += 1
        return number

    @once
    async def once_task(self, number: int) -> int:
        self._ran["once_task", number] += 1
        await sleep(0.3 * runtime.random() ** 2)
        return number


KINDS = (
    *("plain_call", "plain_task", "idempotent_call"),
    *("idempotent_task", "once_call", "once_task"),
)


@dataclass
class Calls:
    """What became of all calls of a scenario."""

    simulation: Simulation
    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    outcomes: Outcomes = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.simulation)

    def serve(self, ours: RpcService, process: Process) -> None:
        """A server's process."""
        ours.create_server("counting", Counting(self.ran))
        ours.serve_forever()

    def call(self, client: RpcClient, kind: str, number: int) -> None:
        """One call, waited for."""
        error: BaseException | None = None
        with self.deadlines.watch(f"{kind} {number}", TIMEOUT_S):
            try:
                answer = client.call(kind, number, timeout_s=TIMEOUT_S)
            except errors.RpcError as failed:
                error = failed
            else:
                if answer != number:
                    self.wrong.append(f"{kind} {number} was answered with {answer!r}")
        self.outcomes[kind, number] = error

    def check(self, calls: int) -> None:
        """What each kind promises."""
        assert len(self.outcomes) == calls, f"{len(self.outcomes)} of {calls} calls have ended"
        assert not self.wrong, self.wrong
        for (kind, number), error in self.outcomes.items():
            times = self.ran[kind, number]
            told = f"{kind} {number} has run {times} times, and ended with {error!r}"
            if error is None:
                assert times >= 1, told
            if isinstance(error, errors.NotSent | errors.Rejected) and not isinstance(
                error, errors.Forgotten
            ):
                assert times == 0, told
            if kind.startswith("plain"):
                assert times <= 1, told
            if kind.startswith("once") and error is None:
                assert times == 1, told
            assert not isinstance(error, errors.RemoteError), told
        assert not self.deadlines.late, self.deadlines.late


def calls(simulation: Simulation) -> None:
    """Two processes of two threads each call all kinds of methods of servers that are killed."""
    each, threads = 9, 2
    done = Calls(simulation)

    def caller(number: int, ours: RpcService, process: Process) -> None:
        client = ours.create_client("counting", 1, timeout_s=CONNECT_S)

        def work(thread: int) -> None:
            for index in range(each):
                key = (number * threads + thread) * each + index
                done.call(client, KINDS[key % len(KINDS)], key)
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(work, thread) for thread in range(threads)])

    begin_master(simulation)
    for name in SERVERS:
        begin(simulation, name, done.serve)
    callers = [begin(simulation, f"caller{n}", partial(caller, n)) for n in range(2)]
    simulation.let_loose(FAULTS, UNTIL_S, may_end=SERVERS)
    run_to_the_end(simulation, callers, UNTIL_S + CONNECT_S + each * (TIMEOUT_S + 2 * SLACK_S))
    done.check(2 * threads * each)


def futures(simulation: Simulation) -> None:
    """Many calls at once by submit(), each with a callback; some are cancelled."""
    count = 40
    done = Calls(simulation)
    called: Counter[int] = Counter()
    ends: dict[int, BaseException | None] = {}
    cancelled: set[int] = set()

    def work(ours: RpcService, process: Process) -> None:
        client = ours.create_client("counting", 1, timeout_s=CONNECT_S)
        waiting: list[tuple[str, int, Any]] = []

        def ended(number: int, future: Any) -> None:
            called[number] += 1
            ends[number] = future.error()

        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            try:
                future = client.submit(kind, number, timeout_s=TIMEOUT_S)
            except errors.RpcError as error:  # Backpressure, say: nothing is under way
                done.outcomes[kind, number] = error
                called[number], ends[number] = 1, error
                continue
            future.add_done_callback(partial(ended, number))
            waiting.append((kind, number, future))
            if number % 8 == 5 and future.cancel():
                cancelled.add(number)
            if number % 4 == 3:
                runtime.sleep(PAUSE_S * runtime.random())
        for kind, number, future in waiting:
            with done.deadlines.watch(f"{kind} {number}", TIMEOUT_S):
                done.outcomes[kind, number] = future.error()
        runtime.sleep(SLACK_S + TIMEOUT_S)  # for callbacks

    begin_master(simulation)
    for name in SERVERS:
        begin(simulation, name, done.serve)
    caller = begin(simulation, "caller", work)
    simulation.let_loose(FAULTS, UNTIL_S, may_end=SERVERS)
    run_to_the_end(simulation, [caller], UNTIL_S + CONNECT_S + 4 * TIMEOUT_S)
    done.check(count)
    for kind, number in done.outcomes:
        error = done.outcomes[kind, number]
        assert called[number] == 1, f"{called[number]} callbacks of {kind} {number}"
        assert ends[number] is error, f"{kind} {number}: {ends[number]!r}, and then {error!r}"
        if number in cancelled:
            assert isinstance(error, errors.Cancelled), f"{kind} {number} ended with {error!r}"


def hedged(simulation: Simulation) -> None:
    """A client that hedges, of three servers that are slow now and then."""
    each, threads = 10, 2
    done = Calls(simulation)
    names = (*SERVERS, "server2")
    kinds = ("idempotent_task", "plain_task", "idempotent_call")

    def caller(ours: RpcService, process: Process) -> None:
        client = ours.create_client(
            "counting", 1, timeout_s=CONNECT_S, hedge=HedgePolicy(delay_s=0.02, hedges_max=2)
        )

        def work(thread: int) -> None:
            for index in range(each):
                key = thread * each + index
                done.call(client, kinds[key % len(kinds)], key)
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(work, thread) for thread in range(threads)])

    begin_master(simulation)
    for name in names:
        begin(simulation, name, done.serve)
    process = begin(simulation, "caller", caller)
    simulation.let_loose(FAULTS, UNTIL_S, may_end=names)
    run_to_the_end(simulation, [process], UNTIL_S + CONNECT_S + each * (TIMEOUT_S + 2 * SLACK_S))
    done.check(threads * each)


def rolling(simulation: Simulation) -> None:
    """Servers that close politely and come again, one after the other: nothing else goes wrong but
    that processes are slow.
    """
    count, threads = 14, 2
    done = Calls(simulation)
    over: list[bool] = []

    def serve(number: int, ours: RpcService, process: Process) -> None:
        while not over:
            server = ours.create_server("counting", Counting(done.ran))
            runtime.sleep(1.0 + runtime.random())
            if number:  # one stays
                server.close(drain_s=TIMEOUT_S)
                runtime.sleep(0.3 * runtime.random())

    def caller(ours: RpcService, process: Process) -> None:
        client = ours.create_client("counting", 1, timeout_s=CONNECT_S)

        def work(thread: int) -> None:
            for index in range(count):
                key = thread * count + index
                done.call(client, ("plain_task", "plain_call")[index % 2], key)
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(work, thread) for thread in range(threads)])
        over.append(True)

    begin_master(simulation)
    for number in range(3):
        begin(simulation, f"server{number}", partial(serve, number))
    process = begin(simulation, "caller", caller)
    simulation.let_loose(Rates(0, 0, 0, 0, 0, slow=0.5, clock=0.2), UNTIL_S)
    run_to_the_end(simulation, [process], UNTIL_S + CONNECT_S + count * (TIMEOUT_S + 2 * SLACK_S))
    done.check(threads * count)
    failed = {key: error for key, error in done.outcomes.items() if error is not None}
    assert not failed, f"servers closed politely, and these failed: {failed!r}"


class Nesting:
    """Calls the other one, until the depth that was asked for is reached."""

    def __init__(self, other: Callable[[], RpcClient]) -> None:
        self._other = other

    def plain(self, depth: int) -> int:
        return 0 if not depth else 1 + int(self._other().call("plain", depth - 1, timeout_s=10.0))

    async def task(self, depth: int) -> int:
        if not depth:
            return 0
        return 1 + int(await self._other().submit("task", depth - 1, timeout_s=10.0))


def nested(simulation: Simulation) -> None:
    """Handlers of two processes that call into each other, while both call from outside, too."""
    count, depth_max = 8, 4
    deadlines = Deadlines(simulation)
    wrong: list[str] = []
    answered: Counter[str] = Counter()

    def live(number: int, ours: RpcService, process: Process) -> None:
        other = f"nest{1 - number}"
        clients: list[RpcClient] = []
        ours.create_server(f"nest{number}", Nesting(lambda: clients[0]))
        clients.append(ours.create_client(other, 1, timeout_s=CONNECT_S))

        def work(thread: int) -> None:
            for index in range(count):
                depth = 1 + (index + thread) % depth_max
                kind = ("plain", "task")[(index + number) % 2]
                with deadlines.watch(f"{kind} {index} of {process.name}", TIMEOUT_S):
                    try:
                        came = clients[0].call(kind, depth, timeout_s=TIMEOUT_S)
                    except errors.RpcError:
                        answered["failed"] += 1
                    else:
                        answered["answered"] += 1
                        if came != depth:
                            wrong.append(f"a depth of {depth} came back as {came}")
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(work, thread) for thread in range(2)])
        quiet_s = UNTIL_S + 6.0 - simulation.now
        runtime.sleep(max(0.0, quiet_s))  # the other one may still call
        # After the faults all that is asked is answered.
        if clients[0].call("plain", depth_max, timeout_s=TIMEOUT_S) != depth_max:
            wrong.append("the last one")
        runtime.sleep(TIMEOUT_S)

    begin_master(simulation)
    both = [begin(simulation, f"process{n}", partial(live, n)) for n in range(2)]
    simulation.let_loose(Rates(cut=0.3, reset=1.0, kill=0, crash=0, stop=0.2, slow=0.3), UNTIL_S)
    run_to_the_end(simulation, both, CONNECT_S + UNTIL_S + count * (TIMEOUT_S + 2 * SLACK_S))
    assert not wrong, wrong
    assert not deadlines.late, deadlines.late
    assert answered.total() == 2 * 2 * count


class Coming:
    """Of one life of a process that comes and goes. `ran` is the test's: outside of all
    processes.
    """

    def __init__(self, ran: Counter[tuple[str, int]], others: list[RpcClient]) -> None:
        self._ran, self._others = ran, others

    def plain(self, number: int, depth: int) -> int:
        self._ran["plain", number] += 1
        if depth and self._others:
            other = self._others[int(runtime.random() * len(self._others))]
            with contextlib.suppress(errors.RpcError):
                other.call("echo", number, timeout_s=0.5)
        return number

    async def task(self, number: int, depth: int) -> int:
        self._ran["task", number] += 1
        if depth and self._others:
            other = self._others[int(runtime.random() * len(self._others))]
            with contextlib.suppress(errors.RpcError):
                await other.submit("echo", number, timeout_s=0.5)
        await sleep(0.2 * runtime.random())
        return number

    @idempotent
    async def echo(self, number: int) -> int:
        await sleep(0.3 * runtime.random() ** 3)
        return number


def comings(simulation: Simulation) -> None:
    """Services that serve each other are closed in the middle of what they do, and made again: some
    threads call, another one cancels, another one closes.
    """
    processes, calls_each = 3, 6
    deadlines = Deadlines(simulation)
    ran: Counter[tuple[str, int]] = Counter()
    ends: dict[tuple[str, int], BaseException | None] = {}
    wrong: list[str] = []
    numbers = iter(range(1_000_000))

    def one(ours: RpcService, process: Process) -> None:
        chance = process.chance.random
        others: list[RpcClient] = []
        ours.create_server(f"coming{process.name[-1]}", Coming(ran, others))
        closing: list[bool] = []
        submitted: list[Any] = []

        def call(thread: int) -> None:
            for index in range(calls_each):
                number = next(numbers)
                kind = ("plain", "task")[index % 2]
                error: BaseException | None = None
                with deadlines.watch(f"{kind} {number} of {process.name}", TIMEOUT_S):
                    try:
                        if others:
                            other = others[int(chance() * len(others))]
                            future = other.submit(kind, number, index % 3, timeout_s=TIMEOUT_S)
                            submitted.append(future)
                            if chance() < 0.6:
                                future.result()
                            error = future.error() if future.done() else errors.RpcError("unknown")
                    except errors.RpcError as failed:
                        error = failed
                ends[kind, number] = error
                if isinstance(error, errors.Closed) and not closing:
                    wrong.append(f"{kind} {number}: {error!r}, and nobody closed it")
                runtime.sleep(0.1 * chance())

        def cancel() -> None:
            while not closing:
                runtime.sleep(0.2 * chance())
                if submitted:
                    submitted[int(chance() * len(submitted))].cancel()

        def close() -> None:
            runtime.sleep(2.0 * chance())
            closing.append(True)
            with deadlines.watch(f"close of {process.name}", 2 * CLOSE_S):
                ours.close()

        for each in range(processes):
            if f"coming{each}" != f"coming{process.name[-1]}":
                with contextlib.suppress(errors.RpcError):
                    others.append(ours.create_client(f"coming{each}", 0, timeout_s=1.0))
        in_threads([partial(call, 0), partial(call, 1), cancel, close])
        for future in submitted:
            with deadlines.watch(f"what {process.name} left", TIMEOUT_S):
                future.error(TIMEOUT_S + SLACK_S)

    def live(process: Process) -> None:
        while simulation.now < UNTIL_S:
            with service(simulation, process) as ours:
                one(ours, process)
            runtime.sleep(0.3 * process.chance.random())

    begin_master(simulation)
    names = [f"process{n}" for n in range(processes)]
    all_of_them = [simulation.process(name, live, host=name) for name in names]
    simulation.let_loose(Rates(cut=0.3, reset=1.5, kill=0, crash=0, stop=0.3, slow=0.5), UNTIL_S)
    run_to_the_end(simulation, all_of_them, CONNECT_S + UNTIL_S + 60.0)
    assert not wrong, wrong
    assert not deadlines.late, deadlines.late
    assert ends
    for (kind, number), error in ends.items():
        times = ran[kind, number]
        told = f"{kind} {number} has run {times} times, and ended with {error!r}"
        assert times <= 1, told
        if error is None:
            assert times == 1 or (kind, number) not in ran, told
        if isinstance(error, errors.NotSent | errors.Rejected):
            assert times == 0, told
        assert not isinstance(error, errors.RemoteError), told


# -- streams ---------------------------------------------------------------------------------------

ITEMS = 20  # more than two windows
LEFT_TIMEOUT_S = 20.0  # of streams that are left before their end: that ends their handlers
LARGE = bytes(BULK_BYTES_MIN)  # what takes the other lane, where small ones overtake it


def made(number: int) -> int | bytes:
    """An item of that number; each third one is large."""
    return number if number % 3 else number.to_bytes(4, "little") + LARGE


def number_of(item: int | bytes) -> int:
    """Of an item that was made so."""
    return item if isinstance(item, int) else int.from_bytes(item[:4], "little")


@dataclass
class Streams:
    """What became of all streams: of each what its handler got, how often it began and ended."""

    begun: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    home: dict[int, Process] = field(default_factory=dict)  # where the handler began last
    got: dict[int, list[int]] = field(default_factory=dict)
    saw_end: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def began(self, number: int, process: Process) -> None:
        self.begun[number] += 1
        self.home[number] = process

    def check_prefix(self, number: int, items: list[int], whole: bool, whose: str) -> None:
        """They came in order, each once; all of them where the end was seen."""
        if items != list(range(len(items))):
            self.wrong.append(f"stream {number}: {whose} got {items}")
        if whole and len(items) != ITEMS:
            self.wrong.append(f"stream {number}: {whose} saw an end after {len(items)} items")


class Streaming:
    """Streams out, in, and both ways."""

    def __init__(self, streams: Streams, process: Process) -> None:
        self._streams = streams
        self._process = process

    async def out(self, number: int, padding: bytes) -> AsyncIterator[int | bytes]:
        self._streams.began(number, self._process)
        try:
            for item in range(ITEMS):
                if item % 5 == 0:
                    await sleep(0.1 * runtime.random())
                yield made(item)
        finally:
            self._streams.ended[number] += 1

    async def into(self, number: int, padding: bytes) -> int:
        streams = self._streams
        streams.began(number, self._process)
        got = streams.got[number] = []
        try:
            async for item in incoming():
                got.append(number_of(item))
            streams.saw_end.add(number)
            return len(got)
        finally:
            streams.ended[number] += 1

    async def both(self, number: int, padding: bytes) -> AsyncIterator[int | bytes]:
        streams = self._streams
        streams.began(number, self._process)
        got = streams.got[number] = []
        try:
            async for item in incoming():
                got.append(number_of(item))
                yield item
            streams.saw_end.add(number)
        finally:
            streams.ended[number] += 1


def streams(simulation: Simulation) -> None:
    """Streams out, in and both ways of two threads, over connections that are lost; some are left
    before their end.
    """
    each, threads = 6, 2
    seen = Streams()
    deadlines = Deadlines(simulation)
    ends: dict[int, BaseException | None] = {}
    left: set[int] = set()  # before its end, by the reader or the sender

    def serve(ours: RpcService, process: Process) -> None:
        ours.create_server("streaming", Streaming(seen, process))
        ours.serve_forever()

    def padding(number: int) -> bytes:
        return LARGE if number % 4 == 1 else b""

    def is_left(number: int) -> bool:
        return number % 5 == 4

    def time_of(number: int) -> float:
        return LEFT_TIMEOUT_S if is_left(number) else TIMEOUT_S

    def out(client: RpcClient, number: int) -> None:
        items: list[int] = []
        whole = False
        try:
            with client.stream("out", number, padding(number), timeout_s=time_of(number)) as stream:
                for item in stream:
                    items.append(number_of(item))
                    if is_left(number) and len(items) == 7:
                        left.add(number)
                        return
                whole = True
        finally:
            seen.check_prefix(number, items, whole, "the client")

    def into(client: RpcClient, number: int) -> None:
        with client.stream("into", number, padding(number), timeout_s=time_of(number)) as stream:
            for item in range(ITEMS):
                stream.send(made(item), timeout_s=TIMEOUT_S)
                if is_left(number) and item == 7:
                    left.add(number)
                    return
            stream.end()
            answer = stream.result(TIMEOUT_S)
            if answer != ITEMS:
                seen.wrong.append(f"stream {number}: {answer} of {ITEMS} items came")

    def both(client: RpcClient, number: int) -> None:
        items: list[int] = []
        whole = False
        try:
            with client.stream("both", number, padding(number), timeout_s=TIMEOUT_S) as stream:
                for item in range(ITEMS):
                    stream.send(made(item), timeout_s=TIMEOUT_S)
                    items.append(number_of(stream.next_item(TIMEOUT_S)))
                stream.end()
                items.extend(map(number_of, stream))
                whole = True
        finally:
            seen.check_prefix(number, items, whole, "the client")

    def caller(ours: RpcService, process: Process) -> None:
        client = ours.create_client("streaming", 1, timeout_s=CONNECT_S)

        def work(thread: int) -> None:
            for index in range(each):
                number = thread * each + index
                ends[number] = None
                with deadlines.watch(f"stream {number}", time_of(number)):
                    try:
                        (out, into, both)[number % 3](client, number)
                    except (errors.RpcError, TimeoutError) as error:
                        ends[number] = error
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(work, thread) for thread in range(threads)])
        runtime.sleep(max(0.0, UNTIL_S + 3.0 - simulation.now) + 3.0)  # for handlers to end

    begin_master(simulation)
    for name in SERVERS:
        begin(simulation, name, serve)
    process = begin(simulation, "caller", caller)
    simulation.let_loose(FAULTS, UNTIL_S, may_end=SERVERS)
    run_to_the_end(
        simulation,
        [process],
        UNTIL_S + CONNECT_S + 6.0 + LEFT_TIMEOUT_S + each * (TIMEOUT_S + 2 * SLACK_S),
    )
    for number, got in seen.got.items():
        seen.check_prefix(number, got, number in seen.saw_end, "the server")
    assert not seen.wrong, seen.wrong
    for number, times in seen.begun.items():
        assert times == 1, f"stream {number} was begun {times} times: {ends[number]!r}"
        if isinstance(ends[number], errors.NotSent | errors.Rejected):
            raise AssertionError(f"stream {number} ended with {ends[number]!r}, and had begun")
        if not seen.home[number].is_dead:
            assert seen.ended[number] == 1, f"the handler of stream {number} has not ended"
    for number, error in ends.items():
        if error is None and number not in left:
            assert seen.begun[number] == 1, f"stream {number} ended well, and never began"
        assert not isinstance(error, errors.RemoteError | CancelledError), repr(error)
    assert not deadlines.late, deadlines.late


SCENARIOS = (calls, futures, hedged, rolling, nested, comings, streams)
