"""Locks, threads and descriptors of simulated processes: the names of shard.runtime, over the
baton.

Each has the face of the library's own. A lock that is free is taken without a switch; one that is
held makes its taker wait in virtual time. Of several who wait for one, chance says who is woken.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from prpc_engine.simulation.errors import SimulationError
from prpc_engine.simulation.scheduler import Abandoned, Owner, Scheduler, ThreadState

FIRST_FD = 1 << 20  # numbers of simulated descriptors: no real one is as high


class Waiters:
    """The threads that wait for one thing."""

    __slots__ = ("_draw", "_scheduler", "_threads")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._threads: list[ThreadState] = []
        self._draw = scheduler.draw

    def __len__(self) -> int:
        return len(self._threads)

    def wait(self, timeout_s: float | None) -> bool:
        """Join them; whether it was woken, before the time was over."""
        me = self._scheduler.here()
        if me is not None:
            self._threads.append(me)
        try:
            return self._scheduler.wait(timeout_s)
        finally:
            if me in self._threads:
                self._threads.remove(me)

    def wake_one(self) -> None:
        """Wake one of them, if there is any."""
        threads = self._threads
        if threads:
            at = int(self._draw() * len(threads)) if len(threads) > 1 else 0
            self._scheduler.wake(threads.pop(at))

    def wake_all(self) -> None:
        """Wake all of them."""
        threads, self._threads = self._threads, []
        for thread in threads:
            self._scheduler.wake(thread)


class SimulatedLock:
    """As threading.Lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.pass_by()
        if not self._held:
            self._held = True
            return True
        if scheduler.is_over:  # its holder may be a thread that has been left, and never lets go
            return blocking
        if not blocking:
            return False
        deadline = None if timeout < 0 else scheduler.clock() + timeout
        while self._held:
            left_s = None if deadline is None else deadline - scheduler.clock()
            if left_s is not None and left_s <= 0:
                return False
            self._waiters.wait(left_s)
        self._held = True
        return True

    def release(self) -> None:
        if not self._held and not self._scheduler.is_over:
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiters:
            self._waiters.wake_one()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock:
    """As threading.RLock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedLock(scheduler)
        self._owner = 0
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner == me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            if self._scheduler.is_over:
                return
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = 0
            self._lock.release()

    def is_owned(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def release_all(self) -> int:
        """Let go of it however often it was taken; how often."""
        count, self._count, self._owner = self._count, 0, 0
        self._lock.release()
        return count

    def take_again(self, count: int) -> None:
        """Undo release_all()."""
        self._lock.acquire()
        self._owner, self._count = threading.get_ident(), count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedCondition:
    """As threading.Condition."""

    def __init__(
        self, scheduler: Scheduler, lock: SimulatedLock | SimulatedRLock | None = None
    ) -> None:
        self._scheduler = scheduler
        self._lock = lock if lock is not None else SimulatedRLock(scheduler)
        self._waiters = Waiters(scheduler)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def _check_held(self, what: str) -> None:
        lock = self._lock
        held = lock.is_owned() if isinstance(lock, SimulatedRLock) else lock.locked()
        if not held and not self._scheduler.is_over:
            raise RuntimeError(f"cannot {what} on un-acquired lock")

    def wait(self, timeout: float | None = None) -> bool:
        self._check_held("wait")
        lock = self._lock
        count = 0
        if isinstance(lock, SimulatedRLock):
            count = lock.release_all()
        else:
            lock.release()
        try:
            return self._waiters.wait(timeout)
        finally:
            if isinstance(lock, SimulatedRLock):
                lock.take_again(count)
            else:
                lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._scheduler.clock() + timeout
        result = predicate()
        while not result:
            left_s = None if deadline is None else deadline - self._scheduler.clock()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        self._check_held("notify")
        for _ in range(min(n, len(self._waiters))):
            self._waiters.wake_one()

    def notify_all(self) -> None:
        self._check_held("notify")
        self._waiters.wake_all()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SimulatedSemaphore:
    """As threading.Semaphore."""

    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._scheduler = scheduler
        self._value = value
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        deadline = None if timeout is None else scheduler.clock() + timeout
        while not self._value:
            if not blocking:
                return False
            left_s = None if deadline is None else deadline - scheduler.clock()
            if left_s is not None and left_s <= 0:
                return False
            self._waiters.wait(left_s)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        for _ in range(min(n, len(self._waiters))):
            self._waiters.wake_one()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    """As threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiters = Waiters(scheduler)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._scheduler.clock() + timeout
        while not self._is_set:
            left_s = None if deadline is None else deadline - self._scheduler.clock()
            if left_s is not None and left_s <= 0:
                break
            self._waiters.wait(left_s)
        return self._is_set


