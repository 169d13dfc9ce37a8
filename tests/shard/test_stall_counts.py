"""Every stall of a shard counts, once: also one that ends between two looks of the thread that
tells of them.
"""

from __future__ import annotations

import time

import pytest

from shard import ShardGroup
from shard.memory.counters import CounterRow
from tests.program import wait_until
from tests.shard.processes import PATIENCE_S

BUDGET_S = 0.2


def counters_asleep(group: ShardGroup) -> CounterRow:
    """What shard 0 wrote when it fell asleep after all that it was asked before."""
    parks = group.statistics().shards[0].counters.parks
    wait_until(lambda: group.statistics().shards[0].counters.parks > parks, "it sleeps")
    return group.statistics().shards[0].counters


@pytest.mark.slow
def test_each_stall_of_a_shard_counts_once_however_it_falls_between_two_looks() -> None:
    with ShardGroup(1, start_method="forkserver", stall_budget_s=BUDGET_S) as group:
        # imports what it needs, which may take too long itself
        group.submit_to(0, time.sleep, 0.0).result(PATIENCE_S)
        before = counters_asleep(group).stalls
        for _ in range(10):
            counters_asleep(group)
            group.submit_to(0, time.sleep, 1.02 * BUDGET_S).result(PATIENCE_S)
        after = counters_asleep(group)
        group.submit_to(0, time.sleep, 0.1 * BUDGET_S).result(PATIENCE_S)
        assert counters_asleep(group).stalls == after.stalls
    assert after.stalls - before == 10
    assert after.stall_ns_max >= 1.02 * BUDGET_S * 1e9
    last = group.statistics().shards[0].counters
    assert (last.stalls, last.stall_ns_max) == (after.stalls, after.stall_ns_max)
