"""How tests are spread over the workers of `pytest -n`: by file, the files that take longest first.
Before the workers start, files that have no byte code yet are compiled: each worker collects all
of them, and all would compile them at the same time.

By file, because what a file's tests share is made once. The longest first, because a worker that
is left alone with one at the end is what all others then wait for. Last come the files with tests
that run `alone`: each waits for what the other workers do, which is short by then.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# Seconds, on two quiet cores, of the files that take longest, with what is marked `slow`. A figure
# that is wrong costs some seconds of the run, and no test.
LONG_FILES_S = {
    "tests/prpc_engine/demo/test_demo_cluster.py": 50,
    "tests/faults/test_group_kills.py": 45,
    "tests/network/test_hosts.py": 40,
    "tests/test_guides.py": 40,
    "tests/faults/test_soak.py": 36,
    "tests/prpc_engine/kv/pslite/test_jobs.py": 35,
    "tests/tensorflow/test_public_scripts.py": 40,
    "tests/tensorflow/test_sendrecv.py": 40,
    "tests/tensorflow/test_flows.py": 40,
    "tests/prpc_engine/test_bad_input.py": 25,
    "tests/prpc_engine/accumulator/test_extreme_values.py": 24,
    "tests/network/test_pieces.py": 22,
    "tests/network/test_service.py": 22,
    "tests/prpc_engine/workloads/test_chaos.py": 21,
    "tests/prpc_engine/workloads/test_echoes.py": 21,
    "tests/prpc_engine/accumulator/test_sketches.py": 21,
    "tests/prpc_engine/test_rpc.py": 20,
    "tests/prpc_engine/test_roles.py": 20,
    "tests/shard/test_group_exit.py": 20,
    "tests/prpc_engine/kv/checkpoint/test_faults.py": 19,
    "tests/prpc_engine/workloads/test_flat.py": 15,
    "tests/perf/test_bench_history.py": 14,
}
ALONE_S = -1
# These parse all our sources, which takes a process some seconds: one worker has them all.
READ_ALL_SOURCES = {
    "tests/habits/test_private_names.py",
    "tests/test_architecture.py",
    "tests/test_documents.py",
}
SOURCES = "sources"
ROOT = Path(__file__).parent.parent
COLD_MIN = 20  # files without byte code for which it is worth while to start processes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile what has no byte code yet, on each core a part of it."""
    cold = [path for path in test_files(config.args) if not has_byte_code(path)]
    if len(cold) < COLD_MIN or sys.dont_write_bytecode:
        return
    cores = len(os.sched_getaffinity(0))
    compiling = [_compiler_of(cold[index::cores]) for index in range(cores)]
    for pid in compiling:
        os.waitpid(pid, 0)


def test_files(arguments: Sequence[str]) -> list[Path]:
    """Those in the folders and files that pytest was given."""
    found: dict[Path, None] = {}
    for argument in arguments:
        path = (ROOT / argument.partition("::")[0]).resolve()
        found.update(dict.fromkeys(sorted(path.rglob("test_*.py")) if path.is_dir() else [path]))
    return [path for path in found if path.is_relative_to(ROOT / "tests")]


def has_byte_code(path: Path) -> bool:
    """Whether pytest has compiled a file since it was changed. Pytest adds its own name to that of
    the file for that, since it rewrites assertions.
    """
    plain = Path(importlib.util.cache_from_source(str(path)))
    changed = path.stat().st_mtime
    return any(
        made.stat().st_mtime >= changed for made in plain.parent.glob(f"{plain.stem}-pytest-*.pyc")
    )


def _compiler_of(paths: Sequence[Path]) -> int:
    """A child that imports these as a worker will, and ends. What goes wrong there, goes wrong in
    the worker, which says so.
    """
    pid = os.fork()
    if not pid:
        try:
            with open(os.devnull, "r+") as nothing:
                for standard in range(3):
                    os.dup2(nothing.fileno(), standard)
            for path in paths:
                with contextlib.suppress(BaseException):
                    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        finally:
            os._exit(0)
    return pid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: two a core, because half of most tests' time is waiting."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Whatever `--dist` says."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SOURCES if file in READ_ALL_SOURCES else file

        def remove_node(self, node: Any) -> str | None:
            """Of a worker that crashed, the test that it ran is over: it would crash the next, too.
            Others have what it had left.
            """
            workload = self.assigned_work[node]
            running = (
                (unit, test)
                for unit in workload.values()
                for test, is_over in unit.items()
                if not is_over
            )
            unit, crashed = next(running, (None, None))
            if unit is None:
                return super().remove_node(node)  # type: ignore[no-any-return]
            unit[crashed] = True
            del self.assigned_work[node]
            self.workqueue.update(
                {scope: unit for scope, unit in workload.items() if not all(unit.values())}
            )
            for other in self.assigned_work:
                self._reschedule(other)
            return str(crashed)

        def _reschedule(self, node: Any) -> None:
            """A worker runs a test once it knows the next one, or that there is none: one in the
            place of a worker that crashed is given what that had left, be it one test.
            """
            super()._reschedule(node)
            if node.shutting_down:
                return
            while self.workqueue and self._pending_of(self.assigned_work[node]) == 1:
                self._assign_work_unit(node)
            if not self.workqueue and self._pending_of(self.assigned_work[node]) == 1:
                node.shutdown()

    config.option.loadscopereorder = False  # the files are in their order already
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of workers alone: without them the order is that of the files' names."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    seconds = {**dict.fromkeys(map(file_of, filter(is_alone, items)), ALONE_S), **LONG_FILES_S}
    items.sort(key=lambda item: -seconds.get(file_of(item), 0))


def file_of(item: pytest.Item) -> str:
    """Its path, from the root."""
    return item.nodeid.partition("::")[0]


def is_alone(item: pytest.Item) -> bool:
    """Whether no other test may run beside it."""
    return item.get_closest_marker("alone") is not None
