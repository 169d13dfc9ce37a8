"""The tables of scenarios_recovery.py, and two workers whose pushes are answered once a checkpoint
has them (`ack="durable"`). All that is promised there, and

    operation             promise                                  how it is checked
    durable push,         a checkpoint of the beginning of the     a save of that epoch was under
     answered              table that it was pushed to has it       way, or ended, since it was
                                                                    asked
    the same              each restore that is asked for later     what tables hold that began with
                           brings it back: the newest checkpoint    that step; the step is of no
                           is that one, or was saved after it,      save of an earlier epoch
                           and lacks it only where the table
                           began again between the two
    durable push, with    applied once or not at all, on each      as of any other push
     an error              server for itself
    liveness              a durable push is answered once          all workers get on within END_S
                           somebody saves

A restore that was under way as a push was answered may bring back less: it had found its checkpoint
before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from prpc_engine import RpcService, errors
from prpc_engine.kv import EpochChanged, RowsLost
from prpc_engine.simulation import Process, Simulation
from tests.simulation import scenarios_recovery as recovery
from tests.simulation.jobs import begin
from tests.simulation.scenarios_recovery import (
    DENSE,
    SUMS,
    TIMEOUT_S,
    UNTIL_S,
    Columns,
    Jobs,
    Ledger,
    Life,
    Write,
    keys_of,
)

CAREFUL = tuple(f"careful{each}" for each in range(2))
SAVE_CHANCE = 0.3  # of a durable push: its worker saves itself
TABLES = (SUMS, DENSE)


@dataclass(frozen=True)
class Acknowledged:
    """A durable push that was answered."""

    life: Life
    write: Write


class DurableLedger(Ledger):
    """A ledger that knows which pushes were answered as durable, and when restores were asked."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.acknowledged: list[Acknowledged] = []
        self.restored: dict[tuple[str, int], float] = {}  # (table, epoch): when it was asked for

    def acknowledge(self, life: Life, write: Write, who: str) -> None:
        """It was answered now."""
        write.ended_s = self.simulation.now
        self.acknowledged.append(Acknowledged(life, write))
        table, epoch = life.table, life.epoch
        assert any(
            save.first.get(table, 0) <= epoch <= save.last.get(table, epoch)
            and save.ended_s > write.begun_s
            for save in self.saves.values()
        ), f"{who}: push {write.number} to {table} of epoch {epoch:x} is answered, and in no save"

    def durable(self, life: Life, below: int) -> Columns:
        asked_s = self.restored.get((life.table, below), 0.0)
        return frozenset(
            each.write.number
            for each in self.acknowledged
            if each.life is life and each.write.ended_s < asked_s
        )

    def brought_back(self, step: int, asked_s: float, began: dict[str, int]) -> None:
        """A restore that was asked for then was answered; began: the epochs of its tables."""
        self.restored |= dict.fromkeys(began.items(), asked_s)
        save = self.saves[step]
        for each in self.acknowledged:
            life, write = each.life, each.write
            last = save.last.get(life.table, life.epoch)
            assert write.ended_s >= asked_s or last >= life.epoch, (
                f"step {step} is of epoch {last:x} of {life.table}, and push {write.number} of "
                f"epoch {life.epoch:x} had been answered {asked_s - write.ended_s:.3f} s before"
            )


class Worker(recovery.Worker):
    """Tells when a restore was asked for."""

    ledger: DurableLedger

    def restore(self) -> bool:
        asked_s, before = self.simulation.now, self.epochs()
        if not super().restore():
            return False
        began = {
            table: epoch for table, epoch in self.epochs().items() if epoch != before.get(table)
        }
        for table, epoch in began.items():
            step = self.ledger.life(table, epoch).step
            assert step is not None
            self.ledger.brought_back(step, asked_s, {table: epoch})
        return True


class Careful(Worker):
    """Its pushes are answered as they are durable."""

    ack = "durable"

    def act(self) -> None:
        table = self.tables[int(self.draw() * len(self.tables))]
        if self.draw() < 0.7:
            self.write(table)
        else:
            self.read(table)

    def write(self, table: str) -> bool:
        before = self.epoch(table)
        life = self.ledger.life(table, before)
        begun = self.next_write(life)
        if begun is None:
            return True
        write, values = begun
        try:
            push = self.kv.submit_push(table, *keys_of(table), values, timeout_s=TIMEOUT_S)
            if self.draw() < SAVE_CHANCE or self.simulation.now >= UNTIL_S:
                self.save()
                before = self.epoch(table)  # it may have found a later one
            with self.jobs.deadlines.watch(f"durable push of {self.name}", TIMEOUT_S):
                push.result()
        except RowsLost as error:
            self.note("durable push", error)
            self.recover(table)
        except EpochChanged as error:
            self.note("durable push", error)
            self.told(table, before, error)
        except errors.RpcError as error:
            self.note("durable push", error)
        else:
            self.ledger.acknowledge(life, write, self.name)
            return True
        return False


class DurableJobs(Jobs):
    """With two workers that push durably."""

    def new_ledger(self) -> Ledger:
        return DurableLedger(self.simulation)

    def new_worker(self, ours: RpcService, process: Process, tables: Sequence[str]) -> Worker:
        return Worker(self, ours, process, tables)

    def push_durably(self, ours: RpcService, process: Process) -> None:
        Careful(self, ours, process, TABLES).run()

    def are_done(self) -> bool:
        return super().are_done() and self.done.issuperset(CAREFUL)

    def begin_workers(self) -> list[str]:
        for name in CAREFUL:
            begin(self.simulation, name, self.push_durably)
        return [*super().begin_workers(), *CAREFUL]


def durable(simulation: Simulation) -> None:
    """The master has a journal."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        DurableJobs(simulation, folder).run()


def durable_on_one_host(simulation: Simulation) -> None:
    """All servers are on one host, which crashes: what they did not sync is lost."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        DurableJobs(simulation, f"{folder}/made/by a save").run(disk=folder)
