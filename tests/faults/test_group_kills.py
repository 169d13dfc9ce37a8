"""kill -9 anywhere in a group: whoever lives is told, gets right answers or named errors, and is
whole again; nothing stays.
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from shard import ClosedError, PeerLostError, RestartPolicy, ShardGroup, failpoints
from tests.faults import group_load
from tests.faults.group_application import (
    HANG_S,
    SHARDS,
    WAIT_S,
    Ended,
    Round,
    count_hits_of_a_shard,
    fail_to_start,
    live_and_count,
    live_through,
)
from tests.faults.rounds import HIT_MAX, ROUNDS, Census, points_of
from tests.faults.zygote import EXIT_BROKEN, Arm, Life, Zygote

TOLD_S_MAX = 10.0  # far above what is printed: a machine may be busy
POINTS = points_of("mesh", "group")
BENEATH = points_of("ring", "lease", "connection", "slab")


# -- books -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def books() -> Iterator[Ended]:
    """What all rounds of the module came to, printed after the last."""
    books = Ended()
    yield books
    if books.told_s:
        told_ms = sorted(1e3 * each for each in books.told_s)
        p99 = told_ms[min(len(told_ms) - 1, len(told_ms) * 99 // 100)]
        print(
            f"\n{len(books.killed)} killed at {len(set(books.killed))} failpoints; "
            f"calls {dict(books.calls)}\n"
            f"told {len(told_ms)} times after {statistics.median(told_ms):.2f} ms p50, "
            f"{p99:.2f} p99, {max(told_ms):.2f} max"
        )


@pytest.fixture(scope="module")
def hits(zygote_of_module: Zygote) -> dict[str, Census]:
    """What an application and a shard of its pass in one undisturbed life."""
    application = run(zygote_of_module, live_and_count, Round(2))
    assert application.exit_code == 0
    shard = run(zygote_of_module, count_hits_of_a_shard)
    assert shard.exit_code == 0
    return {"application": application.life.reported(), "shard": shard.life.reported()}


# A shard passes these after its last answer, or once before its first: no shard can report that.
OUTSIDE_ALL_CALLS = ("group.started", "group.draining", "group.before_flush", "group.before_exit")


def points_of_a_shard(hits: dict[str, Census], points: list[str]) -> list[str]:
    """Where one may die that is up."""
    return [name for name in points if hits["shard"][name] or name in OUTSIDE_ALL_CALLS[1:]]


def hit_of(census: Census, name: str, chance: random.Random) -> int:
    """One that is passed, as far as one life tells."""
    return chance.randint(1, max(1, min(HIT_MAX, census[name])))


# -- processes -------------------------------------------------------------------------------------


def members(pgid: int) -> list[int]:
    """Processes of a process group that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_for_all(pgid: int) -> None:
    """Until no process of that group runs, its leader's children and theirs. Raises AssertionError,
    and kills them then.
    """
    deadline = time.monotonic() + WAIT_S
    while left := members(pgid):
        if time.monotonic() >= deadline:
            os.killpg(pgid, signal.SIGKILL)
            raise AssertionError(f"processes {left} outlive the application {pgid}")
        poll = select.poll()
        fds = []
        for pid in left:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * WAIT_S)
        for fd in fds:
            os.close(fd)


@dataclass(frozen=True)
class Gone:
    """An application that was."""

    exit_code: int | None
    life: Life
    gone_s: float  # from its end to that of the last process it had started


def run(
    zygote: Zygote,
    function: Callable[..., object],
    *args: Any,
    arm: Arm | None = None,
    rounds: int = 1,
) -> Gone:
    """An application from birth to death, and nothing of it is left."""
    victim = zygote.start(function, *args, arm=arm)
    dead_at_s = gone_at_s = 0.0
    try:
        victim.wait(rounds * HANG_S)
        dead_at_s = time.monotonic()
    except AssertionError as error:
        raise AssertionError(f"{error}: {function.__name__}{args}, armed {arm}") from error
    finally:
        wait_for_all(victim.pid)
        gone_at_s = time.monotonic()
    assert victim.exit_code in (0, -signal.SIGKILL), (
        f"{function.__name__}{args}, armed {arm}, ended with {victim.exit_code} in round "
        f"{victim.life.done}; "
        f"{EXIT_BROKEN}: its traceback is on stderr"
    )
    assert not [name for name in os.listdir("/dev/shm") if f".{victim.pid}." in name]
    return Gone(victim.exit_code, victim.life, gone_at_s - dead_at_s)


