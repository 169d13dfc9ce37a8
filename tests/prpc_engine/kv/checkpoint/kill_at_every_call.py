"""A second save, in a child of this process that is killed at one call to the file system after the other.

    python -m tests.prpc_engine.kv.checkpoint.kill_at_every_call FOLDER

prints, for each call, its name, and the step of the newest whole checkpoint after the kill.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from prpc_engine.kv.checkpoint import latest
from tests.prpc_engine.kv.checkpoint.jobs import FailingFiles, create_tables, local_job, train


def save(folder: Path, step: int, files: FailingFiles) -> None:
    worker = local_job(2, files)
    create_tables(worker)
    train(worker, step)
    worker.save(str(folder), step, keep=1)


def save_twice(folder: Path, at: int) -> int:
    """In a child, so that the threads of a save are never in a process that forks: its status."""
    pid = os.fork()
    if not pid:
        files = FailingFiles(at)
        save(folder, 1, FailingFiles())
        save(folder, 2, files)
        (folder / "calls").write_text("\n".join(files.calls))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(folder: Path) -> None:
    assert save_twice(folder / "undisturbed", -1) == 0
    for at, name in enumerate((folder / "undisturbed" / "calls").read_text().split()):
        status = save_twice(folder / str(at), at)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{name} was not reached: {status}"
        print(name, latest(folder / str(at)).step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
