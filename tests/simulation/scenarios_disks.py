"""What is on the disk of a host that crashes, is full, and whose processes are killed.

what                          promise                              how it is checked
journal, append() answered    it is there after any crash          all such transactions are in the
                                                                    tree that is loaded
journal, sync=False           a kill loses nothing, a crash the    no hole: the first so many are
                               last ones                            there; none is missing where
                                                                    there was no crash
journal, append() failed      it is there or not, and those        the same
                               before are
journal, compact()            a crash at any step finds the old    it is done at every few appends
                               pair or the new one
snapshot of accumulators,     it is there after any crash, whole:  load() gives the state that was
 save() returned               it, or one that was begun later      saved last, or a later one
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from functools import partial
from pathlib import Path

from prpc_engine.accumulator import snapshot_file
from prpc_engine.errors import JournalError
from prpc_engine.master.journal import Journal
from prpc_engine.master.registry import Registry
from prpc_engine.master.tree import Kind, NodeTree, SessionRecord
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import run_to_the_end

WRITES = 60
UNTIL_S = 8.0
END_S = UNTIL_S + 30.0
COMPACT_BYTES = 600  # some ten transactions
RATES = Rates(
    *(0.0, 0.0),
    kill=0.3,
    crash=0.6,
    stop=0.1,
    slow=0.1,
    clock=0.1,
    full=0.4,
)


def paths_in(tree: NodeTree) -> list[str]:
    """Of the nodes that were added."""
    return sorted(
        change.path
        for change in tree.snapshot()
        if change.kind is Kind.PUT and re.fullmatch(r"/root/\d+", change.path)
    )


def journal(simulation: Simulation, sync: bool = True) -> None:
    """A process that appends and compacts."""
    least, most = [0], [0]  # how many nodes there are, at least and at most
    done: list[bool] = []  # and it was closed, which syncs

    def keep(folder: Path, process: Process) -> None:
        while True:
            with contextlib.suppress(JournalError):  # the disk is full: it begins again
                append(folder)
                done.append(True)
                return
            runtime.sleep(0.1)

    def append(folder: Path) -> None:
        registry = Registry()
        with contextlib.closing(Journal(folder / "journal", sync, COMPACT_BYTES)) as kept:
            kept.load(registry.tree)
            found = paths_in(registry.tree)
            assert found == [f"/root/{number:04d}" for number in range(len(found))], (
                f"a hole: {found}"
            )
            assert least[0] <= len(found) <= most[0], f"{len(found)} of {least[0]} to {most[0]}"
            least[0] = most[0] = len(found)
            sessions = registry.tree.sessions
            session = next(iter(sessions), None) or registry.open(
                SessionRecord("t", 5.0, "root", "", ""), 0.0
            )
            for number in range(len(found), WRITES):
                most[0] = number + 1
                registry.tree_node_add(session, f"/{number:04d}", "v" * (number % 40), False)
                kept.append(registry.version, registry.take_changes())
                least[0] = number + 1
                if kept.long:
                    kept.compact(registry.tree)
                runtime.sleep(0.3 * runtime.random() ** 2)

    def crashed() -> None:
        if not sync:
            least[0] = 0

    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as name:
        simulation.process("keeper", partial(keep, Path(name)))
        simulation.disk("host", name)
        nemesis = simulation.let_loose(RATES, UNTIL_S, ["keeper"])
        for fault in nemesis.faults:
            if fault.kind == "crash":
                simulation.at(fault.begins_s, crashed)
        simulation.run(lambda: bool(done), END_S)
        assert done, f"{least[0]} of {WRITES} appends after {END_S:g} s"
        tree = NodeTree()
        with contextlib.closing(Journal(Path(name, "journal"))) as kept:
            kept.load(tree)
        assert len(paths_in(tree)) == WRITES


def journal_without_sync(simulation: Simulation) -> None:
    """What a crash loses is the end."""
    journal(simulation, sync=False)


def snapshots(simulation: Simulation) -> None:
    """A process that saves snapshots of accumulators over each other."""
    saved, tried = [0], [0]

    def keep(path: Path, process: Process) -> None:
        with contextlib.closing(snapshot_file.Lock(path)):
            found = 0
            if path.exists() or saved[0]:
                (state,) = snapshot_file.load(path)
                found = state["number"]
                assert saved[0] <= found <= tried[0], f"{found} after {saved[0]}"
            for number in range(found + 1, WRITES):
                tried[0] = max(tried[0], number)
                with contextlib.suppress(OSError):  # the disk is full
                    snapshot_file.save(path, [{"number": number, "what": b"x" * number}])
                    saved[0] = number
                runtime.sleep(0.3 * runtime.random() ** 2)

    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as name:
        process = simulation.process("keeper", partial(keep, Path(name, "counters")))
        simulation.disk("host", name)
        simulation.let_loose(RATES, UNTIL_S, ["keeper"])
        simulation.run(limit_s=UNTIL_S)
        process = simulation.processes["keeper"]
        run_to_the_end(simulation, [process], END_S)
        (state,) = snapshot_file.load(Path(name, "counters"))
        assert saved[0] <= state["number"] <= tried[0] == WRITES - 1, f"{state} after {saved[0]}"
