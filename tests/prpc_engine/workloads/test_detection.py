"""How soon the living hear of the dead: calls in flight at a killed server, calls after a
connection was reset.

The times are printed; what is asserted is how calls end, and bounds far above what an idle machine
needs (100 ms and 1 s).
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.rpc.call import Call
from shard import Future
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.pattern import mixed
from tests.prpc_engine.workloads.servers import cut_socket, serve, serve_to_the_last
from tests.prpc_engine.workloads.sizes import scaled
from tests.prpc_engine.workloads.tally import quantiles_text

ROUNDS = scaled(5, 50)
CALLS_IN_FLIGHT = 32
RESETS = scaled(10, 100)
BOUND_S = 15.0  # a call that takes longer to hear of it hangs, however busy the machine is
Tell = Callable[[str], None]


@pytest.mark.usefixtures("patient_describe")
@pytest.mark.parametrize("kind", ["named server", "not to be repeated", "may be repeated"])
def test_calls_in_flight_at_a_killed_server_end_at_once(
    farm: Farm, master: Master, transport: str, kind: str, tell: Tell
) -> None:
    """Those that may be repeated end with the answer of the other server."""
    other = farm.start_ready(serve, master.address, "dying", transport, 0)
    times_s: list[float] = []
    with RpcService(master.address, transports=[transport]) as service:
        for number in range(ROUNDS):
            victim = farm.start_ready(serve, master.address, "dying", transport, 1)
            with service.create_client("dying", 2, balance="round_robin") as client:
                assert client.call_to(1, "mix", number) == mixed(number)
                calls: list[Future] = []
                ends: list[float] = []
                while len(calls) < CALLS_IN_FLIGHT:
                    if kind == "named server":
                        call: Future = client.submit_to(1, "hold")
                    elif kind == "not to be repeated":
                        call = client.submit("hold")
                    else:
                        call = client.submit("held_or_mixed", victim.pid, number)
                    if call_is_at(call, 1):
                        call.when_done(lambda _, ends=ends: ends.append(time.monotonic()))  # type: ignore[misc]
                        calls.append(call)
                    else:
                        call.cancel()
                client.call_to(1, "mix", number)  # what was sent before it has arrived
                deaths: list[float] = []
                died = threading.Thread(target=note_death, args=(victim._pidfd, deaths))
                died.start()
                victim.kill()
                for call in calls:
                    if kind == "may be repeated":
                        assert call.result(PATIENCE_S) == mixed(number)
                    else:
                        with pytest.raises(errors.MaybeExecuted):
                            call.result(PATIENCE_S)
                died.join(PATIENCE_S)
                wait_until(lambda ends=ends: len(ends) == CALLS_IN_FLIGHT, ("the note of each end"))  # type: ignore[misc]
                times_s += [max(0.0, ended - deaths[0]) for ended in ends]
            victim.wait(PATIENCE_S)
    tell(
        f"{transport}, {kind}: from the end of the process to that of its calls: "
        f"{quantiles_text(times_s)}"
    )
    assert len(times_s) == ROUNDS * CALLS_IN_FLIGHT
    assert max(times_s) < BOUND_S
    end(other)


def is_sent(call: Call) -> bool:
    """Whether it is in a connection's table of calls."""
    return call.table is not None and call.call_id in call.table.in_flight


def call_is_at(call: Future, server_id: int) -> bool:
    """Whether it waits for that server."""
    return bool(call.asked[1].server_id == server_id)  # type: ignore[attr-defined]


def note_death(pidfd: int, deaths: list[float]) -> None:
    """Wait until that process has ended, and note when, by the monotonic clock."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    deaths.append(time.monotonic())


@pytest.mark.parametrize("side", ["caller's", "server's"])
def test_a_live_server_is_usable_at_once_after_its_connection_was_reset(
    farm: Farm, master: Master, transport: str, side: str, tell: Tell
) -> None:
    server = farm.start_ready(
        serve_to_the_last, master.address, "reset", transport, 0, ("callers",)
    )
    times_s: list[float] = []
    failed = 0
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("reset") as client,
    ):
        for number in range(RESETS):
            assert client.call("mix", number) == mixed(number)
            held = client.submit("hold")
            wait_until(lambda held=held: is_sent(held), ("the call to be sent"))  # type: ignore[misc]
            started = time.monotonic()
            if side == "caller's":
                for peer in node_of(service).peers():
                    if peer.connection.transport == transport and peer.calls.in_flight:
                        cut_socket(peer)
            else:
                client.notify("cut")
            while True:
                try:
                    assert client.call("mix", number, timeout_s=PATIENCE_S) == mixed(number)
                    break
                except (errors.MaybeExecuted, errors.NotSent):
                    failed += 1
            times_s.append(time.monotonic() - started)
            with pytest.raises(errors.MaybeExecuted):
                held.result(PATIENCE_S)
    tell(
        f"{transport}, {side} side: from the reset to an answer: {quantiles_text(times_s)}; "
        f"{failed} calls failed meanwhile"
    )
    assert max(times_s) < BOUND_S
    assert end(server)["callers"] == 0
