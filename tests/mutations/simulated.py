"""Defects of orders of events, each put back by one change of a file, and the scenario of the
simulation that finds it by its seeds alone.

    python -m tests.mutations.simulated SCENARIO FIRST AFTER

runs that scenario of this tree with the seeds from FIRST on, up to AFTER and without it, until one
fails: then it prints that seed, and what failed. Exit code: 0 one failed, NONE_FAILED none did.
`python -m tests.mutations.run --simulation` does so for each defect, in a copy of the tree in which
`old` is `new`.

A scenario knows nothing of these defects: all are among those that .ci/run runs, as they are.
`seeds` says how many it took when the defect was put into this table; another figure is no failure,
as any change of the engine shifts what a seed draws.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from prpc_engine.simulation import run_once
from prpc_engine.simulation.explore import Scenario

SEEDS_MAX = 2000
NONE_FAILED = 3  # 1 is Python's own, where it could not run


class Defect(NamedTuple):
    """`old` stands once in `file`, which is relative to the root; `scenario` is a module of
    tests/simulation without its `scenarios_`, a dot and a function.
    """

    name: str
    file: str
    old: str
    new: str
    scenario: str
    seeds: int


DEFECTS = (
    # -- promises: those that were put back by hand first -----------------------------------------
    Defect(
        "replicas decide again who gets a row",
        "prpc_engine/kv/replication/replica.py",
        "self._table(table).replay(decision, *arrays)",
        "self._table(table).push(*arrays)",
        "elastic.elastic",
        2,
    ),
    Defect(
        "a push is known by its number, and not by its client",
        "prpc_engine/kv/server/server.py",
        ("        changes = self._changes.get(verb)\n        if changes is None:"),
        ("        changes, client = self._changes.get(verb), 0\n        if changes is None:"),
        "tables.plain",
        4,
    ),
    Defect(
        "a server that begins empty does not say so",
        "prpc_engine/kv/server/server.py",
        ("        if epoch and life != self.life:\n            return None"),
        ("        if False:\n            return None"),
        "tables.plain",
        3,
    ),
    Defect(
        "a replica skips the first change after its copy",
        "prpc_engine/kv/replication/replica.py",
        'outgoing.description | {"applied": self.applied, ',
        'outgoing.description | {"applied": self.applied + 1, ',
        "elastic.elastic",
        2,
    ),
    Defect(
        "a call marked once is known by its number, and not by its caller",
        "prpc_engine/rpc/once.py",
        "        return self._entries.get(call)\n",
        (
            "        found = (one for (_, at), one in self._entries.items() if at == call[1])\n"
            "        return next(found, None)\n"
        ),
        "calls.calls",
        2,
    ),
    Defect(
        "tokens of locks begin anew with their master",
        "prpc_engine/master/registry.py",
        "self.first_token = first_token",
        "self.first_token = 1",
        "master.locks_without_journal",
        1,
    ),
    Defect(
        "a stream that is cut off ends as if whole",
        "prpc_engine/rpc/stream.py",
        "    call.inbox.finish(error)\n",
        "    call.inbox.finish()\n",
        "calls.streams",
        2,
    ),
    Defect(
        "a call that may have run is said not to have been sent",
        "prpc_engine/rpc/loss.py",
        "    if is_unsent:\n",
        "    if True:\n",
        "calls.calls",
        4,
    ),
    Defect(
        "a master forgets what it has answered",
        "prpc_engine/master/namespace.py",
        ("        if request:\n            self._make(Change(Kind.ANSWER"),
        ("        if False:\n            self._make(Change(Kind.ANSWER"),
        "master.tree",
        17,
    ),
    # -- orders of events: most are defects that the change log says were mended ------------------
    Defect(
        "a primary looks again at once, and again, for a replica whose server died",
        "prpc_engine/kv/replication/replication_log.py",
        "self._changed(self._interrupted is None)",
        "self._changed(True)",
        "elastic.elastic",
        2,
    ),
    Defect(
        "of two that reset a table at a time one gets an inner error",
        "prpc_engine/kv/client/catalog.py",
        "if not is_remote(error, Outdated):  # of two",
        "if True:  # of two",
        "tables.plain",
        29,
    ),
    Defect(
        "a lock that comes too late for who waited is held all the same",
        "prpc_engine/master/session.py",
        "if request.verb in CLAIMING and request.session and",
        "if False and",
        "master.locks",
        6,
    ),
    Defect(
        "a lock that is asked for again waits behind itself",
        "prpc_engine/master/locks_and_barriers.py",
        (".request == request:\n                return int("),
        (".request == -1:\n                return int("),
        "master.locks",
        2,
    ),
    Defect(
        "a verb caught between two connections waits for a third",
        "prpc_engine/master/session.py",
        ("        self._lose(peer)\n        self._send_again(request)\n\n    def _answered"),
        (
            "        self._lose(peer)\n"
            "        self._pending.hold(request, request.deadline)\n"
            "\n"
            "    def _answered"
        ),
        "members.leases",
        4,
    ),
    Defect(
        "a watch misses what changes between two connections",
        "prpc_engine/master/watch.py",
        ("            watch.is_behind = True\n            if anew:"),
        "            if anew:",
        "members.watches",
        1,
    ),
    Defect(
        "a watch that begins is told of changes again that it has seen",
        "prpc_engine/master/watch.py",
        "            if version > watch.version >= 0 and (",
        "            if watch.version >= 0 and (",
        "members.watches",
        1,
    ),
    Defect(
        "a server is not registered again after its lease was lost",
        "prpc_engine/master/session.py",
        (
            "        if self._anew:\n"
            "            await self._in_reactor(partial(self._register_anew, peer, self._token))\n"
        ),
        "",
        "members.members",
        21,
    ),
    Defect(
        "a repeat of a call marked once has another number",
        "prpc_engine/rpc/peer.py",
        "        call_id = call.call_id if kind == REPEAT else self._next_id()\n",
        "        call_id = self._next_id()\n",
        "calls.calls",
        18,
    ),
    Defect(
        "a repeat of a call marked once goes to another process, if one is faster",
        "prpc_engine/client/retry.py",
        "            self.only = route\n",
        "            self.only = None\n",
        "calls.calls",
        5,
    ),
    Defect(
        "a server that closes ends what has begun",
        "prpc_engine/service/serving.py",
        "            stopped.result(drain_s)\n",
        "            stopped.result(0.0)\n",
        "calls.rolling",
        2,
    ),
    Defect(
        "items that overtook others are handed out as they come",
        "prpc_engine/rpc/flow_control.py",
        (
            "        if ahead:\n"
            "            self._early[number] = item\n"
            "            return True\n"
            "        self._items.append(item)\n"
            "        self._next = (number + 1) & NUMBER_MASK"
        ),
        ("        self._items.append(item)\n        self._next = (self._next + 1) & NUMBER_MASK"),
        "calls.streams",
        1,
    ),
    Defect(
        "a stream that is dropped goes on at its server",
        "prpc_engine/rpc/peer.py",
        (
            "            if job is not None:\n"
            '                job.end(CancelledError("the caller cancelled it"))'
        ),
        (
            "            if job is not None and job.inbox is None:\n"
            '                job.end(CancelledError("the caller cancelled it"))'
        ),
        "calls.streams",
        13,
    ),
    Defect(
        "a stream whose connection is lost behind its answer waits for ever",
        "prpc_engine/rpc/peer.py",
        "            if call_id not in self._in_flight:  # answered, with items still under way\n",
        "            if False:\n",
        "calls.streams",
        410,
    ),
    Defect(
        "a stream whose connection is lost behind its answer ends as if whole",
        "prpc_engine/rpc/flow_control.py",
        ("            self._error = error\n            self._ending, self._count = True, None"),
        "            self._ending, self._count = True, None",
        "calls.streams",
        410,
    ),
    Defect(
        "a push that comes again while its first is held is applied twice",
        "prpc_engine/kv/server/server.py",
        "        held = self._held.get((client, sequence))\n",
        "        held = None\n",
        "tables.sync",
        3,
    ),
    Defect(
        "a worker that is back in time is taken for gone",
        "prpc_engine/kv/consistency/barrier_scheduler.py",
        "                missed = self._missed.pop(worker, None)\n",
        "                missed = None\n",
        "tables.ssp",
        9,
    ),
    Defect(
        "a durable push of a table that was reset is answered by the next save",
        "prpc_engine/kv/server/server.py",
        "            self.durable.fail_of(name, _began_again(name))\n",
        "",
        "durable.durable",
        6,
    ),
    Defect(
        "who waits in a table that begins again waits on",
        "prpc_engine/kv/consistency/paced_table.py",
        "        self._pace.begin_again(error)\n",
        "        del error\n",
        "paced.sync",
        1,
    ),
    Defect(
        "calls of a group are over after one round",
        "prpc_engine/remote/termination.py",
        "return last > 0 and all(len(one) > last and one[last] == one[last - 1] for one in told)\n",
        "return last >= 0 and all(len(one) > last for one in told)\n",
        "world.worlds",
        3,
    ),
    Defect(
        "what a replica may have missed is not sent again",
        "prpc_engine/kv/replication/replication_log.py",
        ("        self._is_interrupted = False\n        self._send_all()\n\n    def _send_all"),
        ("        self._is_interrupted = False\n\n    def _send_all"),
        "elastic.elastic",
        19,
    ),
    Defect(
        "a push is acknowledged as replicated before it is",
        "prpc_engine/kv/replication/replica.py",
        (
            "            self._waiting.append((self.applied, answer, value))\n"
            "            self._release()"
        ),
        "            answer.reply(value)",
        "elastic.replicated",
        26,
    ),
    Defect(
        "a copy begun anew leaves the one before it open",
        "prpc_engine/kv/replication/replica.py",
        ("        if before is not None:\n            before.close()\n        outgoing"),
        "        outgoing",
        "elastic.replicated",
        46,
    ),
    Defect(
        "what an owner is told of a reference is lost with its connection",
        "prpc_engine/remote/calls.py",
        "if error is not None and is_there and not isinstance(error, errors.Closed):",
        'if error is not None and is_there and verb == "dropped":',
        "remote.remotes_that_live",
        193,
    ),
)


def scenario_of(name: str) -> Scenario:
    """The function behind a name such as calls.streams."""
    module, _, function = name.partition(".")
    scenario: Scenario = getattr(
        importlib.import_module(f"tests.simulation.scenarios_{module}"), function
    )
    return scenario


def main(arguments: list[str]) -> int:
    """See the file's head."""
    name, first, after = arguments
    scenario = scenario_of(name)
    for seed in range(int(first), int(after)):
        outcome = run_once(scenario, seed)
        if outcome.error:
            print(f"{seed} {outcome.error}")
            return 0
    return NONE_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
