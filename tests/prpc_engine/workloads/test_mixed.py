"""Small calls beside bulk on one connection: each ends right, and how long the small ones take is
printed.

Expected: a 16 MiB array is copied in 4 to 8 ms, during which its process does nothing else; no
small call should take 40 ms.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from prpc_engine import Master, RpcService
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.pattern import any_piece, piece
from tests.prpc_engine.workloads.servers import serve
from tests.prpc_engine.workloads.sizes import MIB, bound_s, scaled
from tests.prpc_engine.workloads.tally import Tally, run_threads

BULK_BYTES, BULK_CALLS = 16 * MIB, scaled(60, 1000)
SMALL_BYTES = 64
Tell = Callable[[str], None]


@pytest.mark.slow
def test_small_calls_are_answered_right_beside_bulk_either_way(
    farm: Farm, master: Master, transport: str, seed: int, tell: Tell
) -> None:
    server = farm.start_ready(serve, master.address, "mixed", transport, 0)
    small, bulk = Tally(), Tally()
    is_over = threading.Event()
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("mixed") as client,
    ):

        def call_small() -> None:
            chance = random.Random(seed)
            while not is_over.is_set():
                sent = chance.randbytes(SMALL_BYTES)
                small.count((sent,), client.call, "echo", sent, timeout_s=PATIENCE_S)

        def call_bulk() -> None:
            chance = random.Random(seed + 1)
            try:
                for number in range(BULK_CALLS):
                    start, sent = any_piece(chance, BULK_BYTES)
                    if number % 2:
                        bulk.count(True, client.call, "is_piece", start, sent, timeout_s=PATIENCE_S)
                    else:
                        bulk.count(True, take, start)
            finally:
                is_over.set()

        def take(start: int) -> bool:
            return bool(
                (
                    client.call("give", start, BULK_BYTES, timeout_s=PATIENCE_S)
                    == piece(start, BULK_BYTES)
                ).all()
            )

        client.call("echo", b"")
        started = time.monotonic()
        run_threads([call_small, call_bulk], bound_s(90.0))
        elapsed_s = time.monotonic() - started
        peers = [peer for peer in service.statistics().peers if peer.transport == transport]
    slow = sum(each >= 0.040 for each in small.times_s)
    tell(f"{transport}: {SMALL_BYTES} B: {small.text(elapsed_s)}; {slow} of 40 ms or more")
    tell(
        f"{transport}: 16 MiB: {bulk.text(elapsed_s)}; "
        f"{BULK_CALLS * BULK_BYTES / MIB / elapsed_s:,.0f} MiB/s"
    )
    assert sum(peer.requests > small.ended + bulk.ended for peer in peers) == 1, (
        "one connection took all"
    )
    assert small.wrong == bulk.wrong == []
    assert bulk.outcomes == {"right": BULK_CALLS}
    assert set(small.outcomes) == {"right"}
    end(server)
