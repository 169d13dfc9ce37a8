"""No wake-up is ever lost between two processes that sleep whenever they can; and this test would
notice one.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shard.memory import memory_order
from shard.transport.rings import make_rings
from tests.shard.sleep_peer import LONG_NS, Report, Side

ROOT = Path(__file__).parent.parent.parent
PARKS = 100_000  # of both sides together
PATIENCE_S = 120.0  # it takes some 10 s
# The broken handshake loses a wake-up in 1 of some hundred pairs; on a machine where the two are
# seldom awake together, in 1 of many thousands: PATIENCE_S is the bound then.
BROKEN_PAIRS_MAX = 1_000_000


def exchange(seed: int, parks: int, pairs_max: int, broken: bool = False) -> tuple[Report, Report]:
    """Pairs to and fro between this process and another, until both slept so often; what each saw.
    Ends with the first wake-up that this side lost."""
    ours, theirs = socket.socketpair()
    segment = make_rings(64 << 10)
    deadline = time.monotonic() + PATIENCE_S
    other_fd = os.dup(segment.fd)
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.shard.sleep_peer",
                *(
                    str(one)
                    for one in (
                        theirs.fileno(),
                        other_fd,
                        seed + 1,
                        "broken" if broken else "right",
                        PATIENCE_S,
                    )
                ),
            ],
            pass_fds=[theirs.fileno(), other_fd],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
    finally:
        theirs.close()
        os.close(other_fd)
    with process:
        side = Side(ours, segment, True, seed, broken)
        turned = side.reactor
        for _ in range(pairs_max):
            side.send_pair()
            if not side.wait_for_pair(deadline) or turned.parks * 2 >= parks or turned.late_wakes:
                break
        if side.connection.error is None:
            side.send_pair(last=True)
        output, _ = process.communicate(timeout=PATIENCE_S)
        report = side.close()
    return report, Report(**json.loads(output))


def show(name: str, report: Report) -> None:
    """What waking up costs, for the log."""
    delays = sorted(report.delays_ns)
    cuts = statistics.quantiles(delays, n=100)
    long = sum(delay > LONG_NS for delay in delays)
    print(
        f"{name}: {report.parks} sleeps, {report.wakeups} woken by a bell, "
        f"{report.late_wakes} lost; message to a sleeper: "
        f"p50 {cuts[49] / 1e3:.0f} us, p99 {cuts[98] / 1e3:.0f} us, "
        f"max {delays[-1] / 1e3:.0f} us, {long} over 1 ms, of which "
        f"{max(0, long - report.late_wakes)} with nothing lost"
    )


needs_fence = pytest.mark.skipif(
    not memory_order.register_fence(),
    reason="without membarrier a wake-up may be lost for a millisecond: memory_order.py",
)


@pytest.mark.slow
@needs_fence
def test_a_hundred_thousand_sleeps_end_by_their_doorbells(seed: int) -> None:
    ours, theirs = exchange(seed, PARKS, pairs_max=PARKS)
    show("this side", ours)
    show("the other", theirs)
    assert ours.late_wakes == theirs.late_wakes == 0
    assert ours.parks + theirs.parks >= PARKS * 0.9
    assert ours.out_of_order == theirs.out_of_order == 0
    assert theirs.messages == ours.messages + 2  # each pair was answered, but for the last


@pytest.mark.slow
@needs_fence
@pytest.mark.alone  # both must be awake at the same time, and often
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2,
    reason="on one core nobody writes while the other falls asleep",
)
def test_a_handshake_that_looks_before_it_says_so_is_caught_losing_one(seed: int) -> None:
    ours, theirs = exchange(
        seed, parks=20 * BROKEN_PAIRS_MAX, pairs_max=BROKEN_PAIRS_MAX, broken=True
    )
    print(
        f"lost after {ours.messages // 2} pairs: {ours.late_wakes} here, {theirs.late_wakes} there"
    )
    assert ours.late_wakes + theirs.late_wakes > 0
    # late, and still all there: every sleep has an end
    assert ours.out_of_order == theirs.out_of_order == 0
