"""Plain tables that several workers save, restore and reset, any of which may be killed.

    operation             promise                                   how it is checked
    push, answered        it is in what is read of that beginning   each pull of any worker of the
                           of the table, on all servers              same epoch has its column
    push, with an error   applied once or not at all, on each       its column is 0 or 1
                           server for itself
    assign                the values are those of one assign that   each server's value is one that
                           no other one has followed                 no answered one has followed
    a pull, answered      of one beginning of the table             all servers have what that one
                                                                     began with, and what was pushed
                                                                     since; never more
    save, answered        has all that was answered before it was   what a table holds that began
                           called, and nothing begun after it        with that step
                           ended; it can be restored
    save, with an error,  it is whole, or it is not there           the same, if it is restored
     or whose worker died
    restore               the newest that was answered, or a newer  the step; what its tables hold
                           one, on all servers
    reset                 all servers begin empty                   the same
    a table that the      is in its checkpoint, as one beginning    what a table holds that began
     saver does not know   of it                                     with that step
    another's restore,    told once, by EpochChanged, with the      no verb is answered in another
     or reset              step                                      epoch than it was asked in; all
                                                                     are told of the same step
    a worker dies in the  others are told of a loss that they can   liveness
     middle of one         restore or reset, or go on
    each verb             ends by its deadline                      virtual time; of save() and
                                                                     restore() UNDO_TIMEOUT_S more
    liveness              all workers push to, and pull from, each  within END_S
                           table once the faults are over

A beginning of a table is known by its epoch: what was answered in one is compared with what is read
in it, whoever asked. Each push has a column of its own, each save a step of its own.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import RpcService, errors
from prpc_engine.kv import Add, EpochChanged, RowsLost, TableWorker
from prpc_engine.kv.client.checkpoint_rounds import UNDO_TIMEOUT_S
from prpc_engine.kv.table.partition import split
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import (
    Deadlines,
    begin,
    begin_master,
    journal_folder,
)
from tests.simulation.scenarios_tables import Keys, serve

SERVERS, WORKERS = 3, 3
COLUMNS = 120  # of each table: pushes to it
TIMEOUT_S, SAVE_TIMEOUT_S = 3.0, 5.0
UNTIL_S = 6.0
END_S = UNTIL_S + 90.0
DOOM_CHANCE = 0.3  # of a save, a restore, a reset, and tables being made: its worker is killed
DOOM_S = 0.1  # so soon, at most
LATE_S = 2.0  # when the last worker begins
SUMS, DENSE, LATE, WEIGHTS = "sums", "dense", "late", "weights"
TABLES, SPARSE = (SUMS, DENSE, WEIGHTS), (SUMS, LATE)
RATES = Rates(cut=0.2, reset=0.8, kill=1.2, crash=0.1, stop=0.2, slow=0.2, clock=0.4, drift=0.1)
ALL_KEYS = np.arange(100, dtype=np.int64)
KEYS = np.array([ALL_KEYS[owned[0]] for owned in split(ALL_KEYS, SERVERS)], np.int64)
Columns = frozenset[int]
EMPTY: Columns = frozenset()


@dataclass(frozen=True)
class World:
    """What each server's part of a table may hold. Of a table that is assigned to: `may` are the
    numbers, one of which it is.
    """

    must: Columns = EMPTY
    may: Columns = EMPTY


@dataclass
class Write:
    """A push, or an assign, of one beginning of a table."""

    number: int
    begun_s: float
    ended_s: float = float("inf")  # as it was answered


@dataclass
class Life:
    """One beginning of a table. step: of the checkpoint that it began with, -1: empty; None: not
    known to be another than one of `steps`.
    """

    table: str
    epoch: int
    steps: tuple[int, ...]
    step: int | None = None
    writes: list[Write] = field(default_factory=list)


@dataclass
class Save:
    """One that was begun. first, last: the epochs of the tables that the saver knows, as it began
    and as it ended.
    """

    step: int
    begun_s: float
    first: dict[str, int]
    last: dict[str, int] = field(default_factory=dict)
    ended_s: float = float("inf")
    was_answered: bool = False


class Ledger:
    """What was asked, and answered: what may be read."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.lives: dict[tuple[str, int], Life] = {}
        self.saves: dict[int, Save] = {}
        self.numbers: dict[str, int] = {}

    def life(self, table: str, epoch: int) -> Life:
        life = self.lives.get((table, epoch))
        if life is None:
            life = self.lives[table, epoch] = Life(table, epoch, (-1, *self.saves))
        return life

    def number(self, table: str) -> int:
        """Of the next write of that table."""
        number = self.numbers[table] = self.numbers.get(table, 0) + 1
        return number

    def began(self, table: str, epoch: int, step: int) -> None:
        """Somebody was told so."""
        life = self.life(table, epoch)
        told = f"epoch {epoch:x} of {table} began with step {step}, others heard {life.step}"
        assert life.step in (None, step), told
        assert step in self.saves or step == -1, told
        life.step = step

    def worlds(self, life: Life, asked_s: float, ended_s: float) -> set[World]:
        """What it may hold, of somebody who asked then, and was answered then."""
        steps = life.steps if life.step is None else (life.step,)
        bases = {base for step in steps for base in self.saved(life.table, step, life.epoch)}
        answered = [write for write in life.writes if write.ended_s < asked_s]
        begun = [write for write in life.writes if write.begun_s < ended_s]
        if life.table != WEIGHTS:
            must = {write.number for write in answered}
            may = {write.number for write in begun}
            return {World(base.must | must, base.may | may) for base in bases}
        last_s = max((write.begun_s for write in answered), default=-1.0)
        may = {write.number for write in begun if write.ended_s >= last_s}
        if answered:
            return {World(EMPTY, frozenset(may))}
        return {World(EMPTY, base.may | may) for base in bases}

    def saved(self, table: str, step: int, below: int) -> set[World]:
        """What that checkpoint may have of the table, of epochs below that one."""
        nothing = {World(EMPTY, frozenset({0}) if table == WEIGHTS else EMPTY)}
        if step == -1:
            return nothing
        save = self.saves[step]
        if table not in save.first:
            return self.saved_unknown(table, save, below) | nothing
        last = save.last.get(table, below - 1)
        least = last if save.was_answered else save.first[table]
        found = {
            World(world.must | self.durable(each, below), world.may)
            for each in self.lives.values()
            if each.table == table and least <= each.epoch <= min(last, below - 1)
            for world in self.worlds(each, save.begun_s, save.ended_s)
        }
        # its saver was killed, and so may be who had reset the table
        return found if save.last else found | nothing

    def durable(self, life: Life, below: int) -> Columns:
        """Of that life: what the one of that epoch has, if it began with a checkpoint of it."""
        return EMPTY

    def saved_unknown(self, table: str, save: Save, below: int) -> set[World]:
        """What a checkpoint may have of a table that its saver does not know: of one beginning."""
        lives = [each for each in self.lives.values() if each.table == table and each.epoch < below]
        return {world for each in lives for world in self.worlds(each, save.begun_s, save.ended_s)}

    def newest_answered(self) -> int:
        """The step of the save that ended last of those answered."""
        return max((each.step for each in self.saves.values() if each.was_answered), default=-1)

    def check(self, life: Life, asked_s: float, values: Any, who: str) -> None:
        """values: of each server, as they were read now."""
        worlds = self.worlds(life, asked_s, self.simulation.now)
        told = (
            f"{who} reads {life.table} of epoch {life.epoch:x}, which began with step {life.step}: "
        )
        if life.table == WEIGHTS:
            found = {int(value) for value in values[:, 0]}
            assert any(found <= world.may for world in worlds), f"{told}{found}, not of {worlds}"
            return
        assert ((values == 0) | (values == 1)).all(), f"{told}twice: {values.max()}"
        found_by_server = [frozenset(np.flatnonzero(each).tolist()) for each in values]
        assert any(
            all(world.must <= found <= world.may for found in found_by_server) for world in worlds
        ), told + "; ".join(
            f"lacks {[sorted(world.must - found) for found in found_by_server]}, "
            f"has {[sorted(found - world.may) for found in found_by_server]} too much"
            for world in worlds
        )


