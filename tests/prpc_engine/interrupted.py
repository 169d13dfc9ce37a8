"""A process whose main thread calls while signals interrupt it at random instants.

    python -m tests.prpc_engine.interrupted serve MASTER
    python -m tests.prpc_engine.interrupted call MASTER VERB SIGNAL HITS SEED
    python -m tests.prpc_engine.interrupted nested MASTER VERB CALLS SEED

The first serves Handlers and tables until its input ends. The second uses one verb again and again
until HITS of its uses were interrupted, by an interval timer or by Ctrl-C from a thread, each after
a random time, and prints what came of it as one line of JSON. An interrupted use may have had its
effect or not; all others have had it once, and answers belong to their questions. The third uses a
verb until the handler of an interval timer has made CALLS calls of its own, or one more, in the
middle of it, and prints how they ended.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import queue
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np

from prpc_engine import RpcClient, RpcService, empty
from prpc_engine.errors import RpcError
from prpc_engine.kv import TableServer, TableWorker
from tests.prpc_engine.handlers import Handlers

TIMEOUT_S = 20.0
# How long an uninterrupted use takes at most, in seconds: interrupts come up to then.
LASTS_S = {"call": 60e-6, "own": 2e-5, "array": 2e-3, "submit": 4e-4, "stream": 1e-3, "push": 4e-4}
ELEMENTS = 200_000
PIPELINED = 5


class Interrupted(Exception):
    """What the signal handler raises."""


class Interrupts:
    """Raises Interrupted out of what runs inside armed(), at most once each, at a random time."""

    def __init__(self, number: signal.Signals, longest_s: float, seed: int) -> None:
        self._number = number
        self._longest_s = longest_s
        self._random = random.Random(seed)
        self._armed = False
        self.hits = 0
        # put() is one step; Python's semaphores, interrupted, may stay locked
        self._wanted = queue.SimpleQueue[None]()
        signal.signal(number, self._handle)
        if number == signal.SIGINT:
            threading.Thread(target=self._shoot, daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise Interrupted

    def _shoot(self) -> None:
        pause = threading.Event()
        while True:
            self._wanted.get()
            pause.wait(self._random.uniform(0.0, self._longest_s))
            os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        try:
            self._armed = True
            if self._number == signal.SIGINT:
                self._wanted.put(None)
            else:
                delay_s = self._random.uniform(1e-6, self._longest_s)
                signal.setitimer(signal.ITIMER_REAL, delay_s)
            yield
        finally:
            self._armed = False


class Uses:
    """The verbs. Each use checks its answer; `done` and `hit` count uses that went through, and
    those that were interrupted.
    """

    def __init__(self, service: RpcService, verb: str) -> None:
        if verb == "own":  # else the process only calls
            service.create_server("own", {"same": operator.index}, inline=True)
            self.own: RpcClient = service.create_client("own")
        self.client: RpcClient = service.create_client("handlers")
        self.kv = TableWorker(service)
        self.kv.create_dense("sums", (4,), {"name": "add"})
        self.done = 0
        self.hit = 0
        self.next = 0
        self._array = empty((ELEMENTS,), np.int64)
        self._array[:] = np.arange(ELEMENTS)

    def call(self) -> None:
        number = self.next
        assert self.client.call("echo", number, timeout_s=TIMEOUT_S) == number

    def own_call(self) -> None:
        """Answered by this thread itself."""
        number = self.next
        assert self.own.call("same", number, timeout_s=TIMEOUT_S) == number

    def array(self) -> None:
        """One that is copied, and one that is lent."""
        for sent in (np.full(ELEMENTS, self.next), self._array):
            back = self.client.call("echo", sent, timeout_s=TIMEOUT_S)
            assert back[0] == sent[0]
            assert back[-1] == sent[-1]

    def submit(self) -> None:
        asked = range(self.next, self.next + PIPELINED)
        calls = [self.client.submit("echo", one, timeout_s=TIMEOUT_S) for one in asked]
        assert [one.result() for one in calls] == list(asked)

    def stream(self) -> None:
        assert list(self.client.stream("rows", PIPELINED)) == list(range(PIPELINED))

    def push(self) -> None:
        self.kv.push("sums", np.ones(4, np.float32))

    def effects(self) -> list[float]:
        """What the pushes have added up to."""
        return [float(one) for one in self.kv.pull("sums")]


def call(master: str, verb: str, number: str, hits: str, seed: str) -> None:
    with RpcService(master=master) as service:
        uses = Uses(service, verb)
        use: Callable[[], None] = uses.own_call if verb == "own" else getattr(uses, verb)
        use()
        before = uses.effects()
        interrupts = Interrupts(signal.Signals[number], LASTS_S[verb], int(seed))
        while uses.hit < int(hits):
            uses.next += PIPELINED
            try:
                with interrupts.armed():
                    use()
                    uses.done += 1
            except Interrupted:
                uses.hit += 1
        signal.signal(signal.Signals[number], signal.SIG_IGN)
        use()
        grown = [after - one for one, after in zip(before, uses.effects(), strict=True)]
        print(json.dumps({"done": uses.done + 1, "hit": uses.hit, "grown": grown}), flush=True)


def nested(master: str, verb: str, calls: str, seed: str) -> None:
    with RpcService(master=master) as service:
        uses = Uses(service, verb)
        use: Callable[[], None] = uses.own_call if verb == "own" else getattr(uses, verb)
        chance = random.Random(int(seed))
        ended = Counter[str]()

        def call_inside(number: int, frame: FrameType | None) -> None:
            asked = ended.total()
            try:
                answer = uses.client.call("echo", asked, timeout_s=TIMEOUT_S)
                ended["right" if answer == asked else "wrong"] += 1
            except RpcError as error:
                ended[type(error).__name__] += 1

        signal.signal(signal.SIGALRM, call_inside)
        while ended.total() < int(calls):
            uses.next += PIPELINED
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, LASTS_S[verb]))
            use()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(ended), flush=True)


def serve(master: str) -> None:
    with RpcService(master=master) as service:
        service.create_server("handlers", Handlers(service))
        TableServer(service)
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), service.stop_serving())).start()
        service.serve_forever()


if __name__ == "__main__":
    {"serve": serve, "call": call, "nested": nested}[sys.argv[1]](*sys.argv[2:])
