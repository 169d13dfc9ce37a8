"""The thread of a group that starts its shards, sees them die, starts them again, and sees to it
that they end.

    state     event                               next
    starting  it answered that it is ready        up
    starting  it died, or START_TIMEOUT_S passed  down; killed first when it is alive
    up        it died                             down
    up        its lane ended                      down; killed first when it is alive END_TIMEOUT_S
                                                  later
    down      the restart policy gives a delay    waiting, for so long
    down      the policy gives none               gone
    waiting   the time has come                   starting, with the next incarnation
    waiting   the same, as the interpreter ends   gone: no process can be started any more
    any       stop()                              gone, by the deadline: first asked, then killed

One thread does it all because a shard dies with the thread that started it (PR_SET_PDEATHSIG is per
thread), so that must live as long as the shards. The initial start is of all shards at once, with
one deadline.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shard.errors import PeerLostError, ShardError
from shard.group.restart import FORGIVEN_S, RestartPolicy, ending
from shard.loop.future import Future

# for all to import, map and answer; python and numpy alone take 0.3 s a shard
START_TIMEOUT_S = 60.0
# from the end of its lane to that of its process: python itself takes 50 ms to end
END_TIMEOUT_S = 1.0
AFTER_BUG_S = 0.1  # so that a bug fills no disk with its traces
WAIT_S_MAX = 1.0  # for clocks to be looked at now and then, should a wake-up be missed

logger = logging.getLogger("shard")


class ShardState(enum.Enum):
    """A shard state says whether one shard runs, or is to run again.

    STARTING: its process runs, and is not ready yet. UP: it answers. WAITING: it died, and is to be
    started again. GONE: it has no process, and none is to come. Events: the table at the file's
    head.
    """

    STARTING = "starting"
    UP = "up"
    WAITING = "waiting"
    GONE = "gone"


@dataclass
class Life:
    """What the supervisor knows of one shard. Written by its thread alone."""

    index: int
    state: ShardState = ShardState.GONE
    incarnation: int = 0
    restarts: int = 0  # in a row
    process: Any = None
    pid: int = 0  # of the process, or the last one
    # STARTING: when it must be up; WAITING: when it is started again; UP: since when
    due: float = 0.0
    exit_code: int | None = None  # of the last process that ended
    ready: Future | None = None
    end_by: float | None = None  # its lane ended, and so must the process
    overdue: bool = False  # killed, as it had not ended when stop() said
    error: BaseException | None = None  # why it is not up


class Supervisor:
    """A supervisor starts a group's shards, sees them die, starts them again, and ends them.

    Owned by the group, which says how a shard is born and is told when one is up or down. It has a
    thread of its own; start(), lane_lost() and stop() are called from others. size: how many
    shards. policy: when one that died is started again. start() raises what went wrong with the
    first shard that is not up. States: the table at the file's head.
    """

    def __init__(
        self,
        size: int,
        policy: RestartPolicy,
        start: Callable[[Life], tuple[Any, Callable[[], Future]]],
        on_ready: Callable[[int], Future | None],
        on_down: Callable[[int, str], None],
    ) -> None:
        """start(life) starts the process and gives it and what asks for a future of its readiness;
        on_ready(index) says that this is done, and gives None when the shard is up now, or what to
        wait for yet; on_down(index, text) says what happened and what will. All of them are called
        in the supervisor's thread."""
        self.lives = [Life(index) for index in range(size)]
        self._policy = policy
        self._start_one = start
        self._on_ready = on_ready
        self._on_down = on_down
        self._stop_by: float | None = None
        self._may_restart = True
        self._ended: set[tuple[int, int]] = set()  # (index, incarnation) whose lane ended
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._first_start = threading.Event()  # for who makes the group, in another thread
        self._first_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prpc-supervisor", daemon=True)

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start all shards and wait until they are up. Raises what went wrong with the first that
        is not.
        """
        self._thread.start()
        self._first_start.wait()
        if self._first_error is not None:
            raise self._first_error

    def lane_lost(self, index: int, incarnation: int) -> None:
        """The application's lane to that shard ended: it is dead, or of no use."""
        self._ended.add((index, incarnation))
        self._wake()

    def expect_ends(self, timeout_s: float) -> None:
        """Shards are about to be asked to end: none that does is news from now on, or started
        again. After `timeout_s` seconds they are killed."""
        self._stop_by = time.monotonic() + timeout_s

    def end_restarts(self) -> None:
        """The interpreter ends, and can soon start no process any more."""
        self._may_restart = False

    def stop(self, timeout_s: float) -> None:
        """Wait until all shards have ended, which somebody has asked them to; after `timeout_s`
        seconds they are killed.
        """
        self.expect_ends(timeout_s)
        if self._thread.ident is not None:
            self._wake()
            self._thread.join()

    def close(self) -> None:
        """After stop(), once no future that this waited for can be completed any more: it would
        write into the pipe.
        """
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _wake(self, _: Future | None = None) -> None:
        try:
            os.write(self._wake_w, b"\0")
        except BlockingIOError:
            return  # so full that it will wake

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start_all()
        except BaseException as error:
            self._first_error = error
        finally:
            self._first_start.set()
        while not self._is_over():
            try:
                self._wait()
                self._look(time.monotonic())
            except Exception:
                # a bug of ours: said, and survived, because the shards die with this thread
                logger.exception("the supervisor failed; it goes on")
                time.sleep(AFTER_BUG_S)

    def _start_all(self) -> None:
        due = time.monotonic() + START_TIMEOUT_S
        for life in self.lives:
            self._begin(life, due)
        while any(life.state is ShardState.STARTING for life in self.lives):
            if self._stop_by is not None:
                return
            self._wait()
            self._look(time.monotonic())
        for life in self.lives:
            if life.state is not ShardState.UP and life.error is not None:
                raise life.error

    def _begin(self, life: Life, due: float) -> None:
        life.incarnation += 1
        life.error = life.end_by = None
        life.state = ShardState.STARTING
        life.due = due
        life.process, ask = self._start_one(life)
        life.pid = life.process.pid
        self._ask(life, ask)

    def _ask(self, life: Life, ask: Callable[[], Future | None]) -> None:
        """Set what to wait for; what asking raises ends that wait, as the process is there and must
        be waited for, too.
        """
        try:
            life.ready = ask()
        except Exception as error:  # it has just died, or what it is to run cannot be sent
            life.ready = Future()
            life.ready.set_error(error)
        if life.ready is not None:
            life.ready.when_done(self._wake)

    def _wait(self) -> None:
        now = time.monotonic()
        times = [
            life.due
            for life in self.lives
            if life.state in (ShardState.STARTING, ShardState.WAITING)
        ]
        times += [
            life.end_by
            for life in self.lives
            if life.end_by is not None and life.process is not None
        ]
        if self._stop_by is not None:
            times = [self._stop_by]
        timeout_s = min([WAIT_S_MAX, *(max(0.0, due - now) for due in times)])
        alive = [life.process.sentinel for life in self.lives if life.process is not None]
        # here: it brings dill, which nobody needs without shards
        from multiprocess.connection import wait

        wait([self._wake_r, *alive], timeout_s)
        try:
            os.read(self._wake_r, 4096)
        except BlockingIOError:
            return

    def _look(self, now: float) -> None:
        """Take every shard through the table at the top."""
        stopping = self._stop_by is not None
        for life in self.lives:
            if life.process is not None:
                self._look_at_process(life, now)
            elif life.state is ShardState.WAITING and (stopping or now >= life.due):
                if stopping:
                    life.state = ShardState.GONE
                elif self._may_restart:
                    self._restart(life, now)
                else:
                    self._stay_down(life)

    def _look_at_process(self, life: Life, now: float) -> None:
        ready = life.ready
        if (life.index, life.incarnation) in self._ended:
            self._ended.discard((life.index, life.incarnation))
            life.end_by = now + END_TIMEOUT_S
        if not life.process.is_alive():
            self._down(life, now)
        elif self._stop_by is not None:
            if now >= self._stop_by:
                life.overdue = True
                life.process.kill()
        elif life.end_by is not None:
            if now >= life.end_by:
                life.process.kill()  # of no use, and perhaps stopped or stuck
        elif life.state is ShardState.STARTING and now >= life.due:
            life.process.kill()
            if life.error is None:
                life.error = ShardError(
                    f"shard {life.index} (pid {life.process.pid}) did not start within "
                    f"{START_TIMEOUT_S} s: it was killed"
                )
        elif life.state is ShardState.STARTING and ready is not None and ready.done():
            error = ready.error()
            if isinstance(error, PeerLostError):  # it is dying, and how it ended will say more
                life.end_by = now + END_TIMEOUT_S
            elif error is None:
                # before anybody who waits for that is told
                due, life.state, life.due = life.due, ShardState.UP, now
                self._ask(life, partial(self._on_ready, life.index))
                if life.ready is not None:
                    life.state, life.due = ShardState.STARTING, due
            else:
                life.error = error
                life.process.kill()

    def _down(self, life: Life, now: float) -> None:
        process, life.process = life.process, None
        process.join()
        if life.ready is not None:  # the end of its lane may be seen after close()
            life.ready.remove_done_callback(self._wake)
        life.exit_code = process.exitcode
        if life.state is ShardState.UP and now - life.due >= FORGIVEN_S:
            life.restarts = 0
        what = (
            f"shard {life.index} (pid {process.pid}, incarnation {life.incarnation}) is gone: "
            f"{ending(life.exit_code)}"
        )
        if life.state is ShardState.STARTING and life.error is not None:
            what += f", because it could not start: {life.error}"
        first_start = not self._first_start.is_set()
        delay_s = (
            None
            if self._stop_by or first_start
            else self._policy.delay_s(life.exit_code, life.restarts)
        )
        outlook = (
            "the group could not start" + _hint(life)
            if first_start
            else self._policy.outlook(life.exit_code, life.restarts)
        )
        process.close()
        if life.error is None:
            life.error = ShardError(f"{what}; {outlook}")
        if delay_s is None:
            life.state = ShardState.GONE
        else:
            life.state, life.due = ShardState.WAITING, now + delay_s
        # else whoever closes the group, or fails to start it, knows
        if self._stop_by is None and not first_start:
            is_lost = delay_s is None and life.exit_code != 0
            logger.log(logging.ERROR if is_lost else logging.WARNING, "%s; %s", what, outlook)
        self._on_down(life.index, f"{what}; {outlook}")

    def _stay_down(self, life: Life) -> None:
        life.state = ShardState.GONE
        self._on_down(life.index, f"shard {life.index} is not started again: the interpreter ends")

    def _restart(self, life: Life, now: float) -> None:
        life.restarts += 1
        try:
            self._begin(life, now + START_TIMEOUT_S)
        except Exception as error:  # no memory, no descriptors: the next try may find some
            life.error = error
            if not self._may_restart:
                self._stay_down(life)
                return
            delay_s = self._policy.delay_s(None, life.restarts)
            outlook = self._policy.outlook(None, life.restarts)
            logger.exception("shard %d could not be started; %s", life.index, outlook)
            if delay_s is None:
                life.state = ShardState.GONE
            else:
                life.state, life.due = ShardState.WAITING, now + delay_s
            self._on_down(
                life.index, f"shard {life.index} could not be started: {error}; {outlook}"
            )

    def _is_over(self) -> bool:
        over = self._stop_by is not None and all(life.process is None for life in self.lives)
        # the next look says that they are gone
        return over and all(life.state is not ShardState.WAITING for life in self.lives)


def _hint(life: Life) -> str:
    """What to try where a shard ended by itself before it was a shard: each imports the script."""
    if life.state is not ShardState.STARTING or life.error is not None or not life.exit_code:
        return ""
    if life.exit_code < 0:  # by a signal
        return ""
    return (
        "; its own error is on standard error. Each shard imports the script that starts it, so "
        'that script does its work under `if __name__ == "__main__":`'
    )