class Jobs:
    """Three workers and one that comes late, with its own table."""

    def __init__(self, simulation: Simulation, folder: str) -> None:
        self.simulation, self.folder = simulation, folder
        self.ledger = self.new_ledger()
        self.deadlines = Deadlines(simulation)
        self.steps = 0
        self.done: set[str] = set()

    def new_ledger(self) -> Ledger:
        return Ledger(self.simulation)

    def new_worker(self, ours: RpcService, process: Process, tables: Sequence[str]) -> Worker:
        return Worker(self, ours, process, tables)

    def work(self, ours: RpcService, process: Process) -> None:
        self.new_worker(ours, process, TABLES).run()

    def come_late(self, ours: RpcService, process: Process) -> None:
        runtime.sleep(max(0.0, LATE_S - self.simulation.now))
        self.new_worker(ours, process, (LATE, *TABLES)).run()

    def are_done(self) -> bool:
        """Whether all workers have got on."""
        return self.done.issuperset([*(f"worker{each}" for each in range(WORKERS)), "late"])

    def begin_workers(self) -> list[str]:
        """Their names."""
        workers = [f"worker{each}" for each in range(WORKERS)]
        for name in workers:
            begin(self.simulation, name, self.work)
        begin(self.simulation, "late", self.come_late)
        return [*workers, "late"]

    def run(self, has_journal: bool = True, disk: str | None = None) -> None:
        simulation = self.simulation
        with journal_folder() as journal:
            begin_master(simulation, journal if has_journal else None)
            servers = [f"server{each}" for each in range(SERVERS)]
            for name in servers:
                begin(simulation, name, serve, host=None if disk is None else "storage")
            if disk is not None:
                simulation.disk("storage", disk)
            workers = self.begin_workers()
            simulation.let_loose(RATES, UNTIL_S, [*servers, *workers, "master"])
            ended = simulation.run(lambda: "late at the end" in self.done, END_S)
            assert ended, f"only {sorted(self.done)} have got on {END_S:g} s after all began"
        assert not self.deadlines.late, self.deadlines.late


