"""Sessions at a master that comes and goes, now and then with another secret, by clients that come
and go as well (docstrings of MasterClient).

operation        what it promises                                   how it is checked
MasterClient()   ends within its time; AuthenticationFailed where   virtual time; whether such a
                  the master has another secret                      master was there
a verb           ends by its deadline, or soon after close();       virtual time; whether the
                  Closed where the client is closed, by anybody      client's close() had begun
generate_id      never twice                                        all answers
close()          ends soon, in any state; again: at once            virtual time
at the end       once the faults are over, a new client is          the last round of each process
                  answered
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from prpc_engine import Master, MasterClient, errors
from prpc_engine.master.master import CLOSE_TIMEOUT_S
from prpc_engine.master.protocol import ANSWER_S
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import (
    LEASE_S,
    MASTER_PORT,
    SECRET,
    Deadlines,
    in_threads,
    journal_folder,
    run_to_the_end,
)

UNTIL_S = 6.0
CONNECT_S = 20.0
ROUNDS, CLIENTS, ASKS = 6, 3, 4
OPEN_S = (0.2, 1.0, 4.0)
TIMEOUTS_S = (0.2, 1.0, 2.0)
OTHER_SECRET = "o" * 32
FAULTS = Rates(cut=0.4, reset=0.7, kill=0.3, crash=0.0, stop=0.3, slow=0.3, clock=0.1)


def sessions(simulation: Simulation) -> None:
    """Clients are made, asked and closed by several threads while the master comes and goes."""
    deadlines = Deadlines(simulation)
    wrong: list[str] = []
    ids: Counter[int] = Counter()
    others: list[float] = []  # when a master with the other secret began

    def serve(folder: str, process: Process) -> None:
        address = f"{process.host.address}:{MASTER_PORT}"
        chance = process.chance.random
        while True:
            is_other = simulation.now < UNTIL_S and chance() < 0.3
            if is_other:
                others.append(simulation.now)
            secret = OTHER_SECRET if is_other else SECRET
            lasts_s = 0.3 + 2.0 * chance() if simulation.now < UNTIL_S else None
            with Master(address, secret=secret, journal=folder, sync=False) as master:
                master.serve_forever(lasts_s)
            runtime.sleep(0.5 * chance())

    def may_ask(client: MasterClient, chance: float, timeout_s: float) -> None:
        if chance < 0.7:
            ids[client.generate_id("numbers", timeout_s)] += 1
        else:
            with client.lock("shared", timeout_s):
                pass

    def use(client: MasterClient, process: Process, number: int) -> None:
        closing: list[float] = []

        def ask(thread: int) -> None:
            for index in range(ASKS):
                timeout_s = TIMEOUTS_S[int(process.chance.random() * len(TIMEOUTS_S))]
                what = f"verb {number}.{thread}.{index} of {process.name}"
                with deadlines.watch(what, 2 * (timeout_s + ANSWER_S)):  # a lock is given back
                    try:
                        may_ask(client, process.chance.random(), timeout_s)
                    except errors.Closed:
                        if not closing:
                            wrong.append(f"{what} was told that its client is closed")
                    except errors.AuthenticationFailed:
                        if not others:
                            wrong.append(f"{what} was told of another secret")
                    except errors.RpcError as error:
                        if isinstance(error, errors.RemoteError):
                            wrong.append(f"{what} ended with {error!r}")
                runtime.sleep(0.3 * process.chance.random())

        def close() -> None:
            chance = process.chance.random
            until_s = simulation.now + 1.5 * chance()
            if chance() < 0.5:  # as soon as it connects again, perhaps
                while client.connected and simulation.now < until_s:
                    runtime.sleep(0.001)
                until_s = simulation.now + 0.05 * chance()
            runtime.sleep(max(0.0, until_s - simulation.now))
            closing.append(simulation.now)
            for again in range(2):
                what = f"close {number}.{again} of {process.name}"
                with deadlines.watch(what, CLOSE_TIMEOUT_S):
                    client.close()

        in_threads([partial(ask, 0), partial(ask, 1), close])

    def made(process: Process, timeout_s: float) -> MasterClient | None:
        address = f"{simulation.host('master').address}:{MASTER_PORT}"
        with deadlines.watch(f"a client of {process.name}", timeout_s + CLOSE_TIMEOUT_S):
            try:
                return MasterClient(address, secret=SECRET, lease_s=LEASE_S, timeout_s=timeout_s)
            except errors.AuthenticationFailed:
                if not others:
                    wrong.append(f"{process.name} was told of another secret")
            except errors.MasterUnreachable:
                pass
        return None

    def live(process: Process) -> None:
        for number in range(ROUNDS):
            client = made(process, OPEN_S[int(process.chance.random() * len(OPEN_S))])
            if client is not None:
                use(client, process, number)
            runtime.sleep(0.5 * process.chance.random())
        runtime.sleep(max(0.0, UNTIL_S + 4.0 - simulation.now))
        last = made(process, CONNECT_S)
        assert last is not None, "after the faults the master answers"
        with last:
            ids[last.generate_id("numbers", CONNECT_S)] += 1

    with journal_folder() as folder:
        simulation.process("master", partial(serve, folder), host="master")
        clients = [
            simulation.process(f"client{n}", live, host=f"client{n}") for n in range(CLIENTS)
        ]
        simulation.let_loose(FAULTS, UNTIL_S, may_end=("master",))
        run_to_the_end(simulation, clients, UNTIL_S + 2 * CONNECT_S + ROUNDS * 20.0)
    assert not wrong, wrong
    assert not deadlines.late, deadlines.late
    twice = [number for number, count in ids.items() if count > 1]
    assert not twice, f"ids that came twice: {twice}"


SCENARIOS = (sessions,)
