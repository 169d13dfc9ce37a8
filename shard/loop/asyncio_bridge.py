"""A reactor as a guest of an asyncio loop: while coroutines await, the loop turns the reactor, and
no other thread is needed.

    spin  a coroutine awaits, and few others do: look at the rings for SPIN_S, as most answers come
          within microseconds
    turn  the loop calls us: one bounded batch, then another in the loop's next round, until a batch
          finds nothing
    rest  nothing to do: the reactor says that nobody turns (peers ring from now on), and the loop
          watches its epoll

The lead (driver.py) is held during a spin and a turn, and never in between: a thread that waits
takes it from a loop that rests, is busy with something else, stopped, or was closed. Whoever gives
the lead up while coroutines await calls their loop.

No wake-up is lost: announce() comes before the look at the sources, as in a park; what comes after
it makes the epoll readable, which the loop's selector sees whenever it next looks. Where another
thread leads meanwhile, it finds the event itself.

All methods run in the loop's thread, but for wants(), is_attentive(), call() and retire().
"""

from __future__ import annotations

import os
import select
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from shard import runtime
from shard.loop import interrupts
from shard.loop.future import Future, await_in_asyncio, running_asyncio_loop
from shard.loop.idle import PARK_S_MAX
from shard.loop.reactor import Reactor

if TYPE_CHECKING:
    import asyncio

# How long a coroutine that awaits keeps its loop, in the hope of an answer: longer than most take,
# shorter than the way through the loop's selector and back, with a sleeping peer's doorbell in it.
SPIN_S = 25e-6
SPIN_TURNS = 64  # empty looks at the rings, 0.09 us each, before one at the clock
# With so many awaits pending there is always something to do in the loop: no spin.
SPIN_AWAITS_MAX = 4
# Awaits that a spin answered in a row, without a round of the loop: more would keep its other tasks
# and its timers waiting.
SPIN_ANSWERS_MAX = 32
# After so many spins in vain only every SPIN_RETRY-th await tries one: answers that take longer are
# the rule at present.
SPIN_MISSES_MAX = 8
SPIN_RETRY = 16
# Batches of one turn: what comes during a batch is seen without a round of the loop (10 us), but no
# task waits for many.
BATCHES_MAX = 4
# A loop keeps watching for so long after its last await, so that the next finds it ready: as long
# as STANDBY_S.
LINGER_S = 0.02
# Loops count milliseconds, and uvloop rounds down twice: a turn that comes too early for its timer
# would be one of hundreds.
ROUNDING_S = 0.0015
# A loop that is so late for a turn is busy with something else: the progress thread steps in.
LATE_S = 0.02
# A loop inside a plain handler rests so long for the handlers of others, again and again.
LEND_S = 0.001


