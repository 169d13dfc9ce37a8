"""A group of shards: one process per core, started by spawn, joined to each other and to the application by rings.

    application ──lane── shard 0 ──lane── shard 1 ...      every pair of processes has one lane (two rings and a socket)

The parent makes all sockets and rings and hands each child its own by descriptor: nothing has a name that another process
could attach to, and nothing is left behind when any of them dies. A child ends when it is told to stop, when the
application's end of its lane closes (so also when the parent is killed), or with its parent by PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import multiprocess
from multiprocess import reduction

from shard import cpu, memory_order
from shard.counters import CounterRow, Counters, size_for
from shard.driver import Driver
from shard.errors import ClosedError, PeerLostError, ShardError
from shard.future import Future
from shard.idle import Adaptive, Idle, Spin
from shard.limits import Limits
from shard.mesh import Lane, Tally
from shard.reactor import Reactor
from shard.segment import Segment
from shard.slab import Slab
from shard.transport.shm_connection import ShmConnection, connection_over, make_rings

SHARDS_MAX = 256  # a lane per pair: 32,896 of them by then
RING_BYTES = 256 << 10  # of each of a lane's two rings: N x N of them
START_TIMEOUT_S = 60.0  # for all to import, map and answer; python and numpy alone take 0.3 s a shard
STOP_TIMEOUT_S = 2.0  # for running functions to return, then the shard is killed
EXIT_CODE_TIMEOUT_S = 0.1  # a killed shard's socket ends a moment before it has an exit code
COUNTERS_PERIOD_S = 0.1  # how old the figures of statistics() may be
_PR_SET_PDEATHSIG = 1
LIMITS = Limits(ring_bytes=RING_BYTES)


class _InheritedFd:
    """A descriptor that travels to a child that is being spawned."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _InheritedFd._receive, (reduction.DupFd(self.fd),)

    @staticmethod
    def _receive(duplicate: Any) -> _InheritedFd:
        return _InheritedFd(duplicate.detach())


@dataclass
class _LaneEnd:
    """What a process needs to build its end of a lane."""

    socket_fd: _InheritedFd
    segment_fd: _InheritedFd
    is_connector: bool


def _make_lane() -> tuple[_LaneEnd, _LaneEnd]:
    ours, theirs = socket.socketpair()
    segment = make_rings(RING_BYTES)
    other = os.dup(segment.fd)
    first = _LaneEnd(_InheritedFd(ours.detach()), _InheritedFd(os.dup(segment.fd)), True)
    second = _LaneEnd(_InheritedFd(theirs.detach()), _InheritedFd(other), False)
    segment.close()
    return first, second


def _connect(end: _LaneEnd, peer: str, slab: Slab) -> ShmConnection:
    sock = socket.socket(fileno=end.socket_fd.fd)
    return connection_over(sock, Segment.attach(end.segment_fd.fd), end.is_connector, peer, LIMITS, slab)


def _close_end(end: _LaneEnd) -> None:
    os.close(end.socket_fd.fd)
    os.close(end.segment_fd.fd)


@dataclass(frozen=True)
class ShardStatistics:
    """One shard, as its counters say."""

    index: int
    pid: int
    core: int | None
    alive: bool
    counters: CounterRow


@dataclass(frozen=True)
class GroupStatistics:
    """The group as seen from the application."""

    shards: tuple[ShardStatistics, ...]
    calls_in_flight: int


# -- inside a shard ----------------------------------------------------------------------------------------------------


