"""A group of shards: one process per core, joined to each other and to the application by rings.

    application ──lane── shard 0 ──lane── shard 1 ...  every pair of processes has one lane (two
                                                       rings and a socket)

The application makes all sockets and rings and hands each process its own by descriptor: nothing
has a name that another process could attach to, and nothing is left behind when any of them dies.
What a shard does with its life is told in process.py, who starts and restarts it in supervisor.py.

close() ends a group in order, and each step begins when the one before has ended in all shards:

    step                                         has
    tasks of one process in another end          drain_s
    those that are left are cancelled, and end   clean_up_s
    at_close(): instances of Sharded are         what each of them allows
    stopped, those that were made last first
    shards are told to stop, and end             what is left of drain_s, clean_up_s at least, or
                                                 STOP_S_MIN where one has not ended its tasks
    what has not ended is killed, and named

So all that a task or a hook may call is there until these are over.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal

from shard.errors import BackpressureError, ClosedError, PeerLostError, ShardError
from shard.group import cpu, descriptors, process
from shard.group.group_calls import (
    NOTHING_TO_SET_UP,
    Setup,
    nothing,
    set_up,
    take_handovers,
)
from shard.group.group_end import Submit, end_tasks, tell_of_ends
from shard.group.group_statistics import GroupStatistics, ShardStatistics
from shard.group.keywords import WithKeywords
from shard.group.lane_handoff import LANE_LIMITS, InheritedFd, LaneEnd, make_lane
from shard.group.mesh import ShardChannel, Tally
from shard.group.payload import pickle_function
from shard.group.restart import NEVER, RestartPolicy
from shard.group.supervisor import Life, ShardState, Supervisor
from shard.group.trimming import Trimmer
from shard.loop.driver import CLOSE_TIMEOUT_S, Driver
from shard.loop.future import Future
from shard.loop.gate import Gate
from shard.loop.idle import polling_enabled, strategy
from shard.loop.stall import STALL_BUDGET_S
from shard.memory import memory_order
from shard.memory.counters import Counters, size_for
from shard.memory.limits import Limits
from shard.memory.segment import Segment
from shard.memory.slab import Slab
from shard.traces import traceback_of
from shard.transport import Traffic
from shard.transport.control_channel import HANDOVER

SHARDS_MAX = 256  # a lane per pair: 32,896 of them by then
DRAIN_S = 2.0  # for running functions and tasks to return, then the shard is killed
EXIT_CODE_TIMEOUT_S = 0.1  # a killed shard's socket ends a moment before it has an exit code
POLLING_VARIABLE = "PRPC_ENABLE_POLLING"
assert SHARDS_MAX <= 1 << process.INDEX_BITS

logger = logging.getLogger("shard")
# by id; valuerefs() takes one step
_open_groups: weakref.WeakValueDictionary[int, ShardGroup] = weakref.WeakValueDictionary()


class ShardGroup:
    """`shards` processes and this one's lanes to them. A context manager; closing it stops the
    shards.

    shards          how many, or "auto": one for each physical core this process may use, less one
                    for itself
    polling         shards never sleep: lowest latency, a whole core each. None: as
                    PRPC_ENABLE_POLLING says, else off
    pin             each shard stays on one core; the application is left alone
    driver          who turns this process's side; one of its own when None
    restart         what becomes of a shard that dies: "never", "on-failure", or a RestartPolicy
    idle            what a shard does without work: "spin", "adaptive", "park". None: "spin" when
                    polling, else "adaptive"
    start_method    "spawn", or "forkserver": quicker from the second group on
    drain_s         how long close(), or a SIGTERM to a shard, lets work that has begun go on; then
                    tasks are cancelled
    clean_up_s      how long their `finally` blocks have before the kill
    stall_budget_s  a function that keeps a shard's reactor longer than this is named in the log,
                    with its stack
    on_change       on_change(index, state, text) when a shard died ("waiting" for its restart,
                    "gone") or is "up" again; called in a thread of the group's, which it must not
                    keep
    limits          of each lane: blocks_bytes_max is what one call or result may carry, ring_bytes
                    and outbox_* what may wait

    Like everything that starts processes by spawn, a script makes one under
    `if __name__ == "__main__":`. Raises ValueError for what is not possible, ShmFull, and
    ShardError when a shard does not start or the limit of open files is too low for so many.
    """

    def __init__(
        self,
        shards: int | Literal["auto"] = "auto",
        polling: bool | None = None,
        pin: bool = True,
        driver: Driver | None = None,
        *,
        restart: str | RestartPolicy = NEVER,
        idle: str | None = None,
        start_method: str = "spawn",
        drain_s: float = DRAIN_S,
        clean_up_s: float = process.CLEAN_UP_S,
        stall_budget_s: float = STALL_BUDGET_S,
        limits: Limits | None = None,
        on_change: Callable[[int, str, str], object] | None = None,
    ) -> None:
        self.closed = True  # until there is something to close
        process.require_no_shard()
        size = cpu.auto_shards() if shards == "auto" else shards
        if not isinstance(size, int) or not 1 <= size <= SHARDS_MAX:
            raise ValueError(
                f'a group of {shards!r} shards: 1 to {SHARDS_MAX} are possible, or "auto"'
            )
        if start_method not in ("spawn", "forkserver"):
            raise ValueError(
                f"start_method={start_method!r}: 'spawn' and 'forkserver' are possible; "
                "a fork would share our rings"
            )
        if polling is None:
            polling = polling_enabled(
                POLLING_VARIABLE, os.environ.get(POLLING_VARIABLE), default=False
            )
        if not 0.0 <= drain_s < math.inf:
            raise ValueError(f"drain_s={drain_s!r}: 0 or more seconds are possible")
        if not 0.0 <= clean_up_s < math.inf:
            raise ValueError(f"clean_up_s={clean_up_s!r}: 0 or more seconds are possible")
        if not stall_budget_s > 0.0:
            raise ValueError(f"stall_budget_s={stall_budget_s!r}: more than 0 seconds are possible")
        if not isinstance(limits := limits or LANE_LIMITS, Limits):
            raise TypeError(
                f"limits={limits!r:.100}: Limits are expected, such as Limits(blocks_bytes_max=1 "
                "<< 30)"
            )
        policy = restart if isinstance(restart, RestartPolicy) else RestartPolicy(restart)
        memory_order.require_store_order()
        with descriptors.named(size):
            descriptors.make_room(size, start_method)
        self.size = size
        self._idle = idle or ("spin" if polling else "adaptive")
        strategy(self._idle)  # here, and not in every shard, is where an unknown one is refused
        self._crowded = self._idle == "spin" and _warn_when_crowded(size + polling)
        self._cores = cpu.place(size) if pin else [None] * size
        self._drain_s, self._clean_up_s = drain_s, clean_up_s
        self._stall_budget_s = stall_budget_s
        self._limits = limits
        self._on_change = on_change
        self._context = _multiprocess().get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["shard.group.process"])
        _forget_a_main_without_file()
        self._pid = os.getpid()
        with descriptors.named(size), contextlib.ExitStack() as undo:
            self.driver = driver or Driver(polling, "prpc-group")
            self._owns_driver = driver is None
            if self._owns_driver:
                undo.callback(self.driver.close)
            self._counters_segment = Segment.create(size_for(size + 1))
            undo.callback(self._counters_segment.close)
            self._supervisor = Supervisor(size, policy, self._bear, self._on_ready, self._on_down)
            undo.pop_all()
        self.slab = Slab()  # this process's: an array made on it goes to a shard by reference
        Trimmer(self.slab, self.driver.reactor)
        self._tally = Tally()
        self._gate = Gate("the application", self.driver)
        self._counters = Counters.format(self._counters_segment.memory, size + 1)
        self._started = self.driver.reactor.clock()
        self._traffic_of_replaced = Traffic()
        self._lanes: dict[int, ShardChannel] = {}
        # of shards that are up
        self._submits: dict[int, Submit] = {}
        self._down: dict[int, str] = {}  # of those that are not: why
        self._setups: list[Setup] = []  # what every shard runs before it counts as up
        self._setups_done: dict[int, int] = {}
        self._at_close: list[Callable[[Mapping[int, Submit]], None]] = []
        self._changing = threading.Condition()  # around which shards are up, and the setups
        self._first_ends: list[dict[int, LaneEnd]] = [{} for _ in range(size)]
        self._started_all = False
        self.closed = False
        _open_groups[id(self)] = self
        try:
            with descriptors.named(size):
                self._supervisor.start()
            self._started_all = True
        except BaseException:
            self.close()
            raise

    # -- birth and death, in the supervisor's thread -----------------------------------------------

    def _bear(self, life: Life) -> tuple[Any, Callable[[], Future]]:
        """Start a shard: its process, and what asks it for its readiness."""
        index = life.index
        others = self._first_ends[index]
        ours, theirs = make_lane(life.incarnation, self._limits.ring_bytes)
        connection = ours.connect(
            f"shard {index} (incarnation {life.incarnation})", self.slab, self._limits
        )
        try:
            if life.incarnation > 1:
                self._join_to_living(life, others)
            else:
                self._join_to_unborn(index)
            lane = ShardChannel(
                connection,
                self.driver.reactor,
                self.driver,
                self.slab,
                self._tally,
                self._gate,
                nothing,
                partial(self._lane_lost, index, life.incarnation),
            )
            # failpoint: group.before_spawn
            birth = self._birth(life, theirs, others)
            child = self._context.Process(
                target=process.main, name=f"prpc-shard-{index}", args=(birth,), daemon=True
            )
            child.start()
            # Not for its exit handler: in a fork of this process, that would take our shards for
            # its own and end them.
            sys.modules["multiprocess"].process._children.discard(child)
            # failpoint: group.after_spawn
        except BaseException:
            connection.close()
            raise
        finally:
            for end in (theirs, *others.values()):
                end.close()
            others.clear()
        # failpoint: group.before_attach
        with self._changing:
            if index in self._lanes:
                self._traffic_of_replaced += self._lanes[index].connection.traffic()
            self._lanes[index] = lane
        if self.closed:  # close() may have told all to stop before this one was there
            lane.stop()
        self.driver.reactor.call_soon(lane.attach)
        setups = list(self._setups)
        self._setups_done[index] = len(setups)
        return child, partial(lane.submit, set_up, (setups,))

    def _birth(self, life: Life, application: LaneEnd, others: dict[int, LaneEnd]) -> process.Birth:
        return process.Birth(
            index=life.index,
            size=self.size,
            incarnation=life.incarnation,
            core=self._cores[life.index],
            cores=cpu.usable_cores(),
            idle=self._idle,
            oversubscribed=self._crowded,
            drain_s=self._drain_s,
            clean_up_s=self._clean_up_s,
            stall_budget_s=self._stall_budget_s,
            limits=self._limits,
            counters_fd=InheritedFd(self._counters_segment.fd),
            application=application,
            others=others,
        )

    def _join_to_unborn(self, index: int) -> None:
        """Lanes to the shards that are started after it. Not all at once: their ends are
        descriptors that wait here.
        """
        for later in range(index + 1, self.size):
            self._first_ends[index][later], self._first_ends[later][index] = make_lane(
                1, self._limits.ring_bytes
            )

    def _join_to_living(self, newborn: Life, ends: dict[int, LaneEnd]) -> None:
        """Lanes to all shards that live, whose ends they are handed; `ends` takes the newborn's."""
        for life in self._supervisor.lives:
            if life.process is None or life is newborn:
                continue
            ours, theirs = make_lane(newborn.incarnation, self._limits.ring_bytes)
            lane = self._lanes[life.index]
            try:
                # failpoint: group.before_handover
                number = newborn.index | newborn.incarnation << process.INDEX_BITS
                lane.connection.notes.hand_over(HANDOVER, number, theirs.fds())
            except PeerLostError:  # it is dying: its own restart will join the two
                ours.close()
            else:
                ends[life.index] = ours
                # failpoint: group.after_handover
                # it is dying, or has too much to do to be asked for more
                with contextlib.suppress(ShardError):
                    lane.submit(take_handovers, ())
            finally:
                theirs.close()

    def _on_ready(self, index: int) -> Future | None:
        """A shard ran its setups and is up; or, when more were asked for meanwhile, the future of
        its running those.
        """
        # failpoint: group.before_up
        lane = self._lanes[index]
        with self._changing:
            missed = self._setups[self._setups_done[index] :]
            if not missed:
                self._down.pop(index, None)
                is_open = not self.closed
                if is_open:
                    self._submits[index] = lane.submit
                self._changing.notify_all()
            else:
                self._setups_done[index] += len(missed)
        if missed:
            return lane.submit(set_up, (missed,))
        life = self._supervisor.lives[index]
        if is_open and life.incarnation > 1:
            text = f"shard {index} (pid {life.pid}, incarnation {life.incarnation}) is up again"
            logger.warning("%s", text)
            self._tell(index, "up", text)
        return None

    def _on_down(self, index: int, text: str) -> None:
        # failpoint: group.before_down
        with self._changing:
            self._submits.pop(index, None)
            self._down[index] = text
            self._changing.notify_all()
        life = self._supervisor.lives[index]
        if not self.closed and life.incarnation and self._started_all:
            self._tell(index, life.state.value, text)

    def _tell(self, index: int, state: str, text: str) -> None:
        try:
            if self._on_change is not None:
                self._on_change(index, state, text)
        except Exception:
            logger.exception("on_change raised when it was told: %s", text)

    def _lane_lost(
        self, index: int, incarnation: int, lane: ShardChannel, error: ShardError
    ) -> None:
        """In the reactor's thread, when a shard died or hung up."""
        if self._lanes.get(index) is lane and not self.closed:
            self._submits.pop(index, None)
            self._supervisor.lane_lost(index, incarnation)

    # -- use ---------------------------------------------------------------------------------------

    def submit_to(
        self, index: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Future:
        """Run function(*args, **keywords) in shard `index`; a coroutine function runs there as a
        task.

        Raises PeerLostError while that shard is down, ClosedError after close(), ValueError for an
        index out of range, BackpressureError when too much waits for that shard
        (submit_when_room() waits then), ForkedError in a fork.
        """
        if keywords:
            function, args = WithKeywords(function), (args, keywords)
        submit = self._submits.get(index)
        if submit is None:
            raise self._no_shard(index)
        return submit(function, args)

    def submit_when_room(
        self, index: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Future:
        """As submit_to(), and blocks while too much waits for that shard: the future of the result
        once the call is on its way. Raises PeerLostError, ClosedError, ValueError, ForkedError.
        """
        while True:
            try:
                return self.submit_to(index, function, *args, **keywords)
            except BackpressureError:
                self._lanes[index].room().result()

    def _no_shard(self, index: int) -> Exception:
        if self.closed:
            return ClosedError("this group was closed here")
        if not isinstance(index, int) or not 0 <= index < self.size:
            return ValueError(
                f"there is no shard {index!r:.100}: this group has shards 0 to {self.size - 1}"
            )
        with self._changing:
            self._changing.wait_for(lambda: index in self._down, EXIT_CODE_TIMEOUT_S)
        return PeerLostError(self._down.get(index, f"shard {index} is not up"))

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this group was closed here")

    def map(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """function(*args, **keywords) in every shard at once; the results in order of index. Raises
        the first error.
        """
        futures = [self.submit_to(index, function, *args, **keywords) for index in range(self.size)]
        return [future.result(timeout_s) for future in futures]

    def at_start(
        self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> None:
        """Run function(*args) in every shard: now, and in one that is restarted before it takes
        calls; a coroutine function to its end. Raises the first error, TimeoutError with the shard
        when it has not ended in all of them after `timeout_s` seconds; then it does not run in
        those either."""
        setup = (pickle_function(function), args)
        with self._changing:
            self._check_open()
            self._setups.append(setup)
            up = dict(self._submits)
        try:
            futures = {index: submit(function, args) for index, submit in sorted(up.items())}
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for index, future in futures.items():
                rest_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    future.error(rest_s)
                except TimeoutError:
                    raise TimeoutError(
                        f"shard {index} has not answered within {timeout_s:g} s"
                    ) from None
                future.result()
        except BaseException:
            with self._changing:
                self._setups = [NOTHING_TO_SET_UP if one is setup else one for one in self._setups]
            raise

    def not_at_start(
        self, function: Callable[..., Any], *first: Any, undo: Callable[..., Any] | None = None
    ) -> None:
        """Take back what at_start() runs: function with arguments that begin so; who starts with it
        runs undo(*first).
        """
        pickled = pickle_function(function)
        with self._changing:
            self._setups = [
                (one, args) if one != pickled or args[: len(first)] != first else NOTHING_TO_SET_UP
                for one, args in self._setups
            ]
            if undo is not None and len(self._submits) < self.size:
                self._setups.append((pickle_function(undo), first))

    def at_close(self, run: Callable[[Mapping[int, Submit]], None]) -> None:
        """Have close() call run(submits) once no shard has tasks of another, the last one first.
        submits: for each shard that answers, what submits function(*args) to it. Raises
        ClosedError.
        """
        with self._changing:
            self._check_open()
            self._at_close.append(run)

    def not_at_close(self, run: Callable[[Mapping[int, Submit]], None]) -> None:
        """Take back what at_close() was given; nothing to do when it is not there."""
        with self._changing, contextlib.suppress(ValueError):
            self._at_close.remove(run)

    def wait_up(self, timeout_s: float) -> None:
        """Wait until every shard is up, restarted ones too. Raises PeerLostError for one that stays
        down, TimeoutError, and ClosedError, also when it is closed meanwhile."""
        deadline = time.monotonic() + timeout_s

        def decided() -> bool | Literal["gone"]:
            lives = self._supervisor.lives
            # and the reason is there
            if any(life.state is ShardState.GONE and life.index in self._down for life in lives):
                return "gone"
            return self.closed or len(self._submits) == self.size

        with self._changing:
            if not (
                found := self._changing.wait_for(decided, max(0.0, deadline - time.monotonic()))
            ):
                down = "; ".join(self._down.values()) or "they are starting"
                raise TimeoutError(f"not all shards were up within {timeout_s} s: {down}")
            self._check_open()
            if found == "gone":
                raise PeerLostError("; ".join(self._down.values()))

    def statistics(self) -> GroupStatistics:
        """A snapshot; reads shared memory and disturbs nobody."""
        with self._changing:
            lanes, replaced = list(self._lanes.values()), self._traffic_of_replaced
        traffic = sum((lane.connection.traffic() for lane in lanes), replaced)
        held = sum(lane.connection.leases_held for lane in lanes)
        application = process.figures(
            0, self._started, 0, self.driver.reactor, self._tally, None, traffic, self.slab, held
        )
        self._counters.write(self.size, application, self._tally.call_ns, self._tally.run_ns)
        shards = tuple(
            ShardStatistics(
                index=life.index,
                pid=life.pid,
                core=self._cores[life.index],
                alive=life.index in self._submits,
                state=life.state.value,
                incarnation=life.incarnation,
                exit_code=life.exit_code,
                counters=self._counters.read(life.index),
                classes=self._counters.classes(life.index),
            )
            for life in self._supervisor.lives
        )
        return GroupStatistics(shards, application, sum(lane.in_flight for lane in lanes))

    def latency_ns(self, index: int | None = None) -> tuple[int, ...]:
        """Sampled calls made by shard `index`, or by the application, by log2 of their round trip
        (counters.quantile_ns).
        """
        if index is None:
            return tuple(self._tally.call_ns)
        return self._counters.call_ns(index)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all shards. Their tasks have drain_s to end, are cancelled then, and clean_up_s to
        clean up; instances of a Sharded that is still open are stopped after that. What does not
        end in time is killed, and the log says so. A second close, or one in a fork, does nothing.
        """
        # first: another thread may have held the lock when we were forked
        if self._pid != os.getpid():
            return
        with self._changing:  # two threads may come at once
            if self.closed:
                return
            self.closed = True
            self._changing.notify_all()
        deadline = time.monotonic() + self._drain_s
        submits, self._submits = self._submits, {}
        left: dict[int, str] = {}
        try:
            left = end_tasks(submits, self._drain_s, self._clean_up_s)
            self._run_at_close({index: submits[index] for index in submits.keys() - left})
        finally:  # Ctrl-C may come out of these waits
            self._end(deadline, left)

    def _run_at_close(self, submits: Mapping[int, Submit]) -> None:
        while True:
            with self._changing:
                if not self._at_close:
                    return
                run = self._at_close.pop()
            try:
                run(submits)
            except Exception as error:
                # as a text: a record that is kept would keep the group through the frames
                logger.error("what runs at the close of a group failed: %s", traceback_of(error))

    def _end(self, deadline: float, left: Mapping[int, str]) -> None:
        """Have all shards end, and let go of everything. left: what is known of those that have
        not ended their tasks.
        """
        # those that do not answer will not end either
        least_s = process.STOP_S_MIN if left else self._clean_up_s
        # before the first can have ended
        self._supervisor.expect_ends(max(least_s, deadline - time.monotonic()))
        # failpoint: group.before_stop
        for lane in list(self._lanes.values()):
            with contextlib.suppress(ShardError):
                lane.stop()
        # failpoint: group.after_stop
        self._supervisor.stop(max(least_s, deadline - time.monotonic()))
        tell_of_ends(self._supervisor.lives, left)
        for ends in self._first_ends:  # of shards that were never started
            for end in ends.values():
                end.close()
        closed = Future(self.driver)
        if not self.driver.closing:
            self.driver.reactor.call_soon(partial(self._close_lanes, closed))
            # the driver was closed at this very moment, or a callback keeps its reactor
            with contextlib.suppress(ClosedError, TimeoutError):
                closed.result(CLOSE_TIMEOUT_S)
        if not closed.done():  # nobody turns the reactor
            self._close_lanes(closed)
        self._supervisor.close()
        if self._owns_driver:
            self.driver.close()
        self._counters_segment.close()
        self.slab.close()
        _open_groups.pop(id(self), None)

    def _close_lanes(self, closed: Future) -> None:
        # failpoint: group.before_close
        for lane in self._lanes.values():
            lane.close()
        closed.set_result(None)

    def __enter__(self) -> ShardGroup:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def the_open_group() -> ShardGroup:
    """The one group that is open in this process. Raises ValueError when there is none, or more
    than one.
    """
    groups = [
        group
        for ref in _open_groups.valuerefs()
        if (group := ref()) is not None and not group.closed
    ]
    if len(groups) != 1:
        if not groups:
            raise ValueError("no group is open in this process: make a ShardGroup first")
        raise ValueError(f"{len(groups)} groups are open in this process: say which one by group=")
    return groups[0]


@atexit.register
def _close_all() -> None:
    """The interpreter ends: shards must not find a half-dead parent."""
    for group in list(_open_groups.values()):
        group.close()


def _end_restarts() -> None:
    for group in list(_open_groups.values()):
        group._supervisor.end_restarts()


def _multiprocess() -> Any:
    """The package, imported when it is needed: it brings dill, which only shards need. Its own
    atexit function runs before _close_all() and removes the fork server's socket, after which no
    process can be started. _end_restarts() therefore runs before that function.
    """
    try:
        import multiprocess
        import multiprocess.util
    except FileNotFoundError as error:
        # dill looks for a folder for temporary files, and writes to it, when it is imported
        raise ShardError(
            f"shards cannot be started without a folder for temporary files ({error.strerror}): "
            "set TMPDIR to a folder in which a file can be written (room on its disk, and "
            "`ulimit -f` above 0)"
        ) from error
    atexit.unregister(_end_restarts)
    atexit.register(_end_restarts)  # after multiprocess has, so that it runs before
    return multiprocess


def _forget_a_main_without_file() -> None:
    """`python -` calls its script the file "<stdin>": shards would look for it, to import it as
    their own main module.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__


_crowding_told = False


def _warn_when_crowded(pollers: int) -> bool:
    """Whether more processes poll than cores can run; said once."""
    global _crowding_told
    warning = cpu.oversubscribed(pollers)
    if warning is not None and not _crowding_told:
        _crowding_told = True
        logger.warning("%s", warning)
    return warning is not None