class _Watched:
    """A descriptor of the loop's own for the reactor's epoll. It stays that until the loop has let
    go of it, whenever the reactor is closed: so the loop never watches a number that has been used
    again. Closes with its last holder."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        os.close(self.fd)


class Lead(Protocol):
    """What an AsyncioBridge needs of its Driver: the reactor, and the right to turn it, which one
    thread has at a time.
    """

    reactor: Reactor
    polling: bool
    closing: bool

    def ask_for_lead(self) -> None:
        """Have whoever leads give the lead up soon."""

    def leads_here(self) -> bool:
        """Whether this thread has the lead."""

    def try_lead(self) -> bool:
        """Take the lead, if nobody has it."""

    def stop_leading(self) -> None:
        """Give the lead up."""

    def lend(self, future: Future, deadline: float | None) -> None:
        """Have others lead until the future is done or the time is over, from inside a handler."""


class AsyncioBridge:
    """One loop that a driver's futures are awaited in. Made by the driver, in the loop's thread."""

    def __init__(self, driver: Lead, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._driver = driver
        self._reactor = driver.reactor
        self._awaited: set[Future] = set()
        self._watched = _Watched(driver.reactor.fileno())
        self._watching = False
        self._scheduled = False  # a turn, in the loop's next round
        self._called = False  # by another thread, and not answered yet
        self._resting = False
        self._due = 0.0  # when a resting loop takes a turn of its own accord
        self._timer: asyncio.TimerHandle | None = None
        self._last_await = 0.0
        self._answers = 0  # by spins, since the loop's last round
        self._misses = 0  # spins in vain, in a row
        self._served = False  # by who lent it
        self._borrowed = False  # the lead is held by a caller of ours: the loop runs inside a turn
        self._turning = False  # a turn of ours is under way, and may be in a handler that waits

    def wait(self, future: Future) -> Generator[Any, None, None]:
        """What a coroutine of the loop yields until the future is done; nothing at all when a spin
        finds the answer.
        """
        if self._may_spin() and self._enter():
            try:
                self._spin(future)
            finally:
                self._leave()
            if future.finished:
                return
        else:
            self._last_await = runtime.monotonic()
        self._awaited.add(future)
        try:
            self._schedule()
            yield from await_in_asyncio(future, self.loop)
        finally:
            self._awaited.discard(future)

    # -- spinning ----------------------------------------------------------------------------------

    def _may_spin(self) -> bool:
        if len(self._awaited) >= SPIN_AWAITS_MAX or self._answers >= SPIN_ANSWERS_MAX:
            return False
        if self._misses < SPIN_MISSES_MAX:
            return True
        self._misses += 1
        return self._misses % SPIN_RETRY == 0

    def _spin(self, future: Future) -> None:
        reactor = self._reactor
        clock = runtime.monotonic
        self._last_await = now = clock()
        until = now + SPIN_S
        while not future.finished and now < until:
            if not reactor.spin(SPIN_TURNS) and not future.finished:
                reactor.poll(now)  # a turn may be due: spin() cannot see timers, tasks and sockets
            now = clock()
        if future.finished:
            self._answers += 1
            self._misses = 0
        else:
            self._misses += 1

    # -- turning -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._scheduled = self._called = False
        self._answers = 0
        if not self._enter():
            # who leads watches; else the loop would be called again and again for one event
            self._unwatch()
            if self._awaited:
                self._driver.ask_for_lead()
            return
        busy = True  # so it is when a batch raises
        try:
            poll, clock = self._reactor.poll, self._reactor.clock
            for _ in range(BATCHES_MAX):
                busy = bool(poll(clock()))
                if not busy:
                    break
            # it had no spin of its own, and one is worth it
            if not busy and len(self._awaited) == 1 and not self._misses:
                future = next(iter(self._awaited))
                self._spin(future)
                busy = bool(future.finished)
            if self._borrowed and self._reactor.held:
                self._driver.lend(Future(), runtime.monotonic() + LEND_S)
        finally:
            try:
                if (
                    not busy
                    and not self._driver.closing
                    and not (self._awaited and self._driver.polling)
                ):
                    self._rest()
            finally:
                self._leave()
        if interrupts.held:
            interrupts.deliver()

    def _rest(self) -> None:
        rest_s = self._reactor.announce(PARK_S_MAX)
        if rest_s is None:
            self._reactor.unannounce(True)
            self._schedule()
            return
        self._resting = True
        if not self._watching:
            self._watching = True
            self.loop.add_reader(self._watched.fd, self._turn)
        rest_s += ROUNDING_S
        due = runtime.monotonic() + rest_s
        # a timer that is too early does no harm, and making one costs more than a turn
        if self._timer is None or due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self.loop.call_later(rest_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._awaited or self._lingers():  # else the progress thread has taken over, or will
            self._turn()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    def _unwatch(self) -> None:
        self._resting = False
        if self._watching:
            self._watching = False
            self.loop.remove_reader(self._watched.fd)

    # -- the lead ----------------------------------------------------------------------------------

    def _enter(self) -> bool:
        """Take the lead, unless another thread has it."""
        driver = self._driver
        if driver.closing:
            return False
        self._borrowed = driver.leads_here()
        if self._borrowed:
            # its owner waits in a handler, as one that blocks: no other handler begins on its stack
            self._served = self._reactor.may_serve
            self._reactor.take_lead(False)
        elif not driver.try_lead():
            return False
        self._resting = False
        self._turning = True
        if self._reactor.parked:  # a loop rested: this one, or another
            self._reactor.unannounce(True)
        return True

    def _leave(self) -> None:
        self._turning = False
        if not self._resting and not self._reactor.closed:
            self._schedule()  # which rests, if there is nothing to do
        if self._borrowed:
            self._reactor.take_lead(self._served)
        else:
            self._driver.stop_leading()

    def _lingers(self) -> bool:
        return runtime.monotonic() - self._last_await < LINGER_S

    def wants(self) -> bool:
        """Whether to call() when the lead becomes free."""
        return (bool(self._awaited) or self._lingers()) and self.loop.is_running()

    def can_serve(self) -> bool:
        """Whether it is there to take requests: it would be called, and waits in no handler."""
        return not self._turning and not self._called and self.wants()

    def is_attentive(self) -> bool:
        """Whether it will take its turn when there is work. Asked by the progress thread when
        nobody led for a while: a loop that does not rest by then, or rests beside work, is busy
        with something else, or stopped."""
        if not (
            self._awaited and self._resting and self._reactor.parked and self.loop.is_running()
        ):
            return False
        if runtime.monotonic() > self._due + LATE_S:
            return False
        poller = select.poll()
        poller.register(self._watched.fd, select.POLLIN)
        return not poller.poll(0)

    def call(self) -> bool:
        """Have the loop take a turn; False when it was closed. From any thread."""
        try:
            if running_asyncio_loop() is self.loop:
                self._schedule()
            elif not self._called:
                self._called = True
                self.loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            return False
        return True

    def retire(self) -> None:
        """The driver was closed: the loop lets go of its epoll. From any thread."""
        if running_asyncio_loop() is self.loop or not self.loop.is_running():
            self._let_go()
        else:
            try:
                self.loop.call_soon_threadsafe(self._let_go)
            except RuntimeError:
                return  # it was closed meanwhile, and its selector with it

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.loop.is_closed():
            self._unwatch()
