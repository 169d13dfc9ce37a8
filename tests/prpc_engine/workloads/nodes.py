"""What the workloads' other processes do: nodes that serve and call at once, clients that call
until they are killed.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
from typing import Any

from prpc_engine import RpcService
from tests.faults.zygote import Life
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.pattern import any_piece, mixed, piece
from tests.prpc_engine.workloads.servers import Works
from tests.prpc_engine.workloads.sizes import KIB

MESH, BOUND_S = "mesh", 120.0


def mesh_node(
    life: Life,
    master: str,
    transport: str,
    server_id: int,
    nodes: int,
    calls: int,
    nbytes_max: int,
    seed: int,
) -> tuple[int, int]:
    """One of `nodes` that all call each other: how many of its calls were answered with what was
    sent, and how many bytes.
    """
    chance = random.Random(seed)
    right = nbytes = 0
    with RpcService(master, transports=[transport]) as service:
        service.create_server(MESH, Works(service), server_id=server_id)
        with service.create_client(MESH, nodes, timeout_s=BOUND_S) as client:
            for number in range(calls):
                _, sent = any_piece(chance, chance.randrange(nbytes_max))
                back = client.call_to(
                    chance.randrange(nodes), "echo", number, sent, timeout_s=BOUND_S
                )
                right += back[0] == number and bytes(back[1]) == bytes(sent)
                nbytes += len(sent)
            service.master_client.barrier("all have called", nodes, timeout_s=BOUND_S)
    return right, nbytes


class Flicker:
    """A server that lives until it has answered once."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def mix(self, number: int) -> int:
        self.answered.set()
        return mixed(number)


def flicker(life: Life, master: str, name: str, transport: str, rounds: int) -> int:
    """Register a server and take it back as soon as it has answered, so often; how often it
    answered.
    """
    answered = 0
    with RpcService(master, transports=[transport]) as service:
        for number in range(rounds):
            works = Flicker()
            server = service.create_server(name, works)
            answered += works.answered.wait(PATIENCE_S)
            server.close(drain_s=0.1 if number % 2 else 0.0)
            life.done = number + 1
    return answered


def call_until_killed(
    life: Life, master: str, name: str, servers: int, transport: str, threads: int, seed: int
) -> None:
    """Threads that make every kind of call; life.done counts right answers, the exit code tells of
    a wrong one.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    wrong: list[str] = []
    with (
        RpcService(master, transports=[transport]) as service,
        service.create_client(name, servers) as client,
    ):
        right = itertools.count(1)

        def work(chance: random.Random) -> None:
            try:
                while not wrong:
                    _one_call(client, chance)
                    life.done = next(right)
            except BaseException as error:
                wrong.append(f"{type(error).__name__}: {error}")
                raise

        for number in range(threads):
            threading.Thread(target=work, args=(random.Random(seed + number),), daemon=True).start()
        signal.sigwait({signal.SIGTERM})
    life.report(wrong)


def _one_call(client: Any, chance: random.Random) -> None:
    """A small one, a task, or arrays either way: then leases are under way when the end comes."""
    kind = chance.random()
    if kind < 0.6:
        number = chance.randrange(1 << 32)
        assert client.call("mix", number) == mixed(number)
    elif kind < 0.8:
        number = chance.randrange(1 << 32)
        assert client.call("mix_later", number) == mixed(number)
    else:
        start, sent = any_piece(chance, chance.randrange(256 * KIB))
        if kind < 0.9:
            assert client.call("is_piece", start, sent)
        else:
            assert (client.call("give", start, len(sent)) == piece(start, len(sent))).all()
