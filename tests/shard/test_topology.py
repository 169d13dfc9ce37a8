"""Machines made of files: what their topology is read as."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shard.group.topology import (
    Core,
    Topology,
    format_ranges,
    parse_ranges,
    read_quota,
    read_topology,
)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """2 nodes x 4 physical cores x 2 threads, numbered as Linux does: 0-3 and 8-11 are node 0; n
    and n + 8 share a core.
    """
    write(tmp_path, "sys/devices/system/cpu/online", "0-15")
    for number in range(16):
        siblings = f"{number % 8},{number % 8 + 8}"
        write(
            tmp_path, f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", siblings
        )
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-3,8-11")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "4-7,12-15")
    (tmp_path / "sys/devices/system/node/power").mkdir()
    return tmp_path


def test_nodes_and_siblings_are_read_from_the_kernels_files(two_nodes: Path) -> None:
    machine = read_topology(range(16), two_nodes)
    assert machine.core(10) == Core(10, node=0, siblings=(2, 10))
    assert machine.core(7) == Core(7, node=1, siblings=(7, 15))
    assert [core.number for core in machine.cores] == list(range(16))
    assert (machine.nodes, machine.physical_count, machine.quota_cores) == ((0, 1), 8, None)


def test_cores_that_a_cpuset_withholds_are_not_there_even_as_siblings(two_nodes: Path) -> None:
    machine = read_topology([1, 2, 9], two_nodes)
    assert machine.cores == (Core(1, 0, (1, 9)), Core(2, 0, (2,)), Core(9, 0, (1, 9)))
    assert (machine.nodes, machine.physical_count) == ((0,), 2)


def test_a_core_that_is_offline_drops_out(two_nodes: Path) -> None:
    write(two_nodes, "sys/devices/system/cpu/online", "0-8,10-15")
    (two_nodes / "sys/devices/system/cpu/cpu9/topology/thread_siblings_list").unlink()
    machine = read_topology(range(16), two_nodes)
    assert machine.core(9) is None
    assert machine.core(1) == Core(1, 0, (1,))


def test_a_node_with_memory_and_no_cores_is_no_node_of_ours(two_nodes: Path) -> None:
    write(two_nodes, "sys/devices/system/node/node2/cpulist", "")
    assert read_topology(range(16), two_nodes).nodes == (0, 1)


def test_a_machine_that_shows_nothing_has_one_node_and_no_siblings(tmp_path: Path) -> None:
    expected = Topology((Core(0, 0, (0,)), Core(5, 0, (5,))), quota_cores=None)
    assert read_topology([5, 0], tmp_path) == expected


@pytest.mark.parametrize("text", ["", "garbage", "0-", "-1", "1-x", "\xff\xfe"])
def test_files_that_make_no_sense_count_as_missing(tmp_path: Path, text: str) -> None:
    for name in ("cpu/online", "cpu/cpu0/topology/thread_siblings_list", "node/node0/cpulist"):
        write(tmp_path, f"sys/devices/system/{name}", text)
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "7")
    write(tmp_path, "proc/self/cgroup", text)
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert read_topology([0, 7], tmp_path).cores == (Core(0, 0, (0,)), Core(7, 1, (7,)))
    assert read_quota(tmp_path) is None


def test_files_that_are_not_text_count_as_missing(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/online", "")
    (tmp_path / "sys/devices/system/cpu/online").write_bytes(b"\xff\xfe0-3")
    assert read_topology([0], tmp_path).cores == (Core(0, 0, (0,)),)


def test_this_machine_can_be_read() -> None:
    usable = sorted(os.sched_getaffinity(0))
    machine = read_topology(usable)
    assert {core.number for core in machine.cores} <= set(usable)
    assert 1 <= machine.physical_count <= len(machine.cores)


# -- lists of cores --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8-11", [0, 1, 2, 3, 8, 9, 10, 11]), ("5", [5]), ("0,2", [0, 2]), (None, []), ("", [])],
)
def test_lists_of_cores_are_read_as_the_kernel_writes_them(
    text: str | None, numbers: list[int]
) -> None:
    assert parse_ranges(text) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 5], "0-2,5"), ([3], "3"), ([4, 0, 2], "0,2,4"), ([], "")]
)
def test_lists_of_cores_are_written_as_the_kernel_writes_them(
    numbers: list[int], text: str
) -> None:
    assert format_ranges(numbers) == text


# -- the cgroup's quota ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("400000 100000", 4.0),
        ("100000 0", None),
        ("max", None),
    ],
)
def test_a_quota_of_version_2_is_in_cores(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert read_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("own_us", "above_us", "cores"), [(200_000, 50_000, 0.5), (50_000, 200_000, 0.5)]
)
def test_the_smallest_quota_on_the_way_up_holds(
    tmp_path: Path, own_us: int, above_us: int, cores: float
) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job.scope")
    write(tmp_path, "sys/fs/cgroup/user.slice/cpu.max", f"{above_us} 100000")
    write(tmp_path, "sys/fs/cgroup/user.slice/job.scope/cpu.max", f"{own_us} 100000")
    assert read_quota(tmp_path) == cores


def test_in_a_container_the_quota_is_at_the_base_though_the_path_is_the_hosts(
    tmp_path: Path,
) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../docker/0123")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert read_quota(tmp_path) == 1.0


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_a_quota_of_version_1_is_in_cores(tmp_path: Path, quota: str, cores: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker\n3:memory:/docker\n1:name=systemd:/")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", quota)
    write(tmp_path, "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "100000")
    assert read_quota(tmp_path) == cores
