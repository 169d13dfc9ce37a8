"""Checkpoints of tables, in a real folder, while servers are killed.

    operation            promise                                    how it is checked
    save, answered       it is on the disk, whole                   a restore later brings it, or a
                                                                     newer one, back
    save, with an error  those before stay; it may be whole or not  the same
    restore              one that was saved whole, the newest        the writer's rows are those of
                                                                     its pushes up to the step, on
                                                                     all servers
    another worker's     in it if answered before save() was        as many as that says, on each
     pushes               called, not if begun after it returned;    server for itself
                          never a part of one
    RowsLost             as in scenarios_tables.py                   the writer restores then, and
                                                                     after each deadline
    a host crashes       as if all its servers were killed, and     the same, on a disk that loses
                          what was not synced is lost                what was not synced
    liveness             all workers end                            within END_S

The writer pushes and saves, and so the step says which of its pushes are in a checkpoint. The other
one pushes all the time.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine import RpcService, errors
from prpc_engine.kv import Add, EpochChanged, RowsLost, TableWorker
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.manifest import CheckpointError
from prpc_engine.kv.schema.beginnings import beginnings_of
from prpc_engine.kv.server.server import TableShard
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import begin, begin_master, run_to_the_end
from tests.simulation.scenarios_tables import SERVERS, Keys, id_of, keys_of, serve

STEPS, SAVE_EVERY = 14, 3
TIMEOUT_S, SAVE_TIMEOUT_S = 5.0, 10.0
UNTIL_S = 6.0
END_S = UNTIL_S + 120.0
NO_ROOM_CHANCE = 0.03  # of each call of a disk
RATES = Rates(cut=0.1, reset=0.3, kill=0.4, crash=0.03, stop=0.1, slow=0.2, clock=0.1)
Serve = Callable[[RpcService, Process], None]
LOST = (RowsLost, EpochChanged)
Counts = np.ndarray[Any, np.dtype[np.int64]]  # of pushes, by server


class Checkpoints:
    """A writer that saves and restores, and another worker."""

    def __init__(self, simulation: Simulation, folder: str) -> None:
        self.simulation, self.folder = simulation, folder
        self.saved = -1  # the step of the newest that was answered
        self.tried = -1  # of the newest save that was begun
        # how many of the other one's pushes are in the tables, at least and at most
        self.least: Counts = np.zeros(SERVERS, np.int64)
        self.most: Counts = np.zeros(SERVERS, np.int64)
        # of each save by its step: the least before it, the most at its end
        self.others: dict[int, tuple[Counts, Counts]] = {}
        self.generation = 0  # grows as a restore begins, and as it ends
        self.is_over = False

    # -- the writer --------------------------------------------------------------------------------

    def write(self, ours: RpcService, process: Process) -> None:
        kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=60.0)
        kv.create_sparse("sums", STEPS, Add(), timeout_s=60.0)
        keys, draw = keys_of(0), process.chance.random
        while self.saved < 0:
            try:
                self.save(kv, 0)
            except LOST:
                self.begin_anew(kv)
        step = 0
        while step < STEPS:
            try:
                grads = np.zeros((SERVERS, STEPS), np.float32)
                grads[:, step] = 1.0
                kv.push("sums", keys, grads, timeout_s=TIMEOUT_S)
                step += 1
                if step % SAVE_EVERY == 0:
                    self.save(kv, step)
                runtime.sleep(0.4 * draw())
            except (*LOST, errors.DeadlineExceeded):  # whether it was applied is not known
                step = self.restore(kv, keys)
        self.is_over = True

    def begin_anew(self, kv: TableWorker) -> None:
        self.generation += 1
        try:
            kv.reset(timeout_s=TIMEOUT_S)
            self.least = np.zeros(SERVERS, np.int64)
        except (*LOST, errors.DeadlineExceeded) as error:
            self.simulation.note(f"no reset: {type(error).__name__}")
        self.generation += 1

    def save(self, kv: TableWorker, step: int) -> None:
        self.tried = max(self.tried, step)
        least = self.least.copy()
        try:
            kv.save(self.folder, step, keep=2, timeout_s=SAVE_TIMEOUT_S)
            self.saved = step
        except CheckpointError as error:
            self.simulation.note(f"no save of {step}: {type(error).__name__}")
            least = np.minimum(least, self.others.get(step, (least, least))[0])
        self.others[step] = least, self.most.copy()

    def restore(self, kv: TableWorker, keys: Keys) -> int:
        """What is there then is what was saved."""
        while True:
            self.generation += 1
            before = self.most.copy()
            try:
                step = kv.restore(self.folder, timeout_s=SAVE_TIMEOUT_S)
                shown = kv.pull("sums", keys, timeout_s=TIMEOUT_S)
                others = kv.pull("sums", keys_of(1), timeout_s=TIMEOUT_S)
                break
            except (*LOST, CheckpointError, errors.DeadlineExceeded) as error:
                self.simulation.note(f"no restore: {type(error).__name__}")
                runtime.sleep(1.0)  # one that was lost never comes
        assert self.saved <= step <= self.tried, f"{step} of {self.saved} to {self.tried}"
        wanted = np.zeros((SERVERS, STEPS), np.float32)
        wanted[:, :step] = 1.0
        assert (shown == wanted).all(), f"step {step} is {shown.tolist()}"
        least, most = self.others[step]
        most = most + (self.most - before)
        assert (others == others[:, :1]).all(), f"a push is torn: {others.tolist()}"
        found = others[:, 0]
        assert ((least <= found) & (found <= most)).all(), f"{least} to {most}, not {found}"
        self.generation += 1
        self.saved = self.tried = step
        self.least, self.most = least.copy(), most
        return step

    # -- the other one -----------------------------------------------------------------------------

    def push_too(self, ours: RpcService, process: Process) -> None:
        kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=60.0)
        kv.create_sparse("sums", STEPS, Add(), timeout_s=60.0)
        keys, draw = keys_of(1), process.chance.random
        ones = np.ones((SERVERS, STEPS), np.float32)
        while not self.is_over:
            generation = self.generation
            self.most = self.most + 1
            try:
                kv.push("sums", keys, ones, timeout_s=TIMEOUT_S)
                if generation == self.generation:
                    self.least = self.least + 1
            except (*LOST, errors.DeadlineExceeded) as error:
                self.simulation.note(f"the other one: {type(error).__name__}")
            runtime.sleep(0.4 * draw())

    def run(self, rates: Rates, serve: Serve = serve, disk: str | None = None) -> None:
        """disk: a folder of a host on which all servers are."""
        simulation = self.simulation
        begin_master(simulation)
        names = [f"server{each}" for each in range(SERVERS)]
        for name in names:
            begin(simulation, name, serve, host=None if disk is None else "storage")
        if disk is not None:
            simulation.disk("storage", disk)
        workers = [
            begin(simulation, "writer", self.write),
            begin(simulation, "other", self.push_too),
        ]
        simulation.let_loose(rates, UNTIL_S, names)
        run_to_the_end(simulation, workers, END_S)


class FullDisk(Files):
    """A disk without room now and then, until the faults are over: a write may be torn."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def _may_fail(self) -> None:
        if runtime.monotonic() < UNTIL_S and self._process.chance.random() < NO_ROOM_CHANCE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make_folder(self, path: Path) -> None:
        self._may_fail()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._may_fail()
        return super().create(path)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        half = len(data) // 2
        super().write_at(fd, data[:half], offset)
        self._may_fail()
        super().write_at(fd, data[half:], offset + half)

    def sync(self, fd: int) -> None:
        self._may_fail()
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self._may_fail()
        super().rename(path, to)

    def sync_folder(self, path: Path) -> None:
        self._may_fail()
        super().sync_folder(path)


