"""The loop of one process: poll the sources, run what became ready, fire timers, look at the
sockets.

    source   anything with poll() -> work_done, bounded per call, and the    (shared memory)
             sleep handshake of its ring
    watched  a file descriptor with a callback, looked at through one epoll  (sockets, doorbells)
    warm     a watched one that tells of a conversation, and spoke lately:   (tcp sockets)
             looked at through poll(2)
    task     a coroutine, run by steps, in classes with shares of the time   (async handlers)
             (queues.py)
    held     the application's own work: a request for its handler, a step of
             its task, a callback of a future
    timer    a callback at a time

Whoever turns the reactor says by `serves` whether the application's work may run meanwhile. Where
it may not (a thread of the application turns it to fetch an answer), that work is held, in order,
until somebody turns who may: driver.py.

poll(now) is a turn: it does some of each and says how much was done; it never waits. A turn is
bounded by time: nothing begins in it once it has lasted TURN_SLICE_S, so it lasts that and one step
at most, and the next one begins with the timers:

    a turn                                            ends early    the next goes on with
    timers that are due                               never
    what the turn before left                         time is over  what is still left
    held work; sources in a circle, a batch of each   time is over  steps; then the source after it
    steps of LATENCY                                  time is over  descriptors
    descriptors, now and then                         time is over  those not told of yet
    steps of other classes, if they are due           time is over  who is due then (queues.py)

So a timer fires late by one slice and one step at most (and the timers due before it), and whatever
is endless, the others have their turn. What one source or socket brings in one go is a batch as
well: pace() says until when it goes on. One piece of work alone costs no look at the clock; more
cost one each while somebody may be late, else one in UNHURRIED.

park() waits, with the handshake that no
wake-up is lost in: every source is told that we sleep, a fence makes that visible everywhere, every
source is asked once more, and only then epoll waits. Clock and idling belong to the driver. Not
thread-safe, but for wake() and call_soon().
"""

from __future__ import annotations

import _thread
import contextlib
import math
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shard import runtime
from shard.loop import asyncio_import
from shard.loop.callback import DoneCallback
from shard.loop.future import Future, Waiter, is_asyncio_imported
from shard.loop.interpreter_lock import LockShare
from shard.loop.queues import ReadyQueues
from shard.loop.task import Task, behalf
from shard.loop.task_class import LATENCY, RUNNING, TaskClass
from shard.loop.timers import Timer, Timers
from shard.memory import memory_order
from shard.memory.counters import ClassStatistics

if TYPE_CHECKING:
    from shard.loop.guest_loop import GuestLoop

# Descriptors are looked at after so many empty turns, or pieces of work: a system call of 0.25 us
# in 16 turns of 0.3 us. But for a while after something went over a socket, every turn looks,
# because an answer is likely: some milliseconds of turning.
DESCRIPTOR_TURNS = 16
WARM_TURNS = 4096
# While there are so many warm descriptors at most, a turn of spin() asks these alone, by poll(2),
# and epoll after DESCRIPTOR_TURNS as ever. What came is found 0.3 us sooner so (a 64 B round trip
# between two bare sockets took 3.2 us with poll, 3.8 with epoll, 3.4 with recv itself and its
# BlockingIOError), but each more costs 0.04 us a turn.
WARM_DESCRIPTORS_MAX = 4

# Looks at all descriptors by epoll after which it is found anew which of them are warm: else one
# that spoke once would be asked as long as any other speaks, and the crowd of a start would never
# end. With one look in DESCRIPTOR_TURNS that is some 2 ms.
RECOUNT_LOOKS = 256
# A look by epoll takes as long as so many at a source, so a spin without sources has fewer of them.
COLD_LOOK_COST = 4

# Bounds on one turn, so that nobody starves: steps of tasks, timers, and events of one epoll.
# Sources bound themselves.
READY_STEPS_MAX = 64
TIMERS_MAX = 64
EVENTS_MAX = 64
# Nothing begins later than this in a turn. A turn's own cost is 0.5 % of it, and a message waits
# this long for its source to be asked, or for the one step that takes longer.
TURN_SLICE_S = 100e-6
# Whether that time is over is looked at after each piece of work, 45 ns, while another class waits
# or a timer is due this soon: 8 pieces that nobody looked between would have to take 0.1 s each to
# make a later one late. Else after so many pieces.
SOON_S = 1.0
UNHURRIED = 8
# Pieces of work that spin() finds before it asks for a whole turn: one call after the other, each
# answered at once, must not keep timers and sockets waiting. A turn costs 0.3 us, in 64 calls of 5
# us each. Where so many take longer than SPIN_S there are fewer the next time, down to one.
SPIN_WORK_MAX = 64
SPIN_S = 1e-3

