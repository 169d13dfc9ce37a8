"""A second save, in a child of this process that is killed at one call to the file system after the
other.

    python -m tests.prpc_engine.kv.checkpoint.kill_at_every_call FOLDER FULL_EVERY

prints, for each call, its name, and the step of the newest whole checkpoint after the kill.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from prpc_engine.kv.checkpoint import latest
from tests.prpc_engine.kv.checkpoint.jobs import FailingFiles, create_tables, local_job, train


def save_twice(folder: Path, at: int, full_every: int) -> int:
    """In a child, so that the threads of a save are never in a process that forks: its status."""
    pid = os.fork()
    if not pid:
        files = FailingFiles()
        worker = local_job(2, files)
        create_tables(worker)
        for step, killed_at in ((1, -1), (2, at)):
            files.calls.clear()
            files.at = killed_at
            train(worker)
            worker.save(str(folder), step, keep=1, full_every=full_every)
        (folder / "calls").write_text("\n".join(files.calls))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(folder: Path, full_every: int) -> None:
    assert save_twice(folder / "undisturbed", -1, full_every) == 0
    for at, name in enumerate((folder / "undisturbed" / "calls").read_text().split()):
        status = save_twice(folder / str(at), at, full_every)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
            f"{name} was not reached: {status}"
        )
        print(name, latest(folder / str(at)).step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
