"""How much memory may be taken: what machines made of files have, and what becomes of programs in
real cgroups.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shard.memory.memory_room import (
    MARGIN_BYTES_MAX,
    MARGIN_BYTES_MIN,
    UNBOUNDED,
    MemoryRoom,
    read_memory_room,
)
from tests.shard.small_memory import end_in_cgroup

GIB, MIB = 1 << 30, 1 << 20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def write(root: Path, name: str, text: str | int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def host(root: Path, total_bytes: int, available_bytes: int) -> None:
    write(
        root,
        "proc/meminfo",
        f"MemTotal: {total_bytes >> 10} kB\nMemFree: 1 kB\nMemAvailable: "
        f"{available_bytes >> 10} kB",
    )


def test_a_machine_that_says_nothing_bounds_nothing(tmp_path: Path) -> None:
    assert read_memory_room(tmp_path) == UNBOUNDED


def test_of_the_host_all_that_is_available_may_be_taken_but_a_margin(tmp_path: Path) -> None:
    host(tmp_path, 16 * GIB, 10 * GIB)
    assert read_memory_room(tmp_path) == MemoryRoom(
        10 * GIB - MARGIN_BYTES_MAX, 16 * GIB, "this host"
    )
    host(tmp_path, 128 * MIB, MIB)
    assert read_memory_room(tmp_path).free_bytes == MIB - MARGIN_BYTES_MIN


def test_the_tightest_cgroup_above_the_process_counts_and_page_cache_does_not_in_version_2(
    tmp_path: Path,
) -> None:
    host(tmp_path, 16 * GIB, 10 * GIB)
    write(tmp_path, "proc/self/cgroup", "0::/pod/job")
    for path, limit, used in (
        ("", "max", 5 * GIB),
        ("/pod", GIB, 900 * MIB),
        ("/pod/job", 2 * GIB, 500 * MIB),
    ):
        write(tmp_path, f"{V2}{path}/memory.max", limit)
        write(tmp_path, f"{V2}{path}/memory.current", used)
    assert read_memory_room(tmp_path) == MemoryRoom((1024 - 900 - 64) * MIB, GIB, "cgroup /pod")
    write(
        tmp_path,
        f"{V2}/pod/memory.stat",
        f"anon 7\nfile 99\nshmem 9\ninactive_file {200 * MIB}\nactive_file {100 * MIB}",
    )
    assert read_memory_room(tmp_path) == MemoryRoom((1024 - 600 - 64) * MIB, GIB, "cgroup /pod")


def test_the_same_in_version_1_where_no_limit_is_a_large_number(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/pod\n0::/")
    for path, limit in (("", 9223372036854771712), ("/pod", GIB)):
        write(tmp_path, f"{V1}{path}/memory.limit_in_bytes", limit)
        write(tmp_path, f"{V1}{path}/memory.usage_in_bytes", 600 * MIB)
        write(
            tmp_path,
            f"{V1}{path}/memory.stat",
            f"inactive_file 1\ntotal_inactive_file {80 * MIB}\ntotal_active_file {20 * MIB}",
        )
    assert read_memory_room(tmp_path) == MemoryRoom((1024 - 500 - 64) * MIB, GIB, "cgroup /pod")


def test_in_a_container_that_shows_the_path_on_the_host_the_limits_at_the_base_count(
    tmp_path: Path,
) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../docker/abc")
    write(tmp_path, f"{V2}/memory.max", 512 * MIB)
    write(tmp_path, f"{V2}/memory.current", 12 * MIB)
    assert read_memory_room(tmp_path) == MemoryRoom((500 - 32) * MIB, 512 * MIB, "cgroup /")


@pytest.mark.alone  # its memory is a real limit, and the kernel takes its time under load
def test_a_slab_that_fills_its_cgroup_is_told_in_time_and_never_killed() -> None:
    program = """
import numpy as np
from shard import ShmFull, Slab

slab = Slab()
kept = []
try:
    while True:
        kept.append(slab.empty((1 << 20,), np.uint8))
        kept[-1][:] = len(kept)
except ShmFull as error:
    assert "of the 128.0 MiB of cgroup /" in str(error), error
assert len(kept) > 30, len(kept)
assert all((array == number).all() for number, array in enumerate(kept, 1))
print("all is well")
"""
    assert end_in_cgroup(128 * MIB, program) == (0, "all is well\n")


@pytest.mark.alone
def test_processes_that_fill_one_cgroup_at_the_same_time_are_all_told_in_time() -> None:
    filling = """
import sys
import numpy as np
from shard import ShmFull, Slab

slab = Slab()
kept = []
sys.stdin.readline()
try:
    while True:
        kept.append(slab.empty((4 << 20,), np.uint8))
except ShmFull:
    print("told", flush=True)
sys.stdin.readline()
"""
    program = f"""
import subprocess, sys
fillers = [
    subprocess.Popen(
        [sys.executable, "-c", {filling!r}],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(3)
]
for filler in fillers:
    filler.stdin.write("go\\n")
    filler.stdin.flush()
told = [filler.stdout.readline() for filler in fillers]
print(told, [filler.communicate("end\\n") and filler.returncode for filler in fillers])
"""
    assert end_in_cgroup(512 * MIB, program) == (0, "['told\\n', 'told\\n', 'told\\n'] [0, 0, 0]\n")
