"""Processes that have no memory for arrays for a while, while calls bring and take arrays.

operation            promise                                       how it is checked
any call             it ends by its deadline, with what is right   virtual time, sums, types
                      or an RpcError
an array that finds  ShmFull at who makes or sends it; BadArguments  MEMORY names all errors that
 no memory            or RpcError where it does not fit            come without other faults
plain                runs once at most; not at all where the       runs counted outside of all
                      array was refused before it was sent          processes
once, answered       has run exactly once                          the same
small calls          go on beside, whoever has no memory           all of them are answered
afterwards           all is as before: nothing waits or is held    all calls are answered; no call
                                                                    in flight; slabs have room
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import RpcClient, RpcService, empty, errors, once
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import Deadlines, begin, begin_master, in_threads, run_to_the_end

CALLS, THREADS = 16, 2
ELEMENTS = 40_000  # of 4 bytes: no array of these is part of a message's body
TIMEOUT_S, CONNECT_S, UNTIL_S = 3.0, 30.0, 8.0
PAUSE_S = 1.0
END_S = CONNECT_S + UNTIL_S + CALLS * (TIMEOUT_S + PAUSE_S)
KINDS = ("plain", "fresh", "ask_once", "make", "small")
# What a call may end with where memory is all that is wrong: as it is made or sent; where it comes;
# where the answer is sent. One that cannot be read where it comes is an RpcError.
MEMORY = (errors.ShmFull, errors.BadArguments, errors.RemoteError)
NO_MEMORY = re.compile(r"no memory for an? |a slab that may grow to 0 bytes")

Array = np.ndarray[Any, np.dtype[np.float32]]


class Arrays:
    """Answers twice what it is given. `ran` is the test's."""

    def __init__(self, ran: Counter[tuple[str, int]]) -> None:
        self._ran = ran

    def plain(self, number: int, values: Array) -> Array:
        self._ran["plain", number] += 1
        return 2 * values

    def fresh(self, number: int, values: Array) -> Array:
        self._ran["fresh", number] += 1
        twice = empty(values.shape)
        np.multiply(values, 2, out=twice)
        return twice

    @once
    def ask_once(self, number: int, values: Array) -> Array:
        self._ran["ask_once", number] += 1
        return 2 * values

    def make(self, number: int) -> Array:
        self._ran["make", number] += 1
        return np.full(ELEMENTS, 2 * number, np.float32)

    def small(self, number: int, value: float) -> float:
        self._ran["small", number] += 1
        return 2 * value


class Arraying:
    """What became of all calls."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.ran: Counter[tuple[str, int]] = Counter()
        self.outcomes: dict[tuple[str, int], BaseException | None] = {}
        self.deadlines = Deadlines(simulation)

    def serve(self, ours: RpcService, process: Process) -> None:
        ours.create_server("arrays", Arrays(self.ran))
        ours.serve_forever()

    def call(self, client: RpcClient, kind: str, number: int) -> None:
        error: BaseException | None = None
        with self.deadlines.watch(f"{kind} {number}", TIMEOUT_S):
            try:
                if kind == "small":
                    assert client.call(kind, number, 1.5, timeout_s=TIMEOUT_S) == 3.0
                else:
                    arguments: tuple[Array, ...] = ()
                    if kind == "fresh":
                        values = empty(ELEMENTS)
                        values[:] = number
                        arguments = (values,)
                    elif kind != "make":
                        arguments = (np.full(ELEMENTS, number, np.float32),)
                    twice = client.call(kind, number, *arguments, timeout_s=TIMEOUT_S)
                    assert twice.shape == (ELEMENTS,) and (twice == 2 * number).all()
            except errors.RpcError as failed:
                error = failed
        self.outcomes[kind, number] = error

    def work(self, first: int, ours: RpcService, process: Process) -> None:
        client = ours.create_client("arrays", 1, timeout_s=CONNECT_S)

        def some(thread: int) -> None:
            for index in range(CALLS):
                number = first + thread * CALLS + index
                self.call(client, KINDS[number % len(KINDS)], number)
                runtime.sleep(PAUSE_S * runtime.random())

        in_threads([partial(some, thread) for thread in range(THREADS)])
        runtime.sleep(max(0.0, UNTIL_S + TIMEOUT_S - self.simulation.now))
        for index, kind in enumerate(KINDS):  # and now nothing is wrong any more
            number = -1 - first - index
            self.call(client, kind, number)
            assert self.outcomes[kind, number] is None, f"{kind}: {self.outcomes[kind, number]!r}"

    def run(self, rates: Rates, may_end: tuple[str, ...] = ()) -> None:
        simulation = self.simulation
        begin_master(simulation)
        for name in ("server0", "server1"):
            begin(simulation, name, self.serve)
        workers = [
            begin(simulation, f"caller{n}", partial(self.work, n * THREADS * CALLS), host=host)
            for n, host in enumerate(("caller0", "server1"))  # over tcp, and over shared memory
        ]
        simulation.let_loose(rates, UNTIL_S, may_end)
        run_to_the_end(simulation, workers, END_S)
        assert not self.deadlines.late, self.deadlines.late
        for (kind, number), error in self.outcomes.items():
            times = self.ran[kind, number]
            told = f"{kind} {number} has run {times} times, and ended with {error!r}"
            assert times <= 1, told
            if error is None:
                assert times == 1, told
            if isinstance(error, errors.ShmFull | errors.NotSent | errors.BadArguments):
                assert times == 0, told


def arrays(simulation: Simulation) -> None:
    """Memory alone is refused: every error is told by its name."""
    done = Arraying(simulation)
    done.run(Rates(*(0.0,) * 8, memory=1.5))
    for (kind, number), error in done.outcomes.items():
        is_named = isinstance(error, MEMORY) or type(error) is errors.RpcError
        assert error is None or (is_named and NO_MEMORY.search(str(error))), (
            f"{kind} {number}: {error!r}"
        )
        if kind == "small":
            assert error is None, f"small {number}: {error!r}"


def arrays_among_faults(simulation: Simulation) -> None:
    """And connections are lost, processes killed."""
    rates = Rates(cut=0.2, reset=0.5, kill=0.3, crash=0.0, stop=0.2, slow=0.2, memory=1.0)
    Arraying(simulation).run(rates, ("server0", "server1"))
