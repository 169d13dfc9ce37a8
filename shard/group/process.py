"""One shard: a process that turns its reactor until it is told to stop, and runs what others send
it.

    state     until                                    what it does with calls
    starting  its lanes are connected                  they wait in the rings
    running   STOP, SIGTERM, the application is gone   runs them
    draining  its tasks have ended, or time is over    refuses new ones (ClosedError), lets tasks
                                                       end; cancels them after drain_s
    ended                                              at_stop() closers have run, what was answered
                                                       has been written

STOP comes from the application once it has seen all shards empty (group.py). SIGTERM, from whoever,
drains this shard alone, for drain_s; the tasks that are left are cancelled then and have clean_up_s
more. A second one ends it at once, and so does the end of that time, even when a handler never
returns. The application's death ends it at once: by PR_SET_PDEATHSIG, and by the end
of its lane should that signal have been missed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from shard.errors import BackpressureError, ClosedError, PeerLostError, ShardError
from shard.group import cpu
from shard.group.keywords import WithKeywords
from shard.group.lane_handoff import InheritedFd, LaneEnd
from shard.group.mesh import ShardChannel, Tally, run_here
from shard.group.trimming import Trimmer
from shard.loop.future import Future
from shard.loop.gate import Gate
from shard.loop.idle import strategy
from shard.loop.reactor import Reactor
from shard.loop.stall import StallDetector
from shard.loop.task import Task
from shard.memory.counters import CounterRow, Counters
from shard.memory.limits import Limits
from shard.memory.segment import Segment
from shard.memory.slab import Slab
from shard.transport import Traffic

APPLICATION = -1  # the lane to it, among those to shards
COUNTERS_PERIOD_S = 0.1  # how old a row of the counters may be
# a signal that comes just before a system call does not end it: Python hears of it by the next one
SIGNAL_AGAIN_S = 0.1
FLUSH_TIMEOUT_S = 0.5  # at the end, for answers that wait for room in a full ring
EXIT_FORCED = 128 + signal.SIGTERM
# For the `finally` blocks of tasks that are cancelled at the end of a drain: a few messages each.
CLEAN_UP_S = 5.0
# For shards without tasks to write their last answers and end, when draining has used up all the
# time.
STOP_S_MIN = 0.5
TOLD_MAX = 8  # tasks that are named where some are left
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("shard")


@dataclass
class Birth:
    """The arguments of a shard's process: which shard of how many it is, where it runs, and its
    ends of the lanes to the application and to other shards. Pickled once, when the process is
    spawned. drain_s, clean_up_s and stall_budget_s are in seconds.
    """

    index: int
    size: int
    incarnation: int
    core: int | None
    cores: list[int]  # where it may run when it has no core of its own
    idle: str
    oversubscribed: bool
    drain_s: float
    clean_up_s: float
    stall_budget_s: float
    limits: Limits
    counters_fd: InheritedFd
    application: LaneEnd
    others: dict[int, LaneEnd]


class Shard:
    """The process one is in, as seen from inside; this_shard() gives it."""

    def __init__(self, birth: Birth) -> None:
        self.index = birth.index
        self.size = birth.size
        self.incarnation = birth.incarnation
        self.core = birth.core
        self.slab = Slab()
        self.reactor = Reactor(time.monotonic)
        Trimmer(self.slab, self.reactor)
        self.tasks = Gate(f"shard {birth.index}")  # what others wait for passes it
        self.sharded: dict[int, Any] = {}  # this shard's instance of each Sharded, by its number
        # this shard's ends of pipes, by their numbers (pipe.py)
        self.inlets: dict[tuple[int, int], Any] = {}
        self.outlets: dict[tuple[int, int, int], Any] = {}
        self._limits = birth.limits
        self._lanes: dict[int, ShardChannel] = {}
        self._ended_lanes: list[ShardChannel] = []  # whose tasks go on
        self._drain_s, self._clean_up_s = birth.drain_s, birth.clean_up_s
        self._lost: dict[int, ShardError] = {}
        self._tally = Tally()
        self._traffic_of_ended = Traffic()
        self._closers: list[Callable[[], None]] = []
        self._stopping = False
        self._idle = strategy(birth.idle, oversubscribed=birth.oversubscribed)
        self._idle_ns = 0
        self._started = self.reactor.clock()
        self._stalls = StallDetector(
            self.reactor,
            threading.get_ident(),
            birth.stall_budget_s,
            f"shard {birth.index} (pid {os.getpid()})",
            counts=True,
        )

    def submit_to(
        self, index: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Future:
        """Run function(*args, **keywords) in shard `index` of this group; await the result.

        Raises PeerLostError while that shard is dead, BackpressureError when too much waits for it
        (submit_when_room() waits then), and ValueError for an index that the group does not have.
        """
        if keywords:
            function, args = WithKeywords(function), (args, keywords)
        if index == self.index:
            return run_here(self.reactor, function, args)
        lane = self._lanes.get(index)
        if lane is None or index == APPLICATION:
            raise self._no_shard(index)
        return lane.submit(function, args)

    async def submit_when_room(
        self, index: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Future:
        """As submit_to(), and waits while too much waits for that shard: the future of the result
        once the call is on its way. Raises PeerLostError, ValueError.
        """
        while True:
            try:
                return self.submit_to(index, function, *args, **keywords)
            except BackpressureError:
                await self._lanes[index].room()

    def _no_shard(self, index: int) -> Exception:
        if not isinstance(index, int) or not 0 <= index < self.size:
            return ValueError(
                f"there is no shard {index!r:.100}: this group has shards 0 to {self.size - 1}"
            )
        return PeerLostError(
            f"shard {index} is gone: {self._lost.get(index, 'it was never connected to this one')}"
        )

    def at_stop(self, closer: Callable[[], None]) -> None:
        """Run closer() before this shard ends; the last one first. What it raises is logged."""
        self._closers.append(closer)

    def drain(self) -> None:
        """Take on nothing new, and stop when all tasks have ended, by themselves or cancelled, or
        its group's clean_up_s after that.
        """
        for lane in self._lanes.values():
            self._refuse(lane)
        # failpoint: group.draining
        self.tasks.close().when_done(lambda _: self.stop())
        self.reactor.call_later(self._drain_s, self._cancel_and_stop)

    def _cancel_and_stop(self) -> None:
        self.cancel_tasks(f"it was told to stop {self._drain_s:g} s ago")
        self.reactor.call_later(self._clean_up_s, self._stop_with_tasks)

    def _stop_with_tasks(self) -> None:
        logger.warning(
            "shard %d (pid %d) ends, and tasks go on %g s after they were cancelled: %s",
            self.index,
            os.getpid(),
            self._clean_up_s,
            ", ".join(self.tasks_left()),
        )
        self.stop()

    def _tasks(self) -> list[Task]:
        lanes = [*self._lanes.values(), *self._ended_lanes]
        return [task for lane in lanes for task in lane.tasks()]

    def cancel_tasks(self, why: str) -> Future:
        """Cancel what other processes have begun here; done when all of it has ended."""
        for task in self._tasks():
            if not task.reasons:  # else it was before, and may be cleaning up
                task.cancel(
                    ClosedError(f"shard {self.index} (pid {os.getpid()}) cancelled it: {why}")
                )
        return self.tasks.wait_empty()

    def tasks_left(self) -> list[str]:
        """What others have begun here and has not ended, for the log."""
        left = [f"{task.get_name()} {task.place()}" for task in self._tasks()]
        more = [f"and {len(left) - TOLD_MAX} more"] if len(left) > TOLD_MAX else []
        return left[:TOLD_MAX] + more

    def _refuse(self, lane: ShardChannel) -> None:
        lane.refuse(f"shard {self.index} (pid {os.getpid()}) is stopping: it takes on no new calls")

    def stop(self) -> None:
        """End after this turn."""
        self._stopping = True

    # -- lanes -------------------------------------------------------------------------------------

    def add_lane(self, other: int, end: LaneEnd) -> None:
        """Connect an end that was handed to this process, in place of any earlier lane to the same
        shard.
        """
        peer = (
            f"shard {other} (incarnation {end.incarnation})"
            if other != APPLICATION
            else "the application"
        )
        connection = end.connect(peer, self.slab, self._limits)
        lane = ShardChannel(
            connection,
            self.reactor,
            None,
            self.slab,
            self._tally,
            self.tasks,
            self.stop,
            partial(self._lane_lost, other, end.incarnation),
        )
        if other == APPLICATION:
            connection.notes.on_handover = self._on_handover
        earlier = self._lanes.get(other)
        self._lanes[other] = lane
        if earlier is not None:
            earlier.connection.close(
                PeerLostError(f"{earlier.connection.peer} is gone: it was started again")
            )
        if self.tasks.closed:
            self._refuse(lane)
        lane.attach()

    def _on_handover(self, number: int, fds: list[int]) -> None:
        """The application restarted a shard, and this is our end of the lane to it."""
        # failpoint: group.handed_over
        index, incarnation = number & INDEX_MASK, number >> INDEX_BITS
        self.add_lane(index, LaneEnd.received(fds, incarnation))

    def take_handovers(self) -> None:
        """Connect lanes that the application has handed over by now. What it asks for next may need
        them, and comes through the ring: faster than the socket is looked at, after a function that
        took long."""
        notes = self._lanes[APPLICATION].connection.notes
        # to the last: each read ends behind the first note with descriptors, which may be another
        # one
        while notes.read():
            pass

    def _lane_lost(
        self, other: int, incarnation: int, lane: ShardChannel, error: ShardError
    ) -> None:
        for inlet in tuple(self.inlets.values()):
            inlet.lose((other, incarnation), error)
        self._traffic_of_ended += lane.connection.traffic()
        self._ended_lanes = [each for each in [*self._ended_lanes, lane] if each.tasks()]
        if self._lanes.get(other) is not lane:
            return  # a newer one has taken its place
        del self._lanes[other]
        self._lost[other] = error
        if other == APPLICATION:
            self.stop()

    # -- turning -----------------------------------------------------------------------------------

    def run(self, counters: Counters) -> None:
        """Turn until stopped, then end in order."""
        self._stalls.start()
        try:
            self._turn(counters)
        finally:
            self._stalls.close()
            self._end(counters)

    def _turn(self, counters: Counters) -> None:
        reactor, idle = self.reactor, self._idle
        clock, poll, spin = time.monotonic, reactor.poll, reactor.spin
        spin_turns = idle.spin_turns
        budget_s, stalled = self._stalls.budget_s, self._stalls.count
        # a turn over the budget passes the next look, whenever it begins
        look_s = min(COUNTERS_PERIOD_S, budget_s)
        now = write_counters_at = look_at = clock()
        while not self._stopping:
            if poll(now) or spin(spin_turns):
                began, now = now, clock()
                idle.work(now)
            else:
                before, now = now, clock()
                park_s = idle.idle(now)
                if park_s:
                    self._write_counters(counters)
                    reactor.park(park_s)
                    now = clock()
                self._idle_ns += int((now - before) * 1e9)
                began = now
            if now >= look_at:
                look_at = now + look_s
                if now - began >= budget_s:
                    stalled(now - began)
                if now >= write_counters_at:
                    write_counters_at = now + COUNTERS_PERIOD_S
                    self._write_counters(counters)

    def _end(self, counters: Counters) -> None:
        for closer in reversed(self._closers):
            try:
                closer()
            except Exception:
                logger.exception("shard %d: a function that runs at its stop raised", self.index)
        # failpoint: group.before_flush
        lanes = list(self._lanes.values())
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while (
            any(lane.connection.outbox_messages for lane in lanes) and time.monotonic() < deadline
        ):
            for lane in lanes:
                lane.connection.drain()
            os.sched_yield()
        self._write_counters(counters)
        # failpoint: group.before_exit
        for lane in lanes:
            lane.close()
        self.reactor.close()

    def _write_counters(self, counters: Counters) -> None:
        lanes = [lane.connection for lane in self._lanes.values()]
        row = figures(
            self.incarnation,
            self._started,
            self._idle_ns,
            self.reactor,
            self._tally,
            self._stalls,
            sum((lane.traffic() for lane in lanes), self._traffic_of_ended),
            self.slab,
            sum(lane.leases_held for lane in lanes),
        )
        classes = self.reactor.statistics()
        counters.write(self.index, row, self._tally.call_ns, self._tally.run_ns, classes)


INDEX_BITS = 8  # of a handover's number; the incarnation is in the rest
INDEX_MASK = (1 << INDEX_BITS) - 1


def figures(
    incarnation: int,
    started: float,
    idle_ns: int,
    reactor: Reactor,
    tally: Tally,
    stalls: StallDetector | None,
    traffic: Traffic,
    slab: Slab,
    leases_held: int,
) -> CounterRow:
    """A process's row of the counters; `started` on the reactor's clock."""
    return CounterRow(
        incarnation=incarnation,
        up_ns=int((reactor.clock() - started) * 1e9),
        idle_ns=idle_ns,
        turns=reactor.turns,
        busy_turns=reactor.busy_turns,
        parks=reactor.parks,
        wakeups=reactor.wakeups,
        late_wakes=reactor.late_wakes,
        stalls=stalls.stalls if stalls else 0,
        stall_ns_max=int(stalls.longest_s * 1e9) if stalls else 0,
        calls=tally.calls,
        failures=tally.failures,
        tasks=tally.tasks,
        cancelled=tally.cancelled,
        records=traffic.records_received,
        bytes_in=traffic.bytes_received,
        bytes_out=traffic.bytes_sent,
        full_waits=traffic.full_waits,
        leases_lent=slab.leases_out,
        slab_bytes=slab.used_bytes,
        leases_held=leases_held,
    )


def main(birth: Birth) -> None:
    """What a shard's process runs from birth to end."""
    global _this
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _let_the_forkserver_end()
    # Ctrl-C goes to all of the terminal; the application decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if birth.core is not None:
        cpu.pin(birth.core)
        cpu.bind_memory(birth.core)  # before the first page of the slab is touched
    else:
        # the application's thread may be pinned, and we inherited that
        cpu.restore(set(birth.cores))
    shard = _this = Shard(birth)
    signal.signal(
        signal.SIGTERM, partial(_on_terminate, shard, birth.drain_s + birth.clean_up_s + STOP_S_MIN)
    )
    signal.signal(signal.SIGALRM, _force)
    segment = Segment.attach(birth.counters_fd.fd)
    counters = Counters(segment.memory)
    segment.close()
    for other, end in birth.others.items():
        shard.add_lane(other, end)
    shard.add_lane(APPLICATION, birth.application)
    # failpoint: group.started
    shard.run(counters)


