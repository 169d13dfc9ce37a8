"""What each verb takes on the RDMA port that this machine would use, through pyverbs, from the post
to its completion; beside it a message of the verbs transport, which posts them, and on the same
port what is written in C: ibv_rc_pingpong of rdma-core, and ib_write_bw and ib_read_bw of perftest.

The port is the first of those that PRPC_VERBS_DEVICE or `[transport]` name, else the first usable
one. Both ends are on it: what moves goes through the device and back to this host, not over a
cable. A table for one's own hardware, and what a transport over verbs is measured by.

Expected, on an adapter of 100 Gb/s and more:
    64 B     a post and a poll of pyverbs, 2 us, and the device's own 1 to 2 us.
    1 MB     the link: 85 us at 100 Gb/s; in flight together no better, as one fills it.
On soft RoCE each packet of 4 KiB is copied and checked by the kernel: 10 to 100 times that.

    python -m perf.bench_rdma [--json] [--quick]
    prpc bench rdma
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shard import VerbsPort, verbs_rails, verbs_refusal
from shard.transport.verbs_device import IWARP, NoVerbs

from .child import NotOffered
from .harness import Candidate, Place, Result, compare
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_alternately, time_each
from .verbs_link import VerbsLink, options
from .verbs_pair import READ, SEND, WRITE, WRITE_WITH_IMM, VerbsPair

NAME = "rdma"
PINGPONG = "ibv_rc_pingpong"
WRITE_BW, READ_BW = "ib_write_bw", "ib_read_bw"
PRPC = "prpc verbs"
PINGPONG_ROUNDS_MIN = 50
PERFTEST_ROUNDS_MIN = 100
COMPARED_TURNS_MIN = 50  # messages that are compared with what they post
INLINE_BYTES = 64  # an adapter may offer some hundred
IN_FLIGHT = 16
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Moved:
    """So many bytes from one end to the other."""

    size_bytes: int

    def __str__(self) -> str:
        return f"{self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class Verb:
    """One way to move them."""

    opcode: int
    in_flight: int = 1
    is_inline: bool = False
    is_asked: bool = False  # the near end announces its memory, the far one reads it and answers


VERBS = {
    "SEND": Verb(SEND),
    "SEND, inline": Verb(SEND, is_inline=True),
    "WRITE": Verb(WRITE),
    "WRITE_WITH_IMM": Verb(WRITE_WITH_IMM),
    "READ": Verb(READ),
    "SEND, READ, SEND": Verb(READ, is_asked=True),
    f"WRITE, {IN_FLIGHT} in flight": Verb(WRITE, IN_FLIGHT),
}
CASES = [Moved(64), Moved(4096), Moved(65_536), Moved(1 << 20)]
# A message's time over that of a verb, both taken in turn: what the host does beside hits both.
TIMES_SEND, TIMES_READ, TIMES_ASKED = "times_of_send", "times_of_read", "times_of_send_read_send"
TARGETS = [
    Target(str(CASES[0]), PRPC, TIMES_SEND, "at most", 2.0),
    Target(str(CASES[-1]), PRPC, TIMES_READ, "at most", 1.1),
    # a message is no READ: somebody has to say what to read, and that it was read
    Target(str(CASES[-1]), PRPC, TIMES_ASKED, "at most", 1.1),
]


def run(
    case: Moved,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one size by every verb."""
    candidates = [
        Candidate(name, "limit", partial(measure, case=case, verb=verb), "pyverbs")
        for name, verb in VERBS.items()
        if not verb.is_inline or case.size_bytes <= INLINE_BYTES
    ]
    candidates.append(Candidate(PRPC, "ours", partial(measure_prpc, case=case), "pyverbs"))
    candidates.append(Candidate(PINGPONG, "peer", partial(measure_pingpong, case=case), "pyverbs"))
    candidates += [
        Candidate(name, "peer", partial(measure_perftest, case=case, name=name), "pyverbs")
        for name in (WRITE_BW, READ_BW)
    ]
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure(place: Place, effort: Effort, case: Moved, verb: Verb) -> Sample:
    """Time of one, from its post until it is complete at both ends."""
    inline_bytes = INLINE_BYTES if verb.is_inline or verb.is_asked else 0
    with VerbsPair(_port(), case.size_bytes, inline_bytes) as pair:
        to_near = verb.opcode == READ and not verb.is_asked
        before, after = (pair.far, pair.near) if to_near else (pair.near, pair.far)
        before.memory[: case.size_bytes] = bytes(case.size_bytes - 1) + b"\x07"
        if verb.is_asked:
            move = pair.moves_when_asked()
        else:
            move = pair.moves(verb.opcode, verb.in_flight, verb.is_inline)
        sample = time_each(move, effort, verb.in_flight)
        return sample.with_work(last_right=int(after.memory[case.size_bytes - 1] == 7))


