"""Small jobs whose tables are worth a checkpoint, and a file system that fails when it is
told to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine.kv import Adagrad, Sgd, TableShard, TableWorker, Uniform
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.client.local import LocalService

KEYS = np.arange(300)


class FailingFiles(Files):
    """The call number `at` (from 0) raises OSError(error), or kills the process; calls are counted
    in `calls`.
    """

    def __init__(self, at: int = -1, error: int = 0) -> None:
        self.at, self.error = at, error
        self.calls: list[str] = []

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            if not self.error:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.error, os.strerror(self.error), f"in {name}")

    def make_folder(self, path: Path) -> None:
        self._count("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self._count("write_at")
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self._count("rename")
        super().rename(path, to)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        super().sync_folder(path)

    def remove_tree(self, path: Path) -> None:
        self._count("remove_tree")
        super().remove_tree(path)


def local_job(servers: int = 1, files: Files | None = None, root: str | None = None) -> TableWorker:
    """A worker of `servers` servers in this process."""
    worker, _ = job_and_shards(servers, files, root)
    return worker


def job_and_shards(
    servers: int,
    files: Files | None = None,
    root: str | None = None,
    kind: type[TableShard] = TableShard,
) -> tuple[TableWorker, list[TableShard]]:
    """The same, and what those servers are, of that class."""
    service, shards = LocalService(), [kind(root, files) for _ in range(servers)]
    for shard in shards:
        service.create_server("kv", shard)
    return TableWorker(service, expected_servers=servers), shards


def create_tables(worker: TableWorker) -> None:
    """One sparse and two dense ones: cut, and whole."""
    worker.create_sparse("clicks/a", 4, Adagrad(0.1), Uniform(0.1))
    worker.create_dense("weights", (7, 3), Adagrad(0.1), Uniform(0.1), split_bytes_min=0)
    worker.create_dense("bias", (), Sgd(1.0))


def train(worker: TableWorker, rounds: int = 1) -> None:
    """Push to all of them."""
    for _ in range(rounds):
        worker.push("clicks/a", KEYS, np.ones((len(KEYS), 4), np.float32))
        worker.push("weights", np.ones((7, 3), np.float32))
        worker.push("bias", np.ones((), np.float32))


def values(worker: TableWorker) -> dict[str, Any]:
    """What all of them hold."""
    return {
        "clicks/a": worker.pull("clicks/a", np.arange(-10, 400)),
        "weights": worker.pull("weights"),
        "bias": worker.pull("bias"),
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for table, array in wanted.items():
        np.testing.assert_array_equal(found[table], array, err_msg=table)
