"""A thousand connections to one server over tcp: all are answered, nobody starves, and when they
leave nothing stays.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from prpc_engine import Master, MasterClient, RpcService
from tests.faults.flatness import MIB, anonymous_bytes
from tests.faults.zygote import Victim
from tests.prpc_engine.inside import accepted_by, node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.crowd import BOUND_S, GO, crowd
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.pattern import mixed
from tests.prpc_engine.workloads.servers import Works, serve_to_the_last
from tests.prpc_engine.workloads.sizes import KIB, scaled
from tests.prpc_engine.workloads.tally import Tally, run_threads

PROCESSES = scaled(4, 10)
CONNECTIONS = scaled(200, 1000)  # in all
CALLS = 20  # of each
ROUNDS = 3  # the first one's memory is what it takes, that of the last may not be more
# Between them: 16 KiB for each connection after the first round (cancelled timers hold what they
# would have cut for a while), and at least what malloc moves (churn.py).
MEMORY_BOUND_MIB = max(8.0, (ROUNDS - 1) * CONNECTIONS * 16 * KIB / MIB)
FLOODS, FLOOD_CALLS = 2, 256  # connections that always have so many calls in flight
BESIDE = 50  # connections beside them
Tell = Callable[[str], None]


class Counted(Works):
    """Says who is there."""

    def callers(self) -> int:
        """Connections that were accepted and are open. Of others nothing is left then: they are
        cycles, with a buffer each.
        """
        gc.collect()
        return len(accepted_by(node_of(self._service)))


def holdings(victim: Victim) -> tuple[int, int, float]:
    """Descriptors, threads, and MiB of private memory of a process."""
    process = psutil.Process(victim.pid)
    return process.num_fds(), process.num_threads(), anonymous_bytes(victim.pid) / MIB


def has_come_or_died(part: Victim) -> bool:
    """Whether its connections need not be waited for any more."""
    return bool(part.life.done) or part.is_dead()


@pytest.mark.slow
def test_every_call_of_a_crowd_that_connects_at_once_is_answered_and_nothing_stays(
    farm: Farm, master: Master, tell: Tell
) -> None:
    server = farm.start_ready(
        serve_to_the_last, master.address, "crowded", "tcp", 0, ("callers",), Counted
    )
    held: list[tuple[int, int, float]] = []
    with (
        MasterClient(master.address) as meetings,
        RpcService(master.address, transports=["tcp"]) as service,
        service.create_client("crowded") as client,
    ):
        assert client.call("callers") == 1
        before = holdings(server)
        for _ in range(ROUNDS):
            parts = [
                farm.start(
                    crowd, master.address, "crowded", CONNECTIONS // PROCESSES, CALLS, PROCESSES + 1
                )
                for _ in range(PROCESSES)
            ]
            for part in parts:
                wait_until(partial(has_come_or_died, part), "the connections of a crowd")
                assert not part.is_dead(), f"a part of the crowd ended with {part.wait(0.0)}"
            wait_until(
                lambda: client.call("callers") == CONNECTIONS + 1, "all of the crowd, each once"
            )
            at_most = holdings(server)
            meetings.barrier(GO, PROCESSES + 1, BOUND_S)
            outcomes: Counter[str] = Counter()
            for part in parts:
                assert part.wait(BOUND_S) == 0
                found = part.life.reported()
                assert found["wrong"] == []
                assert found["fewest"] == CALLS
                outcomes += Counter(found["outcomes"])
            assert outcomes == {"right": CONNECTIONS * CALLS}
            wait_until(lambda: client.call("callers") == 1, "the end of the crowd's connections")
            wait_until(
                lambda: all(
                    now <= then for now, then in zip(holdings(server)[:2], before, strict=False)
                ),
                f"the end of all but {before[:2]} descriptors and threads",
            )
            held.append(holdings(server))
        p50, p99, most = found["times_s"]
        tell(
            f"{CONNECTIONS} connections from {PROCESSES} processes, {ROUNDS} times: "
            f"{CALLS} calls each, p50 {p50 * 1e3:.1f} ms, "
            f"p99 {p99 * 1e3:.1f} ms, max {most * 1e3:.1f} ms; server: "
            f"{before[2]:.1f} MiB before, {at_most[2]:.1f} with them, "
            f"{held[0][2]:.1f} to {held[-1][2]:.1f} after each"
        )
        assert at_most[0] >= before[0] + CONNECTIONS, (
            "a connection is a descriptor: what is counted below counts them"
        )
        assert held[-1][2] <= held[0][2] + MEMORY_BOUND_MIB
    assert end(server)["callers"] == 0


@pytest.mark.slow
def test_a_crowd_is_answered_beside_connections_that_never_stop_calling(
    farm: Farm, master: Master
) -> None:
    """The flood ends only when the crowd has all its answers: a server that prefers the busiest
    would never give them.
    """
    server = farm.start_ready(serve_to_the_last, master.address, "flooded", "tcp", 0)
    over = threading.Event()
    floods = [Tally() for _ in range(FLOODS)]

    def flood(tally: Tally) -> None:
        with (
            RpcService(master.address, transports=["tcp"]) as service,
            service.create_client("flooded") as client,
        ):
            while not over.is_set():
                calls = [
                    (mixed(number), client.submit("mix", number)) for number in range(FLOOD_CALLS)
                ]
                for expected, call in calls:
                    tally.count(expected, call.result, PATIENCE_S)

    def crowd_beside_it() -> None:
        try:
            part = farm.start(crowd, master.address, "flooded", BESIDE, CALLS, 1)
            assert part.wait(BOUND_S) == 0
            assert part.life.reported()["outcomes"] == {"right": BESIDE * CALLS}
        finally:
            over.set()

    run_threads([crowd_beside_it, *(partial(flood, tally) for tally in floods)], BOUND_S)
    for tally in floods:
        assert tally.wrong == []
        assert set(tally.outcomes) == {"right"}
    left = end(server)
    assert not any(left.values()), left
