"""Hundreds of connections of one process: each belongs to a node and a thread of its own, as if it
were a process.

1. all connect at once, and call once; the first calls are what connects
2. barrier "here": whoever waits there, too, knows that all are connected, and may look at the
   server
3. barrier "go": they call, all at the same time
4. all leave
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

from prpc_engine import MasterClient, RpcService
from tests.faults.zygote import Life
from tests.prpc_engine.workloads.pattern import mixed
from tests.prpc_engine.workloads.sizes import bound_s
from tests.prpc_engine.workloads.tally import Tally, quantile, run_threads

GO = "go"
BOUND_S = bound_s(60.0)
# in each process; several processes exceed what a listener takes from one host at a time
JOINS_AT_A_TIME = 16


def crowd(
    life: Life, master: str, name: str, connections: int, calls: int, parties: int
) -> dict[str, Any]:
    """So many connections over tcp, each of which makes so many calls; `parties` meet at the
    barrier. What became of them.
    """
    tallies = [Tally() for _ in range(connections)]
    with MasterClient(master) as meetings:

        def meet() -> None:
            life.done = 1
            meetings.barrier(GO, parties, BOUND_S)

        joining = threading.Semaphore(JOINS_AT_A_TIME)
        joined, together = (
            threading.Barrier(connections),
            threading.Barrier(connections, action=meet),
        )

        def come(tally: Tally) -> None:
            try:
                with contextlib.ExitStack() as stack:
                    with joining:
                        service = stack.enter_context(
                            RpcService(master, transports=["tcp"], timeout_s=BOUND_S)
                        )
                        client = stack.enter_context(service.create_client(name, timeout_s=BOUND_S))
                    joined.wait(BOUND_S)
                    tally.count(mixed(0), client.call, "mix", 0, timeout_s=BOUND_S)
                    together.wait(BOUND_S)
                    for number in range(1, calls):
                        tally.count(mixed(number), client.call, "mix", number, timeout_s=BOUND_S)
            except BaseException:
                joined.abort()  # nobody waits for one who will not come
                together.abort()
                raise

        run_threads([partial(come, tally) for tally in tallies], BOUND_S)
    served = [tally.outcomes["right"] for tally in tallies]
    everything = Tally().merge(*tallies)
    return {
        "outcomes": dict(everything.outcomes),
        "wrong": everything.wrong[:3],
        "fewest": min(served),
        "times_s": [quantile(everything.times_s, share) for share in (0.5, 0.99, 1.0)],
    }
