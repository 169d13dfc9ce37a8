"""Much of the same thing again and again, in a process of its own whose holdings are sampled: they
must not grow.
"""

from __future__ import annotations

import gc
import os
import random
from collections import defaultdict
from collections.abc import Callable

import psutil

from prpc_engine import RpcClient, RpcRequest, RpcService
from tests.faults.flatness import MIB, anonymous_bytes, grew
from tests.faults.zygote import Life
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.pattern import any_piece, mixed
from tests.prpc_engine.workloads.sizes import SHARE

SAMPLES = 30  # ten a third
ARRAY_BYTES = 100_000  # travels by lease
# How far the last third's maximum may be above the middle third's. malloc moves up to an MiB, in a
# million calls some; all else stands still, but for what a sample catches half-way, as a heartbeat
# that waits for a busy master. Of a leak, a third of the samples are hundreds.
BOUNDS = {
    "private memory, MiB": 3.0 if SHARE is None else 8.0,
    "descriptors": 4.0,
    "threads": 4.0,
    "blocks": 8.0,
    "calls in flight": 4.0,
}
Series = dict[str, list[float]]


def churn(
    life: Life, master: str, name: str, transport: str, kind: str, count: int, server_pid: int
) -> tuple[Series, list[str]]:
    """Do `count` things of a kind; what was sampled of this process and the server's, and which of
    it grew. life.done: how many are done."""
    series: defaultdict[str, list[float]] = defaultdict(list)
    with (
        RpcService(master, transports=[transport]) as service,
        service.create_client(name) as client,
    ):
        act = {"calls": _calls, "dealers": _dealers, "streams": _streams}[kind](client)
        for number in range(count):
            act(number)
            life.done = number + 1
            if (number + 1) % max(1, count // SAMPLES) == 0:
                _sample(series, service, server_pid)
    grown = [
        key for key, values in series.items() if grew(values, BOUNDS[key.partition(" of ")[0]])
    ]
    return dict(series), grown


def _sample(series: defaultdict[str, list[float]], service: RpcService, server_pid: int) -> None:
    gc.collect()
    for whose, pid in (("client", os.getpid()), ("server", server_pid)):
        process = psutil.Process(pid)
        series[f"private memory, MiB of {whose}"].append(anonymous_bytes(pid) / MIB)
        series[f"descriptors of {whose}"].append(process.num_fds())
        series[f"threads of {whose}"].append(process.num_threads())
    now = service.statistics()
    series["blocks of client"].append(now.slab.blocks_used)
    series["calls in flight of client"].append(sum(peer.in_flight for peer in now.peers))


def _calls(client: RpcClient) -> Callable[[int], None]:
    """Mostly small; one in a hundred with an array, one given up."""
    chance = random.Random(0)

    def act(number: int) -> None:
        if number % 100 == 0:
            start, sent = any_piece(chance, ARRAY_BYTES)
            assert client.call("is_piece", start, sent)
        elif number % 100 == 1:
            client.submit("mix_later", number).cancel()
        else:
            assert client.call("mix", number) == mixed(number)

    return act


def _dealers(client: RpcClient) -> Callable[[int], None]:
    """Made, used by every tenth, closed."""

    def act(number: int) -> None:
        with client.create_dealer() as dealer:
            if number % 10 == 0:
                # A server of methods has none by that name: the response says so.
                assert dealer.sync_rpc_call(RpcRequest(number), PATIENCE_S).error is not None

    return act


def _streams(client: RpcClient) -> Callable[[int], None]:
    """Opened, and cancelled: at once, or after an item."""

    def act(number: int) -> None:
        with client.stream("count", timeout_s=PATIENCE_S) as stream:
            if number % 2:
                assert stream.next_item(PATIENCE_S) == 0

    return act