def measure_prpc(place: Place, effort: Effort, case: Moved) -> Sample:
    """Time of one message of the transport, from send() until it is delivered; and over the time of
    each verb that could have moved it, in turn.
    """
    size, port = case.size_bytes, _port()
    with VerbsLink(size) as link, VerbsPair(port, size, INLINE_BYTES) as pair:
        sample = time_each(link.move, effort, 1)
        turns = max(COMPARED_TURNS_MIN, min(effort.ops_max, sample.ops))
        verbs = {
            TIMES_SEND: pair.moves(SEND, is_inline=size <= INLINE_BYTES),
            TIMES_READ: pair.moves(READ),
            TIMES_ASKED: pair.moves_when_asked(),
        }
        message, *bare = time_alternately([link.move, *verbs.values()], turns)
        for name, verb in zip(verbs, bare, strict=True):
            if message.p50_ns and verb.p50_ns:
                sample.figures[name] = message.p50_ns / verb.p50_ns
        return sample.with_work(last_right=int(link.last == 7))


def measure_pingpong(place: Place, effort: Effort, case: Moved) -> Sample:
    """Half of its round trip, as it prints that. It sleeps for events: two that spin would wait for
    each other's time slice where there is one core.
    """
    port = _port()
    rounds = max(PINGPONG_ROUNDS_MIN, effort.ops_min)
    said = _client_says(
        PINGPONG,
        "ibverbs-utils",
        *("-d", port.device, "-i", str(port.number), "-g", str(port.gid_index), "-e"),
        *("-s", str(case.size_bytes), "-n", str(rounds)),
    )
    found = re.search(r"= ([\d.]+) usec/iter", said)
    if found is None:
        raise NotOffered(f"{PINGPONG} says no time: {said.strip()[-200:]}")
    return Sample(ops=rounds, p50_ns=float(found[1]) * 1e3 / 2)


def measure_perftest(place: Place, effort: Effort, case: Moved, name: str) -> Sample:
    """The time of one of IN_FLIGHT at once, from the average rate that it prints. Its client spins,
    and its server waits: WRITE knows no events there.
    """
    port = _port()
    rounds = max(PERFTEST_ROUNDS_MIN, effort.ops_min)
    in_flight = {READ_BW: ("-o", str(IN_FLIGHT)), WRITE_BW: ()}[name]
    said = _client_says(
        name,
        "perftest",
        *("-d", port.device, "-i", str(port.number), "-x", str(port.gid_index), "-F"),
        *("-s", str(case.size_bytes), "-n", str(rounds), "-t", str(IN_FLIGHT), *in_flight),
        *("--perform_warm_up", "-Q", "1"),
    )
    # bytes, iterations, peak and average in MiB/s
    found = re.search(rf"^ *{case.size_bytes} +{rounds} +[\d.]+ +([\d.]+)", said, re.MULTILINE)
    if found is None or not float(found[1]):
        raise NotOffered(f"{name} says no rate: {said.strip()[-200:]}")
    return Sample(ops=rounds, p50_ns=case.size_bytes / (float(found[1]) * MIB) * 1e9)


def _client_says(name: str, package: str, *options: str) -> str:
    """What a program prints as the client of itself. Raises NotOffered where it is not there."""
    command = shutil.which(name)
    if command is None:
        raise NotOffered(f"{name} is not installed: apt-get install {package}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = probe.getsockname()[1]
    words = [command, *options, "-p", str(number)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            return _tried([*words, "127.0.0.1"])
        finally:
            server.kill()


def _tried(command: list[str]) -> str:
    """It may begin before its server listens, and then ends at once."""
    said = ""
    for _ in range(50):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        said = tried.stdout + tried.stderr
        if tried.returncode == 0:
            break
    return said


def _port() -> VerbsPort:
    """Raises NotOffered, with what is in the way."""
    refusal = verbs_refusal()
    if refusal is not None:
        raise NotOffered(refusal)
    try:
        wanted = options()
        (port, *_), _ = verbs_rails(wanted.device, gid_index=wanted.gid_index)
    except NoVerbs as error:
        raise NotOffered(str(error)) from error
    if port.link == IWARP:
        raise NotOffered(f"{port} is of iWARP, and bare verbs are connected here without rdma_cm")
    return port


def test_every_verb_moves_the_bytes_where_there_is_a_device() -> None:
    for result in run(Moved(64), TINY):
        assert result.state in ("ok", "not installed", "not offered"), result.note
        if result.state == "ok" and result.candidate not in (PINGPONG, WRITE_BW, READ_BW):
            assert result.work == {"last_right": 1}
        if result.state == "ok" and result.candidate == PRPC:
            assert set(result.figures) == {TIMES_SEND, TIMES_READ, TIMES_ASKED}


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