def serve_on_a_full_disk(ours: RpcService, process: Process) -> None:
    """As TableServer, with those files."""
    shard, server_id = TableShard(None, FullDisk(process)), id_of(process)
    while True:
        try:
            ours.create_server("kv", shard, server_id=server_id, inline=True)
            break
        except errors.NodeExists:  # until the lease of the one before is over
            runtime.sleep(0.2)
    beginnings = beginnings_of(ours, "kv")
    assert beginnings is not None
    beginnings.remember()
    ours.serve_forever()


def checkpoints(simulation: Simulation) -> None:
    """Servers are killed while they save, and while they restore."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Checkpoints(simulation, folder).run(RATES)


def checkpoints_on_a_full_disk(simulation: Simulation) -> None:
    """The same, and writes fail."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Checkpoints(simulation, folder).run(RATES, serve_on_a_full_disk)


def checkpoints_on_a_disk_that_loses(simulation: Simulation) -> None:
    """All servers are on one host, which crashes: what they did not sync is lost."""
    rates = Rates(
        cut=0.1, reset=0.2, kill=0.2, crash=0.4, stop=0.1, slow=0.2, clock=0.1, drift=0.2, full=0.1
    )
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        Checkpoints(simulation, f"{folder}/made/by a save").run(rates, disk=folder)
