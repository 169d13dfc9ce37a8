"""Checkpoints of one server's tables to tmpfs, beside writing and reading files; and what pushes
notice of a save.

Expected, on a core that writes new pages of tmpfs at some 5 GB/s; both threads of the server are
pinned to it:
    save     copying pieces of 8 MiB, writing them, and CRC-32 of them: 1 / (1/10 + 1/5 + 1/6) = 2
             GB/s. Removing the checkpoint before it (keep=1) costs a tenth of that.
    changes  pushing 10,000 rows, then finding and saving those of 500,000: 2 ms and 5 MB, and the
             rounds and fsyncs: 6 ms. Each lies over the one before, so up to 100 of them are kept,
             and the manifests of all are read at each save.
    restore  every byte is read twice, once to verify it (5 GB/s), once to store it in new memory (2
             GB/s): 1.4 GB/s.
    push     10,000 rows of 64 take some ms. During a save each row is copied once, when it is
             changed first, and the push has half of the core, as the thread that writes has the
             other half: two to three times the time.

    python -m perf.bench_checkpoint [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import prpc_engine
from prpc_engine.kv import Adagrad, TableServer, TableWorker
from prpc_engine.kv.checkpoint import verify

from .child import STOP_LOOK_S, Announce, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .peers.prpc import only_core, serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each

NAME = "checkpoint"
TABLE, DIM = "t", 64
ROW_BYTES = 8 + 2 * 4 * DIM  # key, values, accumulator
PUSH_KEYS = 10_000
PIECE_BYTES = 8 << 20
CHAIN = 100  # every so many saves of changes one is full
# between the saves that pushes run beside: so that some have none beside them, as in a real job
PAUSE_S = 0.05
SAVING_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """`what` with a sparse table of float32[rows, 64] under Adagrad: "save", "restore", "push"
    (while saving), or "changes": save after a push of PUSH_KEYS, incrementally.
    """

    what: str
    rows: int

    @property
    def size_bytes(self) -> int:
        """Of one checkpoint, or of one push."""
        if self.what == "changes":
            return PUSH_KEYS * ROW_BYTES
        return self.rows * ROW_BYTES if self.what != "push" else PUSH_KEYS * (8 + 4 * DIM)

    def __str__(self) -> str:
        return f"{self.what}, a table of {self.rows * ROW_BYTES / 1e6:.0f} MB"


CASES = [
    Case("save", 500_000),
    Case("changes", 500_000),
    Case("restore", 500_000),
    Case("push", 500_000),
]
TARGETS = [
    Target(str(CASES[0]), "prpc kv, tmpfs", "p50_ns", "at most", CASES[0].size_bytes),  # 1 GB/s
    Target(str(CASES[2]), "prpc kv, tmpfs", "p50_ns", "at most", CASES[2].size_bytes),
    Target(str(CASES[3]), "push, while saving", "saved_gb_per_s", "at least", 1),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case: a server, and what the machine can do."""
    if case.what == "push":
        candidates = [
            Candidate("push, while saving", "ours", partial(measure_push, case=case, saving=True)),
            Candidate(
                "push, while saving changes",
                "ours",
                partial(measure_push, case=case, saving=True, full_every=10),
            ),
            Candidate("push, not saving", "limit", partial(measure_push, case=case, saving=False)),
        ]
    else:
        files = measure_read if case.what == "restore" else measure_write
        candidates = [
            Candidate("prpc kv, tmpfs", "ours", partial(measure, case=case)),
            Candidate("one file, CRC-32", "limit", partial(files, case=case, crc=True)),
            Candidate("one file", "limit", partial(files, case=case, crc=False)),
        ]
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """On tmpfs; removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="prpc-bench-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def serve(announce: Announce, master: str) -> None:
    """A key-value server, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.RpcService(master=master, polling=True, pin=only_core()) as service:
        TableServer(service)
        announce(service.rank)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


@contextlib.contextmanager
def _filled(place: Place, case: Case) -> Iterator[TableWorker]:
    with (
        place.serve_aside(serve_master) as (_, master),
        place.serve(serve, master),
        prpc_engine.RpcService(master=master, polling=True, pin=only_core()) as service,
    ):
        worker = TableWorker(service, timeout_s=WAIT_S_MAX)
        worker.create_sparse(TABLE, DIM, Adagrad(0.1))
        for begin in range(0, case.rows, PUSH_KEYS):
            keys = np.arange(begin, min(case.rows, begin + PUSH_KEYS))
            worker.push(TABLE, keys, np.ones((len(keys), DIM), np.float32))
        yield worker