class SimulatedThread(threading.Thread):
    """As threading.Thread, in the process of the thread that starts it."""

    def __init__(self, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "daemon": True})
        self._scheduler = scheduler
        self._simulated: ThreadState | None = None
        self._live: Callable[[], None] | None = None

    def start(self) -> None:
        parent = self._scheduler.here()
        if parent is None:
            raise SimulationError("a thread of a simulated process is started inside of it")
        self.start_in(parent.owner)

    def start_in(self, owner: Owner) -> None:
        """Begin it as a thread of that process."""
        if self._simulated is not None:
            raise RuntimeError("threads can only be started once")
        self._simulated = self._scheduler.start(self.name, owner, super().run, self._launch)

    def _launch(self, live: Callable[[], None]) -> threading.Thread:
        self._live = live
        super().start()
        return self

    def run(self) -> None:
        assert self._live is not None, "it was started"
        self._live()

    def join(self, timeout: float | None = None) -> None:
        simulated, scheduler = self._simulated, self._scheduler
        me = scheduler.here()
        if simulated is None:
            raise RuntimeError("cannot join thread before it is started")
        if me is None:
            return
        deadline = None if timeout is None else scheduler.clock() + timeout
        while not simulated.ended and not simulated.owner.is_dead:
            left_s = None if deadline is None else deadline - scheduler.clock()
            if left_s is not None and left_s <= 0:
                return
            simulated.joiners.append(me)
            try:
                scheduler.wait(left_s)
            finally:
                if me in simulated.joiners:
                    simulated.joiners.remove(me)

    def is_alive(self) -> bool:
        return self._simulated is not None and not self._simulated.ended


class SimulatedResult(Future[Any]):
    """As concurrent.futures.Future: who waits for it waits in virtual time."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._done = SimulatedEvent(scheduler)
        self.add_done_callback(lambda _: self._done.set())

    def result(self, timeout: float | None = None) -> Any:
        self._done.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return super().exception(0)


THREADS_MAX = 32  # of an executor that is not told how many: ThreadPoolExecutor goes by the cores


class SimulatedThreads(Executor):
    """As ThreadPoolExecutor: `max_workers` threads of the process, begun when they are needed."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._name = thread_name_prefix
        self._most = THREADS_MAX if max_workers is None else max_workers
        self._threads: list[SimulatedThread] = []
        self._is_over = False
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._waiters = Waiters(scheduler)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        result: Future[Any] = SimulatedResult(self._scheduler)
        self._work.append((result, lambda: fn(*args, **kwargs)))
        if self._waiters:
            self._waiters.wake_one()
        elif len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads) + 1}"
            self._threads.append(SimulatedThread(self._scheduler, target=self._run, name=name))
            self._threads[-1].start()
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_over = True
        while cancel_futures and self._work:
            self._work.popleft()[0].cancel()
        self._waiters.wake_all()
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while True:
            while not self._work:
                if self._is_over:
                    return
                self._waiters.wait(None)
            result, call = self._work.popleft()
            if not result.set_running_or_notify_cancel():
                continue
            try:
                value = call()
            except Abandoned:
                raise
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)


class SimulatedBell:
    """As shard.runtime.Bell."""

    def __init__(self, scheduler: Scheduler, bells: dict[int, SimulatedBell]) -> None:
        self._scheduler = scheduler
        self.fd = FIRST_FD + scheduler.count("bell")
        self.is_rung = False
        self.waiters = Waiters(scheduler)
        bells[self.fd] = self

    def ring(self) -> None:
        self.is_rung = True
        self.waiters.wake_all()

    def quiet(self) -> None:
        self.is_rung = False


class SimulatedEpoll:
    """As select.epoll, of bells alone."""

    def __init__(self, scheduler: Scheduler, bells: dict[int, SimulatedBell]) -> None:
        self._scheduler = scheduler
        self._bells = bells
        self._watched: dict[int, SimulatedBell] = {}

    def register(self, fd: int, eventmask: int = select.EPOLLIN) -> None:
        bell = self._bells.get(fd)
        if bell is None:
            raise SimulationError(
                f"descriptor {fd} is a real one: sockets and pipes are not simulated; use what the "
                "engine has for messages"
            )
        self._watched[fd] = bell

    def modify(self, fd: int, eventmask: int) -> None:
        self.register(fd, eventmask)

    def unregister(self, fd: int) -> None:
        self._watched.pop(fd, None)

    def fileno(self) -> int:
        return -1

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        found = self._look()
        if found or timeout == 0:
            return found
        scheduler = self._scheduler
        deadline = None if timeout is None or timeout < 0 else scheduler.clock() + timeout
        while not found:
            left_s = None if deadline is None else deadline - scheduler.clock()
            if left_s is not None and left_s <= 0:
                break
            for bell in self._watched.values():  # one: that of the reactor
                bell.waiters.wait(left_s)
                break
            found = self._look()
        return found

    def _look(self) -> list[tuple[int, int]]:
        return [(fd, select.EPOLLIN) for fd, bell in self._watched.items() if bell.is_rung]

    def close(self) -> None:
        for fd in self._watched:
            self._bells.pop(fd, None)
        self._watched.clear()
