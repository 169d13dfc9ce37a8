"""64 tensors of 4 KB from one task to another in one step: received one by one, all at once, and
fused into one message.

Every candidate receives the same tensors, which its source has ready before the clock starts: the
source's sends are not timed.

Expected, over shared memory:
    one by one  64 round trips of a 4 KB array: a call of 6 us, some 10 us more for the array's
                header, its copy out of the ring, the table at the source and three futures here:
                1.2 ms.
    at once     the same work, less the waits: both sides at once, 0.8 ms.
    fused       one call; for each tensor its header, an inline copy and a future: some 3 us on each
                side: 0.3 ms. As recv_many() without the futures.
Over tcp a round trip costs 10 to 15 us more, which one by one pays 64 times and fused once.

    python -m perf.bench_fuse [--json] [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from prpc_engine import Server, ServerConfig

from .child import Announce
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, calls_for, summary

NAME = "fuse"
PORT = 2222  # of the source; the receiver has the next one
HOST = "127.83.{}.{}"  # each repeat at a loopback address of its own, where all ports are free
SOURCE, RECEIVER = "/job:ps/task:0", "/job:worker/task:0"
FIRST_ITEM = np.float32(0.5)


@dataclass(frozen=True, slots=True)
class Step:
    """All tensors of one step."""

    transport: str
    tensors: int = 64
    size_bytes: int = 4096

    def __str__(self) -> str:
        return f"{self.tensors} tensors of {self.size_bytes} B, {self.transport}"


CASES = [Step("shm"), Step("tcp")]
ONE_BY_ONE, AT_ONCE, FUSED, MANY = "one by one", "a request each, at once", "fused", "recv_many"
TARGETS = [
    target
    for case in map(str, CASES)
    for target in (
        Target(case, FUSED, "messages", "at most", 1 / 5, against=ONE_BY_ONE),
        Target(case, FUSED, "p50_ns", "at most", 1 / 3, against=ONE_BY_ONE),
    )
]


def run(
    case: Step,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case in all ways."""
    candidates = [Candidate(way, "ours", partial(measure, case=case, way=way)) for way in RECEIVE]
    size_bytes = case.tensors * case.size_bytes
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=size_bytes,
        pinned=pinned,
        progress=progress,
    )


def cluster_of(number: int) -> dict[str, list[str]]:
    """A source and a receiver at a loopback address that goes with a process id."""
    host = HOST.format(number >> 8 & 0xFF, number & 0xFF)
    return {"ps": [f"{host}:{PORT}"], "worker": [f"{host}:{PORT + 1}"]}


def keys_of(case: Step) -> list[str]:
    """The names of the tensors."""
    return [f"edge {index}" for index in range(case.tensors)]


def serve(announce: Announce, cluster: dict[str, list[str]], case: Step) -> None:
    """The source: whenever it is asked for a step, it sends all tensors of it, then says so. Until
    killed.
    """
    keys = keys_of(case)
    tensor = np.full(case.size_bytes // FIRST_ITEM.itemsize, FIRST_ITEM)
    with Server(cluster, "ps", 0, config=ServerConfig(transports=[case.transport])) as source:
        announce(source.target)
        step = 0
        while True:
            source.recv("ask", source=RECEIVER, step=step, timeout_s=WAIT_S_MAX)
            for key in keys:
                source.send(key, tensor, to=RECEIVER, step=step)
            source.send("ready", tensor, to=RECEIVER, step=step)
            source.cleanup(step - 2) if step >= 2 else None
            step += 1


def _one_by_one(server: Server, keys: list[str], step: int) -> list[object]:
    return [server.recv(key, source=SOURCE, step=step) for key in keys]


def _at_once(server: Server, keys: list[str], step: int) -> list[object]:
    receipts = [server.submit_recv(key, source=SOURCE, step=step) for key in keys]
    return [receipt.result() for receipt in receipts]


def _fused(server: Server, keys: list[str], step: int) -> list[object]:
    with server.fuse(step):
        receipts = [server.submit_recv(key, source=SOURCE, step=step) for key in keys]
    return [receipt.result() for receipt in receipts]


def _many(server: Server, keys: list[str], step: int) -> list[object]:
    return [*server.recv_many(keys, source=SOURCE, step=step)]


RECEIVE: dict[str, Callable[[Server, list[str], int], list[object]]] = {
    ONE_BY_ONE: _one_by_one,
    AT_ONCE: _at_once,
    FUSED: _fused,
    MANY: _many,
}


def measure(place: Place, effort: Effort, case: Step, way: str) -> Sample:
    """Time each step from the first request to the last tensor."""
    cluster, keys, receive = cluster_of(os.getpid()), keys_of(case), RECEIVE[way]
    config = ServerConfig(transports=[case.transport])
    with Server(cluster, "worker", 0, config=config) as receiver, place.serve(serve, cluster, case):
        step = wrong = messages = 0

        def prepare() -> None:
            receiver.send("ask", FIRST_ITEM, to=SOURCE, step=step)
            receiver.recv("ready", source=SOURCE, step=step)

        def operate() -> int:
            nonlocal step, wrong, messages
            before = receiver.statistics().messages
            start = time.perf_counter_ns()
            tensors = receive(receiver, keys, step)
            took_ns = time.perf_counter_ns() - start
            messages += receiver.statistics().messages - before
            wrong += sum(
                int(tensor[0] != FIRST_ITEM) for tensor in tensors if isinstance(tensor, np.ndarray)
            )
            wrong += len(keys) - len(tensors)
            receiver.cleanup(step)
            step += 1
            return took_ns

        def both() -> int:
            prepare()
            return operate()

        calls = calls_for(both, effort)
        messages = 0
        sample = summary(np.array([both() for _ in range(calls)], dtype=np.int64))
        sample.figures["messages"] = messages / calls
        return sample.with_work(wrong=wrong, steps=calls)


def test_every_way_receives_every_tensor_and_fused_ways_in_one_message() -> None:
    for case in CASES:
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work == {"wrong": 0, "steps": TINY.ops_min}
            assert result.figures["messages"] == (
                1 if result.candidate in (FUSED, MANY) else case.tensors
            )


def test_every_target_has_something_to_judge() -> None:
    assert {target.case for target in TARGETS} == {str(case) for case in CASES}
    assert {
        name for target in TARGETS for name in (target.candidate, target.against)
    } <= RECEIVE.keys()


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
