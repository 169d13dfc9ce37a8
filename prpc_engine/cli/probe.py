"""Who listens: names looked up and ports connected to, many at a time, each within a time that is
known beforehand.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from prpc_engine.settings.address import Address

WORKERS_MAX = 64  # at a time: most of them only wait
# A resolver that gives up answers within 5 s a try, two tries (resolv.conf); nothing can interrupt
# it, so we stop waiting.
RESOLVE_S_MAX = 11.0


@dataclass(frozen=True)
class ProbeAnswer:
    """What became of one address: whether it is as it should be, and what to tell the user."""

    ok: bool
    text: str


def probe_all(
    addresses: Iterable[Address], timeout_s: float, *, connect: bool
) -> dict[Address, ProbeAnswer]:
    """Look up each host and, with `connect`, connect to its port within timeout_s; in the order
    given.
    """
    found: dict[Address, ProbeAnswer | None] = dict.fromkeys(addresses)
    waiting: queue.SimpleQueue[Address] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Address, ProbeAnswer]] = queue.SimpleQueue()
    for address in found:
        waiting.put(address)

    def work() -> None:
        while not waiting.empty():
            try:
                address = waiting.get_nowait()
            except queue.Empty:  # another one was faster
                return
            answers.put((address, _probe(address, timeout_s, connect)))

    workers = min(WORKERS_MAX, len(found))
    for _ in range(workers):
        # a daemon: the resolver may keep it for long
        threading.Thread(target=work, name="prpc-probe", daemon=True).start()
    until = time.monotonic() + (RESOLVE_S_MAX + timeout_s) * math.ceil(len(found) / max(1, workers))
    for _ in range(len(found)):
        try:
            address, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        found[address] = answer
    return {
        address: answer or ProbeAnswer(False, "the resolver does not answer")
        for address, answer in found.items()
    }


def _probe(address: Address, timeout_s: float, connect: bool) -> ProbeAnswer:
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: a label that is empty or longer than DNS has
        return ProbeAnswer(
            False, f"does not resolve: {error.strerror if isinstance(error, OSError) else error}"
        )
    hosts = list(dict.fromkeys(str(place[4][0]) for place in places))
    if not connect:
        return ProbeAnswer(True, f"resolves to {', '.join(hosts)}")
    refusals = []
    until = time.monotonic() + timeout_s
    for family, kind, protocol, _, place in places:
        with socket.socket(family, kind, protocol) as probing:
            # 0 would mean: do not wait at all
            probing.settimeout(max(0.001, until - time.monotonic()))
            try:
                probing.connect(place)
                # tcp can meet itself at a port that it chose for us
                if probing.getsockname() != probing.getpeername():
                    return ProbeAnswer(True, f"answers at {place[0]}")
                refusals.append(f"{place[0]}: nobody listens")
            except TimeoutError:
                refusals.append(f"{place[0]}: no answer in {timeout_s:g} s")
            except OSError as error:
                refusals.append(f"{place[0]}: {error.strerror}")
    return ProbeAnswer(False, "; ".join(refusals))
