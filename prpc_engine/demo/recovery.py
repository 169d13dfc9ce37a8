"""The demo's servers when they may be lost: copies of every partition, a kill -9 in the middle, and
another process in its place.

    what                        who                   becomes
    a server ends, however      the director sees it  a note, and another server is started
    its partitions              the other servers     promoted from their copies; nothing
                                                      acknowledged is lost
    pulls and pushes under way  each worker           asked again of whoever holds the partition now
    the new server is there     the others            it takes its share, while training goes on

Recovered is when somebody who asks for every partition has its answer: what training waited for, in
the worst case.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait

from prpc_engine.demo.cluster import Role
from prpc_engine.errors import RpcError

PARTITIONS_A_SERVER = 4  # so that one more server can take an even share
KILL_AT = 0.4  # of all examples: both halves of the curve are there to see
PATIENCE_S = 60.0  # for a partition to be served again; the tables' own bound is shorter


@dataclass(frozen=True)
class Recovery:
    """One server lost: after how many examples, and seconds until every partition was served
    again.
    """

    server: str
    after_examples: int
    recovered_s: float


class DemoServers:
    """The server processes of one run. replicas 0: one that ends is not replaced, and `dead` says
    so.

    start: makes the process of server `index`; probe: pulls of every partition, and returns when
    all have answered.
    """

    def __init__(
        self, count: int, replicas: int, start: Callable[[int], Role], probe: Callable[[], object]
    ) -> None:
        self.recoveries: list[Recovery] = []
        self._replicas = replicas
        self._start = start
        self._probe = probe
        self._roles = [start(index) for index in range(count)]
        self._next = count
        self._probing: list[threading.Thread] = []

    def kill_one(self) -> bool:
        """kill -9 of the first that lives; whether one did."""
        role = next((role for role in self._roles if role.process.exitcode is None), None)
        if role is None:
            return False
        os.kill(role.process.pid, signal.SIGKILL)
        role.process.join()
        return True

    def dead(self) -> Role | None:
        """One that has ended and will not be replaced."""
        return next((role for role in self._roles if role.process.exitcode is not None), None)

    def wait_for_death(self, timeout_s: float) -> None:
        """Until one has ended, for `timeout_s` seconds at most: its connections are seen to end
        before it is.
        """
        processes = {role.process.sentinel: role.process for role in self._roles}
        for sentinel in wait(list(processes), timeout_s):
            # its sentinel is a pipe, which ends with its connections
            processes[sentinel].join(timeout_s)

    def replace_dead(self, examples: int, note: Callable[[str], None]) -> None:
        """Start another one for each that has ended. After a call of this with replicas dead()
        knows of nobody.
        """
        for role in self._roles if self._replicas else ():
            if role.process.exitcode is None:
                continue
            self._roles.remove(role)
            new = self._start(self._next)
            self._roles.append(new)
            self._next += 1
            note(
                f"{role.death} after {examples:,} examples; its partitions go on from their "
                f"copies, and {new.name} starts"
            )
            self._probing.append(
                threading.Thread(
                    target=self._time, args=(role.name, examples, note), name="prpc-demo-probe"
                )
            )
            self._probing[-1].start()
            return  # the next one at the next look

    def _time(self, server: str, examples: int, note: Callable[[str], None]) -> None:
        started = time.perf_counter()
        try:
            self._probe()
        except RpcError as error:
            note(f"the partitions of {server} are not served: {error}")
            return
        recovery = Recovery(server, examples, time.perf_counter() - started)
        self.recoveries.append(recovery)
        note(
            f"every partition of {server} was served again after "
            f"{1000 * recovery.recovered_s:,.0f} ms; nothing was lost"
        )

    def join(self) -> None:
        """Wait for probes under way, PATIENCE_S at most."""
        until = time.monotonic() + PATIENCE_S
        for thread in self._probing:
            thread.join(max(0.0, until - time.monotonic()))