# A park that ran out of time with work there: was the bell about to be rung? A peer rings within a
# microsecond of writing; it may have lost its core in between, for a scheduler's slice or two. A
# bell that comes no earlier than this is a lost one.
LATE_BELL_S = 0.01


class Source(Protocol):
    """Something that a reactor polls in every turn, such as a shared-memory connection. All methods
    are called in the reactor's thread.
    """

    def poll(self) -> int:
        """Do a bounded batch of work, by Reactor.pace() too; how much was done."""

    def prepare_sleep(self, sleeping: bool) -> float:
        """Ask the peer to ring our doorbell from now on, or no longer; the longest it bears to go
        unpolled, in seconds. math.inf: what it has comes from this process, by who wakes a reactor
        that is parked.
        """

    def has_work(self) -> bool:
        """Whether poll() would find something; asked after the fence, before parking."""


# Where a turn begins: at the beginning, or where the last one ended for want of time.
_SOURCES, _STEPS, _DESCRIPTORS = range(3)


def _nothing() -> None:
    """A step that does nothing: somebody is to take a turn."""


class Reactor:
    """A reactor is a process's loop: it polls sources and descriptors, runs tasks and timers.

    Owned by one driver, or by one shard's main function. Not thread-safe, but for wake() and
    call_soon(). clock: gives seconds.

    turns, busy_turns  polls, and those that found work
    parks, wakeups     sleeps, and those that an event ended; the others ran out of time
    late_wakes         sleeps that ran out of time although a source had work, and no bell came: 0,
                       or a wake-up was lost
    may_serve          whether who turns it now may run the application's work
    serves             whether such work may run as it comes: the same, and nothing earlier is held
    held               that work, while nobody may: first in, first out
    guest              the asyncio loop that its tasks run in; None until one runs in a process that
                       has imported asyncio, and where `hosts_asyncio` is False
    """

    def __init__(self, clock: Callable[[], float], hosts_asyncio: bool = True) -> None:
        self.clock = clock
        self.guest: GuestLoop | None = None
        self._hosts_asyncio = hosts_asyncio
        if hosts_asyncio:
            asyncio_import.watch()
        self.timers = Timers()
        self._timers_heap = self.timers._heap  # looked at every turn
        self.turns = self.busy_turns = self.parks = self.wakeups = self.late_wakes = 0
        # for a bell, where a source was found to have work
        self.late_bell_s = LATE_BELL_S
        # turns that look at the descriptors in any case; a socket's traffic sets it to WARM_TURNS
        self.warm_turns = 0
        # descriptors that get warm, and the events that are waited for
        self._lively: dict[int, int] = {}
        self._warm = select.poll()
        self._warm_descriptors: set[int] = set()
        self._crowded = False  # more spoke lately than may be warm: all are left to epoll
        self._until_recount = RECOUNT_LOOKS
        self._sources: list[Source] = []
        self._polls: list[Callable[[], int]] = []
        self._always: list[Callable[[], int]] = []  # those asked in turns of other classes, too
        self._queues = ReadyQueues(clock)
        self._ready = self._queues.latency
        self._others = self._queues.others
        self._epoll = runtime.Epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        try:
            self._bell: runtime.Bell | None = runtime.Bell()
        except OSError:
            self._epoll.close()  # the error may be kept, and this reactor with it
            raise
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._callbacks[self._bell.fd] = lambda _: self._drain_bell()
        self._until_descriptors = 0
        self._events: list[tuple[int, int]] = []  # told by epoll, and left for want of time
        self._began = clock()  # the turn under way, or the last one
        self._next = _SOURCES
        self._spinning = False  # no turn is under way, but sources are asked
        self._lock_share = LockShare()
        self._spin_work = self._spin_work_max = SPIN_WORK_MAX
        self.may_serve = self.serves = True
        self.held: deque[Callable[[], object]] = deque()
        # Ctrl-C met the application's work here, and is raised once what that does is done
        self.interrupt: KeyboardInterrupt | None = None
        self._fence = memory_order.register_fence()
        self.parked = False
        self.closed = False
        runtime.close_with_simulation(self._drop_tasks)

    # -- what takes part ---------------------------------------------------------------------------

    def add_source(self, source: Source) -> None:
        """Poll `source` every turn from the next one on."""
        self._sources.append(source)
        self._polls = [one.poll for one in self._sources]

    def remove_source(self, source: Source) -> None:
        """Poll it no longer."""
        if self.closed:
            return  # it has forgotten them all
        self._sources.remove(source)
        self._polls = [one.poll for one in self._sources]
        self._always = [poll for poll in self._always if poll != source.poll]

    def ask_always(self, source: Source) -> None:
        """Poll it in turns of other classes than LATENCY, too: it brings work for them. While
        is_shared() says that another class waits, it leaves LATENCY's as steps.
        """
        self._always.append(source.poll)

    def is_shared(self) -> bool:
        """Whether other classes than LATENCY have steps."""
        return bool(self._others)

    @property
    def watched(self) -> int:
        """How many descriptors it watches, its own among them."""
        return len(self._callbacks)

    def watch(
        self,
        fd: int,
        callback: Callable[[int], None],
        events: int = select.EPOLLIN,
        lively: bool = False,
    ) -> None:
        """Call callback(events) when the descriptor is ready; level-triggered. Again with other
        events to change them.

        `lively`: after an event the next one is likely near, and worth being looked for every turn
        for some milliseconds."""
        if fd in self._callbacks:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._callbacks[fd] = callback
        if lively:
            self._lively[fd] = events
            if fd in self._warm_descriptors:
                self._warm.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor; before it is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        if self._events:  # not for whoever has the number next
            self._events = [event for event in self._events if event[0] != fd]
        self._lively.pop(fd, None)
        if fd in self._warm_descriptors:
            self._warm_descriptors.discard(fd)
            self._warm.unregister(fd)

    def call_soon(self, callback: Callable[[], object], queue: TaskClass = LATENCY) -> None:
        """Run callback() in the next turn, or when its class has its share. From any thread."""
        if queue is LATENCY:
            self._ready.append(callback)
        else:
            self._queues.add(queue, callback)
        if self.parked:
            self.wake()

    def interrupt_soon(self, error: KeyboardInterrupt) -> None:
        """Have it end what turns the reactor in the main thread: the wait that is under way there
        as it ends, or else the next turn.
        """
        self.interrupt = error
        self.call_soon(self.raise_interrupt)

    def raise_interrupt(self) -> None:
        """Raise what interrupt_soon() was given, once, in the main thread."""
        error, self.interrupt = self.interrupt, None
        if error is None:
            return
        if threading.current_thread() is threading.main_thread():
            raise error
        _thread.interrupt_main()  # another thread turns the reactor meanwhile

    def call_in_engine(self, callback: Callable[[], object]) -> bool:
        """Run callback() in a turn of a thread that may run the application's work. From any
        thread. False: it is closed, and nobody turns it any more.
        """
        self.held.append(callback)
        if self.parked:
            self.wake()
        return not (self.closed and self.take_back(callback))

    def take_back(self, callback: Callable[[], object]) -> bool:
        """What call_in_engine() was given is run by nobody; False where it has begun."""
        try:
            self.held.remove(callback)
        except ValueError:
            return False
        return True

    def take_callbacks(self) -> list[Callable[[], object]]:
        """Those of futures that are held, for who ends: all else that is held goes with the
        reactor, but an application hears of each end.
        """
        return [
            each
            for each in list(self.held)
            if isinstance(getattr(each, "__self__", None), DoneCallback) and self.take_back(each)
        ]

    def take_lead(self, may_serve: bool) -> None:
        """Who turns it from now on may run the application's work, or not; what is held comes
        before what the sources have.
        """
        self.may_serve = may_serve
        self.serves = may_serve and not self.held

    def is_awaited(self) -> bool:
        """Whether the application's work waits for somebody who may run it."""
        return bool(self.held or self._others)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Run callback() once, `delay_s` seconds from now."""
        return self.timers.call_at(self.clock() + delay_s, callback)

    def spawn(
        self,
        coroutine: Coroutine[Any, Any, Any],
        waiter: Waiter | None = None,
        queue: TaskClass | None = None,
    ) -> Task:
        """Drive a coroutine, all its steps in one class, by default that of the step that spawns
        it. The first runs now, so that one that never waits costs no turn; that of another class
        than LATENCY waits its turn, as it may be all the work there is."""
        if queue is None:
            queue = RUNNING.value
        if queue is LATENCY:
            schedule: Callable[..., None] = self.call_soon
        else:
            schedule = partial(self.call_soon, queue=queue)
        task = Task(
            coroutine=coroutine,
            schedule=schedule,
            reactor=self,
            waiter=waiter,
            context=behalf(),
        )
        if queue is LATENCY:
            if self.serves and RUNNING.value is LATENCY:
                task.step()
            elif self.serves:
                task.schedule(task.step)
            else:
                self.held.append(task.step)
        else:
            task.schedule(task.step)
        return task

    def sleep(self, delay_s: float) -> Future:
        """A future done in `delay_s` seconds."""
        future = Future()
        self.call_later(delay_s, lambda: future.set_result(None))
        return future

    def invite_asyncio(self) -> GuestLoop | None:
        """The guest, made when there is none; None where it is not to be had."""
        if not self._hosts_asyncio or self.closed or sys.modules.get("asyncio") is None:
            return self.guest
        # Where another thread imports it, this waits for the end of that: the step would have no
        # loop. And guest_loop.py, which waits for it too, must not be half-imported meanwhile: that
        # thread may import it as well (asyncio_import.py), and each would wait for the other.
        with contextlib.suppress(ImportError):  # the other thread could not: it is not there
            import asyncio  # noqa: F401
        if is_asyncio_imported():
            from shard.loop.guest_loop import GuestLoop

            if self.guest is None:
                self.guest = GuestLoop(self)
        return self.guest

    def statistics(self) -> tuple[ClassStatistics, ...]:
        """What each class of work did, LATENCY first. From any thread."""
        return self._queues.statistics()

    def begin_waiting(self) -> tuple[float, float]:
        """The step under way waits from now on, and turns the reactor meanwhile or has others turn
        it: its class is not charged for that. What end_waiting() is to be given.
        """
        return self.clock(), self._queues.waited_s

    def end_waiting(self, began: float, waited_s: float) -> None:
        """It goes on."""
        queues = self._queues  # what waited meanwhile is in this, too
        queues.waited_s = max(queues.waited_s, waited_s + self.clock() - began)

    # -- turning -----------------------------------------------------------------------------------

    def poll(self, now: float) -> int:
        """One turn, which begins `now`: bounded, never waits; the number of things done."""
        self.turns += 1
        self._began = now
        self._spinning = False
        heap = self._timers_heap
        work = self.timers.fire(now, TIMERS_MAX) if heap and heap[0][0] <= now else 0
        waited_s: float | None = None
        if self._others or self._next:
            work, goes_on, waited_s = self._begin(now, work)
            if not goes_on:
                return work
        if self.held and self.may_serve:  # it came before what the sources have now
            work += self._run_held()
        polls = self._polls
        for poll in polls:
            done = poll()
            if done:
                work += done
                if len(polls) > 1 and self.clock() - now >= TURN_SLICE_S:
                    self._leave_sources(poll)
                    break
        if self._ready and not self._next:
            if work and self.clock() - now >= TURN_SLICE_S:
                self._next = _STEPS
            else:
                work += self._run_ready() if self.serves else self._run_own()
        self._until_descriptors -= work or 1
        if (self._until_descriptors < 0 or self.warm_turns or not polls) and not self._next:
            if work and self.clock() - now >= TURN_SLICE_S:
                self._next = _DESCRIPTORS
            else:
                work += self._look()
        if waited_s is not None:
            work += self._share(now, work, waited_s)
        if work:
            self.busy_turns += 1
        return work

    def _begin(self, now: float, work: int) -> tuple[int, bool, float | None]:
        """What precedes the sources in a turn that classes share, or that goes on where the last
        one ended. The work done, whether there is time for the sources, and where classes share
        what steps had waited before.
        """
        waited_s: float | None = None
        if self._others:
            if not self.may_serve:
                if not self.held:  # classes are the application's: somebody else must turn
                    self.held.append(_nothing)
            elif self._queues.is_latency_due(now):
                waited_s = self._queues.waited_s
            else:
                self.busy_turns += 1
                for poll in self._always:
                    work += poll()
                return work + self._run_others(self.clock(), now + TURN_SLICE_S), False, None
        if self._next:
            if self._next == _STEPS and self._ready:
                work += self._run_ready() if self.serves else self._run_own()
                if self.clock() - now >= TURN_SLICE_S:
                    self._next = _DESCRIPTORS
                    return self._end(now, work, waited_s), False, None
            self._next = _SOURCES
            work += self._look()
            if self.clock() - now >= TURN_SLICE_S:
                return self._end(now, work, waited_s), False, None
        return work, True, waited_s

    def _end(self, now: float, work: int, waited_s: float | None) -> int:
        """The turn is over for want of time, after so much work."""
        if waited_s is not None:
            work += self._share(now, work, waited_s)
        if work:
            self.busy_turns += 1
        return work

    def _share(self, now: float, work: int, waited_s: float) -> int:
        """LATENCY had its part of the turn, and did `work`: what others do in the rest of it."""
        queues, at = self._queues, self.clock()
        queues.charge_latency(max(0.0, at - now - (queues.waited_s - waited_s)), work)
        if work and at - now >= TURN_SLICE_S:
            return 0
        return self._run_others(at, now + TURN_SLICE_S)

    def pace(self) -> tuple[Callable[[], float], float, int]:
        """How a batch of more than one piece of work goes on in this turn: the clock, until when
        the next piece may begin, and after how many to look.
        """
        heap, began = self._timers_heap, self._began
        if self._spinning:  # without a clock until now: the slice begins here, if no timer is due
            now = self.clock()
            if not heap or heap[0][0] > now + SPIN_S:
                began = now
        hurried = self._others or (heap and heap[0][0] < began + SOON_S)
        return self.clock, began + TURN_SLICE_S, 1 if hurried else UNHURRIED

    def _leave_sources(self, last: Callable[[], int]) -> None:
        """The time is over after `last`: the next turn goes on behind the sources, and the next
        time these have theirs, it begins with the one after it.
        """
        self._next = _STEPS
        polls = self._polls
        if last in polls:  # else it has gone meanwhile
            at = polls.index(last) + 1
            self._polls = polls[at:] + polls[:at]

    def _look(self) -> int:
        """At the descriptors."""
        self._until_descriptors = DESCRIPTOR_TURNS
        if self.warm_turns:
            self._cool(1)
        return self._poll_descriptors(0)

    def may_go_before(self) -> bool:
        """Whether a piece of work may be done before the next turn, which nobody begins now: so
        much has not been yet, and no classes wait. It is counted with those of spin().
        """
        if self._others or self._spin_work <= 0:
            return False
        self._spin_work -= 1
        return True

    def spin(self, turns: int) -> int:
        """Ask the sources alone, and descriptors while they are warm, up to `turns` times until
        something is found; whether.

        What a short wait costs: no clock, no timers, no tasks. Now and then it answers 0 at once,
        for a whole turn to be due. Where there are no sources, descriptors are all there is to ask;
        where there are, descriptors are due after a spin.
        """
        if self._ready or self._others or self.held or self._spin_work <= 0:
            if self._spin_work <= 0:
                self._lock_share.offer()
                took_long = self.clock() - self._began > SPIN_S
                most = self._spin_work_max
                self._spin_work_max = (
                    max(1, most // 2) if took_long else min(SPIN_WORK_MAX, 2 * most)
                )
            self._spin_work = self._spin_work_max
            return 0
        self._spinning = True
        polls = self._polls
        if self.warm_turns:
            return self._spin_warm(turns)
        if len(polls) == 1:
            poll = polls[0]
            for _ in range(turns):
                work = poll()
                if work:
                    self._spin_work -= work
                    return 1
        elif polls:
            for _ in range(-(-turns // len(polls))):  # rounded up: each is asked once at least
                for poll in polls:
                    work = poll()
                    if work:
                        self._spin_work -= work
                        return 1
        else:
            return self._spin_warm(turns // COLD_LOOK_COST)
        self._until_descriptors = 0
        return 0

    def _spin_warm(self, turns: int) -> int:
        """As spin(), with a look at the descriptors each time: at the warm ones, or at all where
        none is.
        """
        if self.closed:
            return 0
        polls = self._polls
        look, look_at_all = self._warm.poll, self._epoll.poll
        some_warm = bool(self._warm_descriptors)
        until_all = self._until_descriptors if some_warm else 0
        for _ in range(turns):
            for poll in polls:
                work = poll()
                if work:
                    self._spin_work -= work
                    return 1
            if until_all > 0:
                until_all -= 1
                events = look(0)
                if events:
                    self._until_descriptors = until_all
                    if len(events) == 1:  # as _dispatch(), without the call, and warm already
                        ((fd, event),) = events
                        callback = self._callbacks.get(fd)
                        if callback is not None:
                            callback(event)
                        self.warm_turns = WARM_TURNS
                        self._spin_work -= 1
                    else:
                        self._spin_work -= self._dispatch(events)
                    return 1
            else:
                self._until_recount -= 1
                if self._until_recount <= 0:
                    self._forget_warm()
                    look, some_warm = self._warm.poll, False
                if some_warm:
                    self._until_descriptors = until_all = DESCRIPTOR_TURNS
                events = look_at_all(0, EVENTS_MAX)
                if events:
                    self._spin_work -= self._dispatch(events)
                    return 1
        self._until_descriptors = until_all
        self._cool(turns)
        return 0

    def _warm_up(self, fd: int) -> None:
        """It spoke: it may again, soon."""
        self.warm_turns = WARM_TURNS
        if self._crowded or fd in self._warm_descriptors:
            return
        if len(self._warm_descriptors) < WARM_DESCRIPTORS_MAX:
            self._warm_descriptors.add(fd)
            self._warm.register(fd, self._lively[fd])
        else:
            self._forget_warm()
            self._crowded = True

    def _cool(self, turns: int) -> None:
        """So many turns have looked and found nothing."""
        self.warm_turns = left = max(0, self.warm_turns - turns)
        if not left:
            self._forget_warm()

    def _forget_warm(self) -> None:
        self._crowded = False
        self._until_recount = RECOUNT_LOOKS
        self._warm_descriptors.clear()
        self._warm = select.poll()

    def _run_others(self, now: float, until: float) -> int:
        """Steps of other classes than LATENCY, by shares."""
        done = self._queues.run(READY_STEPS_MAX, now, until)
        if done:
            self._until_descriptors -= READY_STEPS_MAX  # they took time, not just turns
        return done

    def _run_ready(self) -> int:
        """A batch of LATENCY's steps."""
        ready = self._ready
        steps = len(ready)
        if steps == 1:
            ready.popleft()()
            return 1
        clock, until, every = self.pace()
        if steps > READY_STEPS_MAX:
            steps = READY_STEPS_MAX
        take = ready.popleft
        look_at = 1
        for done in range(1, steps + 1):
            try:
                step = take()
            except IndexError:
                # a step waited and so turned the reactor deeper, which ran the others
                return done - 1
            step()
            if done >= look_at:
                if clock() >= until:
                    return done
                look_at = done + every
        return steps

    def _run_held(self) -> int:
        """A batch of the application's work that was held. One that waits lets others turn the
        reactor meanwhile, who take the next.
        """
        held = self.held
        clock, until, _ = self.pace()
        done = 0
        try:
            while done < READY_STEPS_MAX and self.may_serve:
                try:
                    work = held.popleft()
                except IndexError:
                    break
                self.serves = True  # for this one
                work()
                done += 1
                if clock() >= until:
                    break
        finally:
            self.take_lead(self.may_serve)
        return done

    def _run_own(self) -> int:
        """A batch of the engine's own steps; those of the application's tasks are held."""
        ready = self._ready
        steps = min(len(ready), READY_STEPS_MAX)
        for done in range(steps):
            try:
                step = ready.popleft()
            except IndexError:
                return done
            if getattr(step, "__func__", None) is Task.step:
                self.held.append(step)
            else:
                step()
        return steps

    def _poll_descriptors(self, timeout_s: float) -> int:
        if self.closed:  # by something that this very turn ran
            return 0
        events, self._events = self._events or self._epoll.poll(timeout_s, EVENTS_MAX), []
        return self._dispatch(events)

    def _dispatch(self, events: list[tuple[int, int]]) -> int:
        """Tell of events, one after the other; how many there was time for."""
        for count, (fd, event) in enumerate(events, 1):
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier callback of this batch may have closed it
                if fd in self._lively:
                    self._warm_up(fd)
                callback(event)
                if count < len(events) and self.clock() - self._began >= TURN_SLICE_S:
                    # a whole turn goes on with them, and no spin before
                    self._events, self._until_descriptors, self._spin_work = events[count:], -1, 0
                    return count
        return len(events)

    def park(self, timeout_s: float) -> None:
        """Wait for a doorbell, a descriptor, a timer or wake(), at most `timeout_s` seconds.

        What came is found by the next poll(): by its sources first, as a doorbell says that one of
        them has work, and reading the bell takes longer than that. The kernel counts milliseconds
        here and rounds up: a timer may fire that much late.
        """
        events: list[tuple[int, int]] = []
        try:
            rest_s = self.announce(timeout_s)
            if rest_s is None:
                return
            self.parks += 1
            events = self._epoll.poll(rest_s, EVENTS_MAX)
            if not events and self._fence and self._sources_have_work():
                events = self._epoll.poll(self.late_bell_s, EVENTS_MAX)
                self.late_wakes += not events
            self.wakeups += bool(events)
        finally:
            self.unannounce(bool(events))

    def fileno(self) -> int:
        """The descriptor that is readable when a doorbell, a descriptor or wake() wants a turn;
        sources do after announce().
        """
        return self._epoll.fileno()

    def announce(self, timeout_s: float) -> float | None:
        """Nobody turns from now on: let peers ring, and call_soon(). Seconds until a turn is due in
        any case, at most `timeout_s`; None: there is work at once. Whoever turns next calls
        unannounce(), either way.

        The other half of park(), for those who wait for fileno() elsewhere.
        """
        deadline = self.timers.next_deadline()
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - self.clock()))
        self.parked = True  # first: from here on call_soon() in another thread rings
        timeout_s = self._announce_sleep(timeout_s)
        if self.closed or self._ready or self._others or self.held or self._sources_have_work():
            return None
        return timeout_s

    def unannounce(self, look: bool) -> None:
        """Somebody turns again: nobody needs to ring. `look`: at the descriptors, in the very next
        turn.
        """
        self.parked = False
        for source in self._sources:
            source.prepare_sleep(False)
        if look:
            self._until_descriptors = 0

    def _announce_sleep(self, timeout_s: float) -> float:
        """Tell every source, and every processor that writes to one; how long it may last."""
        bearable_s = math.inf
        for source in self._sources:
            bearable_s = min(bearable_s, source.prepare_sleep(True))
        if bearable_s < math.inf:
            if self._fence:
                memory_order.fence_all()
            else:
                bearable_s = min(bearable_s, memory_order.SLEEP_WITHOUT_FENCE_S)
        return min(timeout_s, bearable_s)

    def _sources_have_work(self) -> bool:
        return any(source.has_work() for source in self._sources)

    def wake(self) -> None:
        """End a park() early, or the next one. From any thread, signal handler or destructor."""
        bell = self._bell  # held, so that it is not closed under the write
        if bell is not None:
            bell.ring()

    def _drain_bell(self) -> None:
        bell = self._bell
        assert bell is not None
        bell.quiet()

    def close(self) -> None:
        """Let go of the epoll, and of tasks that never began; callbacks that are left run here.
        Sources and descriptors are closed by who owns them.
        """
        if self.closed:
            return
        if self.guest is not None:
            self.guest.shut()
        self.closed = True
        self._epoll.close()
        self._bell = None
        self._callbacks.clear()
        self._lively.clear()
        self._forget_warm()
        self._sources.clear()
        self._polls = self._always = []
        callbacks = self.take_callbacks()
        self._drop_tasks()
        for call_back in callbacks:
            call_back()

    def _drop_tasks(self) -> None:
        """Those that never began: a coroutine that is dropped without a word is warned of."""
        held = list(self.held)
        self.held.clear()
        for step in [*held, *self._queues.take_all()]:
            task = getattr(step, "__self__", None)
            if isinstance(task, Task):
                task.drop()
