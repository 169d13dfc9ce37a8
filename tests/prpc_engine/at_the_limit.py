"""A process that makes one thing under each limit of open files, from what it has open upwards, and
prints how each attempt ends, as JSON.

    python -m tests.prpc_engine.at_the_limit THING MASTER
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prpc_engine import Master, RpcService
from prpc_engine.kv import TableServer
from prpc_engine.master.client import MasterClient
from shard import ShardGroup

MORE_MAX = 300  # descriptors, with which each of them must work
ENDS_S = 20.0  # for what a failed attempt has begun


@contextlib.contextmanager
def tables(master: str) -> Iterator[None]:
    """A service without shards: its own descriptors are there before."""
    TableServer(_service(master))
    yield


_services: list[RpcService] = []


def _service(master: str) -> RpcService:
    if not _services:
        _services.append(RpcService(master))
    return _services[0]


def client(master: str) -> Any:
    """One whose server is there."""
    return _service(master).create_client("echo")


MAKE: dict[str, Callable[[str], Any]] = {
    "RpcService": lambda master: RpcService(master, timeout_s=1.0),
    "RpcClient": client,
    "Master": lambda _: Master("127.0.0.1:0"),
    "MasterClient": lambda master: MasterClient(master, timeout_s=1.0),
    "TableServer": tables,
    "ShardGroup": lambda _: ShardGroup(1, start_method="forkserver"),
}


def open_now() -> tuple[list[str], int, list[str]]:
    """Descriptors by what they are, threads, and segments with a name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of this very look
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found), threading.active_count(), sorted(os.listdir("/dev/shm"))


def attempt(thing: str, master: str) -> str:
    """Its error, or nothing."""
    try:
        with MAKE[thing](master):
            return ""
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"


def main(thing: str, master: str) -> None:
    """From the limit at which nothing is left to the first that is enough."""
    attempt(thing, master)  # what it makes for the whole process stays
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_now()
    for limit in range(len(before[0]) - 1, len(before[0]) + MORE_MAX):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        error = attempt(thing, master)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        deadline = time.monotonic() + ENDS_S
        while (after := open_now()) != before and time.monotonic() < deadline:
            os.sched_yield()
        print(json.dumps({"limit": limit, "error": error, "before": before, "after": after}))
        before = after
        if not error:
            break
    for service in _services:
        service.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
