"""How soon the living hear of the dead: calls in flight at a server that is killed, calls after a
connection was reset.

Expected:
    kill -9    the kernel takes a process apart in 5 to 20 ms, most of it its memory; its sockets
               close on the way. The client's reactor sees the end of the socket (of shm: its
               doorbell) within a wake-up, and ends 64 calls in 1 ms.
    tcp reset  the next call fails or goes over a new connection: a handshake of 1 ms, and a call.
               The first one finds the connection dead when it reads, and what was in flight fails
               with it.

An operation is one kill, or one reset: from before the signal to the end of the last call, and from
before the reset to the first answer. All are in one long repeat, so that the longest is the longest
of all.

    python -m perf.bench_failure [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

import numpy as np

import prpc_engine
from prpc_engine import errors

from .child import Announce
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .peers.prpc import only_core, serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, summary

NAME = "failure"
IN_FLIGHT = 64
# of FULL's five: each needs a new server process, which takes 0.5 to 1 s to start
KILLS_PER_REPEAT = 6
RESETS_PER_REPEAT = 40
# on a machine where starting takes longer there are fewer kills: the harness allows 60 s
KILLING_S_MAX = 40.0
SERVICE = "failure"
AF_UNSPEC_ADDRESS = struct.pack("=H14x", socket.AF_UNSPEC)


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of the server while IN_FLIGHT calls wait there."""

    def __str__(self) -> str:
        return f"kill -9 of the server, {IN_FLIGHT} in flight"


@dataclass(frozen=True, slots=True)
class Reset:
    """The server's end of the tcp connection sends a reset; the server lives on."""

    def __str__(self) -> str:
        return "tcp reset, to the next answer"


Case = Kill | Reset
CASES: list[Case] = [Kill(), Reset()]

