"""The networks of the guest's devices, which have no neighbours, as if they might have."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address
from typing import Any

import pytest

from shard.transport.verbs_introduction import FarEnd
from shard.transport.verbs_queue import VerbsQueue

NOBODYS = IPv6Address("::ffff:10.77.1.99").packed  # a GID of the network of rxe1


@contextlib.contextmanager
def searching(network: str) -> Iterator[None]:
    """A dummy device that has the kernel look for neighbours, as a real one does."""
    subprocess.run(["ip", "link", "set", network, "arp", "on"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", network, "arp", "off"], check=True)


def lie_as(
    monkeypatch: pytest.MonkeyPatch,
    queues: type[VerbsQueue],
    liar: str,
    lie: Callable[[FarEnd], FarEnd],
) -> None:
    """The "connector" or the "acceptor" of the next connection introduces itself with a lie; if
    that is tried again, with none.
    """
    near_end = queues.near_end
    ends = iter(("connector", "acceptor"))  # as they introduce themselves

    def told(queue: Any) -> FarEnd:
        end = near_end(queue)
        return lie(end) if next(ends, None) == liar else end

    monkeypatch.setattr(queues, "near_end", told)
