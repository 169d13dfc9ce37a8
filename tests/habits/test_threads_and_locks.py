"""Where threads are started and locks are made: each has a reason, so that a new one is noticed.

A lock's reason is the comment beside it: on its line, or right above. A thread's stands here. Both
are few by design: what connects, asks, retries and flushes is a coroutine of the control loop
(shard/loop/control.py), and one thread at a time turns a reactor (shard/loop/driver.py).

    python -m tests.habits.test_threads_and_locks    the tables, as they would be now
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.imports import ROOT

PACKAGES = ("shard", "prpc_engine")
SIMULATED = "prpc_engine/simulation/"  # these are not real
OWN_LOCK = "Baton"  # shard/transport/baton.py
LOCK_KINDS = {
    *("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier"),
    OWN_LOCK,
}
THREAD_KINDS = {"Thread", "Timer", "ThreadPoolExecutor", "Threads"}

THREADS = {
    "prpc_engine/accumulator/termination.py": "a signal handler must not wait for what it closes",
    "prpc_engine/cli/probe.py": "prpc doctor and endpoint-map check wait for resolvers of names",
    "prpc_engine/cli/top.py": "prpc top asks all processes at a time",
    "prpc_engine/demo/recovery.py": "measures how long a push takes, beside the director",
    "prpc_engine/ding/children.py": "DI-engine's children in threads, as a program asks for",
    "prpc_engine/kv/checkpoint/save.py": "writes files, one at a time, beside other work",
    "prpc_engine/pslite/handler_threads.py": "handlers of ps-lite applications, as they ask for",
    "prpc_engine/remote/running.py": "functions of users that block or compute for long",
    "prpc_engine/support/monitor.py": "support's monitor, which an application starts",
    "prpc_engine/support/replicator.py": "support's replicator, which an application starts",
    "prpc_engine/support/thread_group.py": "support's thread group, of an application",
    "prpc_engine/tensorflow/threads.py": "TensorFlow's own sessions block their thread",
    "shard/group/supervisor.py": "starts, watches and restarts the shards of a group",
    "shard/loop/control.py": "the control loop",
    "shard/loop/driver.py": "the progress thread, and its spares for handlers that wait",
    "shard/loop/guest_loop.py": "in a simulation alone: asyncio's own are real",
    "shard/loop/stall.py": "the watchdog",
    "shard/loop/waits.py": "run_blocking(), 32 at most",
}
# How many locks each file makes; a new one is a reason to look for one owner of what it guards.
LOCKS: dict[str, int] = {
    "shard/group/group.py": 1,
    "shard/group/supervisor.py": 1,
    "shard/loop/control.py": 2,
    "shard/loop/driver.py": 4,
    "shard/loop/future.py": 1,
    "shard/loop/interrupts.py": 2,
    "shard/loop/sections.py": 1,
    "shard/loop/stall.py": 2,
    "shard/memory/memory_order.py": 1,
    "shard/memory/slab.py": 1,
    "shard/runtime.py": 2,
    "shard/transport/__init__.py": 1,
    "shard/transport/callers.py": 1,
    "shard/transport/shared_port.py": 1,
    "shard/transport/shm_connection.py": 1,
    "shard/transport/tls.py": 1,
    "shard/transport/told.py": 1,
    "shard/transport/verbs_domain.py": 1,
    "shard/transport/verbs_iwarp.py": 1,
    "shard/transport/verbs_queue.py": 1,
    "shard/transport/verbs_rails.py": 1,
    "prpc_engine/accumulator/counter.py": 4,
    "prpc_engine/accumulator/sender.py": 1,
    "prpc_engine/accumulator/server.py": 2,
    "prpc_engine/archive/expanded.py": 1,
    "prpc_engine/client/call_figures.py": 1,
    "prpc_engine/client/directory.py": 1,
    "prpc_engine/client/dispatcher.py": 1,
    "prpc_engine/client/hedging.py": 1,
    "prpc_engine/cluster/links.py": 1,
    "prpc_engine/cluster/server.py": 4,
    "prpc_engine/ding/exchange.py": 2,
    "prpc_engine/cuda/opened.py": 1,
    "prpc_engine/cuda/pool.py": 2,
    "prpc_engine/ding/link.py": 1,
    "prpc_engine/ding/supervisor.py": 2,
    "prpc_engine/ding/value_slots.py": 1,
    "prpc_engine/kv/checkpoint/methods.py": 1,
    "prpc_engine/kv/client/local.py": 1,
    "prpc_engine/kv/client/partition_client.py": 2,
    "prpc_engine/kv/client/recovery.py": 1,
    "prpc_engine/kv/client/session.py": 1,
    "prpc_engine/kv/consistency/cache.py": 1,
    "prpc_engine/kv/schema/services.py": 1,
    "prpc_engine/node/node.py": 1,
    "prpc_engine/pslite/batcher.py": 1,
    "prpc_engine/pslite/customer.py": 1,
    "prpc_engine/pslite/customer_router.py": 1,
    "prpc_engine/pslite/handler_threads.py": 1,
    "prpc_engine/pslite/lifecycle.py": 1,
    "prpc_engine/pslite/postoffice.py": 3,
    "prpc_engine/pslite/simple_app.py": 1,
    "prpc_engine/ray/transport.py": 1,
    "prpc_engine/remote/running.py": 1,
    "prpc_engine/remote/values.py": 1,
    "prpc_engine/rpc/pending.py": 1,
    "prpc_engine/service/service.py": 1,
    "prpc_engine/service/shard_statistics.py": 1,
    "prpc_engine/support/channel.py": 3,
    "prpc_engine/support/monitor.py": 1,
    "prpc_engine/topics/publisher.py": 1,
    "prpc_engine/topics/subscriber.py": 2,
    "prpc_engine/vllm/waits.py": 1,
    "prpc_engine/vllm/queue_node.py": 1,
    "prpc_engine/vllm/reading_end.py": 1,
    "prpc_engine/tensorflow/open_sessions.py": 1,
    "prpc_engine/tensorflow/programs.py": 1,
    "prpc_engine/tensorflow/remote.py": 1,
    "prpc_engine/tensorflow/runtime.py": 2,
    "prpc_engine/tensorflow/sendrecv.py": 1,
    "prpc_engine/tensorflow/server.py": 1,
    "prpc_engine/tensorflow/star.py": 1,
    "prpc_engine/tensorflow/threads.py": 2,
}


class Made(NamedTuple):
    """Something that is made in a line of a file."""

    kind: str
    line: int
    has_reason: bool


def made_in(source: str) -> Iterator[Made]:
    """Threads and locks."""
    if not any(kind in source for kind in LOCK_KINDS | THREAD_KINDS):
        return  # most files: to parse them all takes a second
    lines = source.splitlines()
    tree = ast.parse(source)
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "concurrent.futures")
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        kind = ""
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            kind = (
                function.attr if function.value.id in ("threading", "_threading", "runtime") else ""
            )
        elif isinstance(function, ast.Name) and function.id in {*imported, OWN_LOCK}:
            kind = function.id
        if kind in LOCK_KINDS | THREAD_KINDS:
            yield Made(kind, node.lineno, _has_comment(lines, node.lineno))


def _has_comment(lines: list[str], line: int) -> bool:
    above = lines[line - 2].strip() if line > 1 else ""
    return "  # " in lines[line - 1] or above.startswith("# ")


@cache
def found() -> dict[str, list[Made]]:
    """By file."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    everything = {str(path.relative_to(ROOT)): list(made_in(path.read_text())) for path in paths}
    return {
        path: made for path, made in everything.items() if made and not path.startswith(SIMULATED)
    }


