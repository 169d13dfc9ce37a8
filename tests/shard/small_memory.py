"""Programs with little memory: by a bound that only our own segments see, or by a real cgroup of
their own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shard.memory import memory_room

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def bound_memory(total_bytes: int) -> None:
    """From now on this process has so much for segments, whatever the machine has. For programs,
    not for the tests' process.
    """
    memory_room.read_memory_room = lambda root=Path("/"): memory_room.MemoryRoom(  # type: ignore[assignment]
        total_bytes - segment_bytes(), total_bytes, "a small machine"
    )


@contextmanager
def little_address_space(more_bytes: int) -> Iterator[None]:
    """This process may map so much more meanwhile (RLIMIT_AS), and no thread may start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open none meanwhile (RLIMIT_NOFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def segment_bytes() -> int:
    """In segments that this process has made or mapped, each once."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:prpc."):
                status = os.stat(f"/proc/self/fd/{fd}")
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def run_with_memory(total_bytes: int, program: str) -> None:
    """Run `program` bounded by bound_memory(). Fails with its output unless it ends well."""
    returncode, output = end_with_memory(total_bytes, program)
    assert returncode == 0, f"exit code {returncode}\n{output}"


def end_with_memory(total_bytes: int, program: str) -> tuple[int, str]:
    """As run_with_memory(), whatever the end: the exit code (minus the signal that killed it), and
    what it wrote.
    """
    begin = f"from tests.shard.small_memory import bound_memory\nbound_memory({total_bytes})\n"
    return _end([sys.executable, "-W", "error", "-c", begin + program])


def end_in_cgroup(limit_bytes: int, program: str) -> tuple[int, str]:
    """Run `program` in a memory cgroup with that limit; its exit code and output. Skips the test
    where we may make none.
    """
    with memory_cgroup(limit_bytes) as procs:
        enter = f'echo $$ > {procs} && exec "$0" -W error -c "$1"'
        return _end(["sh", "-c", enter, sys.executable, program])


def _end(command: list[str]) -> tuple[int, str]:
    ran = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return ran.returncode, ran.stdout


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup below our own, while the block lasts; the file that a process enters it by."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, limit = Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
        elif not controllers:
            folder, limit = Path(f"/sys/fs/cgroup{path}"), "memory.max"
        else:
            continue
        mine = folder / f"prpc-test-{os.getpid()}"
        try:
            mine.mkdir()
        except OSError:
            continue
        try:
            try:
                (mine / limit).write_text(str(limit_bytes))
            except OSError:
                continue
            yield mine / "cgroup.procs"
            return
        finally:
            mine.rmdir()
    pytest.skip("making a memory cgroup needs root and a hierarchy that it may write to")
