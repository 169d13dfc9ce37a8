"""What torchrun starts in its tests: `torchrun ... -m this SCENARIO FOLDER`. What a worker has seen
goes to a file of the folder, by its rank and the generation that torchrun counts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from prpc_engine import remote as rpc
from prpc_engine.remote.agent_store import PREFIX
from tests.program import wait_until

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def asked() -> int:
    """How many questions the store of torchrun's agent has."""
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    count: int = distributed.PrefixStore(PREFIX, store).add("asked", 0)
    return count


def say(folder: Path, value: Any) -> None:
    (folder / f"{RANK}.{os.environ['GROUP_RANK']}.{GENERATION}").write_text(json.dumps(value))


def whom() -> list[Any]:
    """Where this runs: rank, process, and the workers that are known here."""
    return [RANK, os.getpid(), [info.name for info in rpc.get_worker_infos()]]


def join() -> list[Any]:
    rpc.init_rpc(f"worker{RANK}")
    return [rpc.rpc_sync(f"worker{rank}", whom) for rank in range(SIZE)]


def again(folder: Path) -> None:
    """A group, torch's own by the same store, and another group of the same processes."""
    first = join()
    rpc.shutdown()
    distributed.init_process_group("gloo")
    total = torch.tensor([RANK])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    say(folder, [first, total.tolist(), join()])
    rpc.shutdown()


def once(folder: Path) -> None:
    """A group."""
    say(folder, join())
    rpc.shutdown()


def restart(folder: Path) -> None:
    """Rank 0 dies, whose address the others have; they find the next one, though they ask first."""
    if not GENERATION:
        say(folder, join())
        if not RANK:
            wait_until(lambda: len(list(folder.iterdir())) == SIZE)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # until torchrun ends this
    if not RANK:
        wait_until(lambda: asked() == 2 * (SIZE - 1), "all others' questions")
    say(folder, join())
    rpc.shutdown()


def unanswered(folder: Path) -> None:
    """Rank 0 dies before it answers: what it was asked is nobody's question any more."""
    if not GENERATION and not RANK:
        wait_until(lambda: asked() == SIZE - 1, "all others' questions")
        os.kill(os.getpid(), signal.SIGKILL)
    say(folder, join())
    rpc.shutdown()


def of_two_agents(folder: Path) -> None:
    """The worker of one agent dies; the other agent, which has rank 0, counts no restart."""
    died, joined = folder / "died", folder / "joined"
    seen = join()
    if RANK and not died.exists():
        wait_until(joined.exists, "rank 0, which would end with an error and count a restart")
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not died.exists():
        joined.touch()
        threading.Event().wait()
    say(folder, seen)
    rpc.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
