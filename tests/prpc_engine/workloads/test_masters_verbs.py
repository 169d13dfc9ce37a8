"""pRPC's workloads of the master: barriers whose names are used again, locks within locks from many
threads.
"""

from __future__ import annotations

import threading
from collections import Counter

from prpc_engine import Master
from prpc_engine.master.client import MasterClient
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.tally import run_threads

BARRIERS = (("b1", 5), ("b1", 10), ("b2", 10), ("b1", 5), ("b2", 5))
THREADS, PAIRS = 4, 10


def test_barriers_can_be_used_again_with_other_sizes_and_let_nobody_through_early(
    master: Master,
) -> None:
    arrived: Counter[int] = Counter()
    guard = threading.Lock()
    with MasterClient(master.address) as client:
        for place, (name, count) in enumerate(BARRIERS):

            def pass_it(place: int = place, name: str = name, count: int = count) -> None:
                with guard:
                    arrived[place] += 1
                client.barrier(name, count, PATIENCE_S)
                assert arrived[place] == count

            run_threads([pass_it] * count, PATIENCE_S)


def test_four_threads_hold_ten_pairs_of_nested_locks_each_one_at_a_time(master: Master) -> None:
    inside: list[int] = []
    tokens: list[tuple[int, int]] = []
    with MasterClient(master.address) as client:

        def work(name: int) -> None:
            for _ in range(PAIRS):
                with (
                    client.lock("outer", PATIENCE_S) as outer,
                    client.lock("inner", PATIENCE_S) as inner,
                ):
                    inside.append(name)
                    assert inside == [name]
                    tokens.append((outer, inner))
                    inside.remove(name)

        run_threads([lambda name=name: work(name) for name in range(THREADS)], PATIENCE_S)  # type: ignore[misc]
    assert len(tokens) == THREADS * PAIRS
    assert tokens == sorted(tokens), "each holder's token is larger than the last one's"
