"""An application with a group of shards that is made to live through deaths, in a process of its
own: a child of the zygote.

    start    the group, with something to run at_start(); every lane is used once
    load     every process calls every other, arrays are lent all ways; calls that do not end by
             themselves watch for deaths
    loss     one shard that nobody armed is killed from outside: the others are handed lanes to its
             next incarnation
    load     as before
    whole    all are up again, or stay down as asked; every lane works; every block and descriptor
             is back
    SIGTERM  to shards that were armed and still live, which drain, where the round has it
    close    no process is left

Shards are armed before the first load, in any of the phases they may die. The application itself is
armed when it is forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shard import (
    ClosedError,
    Future,
    PeerLostError,
    RestartPolicy,
    ShardError,
    ShardGroup,
    failpoints,
)
from shard.memory import slab
from tests.faults import group_load
from tests.faults.group_load import DeathClock, Outcomes
from tests.faults.zygote import Life
from tests.program import wait_until

SHARDS = 3  # one dies, one may be started again meanwhile, one looks on
BURSTS = 3  # a phase
CALLS = 4  # of each process to each other, in one burst
WAIT_S = 30.0  # means that it hangs
LOOK_S = 0.05  # between two looks whether a call has come to the wrong incarnation
HANG_S = 120.0  # of one round; then the stacks of all threads are printed and the process ends
TOKEN = 4711
RESTART = RestartPolicy("on-failure", restarts_max=20, backoff_s=0.01, backoff_s_max=0.05)
NEVER = RestartPolicy("never")


@dataclass(frozen=True)
class Round:
    """One group's life. Its text is what a failure says of it."""

    seed: int
    arms: tuple[tuple[int, str, int], ...] = ()  # shard, failpoint, hit
    restarts: bool = True
    # the loss comes before the first load: armed shards die while another one is started again
    loss_first: bool = False
    # shards that were armed and still live get SIGTERM in place of close()'s STOP
    terminates: bool = False


@dataclass
class Ended:
    """What became of a round."""

    killed: list[str] = field(default_factory=list)  # failpoints that somebody died at
    # from a death at a failpoint to the end of a call that watched for it
    told_s: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)


