"""Who is a member of a job, as the master tells it, and watches of its tree.

what                  promise                                       how it is checked
leases                a server whose process lives and reaches the  an observer looks every LOOK_S
                      master is in all look-ups; one whose process  seconds: each that lives is
                      was killed is in none, once its lease is over there, none GONE_S after its end
ranks                 no two nodes have one, while both are known   at each look, and when one joins
at the end            once the faults are over, the master knows    ranks that processes know, and
                      all that live and no others; all of them can  those the master has; a call of
                      be called                                     each by each
watches               changes come in order; none is missed while   versions grow; values by version
                      the connection lasts; at last the callbacks   are equal for all watchers; what
                      have told what the tree has; also of watches  was told, against the tree
                      that begin as others are told of the same
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise

from prpc_engine import MasterClient, RpcService, TreeEvent, errors
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import (
    LEASE_S,
    SLACK_S,
    begin,
    begin_client,
    begin_master,
    journal_folder,
    run_to_the_end,
)

UNTIL_S = 6.0  # of the nemesis
SETTLE_S = 2 * LEASE_S + 0.5
CONNECT_S = 30.0
LOOK_S = 0.2
# The lease, a quarter of it between two looks of the master, and what slow threads take.
GONE_S = LEASE_S * 1.25 + SLACK_S
BOUND_S = CONNECT_S + UNTIL_S + SETTLE_S
FAULTS = Rates(cut=0.5, reset=0.7, kill=0.5, crash=0.05, stop=0.3, slow=0.2, clock=0.2, drift=0.5)


class Answering:
    """Says whose it is."""

    def __init__(self, number: int) -> None:
        self._number = number

    def whose(self) -> int:
        return self._number


# -- leases ----------------------------------------------------------------------------------------


def leases(simulation: Simulation) -> None:
    """Servers that are killed and come again; all can reach the master at all times."""
    wrong: list[str] = []
    ranks: dict[Process, int] = {}  # of nodes that have joined
    serving: dict[Process, str] = {}  # and whose server is announced
    over: list[bool] = []

    def serve(ours: RpcService, process: Process) -> None:
        taken = {rank for one, rank in ranks.items() if not one.is_dead}
        if ours.rank in taken:
            wrong.append(f"{process.name} got rank {ours.rank} of {taken}")
        ranks[process] = ours.rank
        name = f"of {process.number}"
        ours.create_server(name, Answering(process.number))
        serving[process] = name
        ours.serve_forever()

    def look(client: MasterClient, process: Process) -> None:
        ended: dict[Process, float] = {}  # seen to be dead
        while not over:
            living = {one: name for one, name in serving.items() if not one.is_dead}
            for one in serving:
                if one.is_dead:
                    ended.setdefault(one, simulation.now)
            gone = [one for one, at_s in ended.items() if at_s + GONE_S < simulation.now]
            found = {
                info.rpc_service_name
                for info in client.get_rpc_service_info("RpcService")
                if info.servers
            }
            known = [info.global_rank for info in client.get_comm_info()]
            for one, name in living.items():
                if not one.is_dead and name not in found:
                    wrong.append(f"{simulation.now:.3f}: {one} serves, and {found} were found")
                if not one.is_dead and ranks[one] not in known:
                    wrong.append(f"{simulation.now:.3f}: {one} has joined; known are {known}")
            wrong.extend(
                f"{simulation.now:.3f}: {one} ended at {ended[one]:.3f}, and is found"
                for one in gone
                if serving[one] in found
            )
            if len(set(known)) < len(known):
                wrong.append(f"two nodes have one rank: {known}")
            runtime.sleep(LOOK_S)

    begin_master(simulation)
    names = [f"server{number}" for number in range(3)]
    for name in names:
        begin(simulation, name, serve)
    observer = begin_client(simulation, "observer", look)
    simulation.let_loose(
        Rates(cut=0, crash=0, stop=0, reset=0.7, kill=0.6, slow=0.2, clock=0.2, drift=0.5),
        UNTIL_S,
        may_end=names[1:],
    )
    simulation.at(UNTIL_S + GONE_S + SLACK_S, lambda: over.append(True))
    run_to_the_end(simulation, [observer], BOUND_S)
    assert not wrong, wrong
    assert len(serving) >= len(names)


# -- all kinds of faults ---------------------------------------------------------------------------


def members(simulation: Simulation) -> None:
    """Nodes that come and go, with links that are cut and a master that is killed."""
    names = [f"node{number}" for number in range(3)]
    final: dict[str, int] = {}
    known: dict[str, list[int]] = {}
    answers: dict[tuple[str, str], int] = {}
    there: set[str] = set()

    def live(ours: RpcService, process: Process) -> None:
        ours.create_server(process.name, Answering(process.number))
        runtime.sleep(max(0.0, UNTIL_S + SETTLE_S - simulation.now))
        final[process.name] = ours.rank
        there.add(process.name)
        for name in names:
            with ours.create_client(name, 1, timeout_s=SETTLE_S) as client:
                answers[process.name, name] = client.call("whose", timeout_s=SETTLE_S)
        while len(there) < len(names):
            runtime.sleep(LOOK_S)
        known[process.name] = [one.global_rank for one in ours.master_client.get_comm_info()]
        runtime.sleep(LOOK_S * 10)  # until the others have looked, too

    with journal_folder() as folder:
        begin_master(simulation, folder)
        nodes = [begin(simulation, name, live) for name in names]
        simulation.let_loose(FAULTS, UNTIL_S, may_end=("master", *names))

        def all_ended() -> bool:
            return all(name in known and simulation.processes[name].is_dead for name in names)

        ended = simulation.run(all_ended, 2 * BOUND_S)
        assert ended, f"{nodes} have not ended; {known}"
    assert len(set(final.values())) == len(names), f"two nodes have one rank: {final}"
    for name, ranks in known.items():
        assert ranks == sorted(final.values()), f"{name} sees {ranks}, there are {final}"
    for (name, other), number in answers.items():
        expected = simulation.processes[other].number
        assert number == expected, f"{name} called {other} {expected}, and {number} answered"


# -- watches ---------------------------------------------------------------------------------------


class Seen:
    """What the callbacks of one watch were told."""

    def __init__(self) -> None:
        self.events: list[TreeEvent] = []
        self.tree: dict[str, str] = {}

    def __call__(self, event: TreeEvent) -> None:
        self.events.append(event)
        if event.value is None:
            self.tree.pop(event.path, None)
        else:
            self.tree[event.path] = event.value


def watches(simulation: Simulation, rates: Rates = FAULTS, may_miss: bool = True) -> None:
    """Two writers and two watchers of a few nodes."""
    count = 12
    seen: dict[str, Seen] = {}
    trees: dict[str, dict[str, str]] = {}

    def write(client: MasterClient, process: Process) -> None:
        path = f"/at/{process.name}"
        client.tree_wait("/at", CONNECT_S)
        client.tree_node_add(path, "0", timeout_s=CONNECT_S)
        for number in range(1, count):
            try:
                client.tree_node_set(path, str(number), timeout_s=2.0)
                if number % 4 == 0:
                    client.tree_node_add(f"/at/{number}", process.name, True, timeout_s=2.0)
                elif number % 4 == 2 and number > 2:
                    client.tree_node_del(f"/at/{number - 2}", timeout_s=2.0)
            except errors.RpcError:
                continue
            runtime.sleep(0.8 * runtime.random())
        runtime.sleep(max(0.0, UNTIL_S + SETTLE_S - simulation.now))
        client.tree_node_set(path, "last", timeout_s=SETTLE_S)
        runtime.sleep(4 * SETTLE_S)  # the watchers look meanwhile

    def watch(client: MasterClient, process: Process) -> None:
        one = seen[process.name] = Seen()
        if process.name == "watcher0":
            client.tree_node_add("/at", timeout_s=CONNECT_S)
        else:
            client.tree_wait("/at", CONNECT_S)
        client.tree_watch("/at", one, existing=True, timeout_s=CONNECT_S)
        for number in range(2):  # while the client is told of the same nodes already
            runtime.sleep(UNTIL_S / 2 * process.chance.random())
            name = f"{process.name}, watching writer{number}"
            one = seen[name] = Seen()
            try:
                client.tree_watch(f"/at/writer{number}", one, existing=True, timeout_s=CONNECT_S)
            except errors.RpcError:
                del seen[name]
        runtime.sleep(max(0.0, UNTIL_S + 2 * SETTLE_S + SLACK_S - simulation.now))
        tree: dict[str, str] = {"/at": client.tree_node_get("/at").value}
        for name in client.tree_node_sub("/at"):
            tree[f"/at/{name}"] = client.tree_node_get(f"/at/{name}").value
        trees[process.name] = tree

    with journal_folder() as folder:
        begin_master(simulation, folder)
        for number in range(2):
            begin_client(simulation, f"writer{number}", write)
        watchers = [begin_client(simulation, f"watcher{number}", watch) for number in range(2)]
        simulation.let_loose(rates, UNTIL_S, may_end=("master",))
        run_to_the_end(simulation, watchers, 3 * BOUND_S)
    for name, one in seen.items():
        check_order(name, one.events, may_miss)
        who, _, below = name.partition(", watching ")
        there = {path: value for path, value in trees[who].items() if below in path}
        assert one.tree == there, f"{name} was told of {one.tree}, there is {there}"
    told: dict[tuple[str, int, int], set[str | None]] = defaultdict(set)
    if not may_miss:
        for one in seen.values():
            for event in one.events:
                told[event.path, event.version, event.node_version].add(event.value)
    assert all(len(values) == 1 for values in told.values()), f"watchers were told {told}"


def check_order(name: str, events: list[TreeEvent], may_miss: bool) -> None:
    """Each change in order, and each once."""
    for before, after in pairwise(events):
        assert before.version <= after.version, f"{name} was told of {after} after {before}"
    by_path: dict[str, list[TreeEvent]] = defaultdict(list)
    for event in events:
        by_path[event.path].append(event)
    for path, ones in by_path.items():
        times = Counter((event.version, event.value) for event in ones)
        assert all(count == 1 for count in times.values()), f"{name} was told twice: {times}"
        if not path.startswith("/at/writer"):
            continue
        versions = [event.node_version for event in ones]
        assert versions == sorted(set(versions)), f"{name}: {path} had versions {versions}"
        if not may_miss:
            first = versions[0]
            whole = list(range(first, first + len(versions)))
            assert versions == whole, f"{name} missed some of {path}: {versions}"


def watches_without_loss(simulation: Simulation) -> None:
    """No connection is lost: each change is told."""
    watches(simulation, Rates(cut=0, reset=0, kill=0, crash=0, stop=0, slow=0.4, clock=0.2), False)


SCENARIOS: tuple[Callable[[Simulation], None], ...] = (
    leases,
    members,
    watches,
    watches_without_loss,
)
