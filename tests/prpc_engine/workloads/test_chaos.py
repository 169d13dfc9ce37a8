"""Processes killed at random under load: no call hangs, no answer is wrong, every failure has a
name, the rest goes on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from prpc_engine import Master, RetryPolicy, RpcClient, RpcService
from tests.faults.zygote import Victim
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import ENDED_WELL, Farm, end, terminate
from tests.prpc_engine.workloads.nodes import call_until_killed
from tests.prpc_engine.workloads.pattern import any_piece, mixed
from tests.prpc_engine.workloads.servers import serve, serve_to_the_last
from tests.prpc_engine.workloads.sizes import KIB, SHARE, bound_s, scaled
from tests.prpc_engine.workloads.tally import Tally, run_threads

PROCESSES = scaled(12, 100)
CALLERS, CALLS_PER_CALLER = 4, scaled(1_500, 100_000)
STABLE = 2  # servers that nobody kills
CLIENTS, CLIENTS_AT_A_TIME, CLIENT_THREADS = scaled(16, 100), 8, 2
# Between two kills or starts: with few calls they come sooner, a hundred of them all the same.
GAP_S_MAX = 0.03 if SHARE is None else 0.06
# More attempts than a caller would want: the next server, too, may be killed under the call.
STUBBORN = RetryPolicy(attempts_max=12, unsent_max=40)
# What a call may meet when servers are killed under it: sent and lost, known to the master and
# gone, closing.
NAMED = {"MaybeExecuted", "NotSent", "NoServer", "Stopping", "UnknownService"}
Tell = Callable[[str], None]


class Killer:
    """Starts and ends processes at random until stopped. Each is there, or not; its end is SIGTERM
    or SIGKILL.
    """

    def __init__(self, start: Callable[[int], Victim], places: int, chance: random.Random) -> None:
        self.started = self.killed = 0
        self.victims: list[Victim] = []
        self._start, self._places, self._chance = start, places, chance
        self._there: dict[int, Victim] = {}

    def start_one(self, place: int) -> None:
        """There is one now."""
        self._there[place] = self._start(place)
        self.victims.append(self._there[place])
        self.started += 1

    def run(self, stop: threading.Event) -> None:
        """Until then."""
        there = self._there
        while not stop.wait(self._chance.random() * GAP_S_MAX):
            place = self._chance.randrange(self._places)
            victim = there.pop(place, None)
            if victim is None:
                self.start_one(place)
            else:
                self.end_one(victim)
        for victim in there.values():
            self.end_one(victim)
        for victim in self.victims:
            assert victim.wait(PATIENCE_S) in ENDED_WELL

    def end_one(self, victim: Victim) -> None:
        """By either signal."""
        self.killed += 1
        terminate(victim) if self._chance.random() < 0.5 else victim.kill()


def call_at_random(
    client: RpcClient, repeatable: Tally, once: Tally, calls: int, chance: random.Random
) -> None:
    """Half of the calls may be repeated by the client; of the others some carry arrays, some wait
    in a task.
    """
    for _ in range(calls):
        kind, number = chance.random(), chance.randrange(1 << 32)
        if kind < 0.5:
            repeatable.count(mixed(number), client.call, "mix_again", number, timeout_s=PATIENCE_S)
        elif kind < 0.8:
            once.count(mixed(number), client.call, "mix", number, timeout_s=PATIENCE_S)
        elif kind < 0.95:
            once.count(mixed(number), client.call, "mix_later", number, timeout_s=PATIENCE_S)
        else:
            start, sent = any_piece(chance, chance.randrange(256 * KIB))
            once.count(True, client.call, "is_piece", start, sent, timeout_s=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_describe")
def test_calls_end_right_or_with_a_named_error_while_servers_are_killed_at_random(
    farm: Farm, master: Master, transport: str, seed: int, tell: Tell
) -> None:
    """One server lives all the time: so every call that may be repeated must end right."""
    stable = farm.start_ready(serve, master.address, "mortal", transport, 0)
    killer = Killer(
        lambda place: farm.start(serve, master.address, "mortal", transport, -1),
        PROCESSES,
        random.Random(seed),
    )
    for place in range(PROCESSES // 2):
        killer.start_one(place)
    tallies = [(Tally(), Tally()) for _ in range(CALLERS)]
    stop = threading.Event()
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client(
            "mortal", 1 + PROCESSES // 2, timeout_s=PATIENCE_S, retry=STUBBORN
        ) as client,
    ):

        def callers() -> None:
            try:
                works = [
                    lambda name=name: call_at_random(  # type: ignore[misc]
                        client, *tallies[name], CALLS_PER_CALLER, random.Random(seed + name)
                    )
                    for name in range(CALLERS)
                ]
                elapsed.append(run_threads(works, bound_s(200.0)))
            finally:
                stop.set()

        elapsed: list[float] = []
        run_threads([callers, lambda: killer.run(stop)], bound_s(240.0))
    repeatable, once = (Tally().merge(*(pair[which] for pair in tallies)) for which in (0, 1))
    tell(
        f"{transport}: {killer.started} servers started, {killer.killed} killed; may be repeated: "
        f"{repeatable.text(elapsed[0])}"
    )
    tell(f"{transport}: not to be repeated: {once.text(elapsed[0])}")
    assert repeatable.wrong == once.wrong == []
    assert repeatable.ended + once.ended == CALLERS * CALLS_PER_CALLER
    assert set(once.outcomes) - {"right"} <= NAMED
    assert set(repeatable.outcomes) == {"right"}
    end(stable)


@pytest.mark.slow
def test_servers_outlive_clients_that_are_killed_at_random_and_get_everything_back(
    farm: Farm, master: Master, transport: str, seed: int, tell: Tell
) -> None:
    """Tasks, leases and connections: nothing is left of the dead."""
    servers = [
        farm.start_ready(serve_to_the_last, master.address, "stable", transport, number)
        for number in range(STABLE)
    ]
    chance = random.Random(seed)
    living: list[Victim] = []
    gone: list[Victim] = []
    pause = threading.Event()
    for number in range(CLIENTS):
        living.append(
            farm.start(
                call_until_killed,
                master.address,
                "stable",
                STABLE,
                transport,
                CLIENT_THREADS,
                chance.randrange(1 << 32),
            )
        )
        if number >= CLIENTS_AT_A_TIME:
            victim = living.pop(chance.randrange(CLIENTS_AT_A_TIME))
            victim.kill()
            gone.append(victim)
        pause.wait(chance.random() * GAP_S_MAX)
    wait_until(lambda: any(victim.life.done for victim in [*gone, *living]), "a right answer")
    for victim in living:
        victim.kill()
    for victim in [*gone, *living]:
        assert victim.wait(PATIENCE_S) in ENDED_WELL
    right = sum(victim.life.done for victim in [*gone, *living])
    with (
        RpcService(master.address, transports=[transport]) as service,
        service.create_client("stable", STABLE) as client,
    ):
        assert client.broadcast("mix", 1) == [mixed(1)] * STABLE
    left = [end(server) for server in servers]
    tell(f"{transport}: {CLIENTS} clients killed after {right} right answers")
    assert all(not any(figures.values()) for figures in left), left
