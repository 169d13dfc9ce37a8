"""One small scenario over vLLM's own MessageQueue, or over ours: what a program sees of either.

    python -m tests.prpc_engine.vllm.scenario MODULE

MODULE has a MessageQueue: prpc_engine.vllm, or vLLM's own. It prints a JSON line a step. Readers
are processes of multiprocessing, as vLLM's workers are.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

READERS = 2
VALUES: list[Any] = [
    None,
    ("execute_model", (1, "a"), {"k": [2.5]}, 0),
    np.arange(300_000, dtype=np.float32),  # 1.2 MB: out of band in both
    {"large": np.ones(2_000_000, np.float32)},  # more than a chunk
    list(range(1000)),
]
CHUNK_BYTES, CHUNKS = 4 << 20, 3
STEP_S = 60.0  # longer than any step takes


def seen(value: Any) -> Any:
    """Of a value, for a line."""
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), float(value.sum())]
    if isinstance(value, dict):
        return {name: seen(one) for name, one in value.items()}
    return value


def raised(do: Callable[[], Any]) -> list[bool]:
    """Which of the errors that vLLM's programs catch it raises."""
    try:
        do()
    except Exception as error:
        return [isinstance(error, TimeoutError), isinstance(error, RuntimeError)]
    return []


def read(module: str, handle: Any, rank: int, pipe: Any) -> None:
    """A reader: what it dequeues, and how it ends."""
    queue = importlib.import_module(module).MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    found = [seen(queue.dequeue(timeout=STEP_S)) for _ in VALUES]
    found.append(queue.broadcast_object())
    found.append(raised(lambda: queue.dequeue(timeout=0.01)))
    pipe.send(found)
    pipe.recv()  # the writer has been refused for want of room
    found = [queue.dequeue(timeout=STEP_S) for _ in range(CHUNKS + 1)]
    waits = threading.Timer(0.0, queue.shutdown)
    waits.start()
    found.append(raised(lambda: queue.dequeue(indefinite=True)))
    waits.join()
    pipe.send(found)
    pipe.recv()


def main(module: str) -> None:
    """The writer."""
    queue_class = importlib.import_module(module).MessageQueue
    queue = queue_class(
        n_reader=READERS,
        n_local_reader=READERS,
        max_chunk_bytes=CHUNK_BYTES,
        max_chunks=CHUNKS,
    )
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(READERS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=read, args=(module, queue.export_handle(), rank, theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    queue.wait_until_ready()
    for value in VALUES:
        queue.enqueue(value, timeout=STEP_S)
    print(json.dumps(queue.broadcast_object("to all")))
    for pipe in pipes:
        print(json.dumps(pipe.recv()))
    for number in range(CHUNKS):
        queue.enqueue(number, timeout=STEP_S)
    print(json.dumps(raised(lambda: queue.enqueue(CHUNKS, timeout=0.01))))
    for pipe in pipes:
        pipe.send(None)
    queue.enqueue(CHUNKS, timeout=STEP_S)
    for pipe in pipes:
        print(json.dumps(pipe.recv()))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    queue.shutdown()
    print(json.dumps([len(queue.export_handle().local_reader_ranks), queue.n_remote_reader]))


if __name__ == "__main__":
    main(sys.argv[1])
