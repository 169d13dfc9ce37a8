"""A million calls, ten thousand dealers, a thousand streams: what client and server hold does not
grow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prpc_engine import Master
from tests.faults.zygote import Victim
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.churn import churn
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.servers import serve_to_the_last
from tests.prpc_engine.workloads.sizes import scaled

COUNTS = {"calls": scaled(20_000, 1_000_000), "dealers": 10_000, "streams": 1_000}
Tell = Callable[[str], None]


def end_of(victim: Victim) -> int:
    """Its exit code, however long it takes while it comes on: where two processes share a core a
    call takes milliseconds.
    """
    done = -1
    while done != victim.life.done and not victim.is_dead():
        done = victim.life.done
        victim.is_dead(PATIENCE_S)
    assert victim.is_dead(), (
        f"process {victim.pid} has done {done} things and no more for {PATIENCE_S} s"
    )
    return victim.wait(0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_nothing_that_client_or_server_holds_grows(
    farm: Farm, master: Master, transport: str, kind: str, tell: Tell
) -> None:
    server = farm.start_ready(serve_to_the_last, master.address, "churned", transport, 0)
    client = farm.start(churn, master.address, "churned", transport, kind, COUNTS[kind], server.pid)
    assert end_of(client) == 0
    series, grown = client.life.reported()
    memory = ", ".join(
        f"{values[0]:.1f} to {values[-1]:.1f} {key}"
        for key, values in series.items()
        if key.startswith("private memory")
    )
    tell(f"{transport}: {COUNTS[kind]} {kind}: {memory}")
    assert grown == [], {key: series[key] for key in grown}
    left = end(server)
    assert not any(left.values()), left
