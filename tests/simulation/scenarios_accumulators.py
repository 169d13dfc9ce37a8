"""Accumulators under faults: servers are killed and started again from their snapshots, and clients
go on writing.

    operation               promise                            how it is checked
    write                   counts at most once                no sum is above what was written
    wait_empty, answered    what was written before is merged  a sum read then has it, unless a
                             at its server                      server has been killed since
    a server killed and     counters are those of the last     the sum at the end lacks at most
     started again           snapshot; clients are told how     what was in pushes_lost, and
                             many pushes were lost since        nothing where that is 0
    a server that closes    saves a last time: nothing lost    the same: pushes_lost is 0
    connections reset, cut  nothing is lost, nothing counted   the sum is exact
                             twice
    liveness                all clients end; all is merged     within END_S; nothing is waiting

Each client writes powers of two to a counter of its own, one value a push: a sum says which pushes
are in it, and what was counted twice carries.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from prpc_engine import RpcService, errors
from prpc_engine.accumulator import (
    Accumulator,
    AccumulatorClient,
    AccumulatorServer,
    AccumulatorStatistics,
    CounterSet,
    Sum,
)
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import LEASE_S, begin, begin_master, run_to_the_end

SERVERS, CLIENTS, WRITES = 2, 2, 24
UNTIL_S = 8.0
END_S = UNTIL_S + 40.0
SNAPSHOT_S = 0.5
EMPTY_S = 15.0


def accumulators(simulation: Simulation) -> None:
    """Servers are killed, hosts crash or have no room for a snapshot: what was acknowledged
    since the last one is lost, and told.
    """
    _run(
        simulation,
        Rates(cut=0.2, reset=0.5, kill=0.3, crash=0.2, stop=0.2, slow=0.2, clock=0.1, full=0.2),
        tuple(f"server{each}" for each in range(SERVERS)),
    )


def accumulators_without_a_kill(simulation: Simulation) -> None:
    """Connections alone are lost: every sum is exact."""
    _run(
        simulation,
        Rates(cut=0.5, reset=1.0, kill=0.0, crash=0.0, stop=0.3, slow=0.2, clock=0.1),
        (),
    )


def _run(simulation: Simulation, rates: Rates, may_end: tuple[str, ...]) -> None:
    sums: dict[tuple[int, int], int] = {}  # (client, counter): what it read at its end
    told: dict[int, AccumulatorStatistics] = {}

    def serve(ours: RpcService, process: Process) -> None:
        number = int(process.name.removeprefix("server"))
        path = Path(folder, process.name, "counters")
        while True:
            try:
                server = AccumulatorServer(
                    ours, server_id=number, snapshot_path=path, snapshot_s=SNAPSHOT_S
                )
                break
            except errors.NodeExists:  # the one before holds its number until its lease is over
                runtime.sleep(0.2)
        with server:
            ours.serve_forever()

    def write(ours: RpcService, process: Process) -> None:
        number = int(process.name.removeprefix("client"))
        counters = CounterSet()
        with AccumulatorClient(ours, SERVERS, counters=counters, timeout_s=60.0) as client:
            kept = [
                Accumulator(f"of {number}, {each}", Sum, flush_count=1, counters=counters)
                for each in range(2)
            ]
            for power in range(WRITES):
                for one in kept:
                    one.write(1 << power)
                if process.chance.random() < 0.3:
                    try:
                        client.wait_empty(1.0)
                        merged = client.read(kept[0].name, 1.0).value
                        if not may_end:
                            assert merged == (2 << power) - 1, f"{merged:b} of 2 ** {power}"
                    except errors.RpcError:
                        simulation.note("not empty yet")
                runtime.sleep(0.6 * process.chance.random())
            # What a server has lost is told with the next push to it: one, once no more is lost.
            runtime.sleep(max(0.0, UNTIL_S + 2 * LEASE_S - simulation.now))
            for one in kept:
                one.write(1 << WRITES)
            client.wait_empty(EMPTY_S)
            for each, one in enumerate(kept):
                sums[number, each] = client.read(one.name, EMPTY_S).value
            told[number] = client.statistics()

    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        begin_master(simulation)
        for each in range(SERVERS):
            Path(folder, f"server{each}").mkdir()
            begin(simulation, f"server{each}", serve)
            simulation.disk(f"server{each}", Path(folder, f"server{each}"))
        clients = [begin(simulation, f"client{each}", write) for each in range(CLIENTS)]
        simulation.let_loose(rates, UNTIL_S, may_end)
        run_to_the_end(simulation, clients, END_S)
        check(sums, told)


def check(sums: dict[tuple[int, int], int], told: dict[int, AccumulatorStatistics]) -> None:
    """What was lost was told, and nothing counted twice."""
    whole = (2 << WRITES) - 1
    for number, statistics in told.items():
        assert statistics.waiting == 0, statistics
        assert statistics.dropped == 0, statistics
        missing = 0
        for each in range(2):
            found = sums[number, each]
            assert 0 <= found <= whole, f"client {number}: {found:b} of {whole:b}"
            missing += (whole - found).bit_count()
        if statistics.pushes_lost == 0:
            assert missing == 0, f"client {number}: {missing} values are missing, none told"
