"""What the engine takes from its machine: time, chance, locks, threads, and a way to sleep until
something comes.

    name                                    in a process of its own
    monotonic, time, time_ns, sleep         those of `time`; now(): monotonic() for defaults
    random, Random                          those of `random`
    randbits, randbelow, token_hex          those of `secrets`
    Lock, RLock, Condition, Semaphore,      those of `threading`
     Event, Thread
    Threads                                 a pool, that of `concurrent.futures`
    Epoll, Bell                             epoll(7), eventfd(2)
    pid, this_process, process_is_gone      that of `os`, and what /proc says
    transports                              None: those of the machine
    shares_process                          False: the interpreter has one process of the job
    at_exit, not_at_exit                    register and unregister of `atexit`
    fsync, fdatasync                        those of `os`
    own(key, make), put(key, one)           what there is one of in a process: made by make() once

All of shard/ and prpc_engine/ that decides, waits or draws lots calls these by this module
(`runtime.monotonic()`), at the moment when it needs them: simulate() puts others in their place,
which keep virtual time and run many processes of a job in one. Outside of a simulation each name is
the library's own function, so that a call costs what it costs there.
"""

from __future__ import annotations

import atexit as _atexit
import os
import random as _random
import secrets as _secrets
import select as _select
import threading as _threading
import time as _time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from shard import process_identity as _process_identity

T = TypeVar("T")


class Bell:
    """The descriptor that ends a park. Closes with its last holder, so that a ring() in another
    thread, which holds it meanwhile, never writes to a number that has been used again; and needs
    no lock, which a destructor could find held.

    fd  readable from a ring() until the next quiet()
    """

    fd = -1  # there is none yet

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """End a wait for it, or the next one. From any thread, signal handler or destructor."""
        os.eventfd_write(self.fd, 1)

    def quiet(self) -> None:
        """It has been heard."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # another turn read it

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


monotonic = _time.monotonic
time = _time.time
time_ns = _time.time_ns
sleep = _time.sleep
random = _random.random
Random = _random.Random
randbits = _secrets.randbits
randbelow = _secrets.randbelow
token_hex = _secrets.token_hex
Lock = _threading.Lock
RLock = _threading.RLock
Condition = _threading.Condition
Semaphore = _threading.Semaphore
Event = _threading.Event
Thread = _threading.Thread
Threads = ThreadPoolExecutor
Epoll = _select.epoll
pid = os.getpid
at_exit = _atexit.register
not_at_exit = _atexit.unregister
this_process = _process_identity.this_process
process_is_gone = _process_identity.process_is_gone
# (the node's identity, its slab) -> its transports by their names
transports: Callable[[Any, Any], dict[str, Any]] | None = None
shares_process = False

_own: dict[str, Any] = {}
_making = _threading.Lock()  # that two threads make one, not two


def now() -> float:
    """monotonic() of the moment: for defaults of arguments, which are bound at import."""
    return monotonic()


def fsync(fd: int) -> None:
    """What was written to that file, or the names in that folder, are on the disk when this
    returns. Raises OSError.
    """
    os.fsync(fd)


def fdatasync(fd: int) -> None:
    """The same of a file, without its times. Raises OSError."""
    os.fdatasync(fd)


def own(key: str, make: Callable[[], T]) -> T:
    """What this process has one of: made by make() where nothing is there."""
    found = _own.get(key)
    if found is None:
        with _making:
            found = _own.get(key)
            if found is None:
                found = _own[key] = make()
    return found


def made(key: str) -> Any:
    """What own(key) has made, or None."""
    return _own.get(key)


def put(key: str, one: object) -> None:
    """Have own(key) answer that from now on."""
    _own[key] = one


def close_with_simulation(close: Callable[[], object]) -> None:
    """Of a process that is killed nobody closes what is real: its simulation does, at its end. In a
    process of its own the kernel does.
    """
    if shares_process:
        ends: list[Callable[[], object]] = own("to close", list)
        ends.append(close)


def close_with_process(close: Callable[[], object]) -> None:
    """The same for a descriptor that others see: a lock of a file, say. A simulated process lets go
    of it when it ends or is killed, whatever its threads are at: close() does what the kernel
    would, and its owner may have called it before, or call it once more.
    """
    if shares_process:
        descriptors: list[Callable[[], object]] = own("descriptors", list)
        descriptors.append(close)


def _forget() -> None:
    """A child made by fork() has none of its parent's threads; what its parent had is kept, as its
    end would be the parent's.
    """
    global _own, _making
    _of_parents.append(_own)
    _own, _making = {}, _threading.Lock()  # that of the parent may be held for ever


_of_parents: list[dict[str, Any]] = []
os.register_at_fork(after_in_child=_forget)

NAMES = (
    *("monotonic", "time", "time_ns", "sleep"),
    *("random", "Random", "randbits", "randbelow", "token_hex"),
    *("Lock", "RLock", "Condition", "Semaphore", "Event", "Thread", "Threads"),
    *("Epoll", "Bell", "own", "put"),
    *("pid", "this_process", "process_is_gone", "transports"),
    *("at_exit", "not_at_exit", "fsync", "fdatasync"),
)


@contextmanager
def simulate(names: dict[str, Any]) -> Iterator[None]:
    """Have others in the place of NAMES inside, for what is made or asked there. Not reentrant."""
    global shares_process
    if shares_process:
        raise RuntimeError("a simulation runs in this process: one at a time")
    before = {name: globals()[name] for name in NAMES}
    shares_process = True
    globals().update({name: names[name] for name in NAMES})
    try:
        yield
    finally:
        globals().update(before)
        shares_process = False
