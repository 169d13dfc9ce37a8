"""Groups of a world size, one after the other at the same address: all come, call each other, and
leave by shutdown(), which is a barrier (docs/guides/remote.md).

    operation          promise                                    how it is checked
    init_rpc()         returns once all have come; all are        who has called it; the names that
                        known then                                 get_worker_infos() tells
    a call             is answered, whoever waits in shutdown()   the answer, by number, of all
                        meanwhile, however deep it goes            calls of those whose shutdown()
                                                                   returned; where connections are
                                                                   lost some may have failed
    shutdown()         returns once all that live have called     who has called it; when functions
                        it, and no call is under way               ran last, of that group
    a function that    does not run where only exposed ones do:   NotAllowed; runs, by number
     is not exposed     NotAllowed
    a worker killed    is waited for no more; as its name comes   liveness
                        again it is of the next group
    liveness           all groups come and go                     within END_S
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

from prpc_engine import errors, remote
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from shard import sleep as pause
from tests.simulation.jobs import (
    LEASE_S,
    MASTER_PORT,
    SECRET,
    Deadlines,
    in_threads,
    run_to_the_end,
)

WORKERS, THREADS, GROUPS = 3, 2, 3
NAMES = tuple(f"worker{number}" for number in range(WORKERS))
ACTS_S, CALL_S, INIT_S, SHUTDOWN_S = 0.5, 10.0, 60.0, 40.0
LIVES_S = LEASE_S + CALL_S  # until those that have died are missed, and calls to them over
UNTIL_S = 3.0
END_S = UNTIL_S + 120.0
DEPTH_MAX = 8
LATE_CALLS = 4  # that a worker has under way as it calls shutdown()
DELAYS = Rates(cut=0.0, reset=0.0, kill=0.0, crash=0.0, stop=0.3, slow=0.5, clock=0.2, drift=0.2)
KILLS = Rates(cut=0.0, reset=0.5, kill=0.6, crash=0.0, stop=0.2, slow=0.3, clock=0.2, drift=0.1)
LOSSES = Rates(cut=0.3, reset=1.0, kill=0.0, crash=0.0, stop=0.3, slow=0.3, clock=0.2, drift=0.1)


class Group:
    """What is known of one outside of all processes."""

    def __init__(self) -> None:
        self.came: set[str] = set()
        self.leaves: set[str] = set()  # who has called shutdown()
        self.first_left_s = float("inf")
        self.last_ran_s = 0.0


class Worlds:
    """The groups, and what ran in them."""

    def __init__(self, simulation: Simulation, may_fail: bool) -> None:
        self.simulation, self.may_fail = simulation, may_fail
        self.groups: dict[int, Group] = defaultdict(Group)
        self.ran: Counter[int] = Counter()
        self.numbers = 0
        self.deadlines = Deadlines(simulation)
        self.wrong: list[str] = []
        self.last: set[str] = set()  # who was in a group that began after the faults
        draw = simulation.scheduler.stream("world").random
        self.only_exposed = {name for name in NAMES if draw() < 0.5}


class Here:
    """What one process knows of itself, for the functions that others have it run."""

    def __init__(self, worlds: Worlds, process: Process) -> None:
        self.worlds, self.process = worlds, process
        self.number = 0  # of its group
        self.futures: list[tuple[int, Any]] = []

    @property
    def group(self) -> Group:
        return self.worlds.groups[self.number]

    def choose(self, among: Any) -> Any:
        """One of them."""
        return among[int(self.process.chance.random() * len(among))]

    def ran(self, number: int) -> int:
        """A function with that number."""
        self.worlds.ran[number] += 1
        self.group.last_ran_s = self.worlds.simulation.now
        return number


def here() -> Here:
    """Of the process that asks."""
    found: Here = runtime.own("world", dict)
    return found


@remote.expose
def work(number: int, lasts_s: float) -> int:
    """Blocks for so long."""
    runtime.sleep(lasts_s)
    return here().ran(number)


@remote.expose
async def work_later(number: int, lasts_s: float) -> int:
    """The same, as a coroutine."""
    await pause(lasts_s)
    return here().ran(number)


@remote.expose
def work_deep(number: int, depth: int, lasts_s: float) -> int:
    """Has others do it before, so deep; and one of them goes on, for nobody waits."""
    ours = here()
    runtime.sleep(lasts_s)
    if depth:
        inner = ours.worlds.numbers = ours.worlds.numbers + 1
        args = (inner, depth - 1, lasts_s)
        future = remote.rpc_async(ours.choose(NAMES), work_deep, args, timeout=CALL_S)
        if ours.process.chance.random() < 0.3:
            assert future.wait() == inner
        else:
            ours.futures.append((inner, future))
    return ours.ran(number)


def hidden(number: int) -> int:
    """Nobody has exposed it."""
    return here().ran(number)


class Member:
    """One process, in one group after the other."""

    def __init__(self, worlds: Worlds, process: Process) -> None:
        self.worlds, self.process, self.simulation = worlds, process, worlds.simulation
        self.rank = NAMES.index(process.name)
        self.draw = process.chance.random

    def run(self) -> None:
        ours = Here(self.worlds, self.process)
        runtime.put("world", ours)
        try:
            for number in range(GROUPS):
                ours.number, ours.futures = number, []
                self.be_in_a_group(ours)
                runtime.sleep(0.2 * self.draw())
        finally:
            remote.shutdown(graceful=False)

    def be_in_a_group(self, ours: Here) -> None:
        group, name = ours.group, self.process.name
        group.came.add(name)
        self.join()
        self.expect(group.came == set(NAMES), f"came before {set(NAMES) - group.came}")
        told = sorted(info.name for info in remote.get_worker_infos())
        self.expect(told == sorted(NAMES) or bool(group.leaves), f"is told of {told}")
        until_s = self.simulation.now + ACTS_S * self.draw()
        in_threads([partial(self.act, ours, until_s) for _ in range(THREADS)])
        for _ in range(LATE_CALLS):
            self.begin_call(ours)
        group.leaves.add(name)
        with self.worlds.deadlines.watch(f"shutdown() of {name}", SHUTDOWN_S):
            remote.shutdown(timeout=SHUTDOWN_S)
        group.first_left_s = min(group.first_left_s, self.simulation.now)
        self.expect(group.leaves == set(NAMES), f"left before {set(NAMES) - group.leaves}")
        for number, future in ours.futures:
            self.expect(future.done(), f"call {number} is under way after shutdown()")
            self.settle(number, future)

    def join(self) -> None:
        at = f"tcp://{self.simulation.host(NAMES[0]).address}:{MASTER_PORT}"
        config = NodeConfig.load(secret=SECRET, bind=self.process.bind, lease_s=LEASE_S, shards=0)
        options = remote.Options(
            config=config,
            init_timeout_s=INIT_S,
            rpc_timeout=CALL_S,
            lease_s=LEASE_S,
            only_exposed=self.process.name in self.worlds.only_exposed,
        )
        with self.worlds.deadlines.watch(f"init_rpc() of {self.process.name}", INIT_S):
            remote.init_rpc(self.process.name, self.rank, WORKERS, at, options)

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.worlds.wrong.append(f"{self.process.name} at {self.simulation.now:.3f}: {text}")

    # -- what a thread does ------------------------------------------------------------------------

    def act(self, ours: Here, until_s: float) -> None:
        while self.simulation.now < until_s:
            if self.draw() < 0.2:
                self.call_hidden(ours)
            else:
                number, future = self.begin_call(ours)
                if self.draw() < 0.7:
                    self.settle(number, future)
            runtime.sleep(0.1 * self.draw())

    def begin_call(self, ours: Here) -> tuple[int, Any]:
        self.worlds.numbers += 1
        number, lasts_s = self.worlds.numbers, 0.1 * self.draw() ** 3
        to, function = ours.choose(NAMES), ours.choose((work, work_later, work_deep, work_deep))
        depth = (int(DEPTH_MAX * self.draw()),) if function is work_deep else ()
        future = remote.rpc_async(to, function, (number, *depth, lasts_s), timeout=CALL_S)
        ours.futures.append((number, future))
        return number, future

    def settle(self, number: int, future: Any) -> None:
        try:
            found = future.wait()
        except errors.RpcError as error:
            self.expect(self.worlds.may_fail, f"call {number}: {error!r}")
        else:
            self.expect(found == number, f"call {number} was answered {found}")

    def call_hidden(self, ours: Here) -> None:
        self.worlds.numbers += 1
        number, to = self.worlds.numbers, ours.choose(NAMES)
        is_refused = {to, self.process.name} & self.worlds.only_exposed
        try:
            remote.rpc_sync(to, hidden, (number,), timeout=CALL_S)
        except errors.NotAllowed:
            self.expect(bool(is_refused), f"hidden {number} of {to} was refused")
            self.expect(not self.worlds.ran[number], f"hidden {number} ran, and was refused")
        except errors.RpcError as error:
            self.expect(self.worlds.may_fail, f"hidden {number}: {error!r}")
        else:
            self.expect(to not in self.worlds.only_exposed, f"hidden {number} ran in {to}")


class Mortal(Member):
    """It may be killed, and is in the next group then: which one that is nobody knows here. Of what
    is promised that no others die is not asked.
    """

    def run(self) -> None:
        runtime.put("world", Here(self.worlds, self.process))
        try:
            while not self.worlds.last.issuperset(NAMES):
                self.be_in_one()
                runtime.sleep(0.2 * self.draw())
        finally:
            remote.shutdown(graceful=False)

    def be_in_one(self) -> None:
        ours, is_last = here(), self.simulation.now >= UNTIL_S + LEASE_S
        ours.futures = []
        try:
            self.join()
        except errors.RpcError as error:  # the rank of the one before is not free yet, say
            self.simulation.note(f"{self.process.name}: {error!r}")
            return
        in_threads([partial(self.begin_call, ours) for _ in range(THREADS)])
        with self.worlds.deadlines.watch(f"shutdown() of {self.process.name}", LIVES_S):
            remote.shutdown(timeout=SHUTDOWN_S)
        for number, future in ours.futures:
            self.settle(number, future)
        if is_last:
            self.worlds.last.add(self.process.name)


def _run(simulation: Simulation, rates: Rates, may_fail: bool) -> None:
    worlds = Worlds(simulation, may_fail)
    for name in NAMES:
        simulation.process(name, lambda process: Member(worlds, process).run(), host=name)
    simulation.let_loose(rates, UNTIL_S, (), lasts_s=0.5)
    members = [simulation.processes[name] for name in NAMES]
    try:
        run_to_the_end(simulation, members, END_S)
    finally:
        assert not worlds.wrong, worlds.wrong
    assert not worlds.deadlines.late, worlds.deadlines.late
    for number, group in worlds.groups.items():
        late_s = group.last_ran_s - group.first_left_s
        assert late_s <= 0, f"a function of group {number} ran {late_s:.6f} s after one had left"
    assert max(worlds.ran.values()) == 1, "some have run twice"


def worlds_with_kills(simulation: Simulation) -> None:
    """Workers but rank 0, which has the master, are killed, and come again."""
    worlds = Worlds(simulation, may_fail=True)
    for name in NAMES:
        simulation.process(name, lambda process: Mortal(worlds, process).run(), host=name)
    simulation.let_loose(KILLS, UNTIL_S, NAMES[1:], lasts_s=0.5)
    try:
        ended = simulation.run(lambda: worlds.last.issuperset(NAMES), END_S)
    finally:
        assert not worlds.wrong, worlds.wrong
    assert ended, f"only {sorted(worlds.last)} were in a group after the faults"
    assert not worlds.deadlines.late, worlds.deadlines.late


def worlds(simulation: Simulation) -> None:
    """Nothing is lost, but late: no call fails."""
    _run(simulation, DELAYS, may_fail=False)


def worlds_with_losses(simulation: Simulation) -> None:
    """Connections are lost."""
    _run(simulation, LOSSES, may_fail=True)