def measure(place: Place, effort: Effort, case: Case) -> Sample:
    """Save, or restore, again and again; then look whether what is there is whole."""
    with _folder() as folder, _filled(place, case) as worker:
        steps = itertools.count()
        worker.save(str(folder), next(steps), keep=1)
        before = worker.pull(TABLE, np.arange(100))
        if case.what == "changes":
            keys, grads = (
                np.arange(0, case.rows, case.rows // PUSH_KEYS),
                np.ones((PUSH_KEYS, DIM), np.float32),
            )

            def push_and_save() -> None:
                worker.push(TABLE, keys, grads)
                worker.save(str(folder), next(steps), keep=1, full_every=CHAIN)

            push_and_save()
            sample = time_each(push_and_save, effort)
            before = worker.pull(TABLE, np.arange(100))
            worker.restore(str(folder))
        elif case.what == "save":
            sample = time_each(lambda: worker.save(str(folder), next(steps), keep=1), effort)
        else:
            sample = time_each(lambda: worker.restore(str(folder)), effort)
        whole = int(not verify(folder)[0].fault)
        same = int((worker.pull(TABLE, np.arange(100)) == before).all())
        return sample.with_work(whole=whole, same=same)


def measure_push(
    place: Place, effort: Effort, case: Case, saving: bool, full_every: int = 1
) -> Sample:
    """Time pushes, with somebody else saving all the time or not; saved_gb_per_s: how fast that
    was.
    """
    over = threading.Event()

    took_s: list[float] = []

    def save_on() -> None:
        until = time.monotonic() + SAVING_S_MAX
        for step in itertools.count():
            began = time.monotonic()
            worker.save(str(folder), step, keep=1, full_every=full_every)
            took_s.append(time.monotonic() - began)
            if over.wait(PAUSE_S) or time.monotonic() > until:
                return

    with _folder() as folder, _filled(place, case) as worker:
        random = np.random.default_rng(20240817)
        grads = np.ones((PUSH_KEYS, DIM), np.float32)
        sets = itertools.cycle(
            [np.sort(random.choice(case.rows, PUSH_KEYS, replace=False)) for _ in range(8)]
        )
        saver = threading.Thread(target=save_on)
        if saving:
            saver.start()
        try:
            sample = time_each(lambda: worker.push(TABLE, next(sets), grads), effort)
        finally:
            over.set()
            if saving:
                saver.join(SAVING_S_MAX)
        if took_s and full_every == 1:
            sample.figures["saved_gb_per_s"] = (
                len(took_s) * case.rows * ROW_BYTES / sum(took_s) / 1e9
            )
        return sample.with_work(
            whole=int(any(not finding.fault for finding in verify(folder))), same=1
        )


def measure_write(place: Place, effort: Effort, case: Case, crc: bool) -> Sample:
    """As many bytes into a new file, which takes the place of the one before."""
    piece = np.ones(PIECE_BYTES, np.uint8).data
    with _folder() as folder:

        def write() -> None:
            fd = os.open(folder / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            for offset in range(0, case.size_bytes, PIECE_BYTES):
                if crc:
                    zlib.crc32(piece)
                os.pwrite(fd, piece[: case.size_bytes - offset], offset)
            os.fsync(fd)
            os.close(fd)
            os.rename(folder / "new", folder / "old")

        sample = time_each(write, effort)
        return sample.with_work(
            whole=int((folder / "old").stat().st_size == case.size_bytes), same=1
        )


def measure_read(place: Place, effort: Effort, case: Case, crc: bool) -> Sample:
    """As many bytes from a file."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with _folder() as folder:
        (folder / "file").write_bytes(bytes(case.size_bytes))
        read = 0

        def read_all() -> None:
            nonlocal read
            with open(folder / "file", "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    read += count
                    if crc:
                        zlib.crc32(buffer[:count])

        sample = time_each(read_all, effort)
        return sample.with_work(whole=int(read % case.size_bytes == 0), same=1)


def test_what_is_measured_is_whole() -> None:
    for case in (
        Case("save", 2000),
        Case("changes", 20_000),
        Case("restore", 2000),
        Case("push", 20_000),
    ):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work["whole"] == (result.candidate != "push, not saving")
            assert result.work["same"] == 1


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
