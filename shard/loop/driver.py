"""Inline mode: a process whose threads belong to the user. Who turns the reactor, and who runs the
application's work.

One thread at a time leads: it holds `_lead` and turns the reactor. The application's work
(handlers, steps of tasks, callbacks) is for engine threads alone; a thread of the application that
waits may lead to fetch its answer, and only completes calls.

    thread                     leads                                         runs application's work
    in run()                   while it can                                  yes
    asyncio loop that awaits   by turns (asyncio_bridge.py)                  yes
    spares, progress thread    on duty: when called, or when nobody has led  yes
                               for STANDBY_S and no loop watches
    that waits                 if it can; else it follows: sleeps until its  no
                               future is done, or it is handed the lead
    that waits in a handler    as one that waits; goes on only when it has   no
                               the lead again

    a leader finds         and does
    a request, a step,     holds it (Reactor.held), gives the lead up and calls an engine thread:
     and may not run it    the one in run() if that follows, else a loop, else a spare
    somebody to resume     gives the lead up: a handler has its answer, and goes on before others
                           begin

A thread that wants one inline handler to run leads for so long without turning (step_in()).

A handler may say that it need not be waited for, while it is in a section (sections.py): then the
watchdog takes the lead from it when that takes long.

So a blocking call costs no thread switch, a server answers whether or not its owner waits, and no
handler runs under the locks, in the context or on the stack of somebody's wait. Handlers run one at
a time: each holds the lead until it ends or waits. A spare is a thread of the engine beside the
progress thread; there is one more than handlers that wait, at most SPARES_MAX.

A stall (stall.py) is a leading thread that stays inside one handler. Nobody leading is none: an
application that computes keeps nobody waiting for longer than it takes the progress thread to go on
duty.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from shard import runtime
from shard.errors import ClosedError, ForkedError
from shard.loop import interrupts, thrown
from shard.loop.asyncio_bridge import AsyncioBridge
from shard.loop.future import Future
from shard.loop.idle import PARK_S_MAX, Adaptive, Idle, Park, Spin
from shard.loop.reactor import Reactor
from shard.loop.sections import Sections
from shard.loop.stall import STALL_BUDGET_S, StallDetector

if TYPE_CHECKING:
    import asyncio

# Empty looks at the rings before a waiting thread also looks at timers, tasks and sockets: some 20
# us of 0.09 us each, longer than most answers take.
SPIN_TURNS = 256

# How long nobody may have led before the progress thread goes on duty. It wakes this often while
# others lead: 50 times a second, some 0.1 % of a core.
STANDBY_S = 0.02
# The same while an asyncio loop watches, and nobody calls us: only a loop that is stuck makes
# somebody wait for it.
WATCH_S = 0.1

# The same after a call for which it came too late, as the next wait had begun: many waits in a row
# would each wake it, which takes some 10 us.
NAP_S = 0.001

# Threads beside the progress thread that run handlers while others wait in theirs. Where all of
# them wait, requests wait too.
SPARES_MAX = 256
SPARE_IDLE_S = 2.0  # with nothing to do that another thread could not do, then it ends
HAS_LEAD, TOOK_LEAD = 1, 2  # what step_in() answers
TELL_S = 60.0  # between two lines that say so

# For the turn under way at close() to end: a handler may be running in it.
CLOSE_TIMEOUT_S = 5.0
# Between tries of a reactor whose turns fail, so that a bug fills no disk with its traces.
AFTER_BUG_S = 0.01

logger = logging.getLogger("shard")
held_signals = interrupts.held  # looked at on the path of each call


class Driver:
    """Owner of a reactor in a process whose threads belong to the user.

    polling         waiting threads never sleep
    name            of its threads, and in the log
    stall_budget_s  a handler that keeps the reactor for more seconds is named in the log, with its
                    stack; math.inf: none is
    engine          packages and modules whose functions are no handlers

    watchdog        what looks for such handlers

    Raises ValueError for a budget that is not more than 0.
    """

    def __init__(
        self,
        polling: bool,
        name: str = "prpc",
        stall_budget_s: float = STALL_BUDGET_S,
        engine: tuple[str, ...] = ("shard",),
    ) -> None:
        self.reactor = reactor = Reactor(runtime.monotonic)
        self.watchdog = StallDetector(
            reactor,
            lambda: self._leader,
            stall_budget_s,
            f"{name} (pid {os.getpid()})",
            engine=engine,
            progress=lambda: reactor.turns + reactor.parks + self._led,
            handlers_only=True,
            on_look=lambda: self.sections.look(),
        )
        self.sections = Sections(
            reactor, lambda thread: self._leader == thread, self._take_lead_away, self._lead_again
        )
        self.polling = polling
        # requests may come in at any time: hand over to the progress thread at once, not lazily
        self.prompt = False
        self._expected: set[Future] = set()  # somebody awaits them who cannot lead
        self._lead = runtime.Lock()  # whoever holds it turns the reactor: one thread at a time
        # One for all that lead: the gaps are those of the traffic. In a simulation nothing comes
        # while somebody spins.
        self._adaptive: Idle = Park() if runtime.shares_process else Adaptive()
        self._resting: Idle = Park()  # of who does not spin
        self._spin_turns = 1 if runtime.shares_process else SPIN_TURNS
        self._leader = 0  # ident of the leading thread
        self._wanted = 0  # threads that ask the progress thread for the lead
        self._on_duty = False
        self._running: Future | None = None
        self._stop_asked = False
        self._led = 0  # how often a waiting thread has led
        self._followers: deque[threading.Semaphore] = deque()
        self._runner: threading.Semaphore | None = None  # of the thread in run(), while it follows
        self._resuming: deque[int] = deque()  # threads whose handlers have what they waited for
        self._spares: dict[threading.Thread, None] = {}  # in the order in which they were begun
        self._spares_max = SPARES_MAX
        self._tell_at = 0.0  # when to say again that all wait
        self._called = False  # an engine thread is called for held work, and not there yet
        # one is called for lack of a leader, and has not come, perhaps for want of the interpreter
        self._summoned = False
        self._idle: set[int] = set()  # engine threads that wait for a call to duty
        self._bridges: tuple[AsyncioBridge, ...] = ()  # one for each loop that awaits
        self._inviting = runtime.RLock()  # a signal handler may close() inside
        self._call_to_duty = runtime.Semaphore(0)  # engine threads sleep in it
        self._pid = os.getpid()
        self.closing = False
        self._closed_inside = False  # by a handler: its thread calls back what is left
        self._is_outlasted = False  # close() has given up on a handler, whose thread does the rest
        self._thread = runtime.Thread(target=self._progress, name=f"{name}-progress", daemon=True)
        self._thread.start()
        self.watchdog.start()
        if not runtime.shares_process:  # both are for the whole interpreter
            interrupts.install(self, reactor.wake)
            thrown.install()

    # -- waiting threads ---------------------------------------------------------------------------

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        """Make progress until the future is done or `timeout_s` seconds have passed; whether it is
        done.
        """
        return self.wait_until(
            future, None if timeout_s is None else runtime.monotonic() + timeout_s
        )

    def wait_until(
        self, future: Future, deadline: float | None, serves: bool = False, spins: bool = True
    ) -> bool:
        """The same, until a time of the monotonic clock. `serves`: the application's work may run
        here meanwhile. Not `spins`: this thread parks at once, unless the driver polls: for who has
        given other threads of this process work, which cannot run while this one spins.
        """
        reactor = self.reactor
        while not future.finished:
            if held_signals:
                interrupts.deliver()
            if (
                (serves or not reactor.held or self._all_wait())
                and not self._resuming
                and self._lead.acquire(False)
            ):
                self._leader = me = threading.get_ident()
                self._led += 1
                try:
                    reactor.may_serve = serves  # as take_lead(), without its call
                    reactor.serves = serves and not reactor.held
                    if reactor.parked:  # a loop rests
                        reactor.unannounce(True)
                    # Most answers come within microseconds: look at the rings alone first, and only
                    # then at everything.
                    if reactor.spin(self._spin_turns if spins else 1) and future.finished:
                        return True
                    self._drive(future, deadline, serves, spins)
                finally:
                    if self._leader == me:  # as let_go(), without its call
                        self._leader = 0
                        self._lead.release()
                        if (
                            self._followers
                            or self._bridges
                            or (self.prompt and not self._summoned)
                            or self._expected
                            or reactor.held
                        ):
                            self._pass_on()
                    if reactor.interrupt is not None and interrupts.is_main():
                        reactor.raise_interrupt()
            elif self._leader == threading.get_ident():
                self._wait_inside(future, deadline)
            else:
                self._follow(future, deadline, serves)
            if deadline is not None and runtime.monotonic() >= deadline:
                break
        return bool(future.finished)

    def step_in(self) -> int:
        """Take the lead to run one inline handler, and turn nothing: TOOK_LEAD, and let_go()
        follows; HAS_LEAD where this thread leads already, in a handler; 0: not now.
        """
        if held_signals:
            interrupts.deliver()
        reactor = self.reactor
        me = threading.get_ident()
        if self._leader == me:
            # in a section it may lose the lead at any time
            return HAS_LEAD if me not in self.sections and reactor.may_go_before() else 0
        if (
            reactor.held
            or self._resuming
            or not reactor.may_go_before()
            or not self._lead.acquire(False)
        ):
            return 0
        self._leader = me
        self._led += 1
        reactor.may_serve = reactor.serves = False
        return TOOK_LEAD

    def let_go(self) -> None:
        """Give up the lead, if this thread has it."""
        if self._leader == threading.get_ident():
            self._leader = 0
            self._lead.release()
            if (
                self._followers
                or self._bridges
                or (self.prompt and not self._summoned)
                or self._expected
                or self.reactor.held
            ):
                self._pass_on()

    def run(self, timeout_s: float | None) -> None:
        """Drive from this thread for `timeout_s` seconds, or until stop_running() or close()."""
        self._running = Future(self)
        try:
            # looked at after _running is there: a signal in between finds that
            if not self._stop_asked:
                deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
                self.wait_until(self._running, deadline, serves=True)
        except ClosedError:
            return  # closed meanwhile: that is how it ends
        finally:
            self._running = None
            self._stop_asked = False

    def stop_running(self) -> None:
        """Let run() return, or the next one when none is under way. From any thread or signal
        handler.
        """
        self._stop_asked = True
        running = self._running
        if running is not None:
            self.reactor.call_soon(lambda: running.set_result(None))

    def _drive(
        self, future: Future, deadline: float | None, serves: bool, spins: bool = True
    ) -> None:
        """Turn until the future is done or the time is over, or somebody else has to."""
        self._check_usable(future)
        reactor = self.reactor
        poll, spin = reactor.poll, reactor.spin
        clock = runtime.monotonic
        spin_turns = self._spin_turns if spins else 1
        idle: Idle = self._adaptive if spins else self._resting
        if self.polling and not runtime.shares_process:
            idle = Spin()
        now = clock()
        tell: Callable[[Future], object] | None = None
        while not future.finished and not self.closing:
            if held_signals and interrupts.is_due():
                break
            if self._resuming or (reactor.held and not serves and not self._all_wait()):
                break
            if poll(now) or spin(spin_turns):
                now = clock()
                idle.work(now)
            else:
                now = clock()
                park_s = idle.idle(now)
                if park_s:
                    # another thread may complete the future, and nothing else would end the park
                    # then
                    if tell is None:
                        tell = partial(_end_park, reactor)
                        future.when_done(tell)
                    if deadline is not None:
                        park_s = min(park_s, max(0.0, deadline - now))
                    reactor.park(park_s)
                    # The sources alone: the answer may be there, and what ended the park can be
                    # read in the next whole turn, which takes longer.
                    found = spin(1)
                    now = clock()
                    if found:
                        idle.work(now)
            if deadline is not None and now >= deadline:
                break
        if tell is not None:
            future.remove_done_callback(tell)

    def _wait_inside(self, future: Future, deadline: float | None) -> None:
        """Wait in a turn of this very thread: a handler makes a call. Others' handlers run in other
        threads meanwhile, and this one goes on when it has the lead again.
        """
        section = self.sections.pause()
        if self._leader != threading.get_ident():
            return  # it was taken from this section just now
        reactor = self.reactor
        may_serve = reactor.may_serve
        waited = reactor.begin_waiting()
        reactor.take_lead(False)
        try:
            while not future.finished:
                if held_signals:
                    interrupts.deliver()
                if self._resuming or (reactor.held and not self._all_wait()):
                    self.lend(future, deadline)
                else:
                    self._drive(future, deadline, False)
                if deadline is not None and runtime.monotonic() >= deadline:
                    return
                reactor.take_lead(False)
        finally:
            reactor.end_waiting(*waited)
            reactor.take_lead(may_serve)
            self.sections.go_on(section)

    def lend(self, future: Future, deadline: float | None) -> None:
        """Have others lead until then, from inside a handler. This thread leads again when it
        returns or raises."""
        was_on_duty, self._on_duty = self._on_duty, False
        guest = self.reactor.guest
        running = guest.suspend() if guest is not None else None
        self.let_go()
        interrupt: BaseException | None = None
        try:
            self._follow(future, deadline, False)
        except BaseException as error:  # an exception of a signal handler
            interrupt = error
        interrupt = self._lead_again(was_on_duty) or interrupt
        if guest is not None and running is not None:
            guest.resume(running)
        if interrupt is not None:
            raise interrupt

    def _lead_again(self, on_duty: bool) -> BaseException | None:
        """Wait for the lead, before all that have not begun. What a signal handler raised
        meanwhile, for who calls to raise.
        """
        me = threading.get_ident()
        interrupt: BaseException | None = None
        self._resuming.append(me)
        while True:
            try:
                self.reactor.wake()
                # Bounded: should the leader have looked before we were among those that resume.
                if self._lead.acquire(timeout=STANDBY_S):
                    break
            except BaseException as error:
                interrupt = interrupt or error
        self._leader, self._on_duty = me, on_duty
        self._resuming.remove(me)
        if self.reactor.parked:
            self.reactor.unannounce(True)
        return interrupt

    def _take_lead_away(self) -> bool:
        """From the thread that has it, by the watchdog: an engine thread is called, whatever waits,
        as this may be the only one that would look. Whether it was on duty.
        """
        on_duty, self._on_duty = self._on_duty, False
        self._leader = 0
        self._lead.release()
        self._call_engine()
        return on_duty

    def _follow(self, future: Future, deadline: float | None, serves: bool) -> None:
        self._check_usable(future)
        # this thread sleeps, until it is called to lead or has its result
        turn = runtime.Semaphore(0)

        def tell(_: Future) -> None:
            turn.release()

        self.ask_for_lead()
        self._followers.append(turn)
        if serves:
            self._runner = turn
        future.when_done(tell)
        remaining = (
            STANDBY_S
            if deadline is None
            else min(STANDBY_S, max(0.0, deadline - runtime.monotonic()))
        )
        # Bounded: should the lead be given up between our look at it and our queueing, nobody would
        # call us.
        try:
            is_led = self._lead.locked()
            calls_engine = not is_led and not serves and bool(self.reactor.held)
            if calls_engine:
                self._call_engine()
            if is_led or calls_engine or self._resuming:
                turn.acquire(timeout=remaining)
        finally:  # interrupted, too
            future.remove_done_callback(tell)
            if serves:
                self._runner = None
            try:
                self._followers.remove(turn)
            except ValueError:
                if future.finished:
                    self._pass_on()  # called to lead, and no longer in need of it

    def _pass_on(self) -> None:
        """The lead is free: call somebody to it."""
        if self._resuming:
            return  # they are at it, and call others when they have done
        if self.reactor.held:
            self._call_engine()
            return
        if self._followers:
            try:
                self._followers.popleft().release()
                return
            except IndexError:
                pass  # it follows no longer
        if self._bridges and any(bridge.wants() and bridge.call() for bridge in self._bridges):
            return
        if (self.prompt or self._expected) and not self._summoned:
            self._summoned = True
            self._call_to_duty.release()

    def _call_engine(self) -> None:
        """The application's work waits: call a thread that may run it."""
        runner = self._runner
        if runner is not None:
            runner.release()
            return
        if any(bridge.can_serve() and bridge.call() for bridge in self._bridges):
            return
        if self._called:
            return  # and not there yet
        self._called = True
        self._call_to_duty.release()
        # After the release: a spare that ends for want of work has left _idle before its last look.
        if not self._idle and len(self._spares) >= self._spares_max:
            now = runtime.monotonic()
            if now >= self._tell_at:
                self._tell_at = now + TELL_S
                _tell_that_all_wait(len(self._spares), len(self.reactor.held))
        elif not self._idle and not self.closing:
            spare = runtime.Thread(
                target=self._spare, name=f"{self._thread.name}-spare", daemon=True
            )
            self._spares[spare] = None
            try:
                spare.start()
            except RuntimeError:  # no more threads are to be had: those that there are must do
                self._spares.pop(spare, None)
                self._spares_max = len(self._spares)

    def _all_wait(self) -> bool:
        """Whether all threads that could run the application's work wait in their handlers."""
        return (
            not self._idle
            and len(self._spares) >= self._spares_max
            and self._runner is None
            and not any(bridge.can_serve() for bridge in self._bridges)
        )

    def take_over(self) -> None:
        """Somebody waits who cannot drive:
        the progress thread must lead whenever nobody else does.
        """
        self.prompt = True
        self._call_to_duty.release()

    def expect(self, future: Future) -> None:
        """The same, until the future is done; it ends with ClosedError where the driver is closed
        before.
        """
        self._expected.add(future)
        future.when_done(self._expected.discard)
        if self.closing:
            future.set_error(ClosedError("already closed"))
        else:
            self._call_to_duty.release()

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """Run work() in an engine thread, soon, whether or not somebody waits; False where none is
        left: after close(), and in a fork. From any thread.
        """
        if self.closing or self._pid != os.getpid() or not self.reactor.call_in_engine(work):
            return False
        if self.closing:  # who ends may have looked before it was there
            return not self.reactor.take_back(work)
        if not self._lead.locked():  # else who leads sees it, or passes it on
            self._call_engine()
        return True

    def pin(self, core: int) -> None:
        """Keep the progress thread on one of the cores that this process may use."""
        thread = self._thread.native_id
        assert thread is not None, "it has started"
        os.sched_setaffinity(thread, {core})

    # -- asyncio loops -----------------------------------------------------------------------------

    def await_in(
        self, future: Future, loop: asyncio.AbstractEventLoop
    ) -> Generator[Any, None, None]:
        """What a coroutine of `loop`, which runs in this thread, yields until the future is done;
        the loop makes the progress.

        Raises ClosedError, and ForkedError in a fork of the process that made the driver."""
        for bridge in self._bridges:
            if bridge.loop is loop and not self.closing and self._pid == os.getpid():
                return bridge.wait(future)
        self._check_usable()  # in a fork the lock may be held for ever
        with self._inviting:
            self._check_usable()  # from here on close() finds the guest
            bridge = AsyncioBridge(self, loop)  # which is new here; those of closed loops go
            self._bridges = (bridge, *(one for one in self._bridges if not one.loop.is_closed()))
        return bridge.wait(future)

    def try_lead(self) -> bool:
        """Take the lead if it is free. Who has it turns the reactor, and calls stop_leading()."""
        if self._resuming or not self._lead.acquire(False):
            return False
        self._leader = threading.get_ident()
        self._led += 1
        self.reactor.take_lead(True)
        return True

    def stop_leading(self) -> None:
        """Give up the lead that try_lead() took, to a thread that follows if there is one."""
        if self._leader == threading.get_ident():
            self._leader = 0
            self._lead.release()
            if self._followers or self.reactor.held:
                self._pass_on()

    def leads_here(self) -> bool:
        """Whether this very thread leads, so that it can turn the reactor deeper. Then it is in no
        section any more.
        """
        self.sections.pause()
        return self._leader == threading.get_ident()

    def ask_for_lead(self) -> None:
        """Have the progress thread give up the lead, if it has it; a thread that waits gives it up
        by itself, later.
        """
        if self._on_duty:
            self._wanted += 1
            self.reactor.wake()

    def _check_usable(self, awaited: Future | None = None) -> None:
        """What `awaited` ended with is had after close(), too, which first ends all that waits."""
        if self._pid != os.getpid():
            raise ForkedError(
                f"made in process {self._pid}, used in its fork {os.getpid()}: "
                "start processes by spawn and make it there"
            )
        if self.closing and (awaited is None or not awaited.finished):
            raise ClosedError("already closed")

    # -- the progress thread -----------------------------------------------------------------------

    def _progress(self) -> None:
        led = -1
        standby_s = STANDBY_S
        while not self.closing:
            if held_signals:
                interrupts.try_again()
            interrupts.look()
            # a thread that uses the engine all the time is outside of it for moments only
            called = self._await_call(NAP_S if held_signals else standby_s)
            if not called and led != self._led:
                led = self._led
                if standby_s == NAP_S:
                    self._summoned = True  # yet
                else:
                    standby_s = STANDBY_S
                continue
            held = self.reactor.held
            attentive = any(bridge.is_attentive() for bridge in self._bridges)
            prompt = self.prompt or self._expected or held
            standby_s = WATCH_S if attentive and not prompt else STANDBY_S
            if not held and (attentive or self._followers):
                continue
            if self._go_on_duty():
                led = self._led
            elif prompt and led != self._led:
                # A thread that waits leads, not for long: it would call us each time it has done,
                # and we would come for nothing.
                led, standby_s, self._summoned = self._led, NAP_S, True
        self._call_to_duty.release()  # to the next, which ends as well
        # Callbacks of what close() ended, and those that had not begun by then: beside a handler
        # only if that is stuck.
        if self.reactor.held and not self._closed_inside:
            leads = self._lead.acquire(timeout=CLOSE_TIMEOUT_S)
            for call_back in self.reactor.take_callbacks():
                call_back()
            if leads:
                self._lead.release()

    def _spare(self) -> None:
        """The life of a spare: it is called when others wait in their handlers."""
        ends_at = runtime.monotonic() + SPARE_IDLE_S
        while not self.closing and self._await_call(max(0.0, ends_at - runtime.monotonic())):
            # What it was called for may be done by now. It may have been called for lack of a
            # leader, too: a call that the progress thread was meant to hear.
            if self.reactor.held or self.prompt or self._expected:
                self._go_on_duty(relieve_at=ends_at)
            if self._thread.ident not in self._idle:  # else it would have done the same
                ends_at = runtime.monotonic() + SPARE_IDLE_S
        self._spares.pop(threading.current_thread(), None)
        self._call_to_duty.release()  # to who goes on with what it did, or ends as well

    def _await_call(self, timeout_s: float) -> bool:
        me = threading.get_ident()
        self._idle.add(me)
        try:
            called = self._call_to_duty.acquire(timeout=timeout_s)
        finally:
            self._idle.discard(me)
        called = called or self._call_to_duty.acquire(False)
        while called and self._call_to_duty.acquire(False):
            pass  # one duty answers all calls
        # Before it tries to lead: who finds that it is called yet has given the lead up before.
        self._called = self._summoned = False
        return called

    def _go_on_duty(self, relieve_at: float = math.inf) -> bool:
        """Lead until somebody wants to; False where somebody leads. relieve_at: when a spare gives
        it up to the progress thread, or, where that waits in a handler, later.
        """
        if self._resuming or not self._lead.acquire(False):
            return False
        self._leader = threading.get_ident()
        self._on_duty = True
        try:
            self.reactor.take_lead(True)
            if self.reactor.parked:  # a loop rests, and is late
                self.reactor.unannounce(True)
            self._duty(relieve_at)
        finally:
            self._on_duty = False
            self._wanted = 0
            self._leader = 0
            self._lead.release()
            if self._followers or self._bridges or self.reactor.held:
                self._pass_on()
        return True

    def _duty(self, relieve_at: float) -> None:
        reactor = self.reactor
        clock = runtime.monotonic
        idle = self._adaptive
        while (
            not self.closing and not self._resuming and (not self._wanted or reactor.is_awaited())
        ):
            now = clock()
            if now >= relieve_at:
                if self._thread.ident in self._idle and not reactor.held:
                    break
                relieve_at = now + SPARE_IDLE_S
            if held_signals:
                interrupts.try_again()
            try:
                if reactor.poll(now):
                    idle.work(now)
                elif idle.idle(now):
                    reactor.park(STANDBY_S if held_signals else PARK_S_MAX)
            except BaseException:
                # a bug or an exit in a callback: said, and survived, or everybody here would wait
                # for ever
                logger.exception("the reactor's turn failed; it goes on")
                runtime.sleep(AFTER_BUG_S)
        if self._is_outlasted and not reactor.closed:
            reactor.take_lead(False)
            reactor.poll(clock())  # what its owner wanted done: its connections end
            reactor.close()

    # -- the end -----------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Stop driving: waits end, the progress thread ends. The reactor's sources must be closed
        before. A handler or callback that still runs is waited for, for `timeout_s` seconds in all;
        None: CLOSE_TIMEOUT_S.
        """
        if self.closing or self._pid != os.getpid():
            return
        if timeout_s is None:
            timeout_s = CLOSE_TIMEOUT_S
        self._closed_inside = self.leads_here()
        self.closing = True
        self.reactor.wake()
        self._call_to_duty.release()
        give_up_at = runtime.monotonic() + timeout_s
        for thread in (self._thread, *self._spares):
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - runtime.monotonic()))
        while self._followers:
            self._followers.popleft().release()
        with self._inviting:
            bridges, self._bridges = self._bridges, ()
        for bridge in bridges:
            bridge.retire()
        if self._closed_inside:
            self.reactor.close()
        else:
            leads = self._lead.acquire(timeout=max(0.0, give_up_at - runtime.monotonic()))
            if not leads:
                self._is_outlasted = True
                leads = self._lead.acquire(False)  # it may have ended before it could see that
            if leads:
                try:
                    self.reactor.close()
                finally:
                    self._lead.release()
            else:
                logger.warning("a handler outlasts close(): its thread is left to end by itself")
        for future in list(self._expected):  # nobody would turn the reactor for them any more
            future.set_error(ClosedError("closed before it was done"))
        self.watchdog.close()
        interrupts.leave(self)


def _tell_that_all_wait(handlers: int, requests: int) -> None:
    logger.warning(
        "%d handlers wait for calls of their own, as many as may: %d requests wait for one to end, "
        "and answers that need them come late; `async def` handlers that await need no threads",
        handlers,
        requests,
    )


def _end_park(reactor: Reactor, _: Future) -> None:
    reactor.call_soon(_look_again)


def _look_again() -> None:
    """A step that does nothing, so that a park ends."""