def keys_of(table: str) -> tuple[Keys, ...]:
    """What its verbs have before the gradients: one key at each server, of sparse tables."""
    return (KEYS,) if table in SPARSE else ()


class Worker:
    """One process of a worker."""

    ack = "applied"
    timeout_s = TIMEOUT_S  # of verbs
    patience_s = TIMEOUT_S  # after which they are late
    columns = COLUMNS

    def __init__(
        self, jobs: Jobs, ours: RpcService, process: Process, tables: Sequence[str]
    ) -> None:
        self.jobs, self.ledger, self.simulation = jobs, jobs.ledger, jobs.simulation
        self.name, self.draw, self.tables = process.name, process.chance.random, tables
        self.owed = 0  # times that a save found a table begun again, of which verbs tell
        self.ours, self.process = ours, process
        self.kv: TableWorker

    def run(self) -> None:
        while True:
            try:
                self.kv = TableWorker(
                    self.ours, expected_servers=SERVERS, timeout_s=TIMEOUT_S, ack=self.ack
                )
                break
            except errors.RpcError as error:
                self.note("no tables", error)
        for table in self.tables:
            while not self.create(table):
                runtime.sleep(0.1)
        while self.simulation.now < UNTIL_S:
            self.act()
            runtime.sleep(0.2 * self.draw())
        for table in self.tables:
            while not (self.write(table) and self.read(table)):
                runtime.sleep(0.2 * self.draw())
        self.jobs.done.add(self.name)
        if self.name == "late":  # and what there is then can be saved, and restored
            while not self.jobs.are_done():
                runtime.sleep(0.2)
            while not (self.save() and self.restore()):
                runtime.sleep(0.2)
            for table in self.tables:
                while not self.read(table):  # what a save has found is told first
                    runtime.sleep(0.2)
        self.jobs.done.add(f"{self.name} at the end")
        self.rest()

    def rest(self) -> None:
        """Not that a process ends which others would notice."""
        while True:
            runtime.sleep(10.0)

    def note(self, what: str, error: BaseException) -> None:
        self.simulation.note(f"{self.name}: {what}: {type(error).__name__}")

    def may_die(self) -> None:
        """This process, in the middle of what it begins now."""
        if self.simulation.now < UNTIL_S and self.draw() < DOOM_CHANCE:
            delay_s = DOOM_S * 10 ** (-3.0 * self.draw())
            self.simulation.after(delay_s, self.process.kill)
            self.simulation.after(delay_s + self.draw(), self.begin_again)

    def begin_again(self) -> None:
        """Another process in the place of this one, unless there is one already."""
        process, processes = self.process, self.simulation.processes
        is_last = processes[self.name] is process
        if is_last and process.is_dead and not process.host.is_down:  # which begins it as it boots
            self.simulation.start_again(self.name)

    def act(self) -> None:
        chance, table = self.draw(), self.tables[int(self.draw() * len(self.tables))]
        if chance < 0.45:
            self.write(table)
        elif chance < 0.75:
            self.read(table)
        elif chance < 0.93:
            self.save()
        elif chance < 0.97:
            self.restore()
        else:
            self.reset([table])

    def epoch(self, table: str) -> int:
        return self.epochs()[table]

    def epochs(self) -> dict[str, int]:
        """Of the tables that this worker knows: no verb names them."""
        return {table: each.epoch for table, each in self.kv._catalog.layouts.items()}

    def create(self, table: str) -> bool:
        try:
            with self.jobs.deadlines.watch(f"create of {self.name}", TIMEOUT_S):
                self.make(table)
        except errors.RpcError as error:
            self.note(f"no {table}", error)
            return False
        self.ledger.life(table, self.epoch(table))
        return True

    def make(self, table: str) -> None:
        if table in SPARSE:
            self.kv.create_sparse(table, self.columns, Add(), timeout_s=TIMEOUT_S)
        else:
            self.kv.create_dense(
                table, (SERVERS, self.columns), Add(), split_bytes_min=1, timeout_s=TIMEOUT_S
            )

    def ask(self, table: str, verb: Any, *arguments: Any) -> Any:
        """What it answered; None: it has failed, and what is to be done then was done."""
        before, owed = self.epoch(table), self.owed
        try:
            with self.jobs.deadlines.watch(f"{verb.__name__} of {self.name}", self.patience_s):
                answer = verb(table, *arguments, timeout_s=self.timeout_s)
            assert self.epoch(table) == before, f"{self.name} was not told of {table}"
            assert not owed, f"{self.name} was not told of what a save has found"
            return True if answer is None else answer
        except RowsLost as error:
            self.note(verb.__name__, error)
            self.recover(table)
        except EpochChanged as error:
            self.note(verb.__name__, error)
            self.told(table, before, error)
        except errors.RpcError as error:
            self.note(verb.__name__, error)
        return None

    def told(self, table: str, before: int, error: EpochChanged) -> None:
        self.owed = max(0, self.owed - 1)
        match = re.match(r"table '(\w+)'", str(error))
        assert match is not None, str(error)
        if match[1] == table and self.epoch(table) != before:
            self.ledger.began(table, self.epoch(table), error.step)

    def next_write(self, life: Life) -> tuple[Write, Any] | None:
        """One more, and its values; None: the table has no column left."""
        write = Write(self.ledger.number(life.table), self.simulation.now)
        if write.number >= self.columns:
            return None
        life.writes.append(write)
        values = np.zeros((SERVERS, self.columns), np.float32)
        values[:, write.number] = 1.0
        return write, values

    def write(self, table: str) -> bool:
        life = self.ledger.life(table, self.epoch(table))
        begun = self.next_write(life)
        if begun is None:
            return True
        write, values = begun
        asked_s = self.simulation.now
        keys = keys_of(table)
        if table == WEIGHTS:
            answer = self.ask(table, self.kv.assign, np.full_like(values, write.number))
        elif self.draw() < 0.3:
            answer = self.ask(table, self.kv.push_pull, *keys, values)
        else:
            answer = self.ask(table, self.kv.push, *keys, values)
        if answer is None:
            return False
        write.ended_s = self.simulation.now
        if answer is not True:
            assert (answer[:, write.number] == 1).all(), "its own push is not in its pull"
            self.ledger.check(life, asked_s, answer, self.name)
        return True

    def read(self, table: str) -> bool:
        life = self.ledger.life(table, self.epoch(table))
        asked_s = self.simulation.now
        keys = keys_of(table)
        values = self.ask(table, self.kv.pull, *keys)
        if values is None:
            return False
        self.ledger.check(life, asked_s, values, self.name)
        return True

    def save(self) -> bool:
        """Whether it was answered."""
        self.jobs.steps += 1
        save = Save(self.jobs.steps, self.simulation.now, self.epochs())
        self.ledger.saves[save.step] = save
        self.may_die()
        try:
            with self.jobs.deadlines.watch(f"save of {self.name}", SAVE_TIMEOUT_S + UNDO_TIMEOUT_S):
                self.kv.save(
                    self.jobs.folder,
                    save.step,
                    keep=3,
                    full_every=2 if self.draw() < 0.5 else 1,
                    timeout_s=SAVE_TIMEOUT_S,
                )
            save.was_answered = True
        except errors.RpcError as error:
            self.note(f"no save of {save.step}", error)
        save.ended_s, save.last = self.simulation.now, self.epochs()
        for table, epoch in save.last.items():
            self.ledger.life(table, epoch)
        self.owed += sum(epoch != save.first[table] for table, epoch in save.last.items())
        return save.was_answered

    def recover(self, table: str) -> None:
        """One worker acts: the others find it done."""
        try:
            with self.kv.alone("recover", timeout_s=TIMEOUT_S):
                for act in (self.restore, partial(self.reset, [table])):
                    if self.is_there(table):
                        return
                    act()
        except errors.RpcError as error:
            self.note("no recovery", error)

    def is_there(self, table: str) -> bool:
        """Whether its rows are not lost."""
        before = self.epoch(table)
        keys = keys_of(table)
        try:
            self.kv.pull(table, *keys, timeout_s=TIMEOUT_S)
        except RowsLost:
            return False
        except EpochChanged as error:
            self.told(table, before, error)
        except errors.RpcError as error:
            self.note("look", error)
        return True

    def restore(self) -> bool:
        """Whether it was answered."""
        least = self.ledger.newest_answered()
        before = self.epochs()
        self.may_die()
        try:
            with self.jobs.deadlines.watch(
                f"restore of {self.name}", SAVE_TIMEOUT_S + UNDO_TIMEOUT_S
            ):
                step = self.kv.restore(self.jobs.folder, timeout_s=SAVE_TIMEOUT_S)
        except errors.RpcError as error:
            self.note("no restore", error)
            return False
        self.simulation.note(f"{self.name}: restored step {step}")
        assert step in self.ledger.saves, f"step {step}, which nobody saved"
        assert step >= least or self.is_later(step, least), f"step {step}, though {least} was saved"
        for table, epoch in self.epochs().items():
            if epoch != before.get(table):
                self.ledger.began(table, epoch, step)
        return True

    def is_later(self, step: int, than: int) -> bool:
        """Whether that save may have been committed after another one, which was begun later."""
        return self.ledger.saves[step].ended_s > self.ledger.saves[than].begun_s

    def reset(self, tables: Iterable[str]) -> None:
        names = list(tables)
        self.may_die()
        try:
            with self.jobs.deadlines.watch(f"reset of {self.name}", TIMEOUT_S):
                self.kv.reset(*names, timeout_s=TIMEOUT_S)
        except errors.RpcError as error:
            self.note("no reset", error)
            return
        self.simulation.note(f"{self.name}: reset {names}")
        for table in names:
            self.ledger.began(table, self.epoch(table), -1)


def recovery(simulation: Simulation) -> None:
    """The master has a journal."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Jobs(simulation, folder).run()


def recovery_without_journal(simulation: Simulation) -> None:
    """The master begins again without what it knew."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Jobs(simulation, folder).run(has_journal=False)


def recovery_on_one_host(simulation: Simulation) -> None:
    """All servers are on one host, which crashes: what they did not sync is lost."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Jobs(simulation, f"{folder}/made/by a save").run(disk=folder)
