"""Every stall of a shard counts, once: also one that ends between two looks of the thread that
tells of them.
"""

from __future__ import annotations

import time

from shard import ShardGroup
from tests.program import wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S

BUDGET_S = 0.2


def test_each_stall_of_a_shard_counts_once_however_it_falls_between_two_looks() -> None:
    with ShardGroup(1, start_method="forkserver", stall_budget_s=BUDGET_S) as group:
        # imports what it needs, which may take too long itself
        group.submit_to(0, functions.stalls).result(PATIENCE_S)
        before, _ = group.submit_to(0, functions.stalls).result(PATIENCE_S)
        for _ in range(10):
            parks = group.statistics().shards[0].counters.parks
            wait_until(
                lambda parks=parks: group.statistics().shards[0].counters.parks > parks, "it sleeps"
            )  # type: ignore[misc]
            group.submit_to(0, time.sleep, 1.02 * BUDGET_S).result(PATIENCE_S)
        after, longest_s = group.submit_to(0, functions.stalls).result(PATIENCE_S)
        group.submit_to(0, time.sleep, 0.1 * BUDGET_S).result(PATIENCE_S)
        assert group.submit_to(0, functions.stalls).result(PATIENCE_S)[0] == after
    assert after - before == 10
    assert longest_s >= 1.02 * BUDGET_S
    shard = group.statistics().shards[0].counters
    assert (shard.stalls, shard.stall_ns_max >= 1.02 * BUDGET_S * 1e9) == (after, True)
