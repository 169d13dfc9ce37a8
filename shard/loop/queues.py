"""Steps that wait to run, in classes with shares of the reactor's time. The clock is handed in.

    what runs                                        is charged to
    a step of a task, a plain function of a class    its class
    what messages bring: plain functions, requests   LATENCY
    steps and timers of the engine                   LATENCY
    waiting for a call in a step                     nobody: turns under way meanwhile charge theirs

Every class has a queue, first in, first out. While LATENCY alone has work nothing is measured. As
soon as another class has steps, each step is timed, and so is each part of a turn that is LATENCY's
(reactor.py); the class that has used least time per share runs next. LATENCY's work is mostly not
in its queue, but still in the rings and sockets: it counts as waiting when the part before found
some.

    turn begins        LATENCY has used  and then
    another has steps  least, or as much its part; where that leaves time of the slice, the others'
                       more              the others' steps, until the slice is over or LATENCY due
    found no work      least             it is idle: the others' steps

So two classes that always want to run get their time as their shares are, and one that wants less
than its part leaves the rest to the others. How exactly: two classes with shares a and b, whose
longest steps take A and B, miss their parts of any stretch of time by (A*b + B*a) / (a + b) at
most, where LATENCY's step is a part of a turn: TURN_SLICE_S and one step. For LATENCY and BULK that
is 20 % of BULK's part after 55 times the longest step, and 1 % after 1100 times.

    idle class     saves up nothing: when it comes back it starts where the class that ran last
                   stands
    class in debt  (one long step may use up the part of many turns) keeps its debt while it is
                   idle, and the time that LATENCY had for itself meanwhile pays it off: a bulk job
                   that comes every hour starts without the last one's debt
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shard.errors import ShardError
from shard.loop.task_class import LATENCY, RUNNING, TaskClass
from shard.memory.counters import CLASSES_MAX, ClassStatistics

Step = Callable[[], object]


class _Queue:
    """The steps of one class, and what it used."""

    __slots__ = ("count", "longest_s", "seconds", "steps", "task_class", "used", "waits")

    def __init__(self, task_class: TaskClass) -> None:
        self.task_class = task_class
        self.steps: deque[Step] = deque()
        self.used = 0.0  # seconds per share; only differences between queues count
        self.waits = False  # had work when last looked at
        self.count = 0
        self.seconds = self.longest_s = 0.0

    def charge(self, took_s: float, count: int) -> None:
        """So many steps took so long."""
        self.used += took_s / self.task_class.shares
        self.count += count
        self.seconds += took_s
        if took_s > self.longest_s:
            self.longest_s = took_s


class ReadyQueues:
    """The queues of one reactor. add() from any thread, the rest in the reactor's.

    latency    the queue of class LATENCY, which the reactor fills and empties itself
    others     the queues of other classes that have steps: empty most of the time
    waited_s   seconds that steps spent waiting for calls of their own, all in all; they are
               charged to nobody
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._default = _Queue(LATENCY)
        self.latency = self._default.steps
        self.others: set[_Queue] = set()
        self.waited_s = 0.0
        self._queues = {LATENCY: self._default}
        self._order: list[_Queue] = []  # of choosing between equals; without LATENCY's
        # where the class that ran last stood: a class that comes back starts there at best
        self._floor = 0.0
        self._alone_since: float | None = None  # when LATENCY began to have all time for itself

    def add(self, task_class: TaskClass, step: Step) -> None:
        """Queue a step. Raises ShardError for a class too many."""
        queue = self._queues.get(task_class) or self._make(task_class)
        queue.steps.append(step)
        if queue is not self._default:
            self.others.add(queue)  # after the step: whoever finds it here finds the step

    def _make(self, task_class: TaskClass) -> _Queue:
        if len(self._order) >= CLASSES_MAX - 1:
            raise ShardError(
                f"task class {task_class.name!r} is one more than the {CLASSES_MAX} that a "
                "reactor takes: make classes once, at import, and not one a task"
            )
        made = _Queue(task_class)
        queue = self._queues.setdefault(task_class, made)
        if queue is made:  # and not that of another thread, which came first
            self._order.append(made)
        return queue

    def statistics(self) -> tuple[ClassStatistics, ...]:
        """One for each class that has had steps, LATENCY first. From any thread."""
        return tuple(
            ClassStatistics(
                queue.task_class.name,
                queue.task_class.shares,
                queue.count,
                int(queue.seconds * 1e9),
                int(queue.longest_s * 1e9),
                len(queue.steps),
            )
            for queue in (self._default, *self._order)
        )

    # -- a turn in which another class has steps ---------------------------------------------------

    def is_latency_due(self, now: float) -> bool:
        """Whether LATENCY has its part of the turn that begins now, or others have used less."""
        if self._alone_since is not None:
            self._pay_off(now - self._alone_since)
            self._alone_since = None
        best = self._choose(now)
        return best is None or self._default.used <= best.used

    def charge_latency(self, took_s: float, work: int) -> None:
        """LATENCY had its part of a turn, and did so many pieces of work."""
        default = self._default
        if not work:
            default.waits = bool(default.steps)
            return
        if not default.waits:
            default.waits = True
            default.used = max(default.used, self._floor)
        self._floor = max(self._floor, default.used)
        default.charge(took_s, work)

    def run(self, steps_max: int, now: float, until: float) -> int:
        """Run up to `steps_max` steps of the other classes, by shares, until LATENCY is due; none
        but the first begins at `until` or later. How many.
        """
        clock, default = self._clock, self._default
        count = 0
        while count < steps_max and (now < until or not count):
            queue = self._choose(now)
            if queue is None or (default.waits and default.used <= queue.used):
                break
            self._floor = max(self._floor, queue.used)
            step = queue.steps.popleft()
            waited_s, RUNNING.value = self.waited_s, queue.task_class
            try:
                step()
            finally:
                RUNNING.value = LATENCY
                began, now = now, clock()
                queue.charge(max(0.0, now - began - (self.waited_s - waited_s)), 1)
            count += 1
        return count

    def _choose(self, now: float) -> _Queue | None:
        """Of the other classes' queues with steps the one that has used least time per share; None
        where there are none.
        """
        best: _Queue | None = None
        for queue in self._order:
            if queue.steps:
                if not queue.waits:
                    queue.waits = True
                    queue.used = max(queue.used, self._floor)
                if best is None or queue.used < best.used:
                    best = queue
            elif queue.waits:
                queue.waits = False
                self._rest(queue, now)
        return best

    def _rest(self, queue: _Queue, now: float) -> None:
        """The queue ran empty."""
        self.others.discard(queue)
        if queue.steps:  # another thread has just added one, and found the queue still in there
            self.others.add(queue)
        elif not self.others:
            self._alone_since = now

    def _pay_off(self, alone_s: float) -> None:
        """LATENCY had `alone_s` seconds for itself: as far as others owe it time, that counts."""
        default = self._default
        most = max(queue.used for queue in (default, *self._order))
        default.used = min(most, default.used + alone_s / LATENCY.shares)
        default.waits = False

    def take_all(self) -> list[Step]:
        """Empty every queue: the reactor ends. What was in them."""
        steps: list[Step] = []
        for queue in (self._default, *self._order):
            steps += queue.steps  # in one go: other threads may append meanwhile
            queue.steps.clear()
        self.others.clear()
        return steps
