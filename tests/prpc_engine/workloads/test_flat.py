"""A million calls, ten thousand dealers, a thousand streams: what client and server hold does not grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prpc_engine import Master
from tests.prpc_engine.workloads.churn import churn
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.servers import serve_to_the_last
from tests.prpc_engine.workloads.sizes import bound_s, scaled

COUNTS = {"calls": scaled(50_000, 1_000_000), "dealers": 10_000, "streams": 1_000}
Tell = Callable[[str], None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_nothing_that_client_or_server_holds_grows(farm: Farm, master: Master, transport: str, kind: str, tell: Tell) -> None:
    server = farm.start_ready(serve_to_the_last, master.address, "churned", transport, 0)
    client = farm.start(churn, master.address, "churned", transport, kind, COUNTS[kind], server.pid)
    assert client.wait(bound_s(90.0)) == 0
    series, grown = client.life.reported()
    memory = ", ".join(
        f"{values[0]:.1f} to {values[-1]:.1f} {key}" for key, values in series.items() if key.startswith("private memory")
    )
    tell(f"{transport}: {COUNTS[kind]} {kind}: {memory}")
    assert grown == [], {key: series[key] for key in grown}
    left = end(server)
    assert not any(left.values()), left
