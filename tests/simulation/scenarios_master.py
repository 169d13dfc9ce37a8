"""The master under faults, killed and started again with its journal (docstrings of MasterClient);
when its host crashes, what it did not sync is lost.

operation     what it promises                                     how it is checked
lock          one holder at a time: who releases it with success   no other acquire returned before
              held it until then                                   that release began
tokens        larger than that of any holder before                an acquire that begins after
                                                                   another returned has a larger one
fencing       a writer that lost the lock unaware is fenced off    a resource that takes growing
                                                                   tokens takes each write of a
                                                                   holder that releases with success
generate_id   never twice; larger than any before                  as tokens
count_up      never twice                                          all answers
barrier       opens for a member when `count` members have come    all have begun that round by then
tree          get, set, add, del, children: linearizable; what     linearizability.py; unknown:
              ended with NotSent or was refused did nothing        MaybeExecuted, DeadlineExceeded
any verb      ends by its deadline; one that waits at the          virtual time
              master has ANSWER_S more for the answer
at the end    once the faults are over, all verbs succeed          the last round of each scenario
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import MasterClient, errors
from prpc_engine.master.protocol import ANSWER_S
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import (
    LEASE_S,
    SLACK_S,
    Deadlines,
    begin_client,
    begin_master,
    in_threads,
    journal_folder,
    run_to_the_end,
)
from tests.simulation.linearizability import UNKNOWN, Model, Operation, linearization

TIMEOUT_S = 3.0
UNTIL_S = 6.0  # of the nemesis
# After the faults: for leases of who is gone to end, and for connections to be made again.
SETTLE_S = 2 * LEASE_S + 0.5
CONNECT_S = 30.0
FAULTS = Rates(cut=0.5, reset=0.7, kill=0.3, crash=0.3, stop=0.3, slow=0.2, clock=0.2, drift=0.5)
# A clock that is set back is what tokens need a journal for.
FAULTS_WITHOUT_JOURNAL = Rates(cut=0.5, reset=0.7, kill=0.5, crash=0, stop=0.3, slow=0.2, clock=0)
BOUND_S = CONNECT_S + UNTIL_S + SETTLE_S
RELEASES_MAX = 20  # tries to give a lock back


def settle(simulation: Simulation) -> None:
    """Until the faults are over, and what they left behind."""
    runtime.sleep(max(0.0, UNTIL_S + SETTLE_S - simulation.now))


# -- locks and ids ---------------------------------------------------------------------------------


@dataclass
class Hold:
    """One time that a client held the lock."""

    client: str
    token: int
    asked_s: float  # when it began to acquire it
    acquired_s: float
    releases_s: float = UNKNOWN  # when it began to give it back
    was_released: bool = False  # with success
    was_taken: bool = False  # its write, by the resource

    def __str__(self) -> str:
        return (
            f"{self.client} with token {self.token}, {self.asked_s:.6f} {self.acquired_s:.6f} "
            f"{self.releases_s:.6f} {self.was_released}"
        )


def locks(simulation: Simulation, keeps: bool = True) -> None:
    """Three clients, one of them with two threads, that hold a lock for a while; and ids."""
    rounds = 5
    deadlines = Deadlines(simulation)
    holds: list[Hold] = []
    last: list[str] = []  # who held it once the faults were over
    ids: list[tuple[float, float, int]] = []  # begun, ended, id
    counted: Counter[int] = Counter()
    resource = [0]  # the largest token that it was written with

    def hold(client: MasterClient, name: str, timeout_s: float, is_last: bool = False) -> None:
        asked_s = simulation.now
        try:
            with deadlines.watch(f"acquire_lock of {name}", timeout_s + ANSWER_S):
                token = client.acquire_lock("lock", timeout_s)
        except errors.RpcError:
            if is_last:
                raise
            return
        one = Hold(name, token, asked_s, simulation.now)
        holds.append(one)
        runtime.sleep(0.2 * runtime.random())
        if token > resource[0]:
            resource[0], one.was_taken = token, True
        one.releases_s = simulation.now
        for _ in range(RELEASES_MAX):  # what is not given back is held as long as the session lasts
            try:
                with deadlines.watch(f"release_lock of {name}", timeout_s):
                    client.release_lock("lock", timeout_s)
            except errors.Rejected:  # it was lost
                assert not is_last, f"{name} lost the lock once the faults were over"
                return
            except errors.RpcError:
                continue
            one.was_released = True
            if is_last:
                last.append(name)
            return

    def work(client: MasterClient, name: str) -> None:
        for _ in range(rounds):
            hold(client, name, TIMEOUT_S)
            begun_s = simulation.now
            for ask in (client.generate_id, client.count_up):
                try:
                    with deadlines.watch(f"an id for {name}", TIMEOUT_S):
                        given = ask("id", TIMEOUT_S)
                except errors.RpcError:
                    continue
                if ask == client.generate_id:
                    ids.append((begun_s, simulation.now, given))
                else:
                    counted[given] += 1
            runtime.sleep(0.5 * runtime.random())

    def live(client: MasterClient, process: Process) -> None:
        threads = 2 if process.name == "client0" else 1
        in_threads([partial(work, client, f"{process.name}/{n}") for n in range(threads)])
        settle(simulation)
        hold(client, process.name, BOUND_S, is_last=True)

    with journal_folder() as folder:
        begin_master(simulation, folder if keeps else None)
        clients = [begin_client(simulation, f"client{number}", live) for number in range(3)]
        rates = FAULTS if keeps else FAULTS_WITHOUT_JOURNAL
        simulation.let_loose(rates, UNTIL_S, may_end=("master",))
        run_to_the_end(simulation, clients, 2 * BOUND_S + rounds * 4 * (TIMEOUT_S + SLACK_S))
    check_holds(holds)
    assert len(last) == len(clients), f"only {last} held the lock after the faults"
    check_growing([(one.asked_s, one.acquired_s, one.token) for one in holds], "tokens")
    check_growing(ids, "ids")
    if keeps:
        assert all(times == 1 for times in counted.values()), f"count_up: {counted}"
    assert not deadlines.late, deadlines.late


def locks_without_journal(simulation: Simulation) -> None:
    """A master that remembers nothing: its tokens and ids grow all the same."""
    locks(simulation, keeps=False)


def check_holds(holds: list[Hold]) -> None:
    """One holder at a time, as far as the lock says that it was held."""
    for one in holds:
        if not one.was_released:
            continue
        for other in holds:
            if other.token > one.token:
                assert other.acquired_s >= one.releases_s, f"two hold the lock: {one}; {other}"
        assert one.was_taken, f"the write of a holder was fenced off: {one}"


def check_growing(given: list[tuple[float, float, int]], what: str) -> None:
    """None is given twice; of two that did not overlap in time the later one is larger."""
    times = Counter(number for _, _, number in given)
    assert all(count == 1 for count in times.values()), f"{what} were given twice: {times}"
    for begun, _, number in given:
        for _, ended, before in given:
            if ended < begun:
                assert before < number, f"{what} do not grow: {before}, and later {number}"


# -- barriers --------------------------------------------------------------------------------------


def barriers(simulation: Simulation) -> None:
    """Three members that meet again and again; who is late or lost goes on with the next round."""
    members, rounds = 3, 7
    deadlines = Deadlines(simulation)
    come: dict[int, set[str]] = {number: set() for number in range(rounds + 1)}
    early: list[str] = []
    opened: Counter[int] = Counter()

    def meet(client: MasterClient, name: str, number: int, timeout_s: float) -> None:
        come[number].add(name)
        with deadlines.watch(f"barrier {number} of {name}", timeout_s + ANSWER_S):
            client.barrier(f"round {number}", members, timeout_s, member=name)
        opened[number] += 1
        if len(come[number]) < members:
            early.append(f"round {number} opened for {name}, and {come[number]} have come")

    def live(client: MasterClient, process: Process) -> None:
        for number in range(rounds):
            try:
                meet(client, process.name, number, 1.5)
            except errors.DeadlineExceeded:
                # once more: those who came too late may be there now
                try:
                    meet(client, process.name, number, 0.7)
                except errors.RpcError:
                    continue
            except errors.RpcError:
                continue
            runtime.sleep(0.5 * runtime.random())
        settle(simulation)
        meet(client, process.name, rounds, BOUND_S)

    with journal_folder() as folder:
        begin_master(simulation, folder)
        clients = [begin_client(simulation, f"member{number}", live) for number in range(members)]
        simulation.let_loose(FAULTS, UNTIL_S, may_end=("master",))
        run_to_the_end(simulation, clients, 2 * BOUND_S + rounds * 2 * (TIMEOUT_S + SLACK_S))
    assert not early, early
    assert opened[rounds] == members, f"the last one opened for {opened[rounds]}"
    assert not deadlines.late, deadlines.late


# -- the tree --------------------------------------------------------------------------------------

NAMES = ("a", "b")
Node = tuple[str, int] | None  # value and version


def tree_step(state: tuple[Node, ...], called: tuple[Any, ...]) -> tuple[Any, tuple[Node, ...]]:
    """The tree as its docstrings have it: below one node, those of NAMES."""
    verb, *arguments = called
    if verb == "sub":
        return tuple(n for n, node in zip(NAMES, state, strict=True) if node is not None), state
    at = NAMES.index(arguments[0])
    node = state[at]

    def changed(to: Node) -> tuple[Node, ...]:
        return (*state[:at], to, *state[at + 1 :])

    if verb == "add":
        if node is not None:
            return "NodeExists", state
        return "done", changed((arguments[1], 0))
    if node is None:
        return "NoSuchNode", state
    value, version = node
    if verb == "get":
        return (value, version), state
    expected = arguments[-1]
    if 0 <= expected != version:
        return "VersionMismatch", state
    if verb == "set":
        return version + 1, changed((arguments[1], version + 1))
    return "done", changed(None)


TREE: Model[tuple[Node, ...]] = Model((None,) * len(NAMES), tree_step)


def tree(simulation: Simulation) -> None:
    """Four clients that read and write two nodes."""
    count = 11
    deadlines = Deadlines(simulation)
    history: list[Operation] = []

    def ask(client: MasterClient, called: tuple[Any, ...]) -> Any:
        verb, *arguments = called
        if verb == "sub":
            return tuple(client.tree_node_sub("/at", TIMEOUT_S))
        path = f"/at/{arguments[0]}"
        if verb == "get":
            return tuple(client.tree_node_get(path, TIMEOUT_S)[:2])
        if verb == "set":
            return client.tree_node_set(path, arguments[1], arguments[2], TIMEOUT_S)
        if verb == "add":
            client.tree_node_add(path, arguments[1], timeout_s=TIMEOUT_S)
        else:
            client.tree_node_del(path, arguments[1], TIMEOUT_S)
        return "done"

    def draw(name: str, number: int) -> tuple[Any, ...]:
        at, chance = NAMES[int(runtime.random() * 2)], runtime.random()
        if chance < 0.3:
            return ("set", at, f"{name}.{number}", -1)
        if chance < 0.4:
            return ("set", at, f"{name}.{number}", int(4 * runtime.random()))
        if chance < 0.55:
            return ("add", at, f"{name}.{number}")
        if chance < 0.65:
            return ("del", at, -1)
        return ("sub",) if chance < 0.7 else ("get", at)

    def one(client: MasterClient, name: str, called: tuple[Any, ...]) -> None:
        begun, ended, answer = simulation.now, UNKNOWN, None
        with deadlines.watch(f"{called} of {name}", TIMEOUT_S):
            try:
                answer = ask(client, called)
                ended = simulation.now
            except (errors.NodeExists, errors.NoSuchNode, errors.VersionMismatch) as error:
                answer, ended = type(error).__name__, simulation.now
            except (errors.MaybeExecuted, errors.DeadlineExceeded):
                answer = None  # unknown
            except errors.NotSent:
                return
        history.append(Operation(name, called, answer, begun, ended))

    def live(client: MasterClient, process: Process) -> None:
        if process.name == "client0":
            client.tree_node_add("/at", timeout_s=CONNECT_S)
        else:
            client.tree_wait("/at", CONNECT_S)
        for number in range(count):
            one(client, process.name, draw(process.name, number))
            runtime.sleep(0.6 * runtime.random() ** 2)
        settle(simulation)
        before = len(history)
        for called in (("sub",), *(("get", name) for name in NAMES)):
            one(client, process.name, called)
        assert len(history) >= before + 3, "after the faults all is answered"

    with journal_folder() as folder:
        begin_master(simulation, folder)
        clients = [begin_client(simulation, f"client{number}", live) for number in range(4)]
        simulation.let_loose(FAULTS, UNTIL_S, may_end=("master",))
        run_to_the_end(simulation, clients, 2 * BOUND_S + count * (TIMEOUT_S + SLACK_S))
    lines = "\n".join(map(str, sorted(history, key=lambda each: each.begun)))
    assert linearization(TREE, history) is not None, f"no order explains:\n{lines}"
    assert not deadlines.late, deadlines.late


SCENARIOS: tuple[Callable[[Simulation], None], ...] = (
    locks,
    locks_without_journal,
    barriers,
    tree,
)
