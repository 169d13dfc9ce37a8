"""A process one of whose threads calls while another one throws exceptions into it, at random
instants, by PyThreadState_SetAsyncExc.

    python -m tests.prpc_engine.thrown MASTER VERB HOW TRANSPORT THROWS SEED

Uses one verb THROWS times (interrupted.py has the verbs, and the process that serves them), and
throws once into each use, after a random time; HOW: `ctypes` as programs do it, `past` by a
function that the engine does not know of. Another thread calls meanwhile, and nothing is thrown
into that.
Prints what came of it as one line of JSON:

    hit, late   exceptions that came out of a use, and after it
    swallowed   that came nowhere
    errors      other errors of the uses, by name; DeadlineExceeded says that a call hung
    beside      the same of the other thread
    wrong       uses whose answer was another's
    lost        connections that ended
    left        what is not as before, once all has ended: locks, calls in flight, blocks
    grown       what pushes have added up to; done: uses that went through
"""

from __future__ import annotations

import ctypes
import gc
import json
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from prpc_engine import RpcClient, RpcService, errors
from prpc_engine.node.slab import default_slab
from tests.prpc_engine import interrupted
from tests.prpc_engine.interrupted import LASTS_S, PIPELINED, Uses

SETTLE_S = 10.0
COMES_S = 2.0  # for what was thrown to come out of a thread that does nothing else
SWITCH_S = 1e-5  # so that threads change places anywhere
LOCK = type(threading.Lock())
RLOCK = type(threading.RLock())


class Thrown(BaseException):
    """What is thrown."""


class Thrower:
    """Throws Thrown once into the calling thread for each aim(), after a random time."""

    def __init__(
        self, throw: Callable[[int, type[BaseException]], object], longest_s: float, seed: int
    ) -> None:
        self._throw = throw
        self._longest_s = longest_s
        self._random = random.Random(seed)
        # its put() is one step of the interpreter
        self._wanted = queue.SimpleQueue[int]()
        threading.Thread(target=self._run, daemon=True).start()

    def aim(self) -> None:
        self._wanted.put(threading.get_ident())

    def _run(self) -> None:
        while True:
            thread = self._wanted.get()
            time.sleep(self._random.uniform(0.0, self._longest_s))
            self._throw(thread, Thrown)


def throw_by_ctypes(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def thrower_past_us() -> Callable[[int, type[BaseException]], object]:
    """Of a library of its own."""
    throw = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
    return lambda thread, kind: throw(ctypes.c_ulong(thread), ctypes.py_object(kind))


class Beside:
    """A thread that calls all the time."""

    def __init__(self, client: RpcClient) -> None:
        self.errors: Counter[str] = Counter()
        self.calls = 0
        self._client = client
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            self.calls += 1
            try:
                if (
                    self._client.call("echo", self.calls, timeout_s=interrupted.TIMEOUT_S)
                    != self.calls
                ):
                    self.errors["wrong"] += 1
            except errors.RpcError as error:
                self.errors[type(error).__name__] += 1
            time.sleep(2e-4)

    def end(self) -> None:
        self._ends = True
        self._thread.join()


def left_locked() -> list[str]:
    """Which locks of the engine's objects are held."""
    found = []
    for one in gc.get_objects():
        module = type(one).__module__
        if not module.startswith(("shard", "prpc_engine")):
            continue
        values: dict[str, Any] = dict(getattr(one, "__dict__", {}))
        for slot in getattr(type(one), "__slots__", ()):
            values[slot] = getattr(one, slot, None)
        for name, value in values.items():
            if (type(value) is LOCK and value.locked()) or (
                type(value) is RLOCK and not _can_take(value)
            ):
                found.append(f"{type(one).__name__}.{name}")
    return sorted(set(found) - {"Driver._lead"})


def _can_take(lock: Any) -> bool:
    taken: list[bool] = []

    def take() -> None:
        if lock.acquire(timeout=1.0):
            lock.release()
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)


def what_is_left(service: RpcService) -> list[str]:
    """What is not as it is where nobody calls."""
    found = left_locked()
    for peer in service.statistics().peers:
        if peer.in_flight or peer.outbox_messages:
            found.append(f"{peer.peer}: {peer.in_flight} in flight, {peer.outbox_messages} waiting")
    for name, client in service.statistics().clients.items():
        if client.waiting:
            found.append(f"{name}: {client.waiting} waiting")
    slab = default_slab().statistics()
    if slab.leases or slab.blocks_used > 1:
        found.append(f"{slab.leases} leases, {slab.blocks_used} blocks")
    return found


def throw(master: str, verb: str, how: str, transport: str, throws: str, seed: str) -> None:
    throw_it = throw_by_ctypes if how == "ctypes" else thrower_past_us()
    with RpcService(master=master, transports=(transport,)) as service:
        uses = Uses(service, verb)
        use: Callable[[], None] = uses.own_call if verb == "own" else getattr(uses, verb)
        use()
        before = uses.effects()
        beside = Beside(uses.client)
        thrower = Thrower(throw_it, LASTS_S[verb], int(seed))
        came = Counter[str]()
        failed = Counter[str]()
        began = time.monotonic()
        sys.setswitchinterval(SWITCH_S)

        def one() -> None:
            is_over = False
            try:
                thrower.aim()
                try:
                    use()
                    is_over = True
                    uses.done += 1
                except errors.RpcError as error:
                    is_over = True
                    failed[type(error).__name__] += 1
                except AssertionError:
                    is_over = True
                    failed["wrong"] += 1
                until = time.monotonic() + COMES_S
                while time.monotonic() < until:
                    time.sleep(2e-5)
                came["swallowed"] += 1
            except Thrown:
                came["late" if is_over else "hit"] += 1

        def all_of_them() -> None:
            for _ in range(int(throws)):
                uses.next += PIPELINED
                try:
                    one()
                except Thrown:  # in the loop of one(): seen once to pass by its except, on 3.13
                    came["late"] += 1

        victim = threading.Thread(target=all_of_them)
        victim.start()
        victim.join()
        took_s = time.monotonic() - began
        beside.end()
        use()
        deadline = time.monotonic() + SETTLE_S
        while (left := what_is_left(service)) and time.monotonic() < deadline:
            time.sleep(0.05)
        grown = [after - one for one, after in zip(before, uses.effects(), strict=True)]
        print(
            json.dumps(
                {
                    **came,
                    "errors": failed,
                    "beside": {"calls": beside.calls, **beside.errors},
                    "lost": sum(one.connections for one in service.statistics().ended.values()),
                    "left": left,
                    "grown": sorted(set(grown)),
                    "done": uses.done + 1,
                    "took_s": round(took_s, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    throw(*sys.argv[1:])