class Shard:
    """The process one is in, as seen from inside; this_shard() gives it."""

    def __init__(self, index: int, size: int, core: int | None, polling: bool) -> None:
        self.index = index
        self.size = size
        self.core = core
        self.polling = polling
        self.slab = Slab()
        self.reactor = Reactor(time.monotonic)
        self.stopping = False
        self._lanes: dict[int, Lane] = {}
        self._tally = Tally()
        self._closers: list[Callable[[], None]] = []

    def submit_to(self, index: int, function: Callable[..., Any], *args: Any) -> Future:
        """Run function(*args) in shard `index` of this group; await the result."""
        if index == self.index:
            return _run_here(self.reactor, function, args)
        lane = self._lanes.get(index)
        if lane is None:
            raise ShardError(f"there is no shard {index} here: this group has shards 0 to {self.size - 1}, or it died")
        return lane.submit(function, args)

    def at_stop(self, closer: Callable[[], None]) -> None:
        """Run closer() before this shard ends; the last one first."""
        self._closers.append(closer)

    def _stop(self) -> None:
        self.stopping = True

    def _lost(self, index: int, error: ShardError) -> None:
        self._lanes.pop(index, None)

    def _run(self, counters: Counters) -> None:
        reactor = self.reactor
        clock = time.monotonic
        idle: Idle = Spin() if self.polling else Adaptive()
        write_counters_at = 0.0
        while not self.stopping:
            now = clock()
            if now >= write_counters_at:
                write_counters_at = now + COUNTERS_PERIOD_S
                self._write_counters(counters)
            if reactor.poll(now):
                idle.work(now)
            else:
                park_s = idle.idle(now)
                if park_s:
                    self._write_counters(counters)
                    reactor.park(park_s)
        self._write_counters(counters)
        for closer in reversed(self._closers):
            closer()
        for lane in list(self._lanes.values()):
            lane.close()
        reactor.close()

    def _write_counters(self, counters: Counters) -> None:
        reactor, tally = self.reactor, self._tally
        counters.write(
            self.index,
            CounterRow(reactor.turns, reactor.busy_turns, reactor.parks, tally.calls, tally.failures, tally.tasks),
        )


_this: Shard | None = None


def this_shard() -> Shard:
    """The shard that this process is. Raises ShardError outside one."""
    if _this is None:
        raise ShardError("this process is no shard: this_shard() works in functions that submit_to() or map() sent to one")
    return _this


def _run_here(reactor: Reactor, function: Callable[..., Any], args: tuple[Any, ...]) -> Future:
    import inspect

    future = Future()
    try:
        value = function(*args)
    except Exception as error:
        future.set_error(error)
        return future
    if inspect.iscoroutine(value):
        return reactor.spawn(value)
    future.set_result(value)
    return future


def _shard_main(
    index: int,
    size: int,
    core: int | None,
    cores: list[int],
    polling: bool,
    parent_pid: int,
    tied_to_parent: bool,
    counters_fd: _InheritedFd,
    application: _LaneEnd,
    others: dict[int, _LaneEnd],
) -> None:
    """What a shard's process runs from birth to end."""
    global _this
    if tied_to_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # it died before we were tied to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of the terminal; the application decides
    if core is not None:
        cpu.pin(core)
    else:
        cpu.restore(set(cores))  # the application's thread may be pinned, and we inherited that
    shard = _this = Shard(index, size, core, polling)
    segment = Segment.attach(counters_fd.fd)
    counters = Counters(segment.memory)
    segment.close()

    def add_lane(other: int, end: _LaneEnd, peer: str, on_lost: Callable[[ShardError], None]) -> None:
        lane = Lane(_connect(end, peer, shard.slab), shard.reactor, None, shard._tally, shard._stop, on_lost)
        shard._lanes[other] = lane
        lane.attach()

    for other, end in others.items():
        add_lane(other, end, f"shard {other}", partial(shard._lost, other))
    add_lane(-1, application, "the application", lambda error: shard._stop())
    shard._run(counters)


# -- in the application ------------------------------------------------------------------------------------------------