def _let_the_forkserver_end() -> None:
    """Its children are given a copy of the pipe that keeps it alive. Without ours it ends with the
    application, and then we do: PR_SET_PDEATHSIG is about our parent, which it is."""
    module = sys.modules.get("multiprocess.forkserver")
    fd = module._forkserver._forkserver_alive_fd if module is not None else None
    if fd is not None:
        os.close(fd)
        module._forkserver._forkserver_alive_fd = None  # type: ignore[union-attr]


def _on_terminate(shard: Shard, most_s: float, number: int, frame: FrameType | None) -> None:
    """The first SIGTERM: drain, by a deadline that holds even if the handler under way never
    returns.
    """
    signal.signal(signal.SIGTERM, _force)
    signal.setitimer(signal.ITIMER_REAL, most_s, SIGNAL_AGAIN_S)
    shard.reactor.call_soon(shard.drain)
    shard.reactor.wake()


def _force(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_FORCED)


_this: Shard | None = None


def require_no_shard() -> None:
    """Raise ShardError in a shard: its own would have nobody that sees to their end when it is
    killed.
    """
    if _this is not None:
        raise ShardError(
            f"shard {_this.index} cannot start a group of its own: "
            "make a group with more shards in the application, and send it "
            "its work by this_shard().submit_to()"
        )


def this_shard() -> Shard:
    """The shard that this process is. Raises ShardError outside one."""
    if _this is None:
        raise ShardError(
            "this process is no shard: this_shard() works in functions that submit_to() or map() "
            "sent to one"
        )
    return _this
