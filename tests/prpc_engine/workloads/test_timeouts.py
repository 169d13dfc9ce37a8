"""pRPC's workload of echoes with 10 ms to answer: an answer that comes late is never taken for the
next request's.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from prpc_engine import Dealer, ErrorCode, Master, RpcRequest, RpcResponse, RpcService, Terminated
from tests.faults.zygote import Life
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end
from tests.prpc_engine.workloads.sizes import bound_s, scaled
from tests.prpc_engine.workloads.tally import run_threads

DEALERS, CALLERS = 2, 2
CALLS = scaled(500, 10_000)  # of each caller
TIMEOUT_S = 0.010
# one in so many is answered only when its caller has given it up, and asked something else
LATE_EVERY = 20
Tell = Callable[[str], None]


def serve_late(life: Life, master: str, transport: str) -> int:
    """Dealers that echo, some of it late, until SIGTERM; how many were held back. life.done: the
    server is registered.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    held_back: dict[int, RpcRequest] = {}  # by caller
    count = 0
    guard = threading.Lock()

    def answer(dealer: Dealer) -> None:
        nonlocal count
        while True:
            try:
                request = dealer.recv_request()
            except Terminated:
                return
            caller, number = request
            with guard:
                held = held_back.get(caller)
                # given up long ago: the caller waits for that one
                is_overtaken = held is not None and held.values[1] > number
                late = None if is_overtaken else held_back.pop(caller, None)
                holds = number % LATE_EVERY == 0 and not is_overtaken
                if holds:
                    held_back[caller] = request
                    count += 1
            # the late one first: it could be mistaken
            for each in (late, None if holds else request):
                if each is not None:
                    dealer.send_response(RpcResponse(each, *each))

    with RpcService(master, transports=[transport]) as service:
        server = service.create_server("late")
        workers = [
            threading.Thread(target=answer, args=(server.create_dealer(),)) for _ in range(DEALERS)
        ]
        for worker in workers:
            worker.start()
        life.done = 1
        signal.sigwait({signal.SIGTERM})
        server.terminate()
        for worker in workers:
            worker.join()
    return count


@pytest.mark.slow
def test_every_request_gets_its_own_answer_or_a_timeout_although_answers_come_late(
    farm: Farm, master: Master, transport: str, tell: Tell
) -> None:
    server = farm.start_ready(serve_late, master.address, transport)
    outcomes = [Counter[str]() for _ in range(CALLERS)]
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("late") as client,
    ):

        def call(caller: int) -> None:
            with client.create_dealer() as dealer:
                for number in range(CALLS):
                    response = dealer.sync_rpc_call(RpcRequest(caller, number), timeout_s=TIMEOUT_S)
                    outcomes[caller][response.error_code.name] += 1
                    assert response.error is not None or list(response) == [caller, number]
                # however late the others were
                last = dealer.sync_rpc_call(RpcRequest(caller, -1), timeout_s=PATIENCE_S)
                assert (last.error, list(last)) == (None, [caller, -1])

        run_threads([partial(call, caller) for caller in range(CALLERS)], bound_s(90.0))
    held_back = end(server)
    tell(
        f"{transport}: {held_back} answers held back; "
        f"{', '.join(str(dict(each)) for each in outcomes)}"
    )
    for each in outcomes:
        assert each.keys() <= {ErrorCode.SUCC.name, ErrorCode.ETIMEOUT.name}
        assert each.total() == CALLS
        assert each[ErrorCode.ETIMEOUT.name] >= CALLS // LATE_EVERY