_KILL, _RESET = (str(case) for case in CASES)
SHM, TCP = "prpc shm, parking", "prpc tcp, parking"
TARGETS = [
    Target(_KILL, SHM, "longest_ns", "at most", 100e6),
    Target(_KILL, TCP, "longest_ns", "at most", 100e6),
    Target(_RESET, TCP, "longest_ns", "at most", 1e9),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates, in one repeat."""
    each = (
        (KILLS_PER_REPEAT if isinstance(case, Kill) else RESETS_PER_REPEAT)
        if effort.timed_s
        else effort.ops_min
    )
    once = replace(effort, repeats=1, ops_min=each * effort.repeats)
    if isinstance(case, Kill):
        candidates = [
            Candidate(SHM, "ours", partial(measure_kills, transport="shm")),
            Candidate(TCP, "ours", partial(measure_kills, transport="tcp")),
        ]
    else:
        candidates = [Candidate(TCP, "ours", measure_resets)]
    return compare(NAME, str(case), candidates, once, pinned=pinned, progress=progress)


# -- both sides ------------------------------------------------------------------------------------


class Works:
    """What the server serves."""

    def __init__(self, master: str) -> None:
        self._master_port = int(master.rpartition(":")[2])
        self._held: list[prpc_engine.Deferred] = []

    def echo(self, number: int) -> int:
        """The number."""
        return number

    def hold(self) -> prpc_engine.Deferred:
        """Answered never."""
        self._held.append(prpc_engine.Deferred())
        return self._held[-1]

    def reset(self) -> None:
        """Reset all tcp connections of this process but that to the master, behind everybody's
        back.
        """
        for name in os.listdir("/proc/self/fd"):
            if _peer_port(int(name)) not in (None, self._master_port):
                _reset(int(name))


def _peer_port(fd: int) -> int | None:
    """The port at the other end of a descriptor; None for what is no tcp connection."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        return int(sock.getpeername()[1]) if sock.family == socket.AF_INET else None
    except OSError:  # it listens
        return None
    finally:
        sock.detach()


_libc = ctypes.CDLL(None, use_errno=True)


def _reset(fd: int) -> None:
    """Have the kernel send a reset and forget the connection; the descriptor stays whose it is.
    connect(2), AF_UNSPEC.
    """
    if _libc.connect(fd, AF_UNSPEC_ADDRESS, len(AF_UNSPEC_ADDRESS)):
        raise OSError(ctypes.get_errno(), "connect to AF_UNSPEC")


def serve(announce: Announce, master: str, transport: str, name: str) -> None:
    """Answer until killed."""
    with prpc_engine.RpcService(master=master, transports=[transport], pin=only_core()) as service:
        service.create_server(name, Works(master))
        announce(service.rank)
        service.serve_forever()


@contextlib.contextmanager
def joined(place: Place, transport: str) -> Iterator[tuple[prpc_engine.RpcService, str]]:
    """This process as a member of a job of its own, and where its master is."""
    with (
        place.serve_aside(serve_master) as (_, master),
        prpc_engine.RpcService(master=master, transports=[transport], pin=only_core()) as service,
    ):
        yield service, master


# -- measuring -------------------------------------------------------------------------------------


def measure_kills(place: Place, effort: Effort, transport: str) -> Sample:
    """Server after server, each killed; a number of those there should be, when starting them takes
    too long.
    """
    took_ns: list[int] = []
    ended = 0
    give_up = time.monotonic() + KILLING_S_MAX
    with joined(place, transport) as (service, master):
        while len(took_ns) < effort.ops_min and time.monotonic() < give_up:
            name = f"{SERVICE}{len(took_ns)}"
            with (
                place.serve(serve, master, transport, name) as (victim, _),
                service.create_client(name) as client,
            ):
                ends_ns: SimpleQueue[int] = SimpleQueue()
                calls = [client.submit("hold") for _ in range(IN_FLIGHT)]
                for call in calls:
                    call.when_done(lambda _, put=ends_ns.put: put(time.perf_counter_ns()))  # type: ignore[misc]
                client.call("echo", 0)  # what was sent before it has arrived
                start_ns = time.perf_counter_ns()
                os.kill(victim.pid, signal.SIGKILL)
                ended += sum(_is_lost(call) for call in calls)
                # Who waits for a call may hear of its end before its callback has noted it.
                took_ns.append(max(ends_ns.get(timeout=WAIT_S_MAX) for _ in calls) - start_ns)
    return _sample(took_ns).with_work(kills=len(took_ns), ended=ended)


def measure_resets(place: Place, effort: Effort) -> Sample:
    """One reset after the other, with a call in flight each time, which must end."""
    took_ns: list[int] = []
    ended = failed = 0
    with (
        joined(place, "tcp") as (service, master),
        place.serve(serve, master, "tcp", SERVICE),
        service.create_client(SERVICE) as client,
    ):
        for number in range(effort.ops_min):
            client.call("echo", number)
            held = client.submit("hold")
            start_ns = time.perf_counter_ns()
            client.notify("reset")
            failed += _calls_until_answered(client, number)
            took_ns.append(time.perf_counter_ns() - start_ns)
            ended += _is_lost(held)
    sample = _sample(took_ns)
    sample.figures.update(failed_calls_per_reset=failed / len(took_ns))
    return sample.with_work(resets=len(took_ns), ended=ended)


def _is_lost(call: prpc_engine.Call) -> bool:
    """Whether it ends as calls must whose server is gone. Raises what else it ends with, and
    TimeoutError.
    """
    try:
        call.result(WAIT_S_MAX)
    except errors.MaybeExecuted:
        return True
    return False


def _calls_until_answered(client: prpc_engine.RpcClient, number: int) -> int:
    """Call again and again; how many calls failed before one was answered, rightly."""
    failed = 0
    give_up = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            answer = client.call("echo", number)
        except (errors.MaybeExecuted, errors.NotSent):
            if time.monotonic() > give_up:
                raise
            failed += 1
        else:
            assert answer == number, f"{answer} for {number}"
            return failed


def _sample(took_ns: list[int]) -> Sample:
    sample = summary(np.array(took_ns))
    sample.figures.update(longest_ns=max(took_ns))
    return sample


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_all_calls_in_flight_at_a_killed_server_end() -> None:
    for result in run(Kill(), replace(TINY, ops_min=1)):
        assert result.state == "ok", result.note
        assert result.work == {"kills": 1, "ended": IN_FLIGHT}


def test_calls_are_answered_after_each_reset() -> None:
    for result in run(Reset(), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"resets": TINY.ops_min, "ended": TINY.ops_min}


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
