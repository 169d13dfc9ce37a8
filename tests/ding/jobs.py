"""Programs of DI-engine, written as its users write them: nothing here knows of prpc.

Each main() runs in every worker of a launch, and writes what it saw to <node id>.json in the folder
JOBS_FOLDER. JOBS_NODES: how many nodes the job has.

    python -m tests.ding.jobs MAIN MQ PROTOCOL WORKERS    by Parallel.runner, as scripts do
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ding.framework import Parallel, task

PATIENCE_S = 60.0
TICK_S = 0.03  # as DI-engine's own tests
BURST = 5000
QUIET_S = 3.0  # of a job whose queue loses events: then no more will come


def _say(**what: Any) -> None:
    folder = Path(os.environ["JOBS_FOLDER"])
    unfinished = folder / f".{Parallel().node_id}"
    unfinished.write_text(json.dumps(what))
    unfinished.replace(folder / f"{Parallel().node_id}.json")


def _until(happened: Any) -> bool:
    give_up_at = time.monotonic() + PATIENCE_S
    while not happened() and time.monotonic() < give_up_at:
        time.sleep(TICK_S)
    return bool(happened())


def ping() -> None:
    """Emit until all others have been heard, and have heard all."""
    others = int(os.environ["JOBS_NODES"]) - 1
    heard: set[int] = set()
    content: set[int] = set()
    with task.start():
        task.on("ping", heard.add)
        task.on("content", content.add)
        me = Parallel().node_id
        give_up_at = time.monotonic() + PATIENCE_S
        while len(content) < others and time.monotonic() < give_up_at:
            task.emit("ping", me, only_remote=True)
            if len(heard) == others:
                task.emit("content", me, only_remote=True)
            time.sleep(TICK_S)
        task.emit("content", me, only_remote=True)
        _say(heard=sorted(heard), labels=sorted(Parallel().labels))


def first() -> None:
    """Each node emits once, at once."""
    others = int(os.environ["JOBS_NODES"]) - 1
    heard: list[int] = []
    byes: list[int] = []
    with task.start():
        task.on("first", heard.append)
        task.on("bye", byes.append)
        task.emit("first", Parallel().node_id, only_remote=True)
        _until(lambda: len(heard) == others)
        _say(heard=sorted(heard))
        task.emit("bye", Parallel().node_id, only_remote=True)
        _until(lambda: len(byes) == others)  # a node that leaves ends the others


def burst() -> None:
    """Node 0 emits BURST events as fast as it can; node 1 counts them."""
    router = Parallel()
    got: Counter[str] = Counter()
    order: list[int] = []
    with task.start():
        task.on("burst", lambda number, data: order.append(number))
        task.on("ready", lambda: got.update(ready=1))
        task.on("enough", lambda: got.update(enough=1))
        if router.node_id == 0:
            _until(lambda: got["ready"])
            for number in range(BURST):
                router.emit("task.burst", "burst", number, b"x" * 64)
            _say(emitted=BURST)
            _until(lambda: got["enough"])
        else:
            give_up_at = time.monotonic() + PATIENCE_S
            while not order and time.monotonic() < give_up_at:
                task.emit("ready", only_remote=True)
                time.sleep(TICK_S)
            seen, quiet_since = -1, time.monotonic()
            while len(order) < BURST and time.monotonic() < quiet_since + QUIET_S:
                if len(order) != seen:
                    seen, quiet_since = len(order), time.monotonic()
                time.sleep(TICK_S)
            _say(received=len(order))
            task.emit("enough", only_remote=True)


def beat() -> None:
    """Emit its number on and on, and tell who was heard, until a file says that it is enough."""
    folder = Path(os.environ["JOBS_FOLDER"])
    heard: Counter[int] = Counter()
    with task.start():
        task.on("beat", lambda node: heard.update([node]))
        give_up_at = time.monotonic() + PATIENCE_S
        while not (folder / "enough").exists() and time.monotonic() < give_up_at:
            task.emit("beat", Parallel().node_id, only_remote=True)
            _say(heard=dict(heard))
            time.sleep(TICK_S)
        _say(heard=dict(heard), is_over=True)


def fail() -> None:
    """What a worker raises is raised by the launch."""
    raise RuntimeError("P1 Error")


if __name__ == "__main__":
    name, mq, protocol, workers = sys.argv[1:]
    Parallel.runner(
        int(workers), mq_type=mq, protocol=protocol, ports=int(os.environ["JOBS_PORT"])
    )(globals()[name])