class Application:
    """One round under way. Owns its group and clocks."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.ended = Ended()
        self._chance = random.Random(round_.seed)
        self.may_be_lost: set[int] = {shard for shard, _, _ in round_.arms}
        self._clocks = {shard: DeathClock() for shard, _, _ in round_.arms}
        self._watches: list[tuple[int, Future, Future]] = []  # of whom, by us; and by another shard
        self._told: dict[int, float] = {}
        slab.SEGMENT_BYTES_FIRST = group_load.SEGMENT_BYTES_FIRST
        self.group = ShardGroup(
            SHARDS,
            pin=False,
            restart=RESTART if round_.restarts else NEVER,
            start_method="forkserver",
        )

    # -- the phases --------------------------------------------------------------------------------

    def live(self) -> Ended:
        """All phases. Raises AssertionError for whatever does not hold."""
        with contextlib.ExitStack() as undo:
            for clock in self._clocks.values():
                undo.callback(clock.close)
            undo.callback(self.group.close)
            self.start()
            pids = {each.index: each.pid for each in self.group.statistics().shards}
            with pidfds(pids) as are_dead:
                fds = self._holdings()
                for shard, name, nth in self.round.arms:
                    self._submit_and_wait(
                        shard, group_load.arm_to_die, name, nth, self._clocks[shard].path
                    )
                self._watch()
                if self.round.loss_first:
                    self._lose(pids, are_dead)
                self.load()
                if not self.round.loss_first:
                    self._lose(pids, are_dead)
                    self.load()
                died = [shard for shard, _, _ in self.round.arms if are_dead[shard](0.0)]
                self._be_told(died)
                self._be_whole(fds, died)
                self._terminate(pids, are_dead)
                self.group.close()
                self._count_deaths(are_dead)
            for each in self.group.statistics().shards:
                assert not os.path.exists(f"/proc/{each.pid}"), self._what(
                    f"shard {each.index} outlives close()"
                )
        return self.ended

    def start(self) -> None:
        self.group.at_start(group_load.set_up, TOKEN)
        self._burst(range(SHARDS), may_be_lost=set())

    def _watch(self) -> None:
        """Calls in flight to each victim, from us and from the other shards;
        and from it to them.
        """
        for victim in self._clocks:
            # where it was armed lies on the way of this call
            with contextlib.suppress(PeerLostError):
                ours = self.group.submit_to(victim, group_load.hold)
                ours.when_done(partial(self._note_told, victim))
                for other in set(range(SHARDS)) - {victim}:
                    self.group.submit_to(victim, group_load.watch, other)
                    if other not in self._clocks:
                        self._watches.append(
                            (victim, ours, self.group.submit_to(other, group_load.watch, victim))
                        )

    def _note_told(self, victim: int, _: Future) -> None:
        self._told[victim] = time.monotonic()

    def load(self) -> None:
        for _ in range(BURSTS):
            self._burst(range(SHARDS), self.may_be_lost)

    def _lose(self, pids: dict[int, int], are_dead: dict[int, Callable[[float], bool]]) -> None:
        """kill -9 from outside, to a shard that may live for all we know."""
        lost = self._chance.choice(
            [shard for shard in range(SHARDS) if shard not in self._clocks] or [0]
        )
        self.may_be_lost.add(lost)
        os.kill(pids[lost], signal.SIGKILL)
        assert are_dead[lost](WAIT_S), self._what(f"shard {lost} does not die")
        if self.round.restarts and not self.round.loss_first:
            self.wait_up()

    def wait_up(self) -> None:
        """One that dies while another is started makes it wait for both."""
        try:
            self.group.wait_up(WAIT_S)
        except TimeoutError as error:
            raise AssertionError(self._what(str(error))) from error

    def _be_told(self, died: list[int]) -> None:
        for victim, ours, theirs in self._watches:
            if victim not in died:
                continue
            dead_at_s = self._clocks[victim].died_at_s()
            self._wait_for_end(victim, ours)
            error = ours.error()
            if error is not None:
                assert isinstance(error, PeerLostError), self._what(
                    f"a call to shard {victim} ended with {error!r}"
                )
                wait_until(
                    lambda victim=victim: victim in self._told, ("the callback of that call")
                )  # type: ignore[misc]
                self.ended.told_s.append(self._told[victim] - dead_at_s)
            self._wait_for_end(victim, theirs)
            try:
                name, told_at_s = theirs.result()
            except PeerLostError:
                continue  # that shard was lost, too
            if name != "released":
                assert name == "PeerLostError", self._what(
                    f"a shard's call to shard {victim} ended with {name}"
                )
                self.ended.told_s.append(told_at_s - dead_at_s)

    def _wait_for_end(self, victim: int, watch: Future) -> None:
        """Of a watch() or hold() for a victim that is dead. Whoever lacked a core before it called
        may have come to the next incarnation: release() ends that, and no call to the dead."""
        deadline = time.monotonic() + WAIT_S
        while not watch.done():
            assert time.monotonic() < deadline, self._what(
                f"a call to shard {victim}, which is dead, hangs"
            )
            with contextlib.suppress(TimeoutError):
                watch.error(LOOK_S)
            with contextlib.suppress(PeerLostError):
                self.group.submit_to(victim, group_load.release)

    def _be_whole(self, fds: list[int], died: list[int]) -> None:
        """Every lane between those who live works, and nothing of the dead is left with them."""
        living = set(range(SHARDS))
        if self.round.restarts:
            self.wait_up()
        else:
            living = {each.index for each in self.group.statistics().shards if each.alive}
            for victim in died:
                try:
                    self.group.submit_to(victim, os.getpid)
                except PeerLostError:
                    continue
                raise AssertionError(self._what(f"shard {victim} is down and takes calls"))
        # Who is armed and has not died yet may still do so; it holds watches, which hold no blocks.
        at_rest = not (self._clocks.keys() - set(died))
        self._burst(living, self.may_be_lost if not at_rest else set(range(SHARDS)) - living)
        if not at_rest:
            return
        for shard in living:
            self.group.submit_to(shard, group_load.release).result(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while True:
            gc.collect()
            selves = {
                shard: self.group.submit_to(shard, group_load.about_me).result(WAIT_S)
                for shard in living
            }
            blocks = {shard: each.blocks_used for shard, each in selves.items() if each.blocks_used}
            ours = self.group.slab.statistics().blocks_used
            now = [self._fds(), *(each.fds for each in selves.values())]
            more = (
                [(one, other) for one, other in zip(fds, now, strict=False) if other > one]
                if self.round.restarts
                else []
            )
            if not blocks and not ours and not more:
                break
            assert time.monotonic() < deadline, self._what(
                f"blocks used {blocks}, {ours} of ours; descriptors {fds} -> {now}"
            )
        assert all(each.token == TOKEN for each in selves.values()), self._what(
            "a shard is up and was not set up"
        )

    def _terminate(
        self, pids: dict[int, int], are_dead: dict[int, Callable[[float], bool]]
    ) -> None:
        """SIGTERM to shards that were armed and have not got there."""
        for shard in range(SHARDS):
            with contextlib.suppress(PeerLostError):
                self.group.submit_to(shard, group_load.release).error(WAIT_S)
        if self.round.terminates:
            for shard in [shard for shard in self._clocks if not are_dead[shard](0.0)]:
                with contextlib.suppress(ProcessLookupError):  # it has just got there
                    os.kill(pids[shard], signal.SIGTERM)
                assert are_dead[shard](WAIT_S), self._what(f"shard {shard} does not end by SIGTERM")

    def _count_deaths(self, are_dead: dict[int, Callable[[float], bool]]) -> None:
        for shard, name, _ in self.round.arms:
            assert are_dead[shard](0.0), self._what(f"shard {shard} outlives close()")
            if self._clocks[shard].has_struck():
                self.ended.killed.append(name)

    # -- calls -------------------------------------------------------------------------------------

    def _burst(self, shards: Iterable[int], may_be_lost: set[int]) -> None:
        """Everybody calls everybody, and each call ends well unless one of its two ends may be
        lost.
        """
        asked: list[tuple[int, Future, Any]] = []
        uncalled = set(range(SHARDS)) - set(shards)  # because they are down
        for shard in shards:
            for number in range(CALLS):
                try:
                    if not number:
                        asked.append(
                            (
                                shard,
                                self.group.submit_to(
                                    shard, group_load.load, self._chance.getrandbits(32), CALLS
                                ),
                                None,
                            )
                        )
                    asked.append(
                        (
                            shard,
                            *group_load.ask(
                                self.group.submit_to, shard, self._chance, self.group.slab
                            ),
                        )
                    )
                except PeerLostError as error:
                    self._count(shard, {shard: Counter([type(error).__name__])}, may_be_lost)
        while asked:
            shard, future, expected = asked.pop()
            try:
                value = future.result(WAIT_S)
            except TimeoutError:
                raise AssertionError(self._what(f"a call to shard {shard} hangs")) from None
            except (PeerLostError, ClosedError) as error:
                self._count(shard, {shard: Counter([type(error).__name__])}, may_be_lost)
            else:
                if expected is None:
                    self._count(shard, value, may_be_lost | uncalled)
                else:
                    right = group_load.is_right(value, expected)
                    self._count(
                        shard, {shard: Counter(["right" if right else "wrong"])}, may_be_lost
                    )

    def _count(self, shard: int, outcomes: Outcomes, may_be_lost: set[int]) -> None:
        for other, counter in outcomes.items():
            self.ended.calls += counter
            allowed = {"right", "PeerLostError"} if {shard, other} & may_be_lost else {"right"}
            assert counter.keys() <= allowed, self._what(
                f"calls to shard {other}, of {shard} or ours: {dict(counter)}"
            )

    def _submit_and_wait(self, shard: int, function: Callable[..., Any], *args: Any) -> None:
        """For what may be the death of it."""
        try:
            self.group.submit_to(shard, function, *args).result(WAIT_S)
        except PeerLostError:
            assert shard in self.may_be_lost, self._what(f"shard {shard} is lost")

    def _fds(self) -> int:
        return group_load.count_fds(self.group.slab, self.group._lanes.values())

    def _holdings(self) -> list[int]:
        """Descriptors of the application and the shards."""
        selves = self.group.map(group_load.about_me, timeout_s=WAIT_S)
        return [self._fds(), *(each.fds for each in selves)]

    def _what(self, text: str) -> str:
        return f"{text}; in {self.round}"


@contextlib.contextmanager
def pidfds(pids: dict[int, int]) -> Iterator[dict[int, Callable[[float], bool]]]:
    """Whether each of these processes has ended, within so many seconds."""
    fds = {index: os.pidfd_open(pid) for index, pid in pids.items()}

    def is_dead(fd: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    try:
        yield {index: partial(is_dead, fd) for index, fd in fds.items()}
    finally:
        for fd in fds.values():
            os.close(fd)


# -- processes -------------------------------------------------------------------------------------


def live_through(life: Life, plan: list[Round]) -> Ended:
    """A process that survives every round; what became of them all. life.done says how many it has
    done.
    """
    os.setpgid(0, 0)
    whole = Ended()
    fds = 0
    for round_ in plan:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        ended = Application(round_).live()
        whole.killed += ended.killed
        whole.told_s += ended.told_s
        whole.calls += ended.calls
        life.done += 1
        gc.collect()
        now = group_load.count_fds()
        assert now <= (fds or now), f"{now} descriptors, {fds} before; after {round_}"
        fds = fds or now
    faulthandler.cancel_dump_traceback_later()
    return whole


def live_and_count(life: Life, round_: Round) -> None:
    """A process that may be armed itself, with shards that may be; it reports how often it passed
    each failpoint.
    """
    os.setpgid(0, 0)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    life.sign()
    Application(round_).live()
    faulthandler.cancel_dump_traceback_later()


def count_hits_of_a_shard(life: Life) -> dict[str, int]:
    """An undisturbed process; how often one of its shards passed each failpoint in two loads and
    the loss of another between.
    """
    os.setpgid(0, 0)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    application = Application(Round(1))
    with application.group:
        application.start()
        pids = {each.index: each.pid for each in application.group.statistics().shards}
        before = application.group.submit_to(2, group_load.all_hits).result(WAIT_S)
        application.load()
        # before: later it might come to the next incarnation
        doomed = application.group.submit_to(0, group_load.hold)
        os.kill(pids[0], signal.SIGKILL)
        assert isinstance(doomed.error(WAIT_S), PeerLostError)
        application.may_be_lost.add(0)
        application.wait_up()
        application.load()
        after = application.group.submit_to(2, group_load.all_hits).result(WAIT_S)
    faulthandler.cancel_dump_traceback_later()
    return {name: after[name] - before[name] for name in after}


def fail_to_start(life: Life, setting: str) -> str:
    """A process whose shards all die at one failpoint while they start; what it is told."""
    os.setpgid(0, 0)
    os.environ[failpoints.VARIABLE] = setting
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    fds = group_load.count_fds()
    try:
        with ShardGroup(SHARDS, pin=False, start_method="spawn"):
            raise AssertionError("the group started")
    except ShardError as error:
        told = str(error)
    gc.collect()
    assert group_load.count_fds() <= fds + FDS_OF_MULTIPROCESS
    faulthandler.cancel_dump_traceback_later()
    return told


FDS_OF_MULTIPROCESS = 1  # the pipe to its resource tracker, started with the first process and kept