def survive(zygote: Zygote, plan: list[Round], books: Ended) -> Ended:
    """One application that lives through all rounds."""
    ended: Ended = run(zygote, live_through, plan, rounds=len(plan)).life.reported()
    books.killed += ended.killed
    books.told_s += ended.told_s
    books.calls += ended.calls
    print(f"{len(plan)} rounds, {len(ended.killed)} killed: {dict(Counter(ended.killed))}")
    assert max(ended.told_s, default=0.0) < TOLD_S_MAX
    return ended


# -- shards die ------------------------------------------------------------------------------------


def plan_of(
    hits: dict[str, Census], seed: int, count: int, victims: int = 1, loss_first: bool = False
) -> list[Round]:
    """Every point of mesh and group in its turn, at its first hit; then any, and those beneath
    them, at any hit.
    """
    chance = random.Random(f"{seed} {victims} {loss_first}")
    points = points_of_a_shard(hits, POINTS)
    anything = points + points_of_a_shard(hits, BENEATH)
    chance.shuffle(points)
    # first where losses come first
    points.sort(key=lambda name: not loss_first or name != "group.handed_over")
    plan = []
    for number in range(count):
        arms = []
        for order, shard in enumerate(chance.sample(range(SHARDS), victims)):
            first = number < len(points) and not order
            name = points[number] if first else chance.choice(anything)
            arms.append((shard, name, 1 if first else hit_of(hits["shard"], name, chance)))
        # Only the lane to a restarted shard is handed over, and only SIGTERM drains.
        needed = {name for _, name, _ in arms} & {"group.handed_over", "group.draining"}
        plan.append(
            Round(
                chance.getrandbits(32),
                tuple(arms),
                restarts=bool(needed) or loss_first or number % 2 == 0,
                loss_first=loss_first,
                terminates=bool(needed) or chance.random() < 0.5,
            )
        )
    return plan


@pytest.mark.slow
def test_every_point_is_passed_by_an_application_or_a_shard(hits: dict[str, Census]) -> None:
    missed = [name for name in POINTS if not hits["application"][name] and not hits["shard"][name]]
    assert set(missed) <= set(OUTSIDE_ALL_CALLS), (
        "nobody gets there: give the life of a group a step that does"
    )


