"""The loop of one process: poll the sources, run what became ready, fire timers, look at the sockets.

    source    anything with poll() -> work_done, bounded per call, and the sleep handshake of its ring    (shared memory)
    watched   a file descriptor with a callback, looked at through one epoll                           (sockets, doorbells)
    task      a coroutine, run by steps                                                                     (async handlers)
    timer     a callback at a time

poll(now) does one bounded batch of each and says how much was done; it never waits. park() waits, with the handshake that
no wake-up is lost in: every source is told that we sleep, a fence makes that visible everywhere, every source is asked once
more, and only then epoll waits. Clock and idling belong to the driver. Not thread-safe, but for wake() and call_soon().
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from shard import memory_order
from shard.future import Future, Waiter
from shard.task import Task
from shard.timers import Timer, Timers

# Descriptors are looked at this often: a system call of 0.25 us in 16 turns of 0.3 us. But for a while after something
# went over a socket, every turn looks, because an answer is likely: some milliseconds of turning.
DESCRIPTOR_TURNS = 16
WARM_TURNS = 4096

# Bounds on one turn, so that nobody starves: steps of tasks, and events of one epoll.
READY_STEPS_MAX = 64
EVENTS_MAX = 64


class Source(Protocol):
    """Something polled every turn."""

    def poll(self) -> int:
        """Do a bounded batch of work; how much was done."""

    def prepare_sleep(self, sleeping: bool) -> float:
        """Ask the peer to ring our doorbell from now on, or no longer; the longest it bears to go unpolled, in seconds."""

    def has_work(self) -> bool:
        """Whether poll() would find something; asked after the fence, before parking."""


class Reactor:
    """See the file's head. Owned by one driver, or by one shard's main function."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.timers = Timers()
        self.turns = self.busy_turns = self.parks = 0
        self.warm_turns = 0  # turns that look at the descriptors in any case; a socket's traffic sets it to WARM_TURNS
        self._sources: list[Source] = []
        self._polls: list[Callable[[], int]] = []
        self._ready: deque[Callable[[], object]] = deque()
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._callbacks[self._wakeup] = lambda _: self._drain_wakeup()
        self._until_descriptors = 0
        self._fence = memory_order.register_fence()
        self._waking = threading.RLock()  # the descriptor is not closed, and its number used again, under a wake()
        self.parked = False
        self.closed = False

    # -- what takes part ---------------------------------------------------------------------------------------------

    def add_source(self, source: Source) -> None:
        """Poll `source` every turn from the next one on."""
        self._sources.append(source)
        self._polls = [one.poll for one in self._sources]

    def remove_source(self, source: Source) -> None:
        """Poll it no longer."""
        self._sources.remove(source)
        self._polls = [one.poll for one in self._sources]

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call callback(events) when the descriptor is ready; level-triggered. Again with other events to change them."""
        if fd in self._callbacks:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor; before it is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run callback() in the next turn. From any thread."""
        self._ready.append(callback)
        if self.parked:
            self.wake()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Run callback() once, `delay_s` seconds from now."""
        return self.timers.call_at(self.clock() + delay_s, callback)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], waiter: Waiter | None = None) -> Task:
        """Drive a coroutine; its first step runs now, so that one that never waits costs no turn."""
        task = Task(coroutine=coroutine, schedule=self.call_soon, waiter=waiter)
        task.step()
        return task

    def sleep(self, delay_s: float) -> Future:
        """A future done in `delay_s` seconds."""
        future = Future()
        self.call_later(delay_s, lambda: future.set_result(None))
        return future

    # -- turning -----------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> int:
        """One turn: bounded, never waits; the number of things done."""
        self.turns += 1
        work = 0
        for poll in self._polls:
            work += poll()
        if self._ready:
            work += self._run_ready()
        if self.timers._heap and self.timers._heap[0][0] <= now:
            work += self.timers.fire(now)
        if self.warm_turns:
            self.warm_turns -= 1
            work += self._poll_descriptors(0)
        else:
            self._until_descriptors -= 1
            if self._until_descriptors < 0:
                self._until_descriptors = DESCRIPTOR_TURNS
                work += self._poll_descriptors(0)
        if work:
            self.busy_turns += 1
        return work

    def spin(self, turns: int) -> int:
        """Ask the sources alone, and descriptors while they are warm, up to `turns` times until something is found; whether.

        What a short wait costs: no clock, no timers, no tasks."""
        if self._ready or self.closed:
            return 0
        polls = self._polls
        if self.warm_turns:
            wait = self._epoll.poll
            for _ in range(turns):
                for poll in polls:
                    if poll():
                        return 1
                events = wait(0, EVENTS_MAX)
                if events:
                    for fd, event in events:  # as _dispatch(), without the call
                        callback = self._callbacks.get(fd)
                        if callback is not None:
                            callback(event)
                    return 1
            self.warm_turns = max(0, self.warm_turns - turns)
        elif len(polls) == 1:
            poll = polls[0]
            for _ in range(turns):
                if poll():
                    return 1
        elif polls:
            for _ in range(turns // len(polls)):
                for poll in polls:
                    if poll():
                        return 1
        return 0

    def _run_ready(self) -> int:
        ready = self._ready
        steps = min(len(ready), READY_STEPS_MAX)
        for _ in range(steps):
            ready.popleft()()
        return steps

    def _poll_descriptors(self, timeout_s: float) -> int:
        if self.closed:  # by something that this very turn ran
            return 0
        events = self._epoll.poll(timeout_s, EVENTS_MAX)
        self._dispatch(events)
        return len(events)

    def _dispatch(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier callback of this batch may have closed it
                callback(event)

    def park(self, timeout_s: float) -> None:
        """Wait for a doorbell, a descriptor, a timer or wake(), at most `timeout_s` seconds."""
        deadline = self.timers.next_deadline()
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - self.clock()))
        self.parked = True
        try:
            for source in self._sources:
                timeout_s = min(timeout_s, source.prepare_sleep(True))
            if self._sources:
                if self._fence:
                    memory_order.fence_all()
                else:
                    timeout_s = min(timeout_s, memory_order.SLEEP_WITHOUT_FENCE_S)
            if self._ready or any(source.has_work() for source in self._sources):
                return
            self.parks += 1
            self._poll_descriptors(timeout_s)
        finally:
            self.parked = False
            for source in self._sources:
                source.prepare_sleep(False)

    def wake(self) -> None:
        """End a park() early. From any thread, signal handler or destructor."""
        with self._waking:
            if not self.closed:
                os.eventfd_write(self._wakeup, 1)

    def _drain_wakeup(self) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return  # another turn read it

    def close(self) -> None:
        """Let go of the epoll; sources and descriptors are closed by who owns them."""
        with self._waking:
            if self.closed:
                return
            self.closed = True
            self._epoll.close()
            os.close(self._wakeup)
        self._callbacks.clear()
        self._sources.clear()
        self._polls = []
