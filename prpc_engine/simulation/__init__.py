"""A whole cluster in one process, on virtual time, from a seed: for tests of one's own services as
of the engine's.

simulation  what a test makes, and the names of shard.runtime meanwhile
process     a simulated process: kill, stop, go on, memory
clock       a host's monotonic clock, which drifts
disk        a host's disk, which a crash tears
network     hosts, delays, cuts, connections
transport   the transports of simulated processes
scheduler   virtual time, the baton, who runs next
primitives  locks, threads and descriptors over it
timeline    what happened: digest, text, trace
nemesis     what goes wrong, and when
explore     many seeds, and failures made small
errors      what ends a simulation before its time
"""

from __future__ import annotations

from prpc_engine.simulation.errors import Deadlock, ProcessFailed, SimulationError, Stuck
from prpc_engine.simulation.explore import Failure, RunOutcome, explore, outcomes, run_once, shrink
from prpc_engine.simulation.nemesis import Fault, Nemesis, Rates
from prpc_engine.simulation.process import Process
from prpc_engine.simulation.simulation import Simulation
from prpc_engine.simulation.timeline import Happening, Timeline

__all__ = [
    "Deadlock",
    "Failure",
    "Fault",
    "Happening",
    "Nemesis",
    "RunOutcome",
    "Process",
    "ProcessFailed",
    "Rates",
    "Simulation",
    "SimulationError",
    "Stuck",
    "Timeline",
    "explore",
    "outcomes",
    "run_once",
    "shrink",
]