class ShardGroup:
    """`size` shards and this process's lanes to them. A context manager; closing it stops the shards.

    size     how many processes
    polling  shards never sleep: lowest latency, a whole core each
    pin      each shard stays on one core; the application is left alone

    Like everything that starts processes by spawn, a script makes one under `if __name__ == "__main__":`.
    """

    def __init__(self, size: int, polling: bool = False, pin: bool = True, driver: Driver | None = None) -> None:
        if not 1 <= size <= SHARDS_MAX:
            raise ValueError(f"a group of {size} shards: 1 to {SHARDS_MAX} are possible")
        memory_order.require_store_order()
        self.size = size
        self._driver = driver or Driver(polling, "prpc-group")
        self._owns_driver = driver is None
        self._slab = Slab()
        self._closed = False
        self._pid = os.getpid()
        self._cores = cpu.place(size) if pin else [None] * size
        counters = Segment.create(size_for(size))
        self._counters = Counters.format(counters.memory, size)
        self._lanes: list[Lane] = []
        self._lost: dict[int, ShardError] = {}
        self._processes: list[Any] = []
        try:
            self._start(polling, counters.fd)
        except BaseException:
            self.close()
            raise
        finally:
            counters.close()

    def _start(self, polling: bool, counters_fd: int) -> None:
        context = multiprocess.get_context("spawn")
        ends: list[dict[int, _LaneEnd]] = [{} for _ in range(self.size)]
        for one in range(self.size):
            for two in range(one + 1, self.size):
                ends[one][two], ends[two][one] = _make_lane()
        tied = threading.current_thread() is threading.main_thread()  # the signal comes when the *thread* ends
        theirs = []
        try:
            for index in range(self.size):
                ours, child_end = _make_lane()
                theirs.append(child_end)
                connection = _connect(ours, f"shard {index}", self._slab)
                lane = Lane(connection, self._driver.reactor, self._driver, Tally(), _nothing, partial(self._on_lost, index))
                self._lanes.append(lane)
                process = context.Process(
                    target=_shard_main,
                    name=f"prpc-shard-{index}",
                    args=(
                        index,
                        self.size,
                        self._cores[index],
                        cpu.usable_cores(),
                        polling,
                        os.getpid(),
                        tied,
                        _InheritedFd(counters_fd),
                        child_end,
                        ends[index],
                    ),
                    daemon=True,
                )
                process.start()
                self._processes.append(process)
        finally:
            for end in [*theirs, *(end for row in ends for end in row.values())]:
                _close_end(end)
        for lane in self._lanes:
            self._driver.reactor.call_soon(lane.attach)
        deadline = time.monotonic() + START_TIMEOUT_S
        ready = [lane.submit(os.getpid, ()) for lane in self._lanes]
        for index, future in enumerate(ready):
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise ShardError(
                    f"shard {index} (pid {self._processes[index].pid}) did not start within {START_TIMEOUT_S} s"
                ) from error

    def _on_lost(self, index: int, error: ShardError) -> None:
        self._lost[index] = error

    def submit_to(self, index: int, function: Callable[..., Any], *args: Any) -> Future:
        """Run function(*args) in shard `index`; a coroutine function runs there as a task.

        Raises PeerLostError when that shard died, ClosedError after close(), ValueError for an index out of range.
        """
        if self._closed:
            raise ClosedError("this group was closed here")
        if not 0 <= index < self.size:
            raise ValueError(f"there is no shard {index}: this group has shards 0 to {self.size - 1}")
        if index in self._lost:
            process = self._processes[index]
            process.join(EXIT_CODE_TIMEOUT_S)
            raise PeerLostError(f"shard {index} (pid {process.pid}) is gone, exit code {process.exitcode}: {self._lost[index]}")
        return self._lanes[index].submit(function, args)

    def map(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """function(*args) in every shard at once; the results in order of index. Raises the first error."""
        futures = [self.submit_to(index, function, *args) for index in range(self.size)]
        return [future.result(timeout_s) for future in futures]

    def statistics(self) -> GroupStatistics:
        """A snapshot; reads shared memory and disturbs nobody."""
        shards = tuple(
            ShardStatistics(index, process.pid, self._cores[index], process.is_alive(), self._counters.read(index))
            for index, process in enumerate(self._processes)
        )
        return GroupStatistics(shards, sum(lane.in_flight for lane in self._lanes))

    def close(self) -> None:
        """Stop all shards; those that do not stop in time are killed. A second close, or one in a fork, does nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for lane in self._lanes:
            try:
                lane.stop()
            except ShardError:
                continue  # that shard is gone already
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        closed = Future(self._driver)

        def close_lanes() -> None:
            for lane in self._lanes:
                lane.close()
            closed.set_result(None)

        if not self._driver.closing:
            self._driver.reactor.call_soon(close_lanes)
            closed.result()
        if self._owns_driver:
            self._driver.close()
        self._slab.close()

    def __enter__(self) -> ShardGroup:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _nothing() -> None:
    """A shard never tells the application to stop."""
