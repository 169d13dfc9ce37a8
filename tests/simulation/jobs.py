"""Processes that scenarios are made of: a master, services, and how their processes find each
other; and how late an operation may end.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prpc_engine import Master, MasterClient, RpcService
from prpc_engine.simulation import Process, Simulation
from prpc_engine.simulation.nemesis import DRIFT_MAX
from shard import runtime

SECRET = "s" * 32
MASTER_PORT = 7000
LEASE_S = 2.0
# What an operation may take beyond its deadline: threads of a slow process wake up to 0.2 s late,
# some of them one after the other.
SLACK_S = 1.0


def begin_master(simulation: Simulation, journal: str | None = None) -> Process:
    """The master, on a host of its own, with a folder of its disk for its journal."""
    below = None if journal is None else f"{journal}/made/by it"

    def serve(process: Process) -> None:
        address = f"{process.host.address}:{MASTER_PORT}"
        with Master(address, secret=SECRET, journal=below) as master:
            master.serve_forever()

    process = simulation.process("master", serve, host="master")
    if journal is not None:
        simulation.disk("master", journal)
    return process


def service(simulation: Simulation, process: Process, **arguments: Any) -> RpcService:
    """This process's place in the job."""
    master = simulation.host("master").address
    settings: dict[str, Any] = {"lease_s": LEASE_S, "timeout_s": 60.0, **arguments}
    return RpcService(f"{master}:{MASTER_PORT}", secret=SECRET, bind=process.bind, **settings)


def begin(
    simulation: Simulation,
    name: str,
    run: Callable[[RpcService, Process], Any],
    host: str | None = None,
    **arguments: Any,
) -> Process:
    """A process with a service, on a host of its own unless one is given."""

    def main(process: Process) -> Any:
        with service(simulation, process, **arguments) as ours:
            return run(ours, process)

    return simulation.process(name, main, host=host or name)


@contextlib.contextmanager
def journal_folder() -> Iterator[str]:
    """For the journal of one simulation's master: its files are real."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        yield folder


def begin_client(
    simulation: Simulation,
    name: str,
    run: Callable[[MasterClient, Process], Any],
    host: str | None = None,
) -> Process:
    """A process with a client of the master, on a host of its own unless one is given."""

    def main(process: Process) -> Any:
        address = f"{simulation.host('master').address}:{MASTER_PORT}"
        with MasterClient(address, secret=SECRET, lease_s=LEASE_S, timeout_s=60.0) as client:
            return run(client, process)

    return simulation.process(name, main, host=host or name)


def in_threads(works: Sequence[Callable[[], object]]) -> None:
    """Run each in a thread of this process, until all have ended."""
    threads = [
        runtime.Thread(target=work, name=f"caller{number}") for number, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_to_the_end(simulation: Simulation, processes: Sequence[Process], limit_s: float) -> None:
    """Until all have ended: within `limit_s` seconds, which is what liveness means here."""
    ended = simulation.run(lambda: all(one.is_dead for one in processes), limit_s)
    still = [one.name for one in processes if not one.is_dead]
    assert ended, f"{still} have not ended {limit_s:g} s after all began"


@dataclass
class Deadlines:
    """Which operations ended later than they may: SLACK_S after their deadline, by a clock that may
    be slow, and as much more as the nemesis had processes stopped meanwhile.
    """

    simulation: Simulation
    late: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self, what: str, timeout_s: float) -> Iterator[None]:
        """One operation."""
        begun_s = self.simulation.now
        try:
            yield
        finally:
            ended_s = self.simulation.now
            allowed_s = timeout_s / (1 - DRIFT_MAX) + SLACK_S + self._stopped_s(begun_s, ended_s)
            if ended_s - begun_s > allowed_s:
                took_s = ended_s - begun_s
                self.late.append(f"{what} took {took_s:.3f} s of {timeout_s:g} s at {begun_s:.3f}")

    def _stopped_s(self, begun_s: float, ended_s: float) -> float:
        spans = [
            min(ended_s, each.begins_s + each.lasts_s) - max(begun_s, each.begins_s)
            for each in self.simulation.faults
            if each.kind == "stop"
        ]
        return sum(span for span in spans if span > 0)
