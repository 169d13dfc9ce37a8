"""Steps that wait to run, in classes with shares of the reactor's time. No clock in this file: it
is handed in.

    class      shares   for
    LATENCY      1000   answers, small handlers, the engine itself: what somebody waits for
    BULK          100   what only has to be done: scans, checkpoints, compaction

Every class has a queue, first in, first out. While only LATENCY has steps nothing is measured. As
soon as another class has some, each step is timed, and the class that has used least time per share
runs next. So two classes that always want to run get their time as their shares are, and one that
wants less than its part leaves the rest to the others.

    idle class     saves up nothing: when it comes back it starts where the class that ran last
                   stands
    class in debt  (one long step may use up the part of many turns) keeps its debt while it is
                   idle, and the time that LATENCY had for itself meanwhile pays it off: a bulk job
                   that comes every hour starts without the last one's debt
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shard.checks import is_count
from shard.errors import ShardError

Step = Callable[[], object]
Function = TypeVar("Function", bound=Callable[..., Any])

# The choice looks at every class for every timed step, 0.1 us each: few classes is what makes it
# cheap.
CLASSES_MAX = 16
SHARES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A class of work. Time is divided by `shares`, 1 to SHARES_MAX; two objects with the same
    values are the same class.
    """

    name: str
    shares: int

    def __post_init__(self) -> None:
        if not is_count(self.shares, 1) or self.shares > SHARES_MAX:
            raise ValueError(
                f"task class {self.name!r} with {self.shares!r} shares: "
                f"1 to {SHARES_MAX} are possible"
            )


# A tenth: bulk work goes on under full load (a second of it takes eleven), and costs latency work a
# tenth of its throughput at most. Seastar divides between its main and its background work so, too.
LATENCY = TaskClass("latency", 1000)
BULK = TaskClass("bulk", 100)

TASK_CLASS_ATTRIBUTE = "_shard_task_class"


def in_class(task_class: TaskClass) -> Callable[[Function], Function]:
    """Decorator: where this function is sent to a shard, it runs there as a task of `task_class`.

    @shard.in_class(shard.BULK)
    async def compact(table): ...
    """

    def mark(function: Function) -> Function:
        setattr(function, TASK_CLASS_ATTRIBUTE, task_class)
        return function

    return mark


def class_of(function: Callable[..., Any]) -> TaskClass:
    """The class that in_class() gave the function; LATENCY without."""
    found = getattr(function, TASK_CLASS_ATTRIBUTE, LATENCY)
    assert isinstance(found, TaskClass)
    return found


class _Queue:
    """The steps of one class."""

    __slots__ = ("shares", "steps", "used", "waits")

    def __init__(self, shares: int) -> None:
        self.shares = shares
        self.steps: deque[Step] = deque()
        self.used = 0.0  # seconds per share; only differences between queues count
        self.waits = False  # had steps when last looked at


class ReadyQueues:
    """The queues of one reactor. add() from any thread, the rest in the reactor's.

    The two public containers are there for the reactor's hot path: `latency` is the queue of class
    LATENCY, which it fills and empties itself while `others`, the queues of other classes that have
    steps, is empty.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._default = _Queue(LATENCY.shares)
        self.latency = self._default.steps
        self.others: set[_Queue] = set()
        self._queues = {LATENCY: self._default}
        self._order = [self._default]  # of choosing between equals
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
        if len(self._order) >= CLASSES_MAX:
            raise ShardError(
                f"task class {task_class.name!r} is one more than the {CLASSES_MAX} that a "
                "reactor takes: make classes once, at import, and not one a task"
            )
        made = _Queue(task_class.shares)
        queue = self._queues.setdefault(task_class, made)
        if queue is made:  # and not that of another thread, which came first
            self._order.append(made)
        return queue

    def run(self, steps_max: int, slice_s: float) -> int:
        """Run up to `steps_max` steps, by shares, none after `slice_s` seconds have passed; how
        many.

        A step that turns the reactor deeper, because it waits, is charged for all of that time.
        """
        clock = self._clock
        started = now = clock()
        if self._alone_since is not None:
            self._pay_off(now - self._alone_since)
            self._alone_since = None
        count = 0
        while count < steps_max and now - started < slice_s:
            queue = self._choose(now)
            if queue is None:
                break
            step = queue.steps.popleft()
            try:
                step()
            finally:
                began, now = now, clock()
                queue.used += (now - began) / queue.shares
            count += 1
        return count

    def _choose(self, now: float) -> _Queue | None:
        """The queue with steps that has used least time per share; None when there are no steps."""
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
        if best is not None:
            self._floor = max(self._floor, best.used)
        return best

    def _rest(self, queue: _Queue, now: float) -> None:
        """The queue ran empty."""
        if queue is self._default:
            return
        self.others.discard(queue)
        if queue.steps:  # another thread has just added one, and found the queue still in there
            self.others.add(queue)
        elif not self.others:
            self._alone_since = now

    def _pay_off(self, alone_s: float) -> None:
        """LATENCY had `alone_s` seconds for itself: as far as others owe it time, that counts."""
        default = self._default
        most = max(queue.used for queue in self._order)
        default.used = min(most, default.used + alone_s / default.shares)
        default.waits = False

    def take_all(self) -> list[Step]:
        """Empty every queue: the reactor ends. What was in them."""
        steps: list[Step] = []
        for queue in self._order:
            steps += queue.steps  # in one go: other threads may append meanwhile
            queue.steps.clear()
        self.others.clear()
        return steps