def locks() -> dict[str, int]:
    """How many each file makes."""
    counts = Counter(
        {path: sum(one.kind in LOCK_KINDS for one in made) for path, made in found().items()}
    )
    return {path: count for path, count in counts.items() if count}


def test_each_file_that_starts_threads_is_known_with_its_reason() -> None:
    starting = {
        path for path, made in found().items() if any(one.kind in THREAD_KINDS for one in made)
    }
    assert starting == THREADS.keys(), "coroutines of the control loop need no thread"


def test_each_file_makes_as_many_locks_as_are_stated() -> None:
    assert locks() == LOCKS, "give what is guarded one owner; else state the number in LOCKS"


def test_each_lock_has_its_reason_beside_it() -> None:
    bare = [
        f"{path}:{one.line}"
        for path, made in found().items()
        for one in made
        if one.kind in LOCK_KINDS and not one.has_reason
    ]
    assert not bare, "say in a comment what it guards, and against whom:\n" + "\n".join(bare)


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("import threading\na = threading.Lock()  # why", [Made("Lock", 2, True)]),
        ("import threading\n# why\na = threading.RLock()", [Made("RLock", 3, True)]),
        ("import threading\na = threading.Lock()\nb = 1  # why", [Made("Lock", 2, False)]),
        ("from shard import runtime\na = runtime.Lock()  # why", [Made("Lock", 2, True)]),
        ("from threading import Thread\nThread(target=f)", [Made("Thread", 2, False)]),
        ("from shard import Semaphore\nSemaphore(3)", []),
    ],
)
def test_what_counts(source: str, made: list[Made]) -> None:
    assert list(made_in(source)) == made


if __name__ == "__main__":
    for file, count in locks().items():
        print(f'    "{file}": {count},')
