"""Another node, asked as a client would ask it: over every transport that we may use, one at a
time.

The first word goes to the address that was given. The node then says at which addresses others
reach it, and a client takes the first of its transports that connects to one of those.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from prpc_engine import errors
from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.visitor import visiting_node
from prpc_engine.node.node_info import ABOUT, ABOUT_ROUTE, PING
from prpc_engine.release import VERSION
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.paths import Refusal
from prpc_engine.rpc.peer import Peer
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import ALL_TRANSPORTS, TRANSPORTS
from prpc_engine.settings.node_config import NodeConfig
from shard import runtime

PINGS = 200
# leases and deadlines go by each node's own clock: this is for who reads two logs side by side
CLOCK_S_MAX = 1.0
TIMEOUT_S = 5.0  # for one address to connect, and for one answer


def peer_address(text: str) -> str:
    """The address of a node as transports have it, of what a user wrote: host:port,
    tcp://host:port, verbs://host:port, shm://... or unix://... Raises ConfigError."""
    scheme, found, rest = text.partition("://")
    if found and scheme in ("shm", "unix"):
        if rest.count("/") != 2:
            raise errors.ConfigError(f"{text!r} is no address: {scheme}://host/uid/token expected")
        return text
    if found and scheme == "verbs":
        return f"verbs://{Address.parse(rest)}"
    return f"tcp://{Address.parse(text.removeprefix('tcp://'))}"


def _ask(peer: Peer, method: str) -> Any:
    return peer.request(ABOUT_ROUTE, method, method_key(method), (), TIMEOUT_S, False).result()


def examine_peer(text: str, secret: bytes) -> Iterator[Finding]:
    """What another node answers, and over which path. Raises ConfigError for what is no address,
    NotSent where nobody answers at it, AuthenticationFailed, DeadlineExceeded, NotAllowed."""
    address = peer_address(text)
    scheme = address.partition("://")[0]
    config = NodeConfig.load(secret=secret)
    with visiting_node("prpc-doctor", config.override(transports=[scheme])) as node:
        peer = node.peer_at([address], TIMEOUT_S, text)
        asked_s = time.time()
        about = _ask(peer, ABOUT)
        answered_s = time.time()
        # failpoint: doctor.answered
    yield from _identity(text, about)
    yield compare_clocks(about["time_s"], asked_s, answered_s)
    addresses, is_lost = _reachable(about["addresses"], address)
    if is_lost and "master" not in about["services"]:
        yield Finding(
            "its address",
            is_lost,
            "bad",
            "it tells others to connect there, which leads each of them to itself: "
            "give it advertise=",
        )
    yield from _paths(addresses, config, text)


def _identity(text: str, about: dict[str, Any]) -> Iterator[Finding]:
    host, pid = about["process"].rpartition("/")[0].rsplit("/", 1)
    ours = runtime.this_process().rsplit("/", 2)[0]
    if host == ours:
        where = "of this host"
    elif host.partition("/")[0] == ours.partition("/")[0]:
        where = "in another container of this host"
    else:
        where = "of another host"
    services = ", ".join(about["services"]) or "nothing"
    yield Finding("peer", f"{text}: process {pid} {where}; serves {services}")
    value = f"prpc {about['version']}, python {about['python']}"
    if about["version"] != VERSION:
        yield Finding(
            "its version",
            value,
            "warn",
            f"this is prpc {VERSION}: install the same one at all nodes of a job",
        )
    else:
        yield Finding("its version", value)


def compare_clocks(theirs_s: float, asked_s: float, answered_s: float) -> Finding:
    """How far its clock is from ours: it read that between our asking and its answer's arrival."""
    ahead_s = theirs_s - (asked_s + answered_s) / 2
    value = (
        f"{abs(ahead_s) * 1e3:.1f} ms {'ahead of' if ahead_s > 0 else 'behind'} ours, give or take "
    )
    value += f"{(answered_s - asked_s) * 500:.1f} ms"
    if abs(ahead_s) > CLOCK_S_MAX + (answered_s - asked_s) / 2:  # a late answer is no difference
        return Finding(
            "its clock",
            value,
            "warn",
            "times in the two logs cannot be compared: let NTP or chrony set both",
        )
    return Finding("its clock", value)


def _reachable(addresses: list[str], given: str) -> tuple[list[str], str]:
    """Those addresses, with `given` for one that is every address of its host;
    and that one, or "".
    """
    everywhere = next(
        (one for one in addresses if one.startswith(("tcp://0.0.0.0:", "tcp://[::]:"))), ""
    )
    instead = [given] if given.startswith("tcp://") else []
    return [one for one in addresses if one != everywhere] + (
        instead if everywhere else []
    ), everywhere


def _paths(addresses: list[str], config: NodeConfig, text: str) -> Iterator[Finding]:
    """One finding a transport, in our order of preference."""
    taken, wanted = "", config.node.transports
    for name in (*wanted, *(other for other in ALL_TRANSPORTS if other not in wanted)):
        fact = f"path {name}"
        if name not in wanted:
            is_usual = name in TRANSPORTS
            yield Finding(
                fact,
                "forbidden here by PRPC_TRANSPORTS" if is_usual else "not in PRPC_TRANSPORTS",
            )
            continue
        try:
            with visiting_node("prpc-doctor", config.override(transports=[name])) as node:
                peer = node.peer_at(addresses, TIMEOUT_S, text)
                value = f"{peer.connection.peer}, round trip {_round_trip_us(peer):.0f} us"
        except errors.ConfigError as error:  # it does not work in this process
            yield Finding(fact, str(error))
        except errors.NoPath as error:
            yield from (_refused(fact, refusal) for refusal in error.refusals)
        else:
            yield Finding(
                fact,
                f"works, not taken: {taken} is preferred; {value}" if taken else f"taken: {value}",
            )
            taken = taken or name
    if not taken:
        yield Finding("path", "none", "bad", "a client could not reach it: mend one of the above")


def _refused(fact: str, refusal: Refusal) -> Finding:
    if not refusal.failed:
        return Finding(fact, f"not taken: {refusal.reason}")
    advice = "it should work between these two: mend it, or forbid it by PRPC_TRANSPORTS"
    return Finding(fact, f"failed: {refusal.reason}", "warn", advice)


def _round_trip_us(peer: Peer) -> float:
    """The median of PINGS calls that do nothing."""
    took_ns = []
    for _ in range(PINGS):
        started = time.perf_counter_ns()
        _ask(peer, PING)
        took_ns.append(time.perf_counter_ns() - started)
    return statistics.median(took_ns) / 1e3