@pytest.mark.slow
def test_a_shard_that_dies_is_missed_and_replaced_and_takes_nothing_along(
    zygote: Zygote, hits: dict[str, Census], books: Ended, seed: int
) -> None:
    points = points_of_a_shard(hits, POINTS)
    ended = survive(zygote, plan_of(hits, seed, max(len(points) + 4, ROUNDS // 2)), books)
    assert set(points) <= set(ended.killed), (
        "a failpoint at which nobody died: the test shows nothing there"
    )
    assert ended.told_s


def test_two_shards_that_die_at_once_are_both_missed_and_replaced(
    zygote: Zygote, hits: dict[str, Census], books: Ended, seed: int
) -> None:
    ended = survive(zygote, plan_of(hits, seed, max(4, ROUNDS // 10), victims=2), books)
    assert ended.killed


@pytest.mark.slow
def test_a_shard_dies_while_another_one_is_started_again(
    zygote: Zygote, hits: dict[str, Census], books: Ended, seed: int
) -> None:
    ended = survive(zygote, plan_of(hits, seed, max(6, ROUNDS // 10), loss_first=True), books)
    assert ended.killed


@pytest.mark.parametrize("name", ["group.started", "mesh.before_run"])
def test_shards_that_die_as_they_start_make_the_start_fail_and_leave_nothing(
    name: str, zygote: Zygote
) -> None:
    victim = run(zygote, fail_to_start, f"{name}=kill9")
    assert "killed by SIGKILL" in victim.life.reported()


@pytest.mark.slow
def test_a_shard_that_dies_as_it_is_started_again_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "armed")
    with ShardGroup(2, pin=False, restart=RestartPolicy("on-failure", restarts_max=1000)) as group:
        lives = group.statistics().shards
        doomed = group.submit_to(1, group_load.hold)
        monkeypatch.setenv(failpoints.VARIABLE, "group.started=kill9")
        os.kill(lives[1].pid, signal.SIGKILL)
        assert isinstance(doomed.error(WAIT_S), PeerLostError)
        deadline = time.monotonic() + WAIT_S
        while (now := group.statistics().shards[1]).incarnation < 3 and (
            now.incarnation,
            now.state,
        ) != (2, "waiting"):
            assert group.submit_to(0, os.getpid).result(WAIT_S) == lives[0].pid
            assert time.monotonic() < deadline, "its second incarnation does not die"
        monkeypatch.setenv(failpoints.VARIABLE, "armed")
        group.wait_up(2 * WAIT_S)
        assert group.statistics().shards[1].incarnation >= 3
        assert group.submit_to(1, group_load.load, 1, 1).result(WAIT_S)[0].keys() == {"right"}
        assert group.submit_to(0, group_load.load, 1, 1).result(WAIT_S)[1].keys() == {"right"}


# -- the application dies --------------------------------------------------------------------------


def applications_die(
    zygote: Zygote, hits: dict[str, Census], chance: random.Random, count: int, with_a_shard: bool
) -> Counter[str]:
    """Where they died: at every point of mesh and group in its turn, then at any, and those beneath
    them.
    """
    points = [name for name in POINTS if hits["application"][name]]
    anything = points + [name for name in BENEATH if hits["application"][name]]
    shards_points = points_of_a_shard(hits, POINTS + BENEATH)
    chance.shuffle(points)
    killed: Counter[str] = Counter()
    gone_s = []
    for number in range(count):
        first = number < len(points)
        name = points[number] if first else chance.choice(anything)
        arm = (
            name,
            "kill9",
            1 if first and number % 2 else hit_of(hits["application"], name, chance),
        )
        arms = []
        if with_a_shard:
            theirs = chance.choice(shards_points)
            arms = [(chance.randrange(SHARDS), theirs, hit_of(hits["shard"], theirs, chance))]
        victim = run(zygote, live_and_count, Round(chance.getrandbits(32), tuple(arms)), arm=arm)
        if victim.exit_code:
            killed[name] += 1
            gone_s.append(victim.gone_s)
    print(f"{count} rounds, {killed.total()} killed: {dict(killed)}")
    assert killed, "nobody died: the test shows nothing"
    print(
        f"all its processes gone after {statistics.median(gone_s) * 1e3:.0f} ms (p50), "
        f"{max(gone_s) * 1e3:.0f} ms (max): "
        "shards, forkserver and resource tracker, a look at all processes included"
    )
    return killed


@pytest.mark.slow
def test_an_application_that_dies_takes_all_its_shards_along(
    zygote: Zygote, hits: dict[str, Census], seed: int
) -> None:
    points = [name for name in POINTS if hits["application"][name]]
    killed = applications_die(
        zygote, hits, random.Random(seed), max(len(points) + 2, ROUNDS // 5), with_a_shard=False
    )
    assert len(set(points) - killed.keys()) < len(points) // 2, "nobody died at most of the points"


@pytest.mark.slow
def test_an_application_and_a_shard_that_die_leave_nothing(
    zygote: Zygote, hits: dict[str, Census], seed: int
) -> None:
    applications_die(zygote, hits, random.Random(seed + 1), max(3, ROUNDS // 12), with_a_shard=True)


# -- a shard stands still --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mesh.before_run", "mesh.after_answer", "ring.after_payload"])
def test_callers_of_a_stopped_shard_give_up_in_time_and_it_goes_on_with_nothing_lost(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "armed")
    with ShardGroup(2, pin=False) as group:
        pid = group.statistics().shards[1].pid
        group.submit_to(1, failpoints.arm, name, "stop", 3)
        calls = [group.submit_to(1, group_load.make, number, 20_000) for number in range(20)]
        others = group.submit_to(0, group_load.load, 1, 4)
        wait_until_stopped(pid)
        with pytest.raises(TimeoutError):
            calls[-1].result(0.01)
        with pytest.raises(TimeoutError):
            others.result(0.01)
        assert group.submit_to(0, group_load.echo, "alive").result(WAIT_S) == "alive"
        os.kill(pid, signal.SIGCONT)
        for number, call in enumerate(calls):
            assert group_load.is_right(call.result(WAIT_S), group_load.pattern(number, 20_000))
        assert others.result(WAIT_S)[1].keys() == {"right"}


@pytest.mark.slow
def test_closing_a_group_with_a_stopped_shard_ends_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "armed")
    with ShardGroup(2, pin=False, drain_s=0.1) as group:
        pids = [each.pid for each in group.statistics().shards]
        group.submit_to(1, failpoints.arm, "mesh.before_run", "stop").result(WAIT_S)
        call = group.submit_to(1, os.getpid)
        wait_until_stopped(pids[1])
    assert call.done()
    # whether its end is seen before our own lane is closed
    with pytest.raises((PeerLostError, ClosedError)):
        call.result()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def wait_until_stopped(pid: int) -> None:
    """For a child of ours. Raises AssertionError when it ends, and when it never stops."""
    deadline = time.monotonic() + WAIT_S
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"{pid} does not stop"
        os.sched_yield()
