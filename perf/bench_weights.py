"""Weights of a topic to a reader: what has changed, beside all of them.

16 arrays of 16-bit elements, of which two in a hundred change in one bit between two versions, as
bfloat16 weights do between steps of reinforcement learning. The reader sums all bytes: what it has
is compared with what was published.

Expected, 1 GB: 2 % of 500 M elements at 4 + 2 bytes are 60 MB, a 17th of all. The publisher
compares all of them, 1.5 GB/s; the reader writes 10 M elements here and there, 0.3 s, and sums 1
GB, 0.2 s. All of them take two copies at the publisher, 1 s, and none at the reader.

    python -m perf.bench_weights [--json] [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

import prpc_engine
from prpc_engine import topics

from .child import STOP_LOOK_S, Announce, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.prpc import serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, summary

NAME = "weights"
ARRAYS = 16
CHANGED = 0.02
TOPIC, SUMS = "weights", "sums"
WAIT_S_MAX = 60.0
CHANGES, WHOLE = "what has changed", "all of them"


@dataclass(frozen=True, slots=True)
class Sync:
    """Weights of so many bytes."""

    size_bytes: int

    def __str__(self) -> str:
        return f"{self.size_bytes / 1e6:g} MB, 2 % changed"


CASES = [Sync(1_000_000_000)]
TARGETS = [
    Target(str(CASES[0]), CHANGES, "sent_bytes", "at most", 1 / 10, against=WHOLE),
    Target(str(CASES[0]), CHANGES, "wrong", "at most", 0),
]


def sums(state: dict[str, NDArray[np.uint16]]) -> list[int]:
    """Of the elements of each array."""
    return [int(array.sum(dtype=np.uint64)) for array in state.values()]


def serve(announce: Announce, master: str) -> None:
    """A reader, until SIGTERM: publishes what it has got, as sums."""
    stop = StopRequest()
    with (
        prpc_engine.RpcService(master) as service,
        topics.Subscriber(service, TOPIC) as weights,
        topics.Publisher(service, SUMS) as answers,
    ):
        announce(service.rank)
        while not stop.asked:
            try:
                item = weights.receive(STOP_LOOK_S)
            except prpc_engine.errors.DeadlineExceeded:
                continue
            answers.publish([item.version, sums(item.value)])


def run(
    case: Sync,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case both ways."""
    candidates = [
        Candidate(name, "ours", partial(measure, case=case, is_whole=name == WHOLE))
        for name in (CHANGES, WHOLE)
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


def measure(place: Place, effort: Effort, case: Sync, is_whole: bool) -> Sample:
    """Time from publish() until the reader has summed them; figures: bytes that were sent or lent
    for a version, and how many arrays were not equal.
    """
    generator = np.random.default_rng(1)
    size = case.size_bytes // ARRAYS // 2
    state = {
        f"layer {number}": generator.integers(0, 1 << 16, size, np.uint16)
        for number in range(ARRAYS)
    }
    with (
        place.serve_aside(serve_master) as (_, master),
        place.serve(serve, master),
        prpc_engine.RpcService(master) as service,
        topics.Publisher(service, TOPIC, mode="latest") as publisher,
        topics.Subscriber(service, SUMS) as answers,
    ):
        publisher.wait_for_readers(1, WAIT_S_MAX)
        version, wrong, took_ns, sent = 0, 0, [], 0
        for step in range(2 + min(effort.ops_min, 3)):
            for array in state.values():
                array[generator.integers(0, size, int(size * CHANGED))] ^= 1
            before, began = _bytes_sent(service), time.perf_counter_ns()
            version = publisher.publish(state, changed_since=0 if is_whole else version)
            got, found = answers.receive(WAIT_S_MAX).value
            if step >= 2:  # the first comes whole, and the second makes them the reader's own
                took_ns.append(time.perf_counter_ns() - began)
                sent = _bytes_sent(service) - before
            wrong += sum(one != other for one, other in zip(found, sums(state), strict=True))
            wrong += got != version
        sample = summary(np.array(took_ns, dtype=np.float64))
        sample.figures.update(sent_bytes=float(sent), wrong=float(wrong))
        return sample.with_work(versions=version, wrong=wrong)


def _bytes_sent(service: prpc_engine.RpcService) -> int:
    return sum(peer.traffic.bytes_sent for peer in service.statistics().peers)


def test_both_ways_the_reader_has_what_was_published() -> None:
    for result in run(Sync(3_200_000), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"versions": 5, "wrong": 0}
        assert result.figures["sent_bytes"] > 0


def test_every_target_has_something_to_judge() -> None:
    for target in TARGETS:
        assert target.case in map(str, CASES)
        assert {name for name in (target.candidate, target.against) if name} <= {CHANGES, WHOLE}


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
