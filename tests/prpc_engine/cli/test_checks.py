"""The doctor's checks, on machines made of files."""

from __future__ import annotations

import platform
import resource
import socket
from pathlib import Path

import pytest

from prpc_engine.cli.checks import cpu, devices, examine, limits, memory, software
from prpc_engine.cli.checks.cpu import cgroup_cores
from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from shard import ShmFull, Slab


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1
    return findings[0]


def test_every_check_answers_on_this_machine_and_every_complaint_has_advice() -> None:
    findings = examine()
    assert len({finding.fact for finding in findings}) == len(findings)
    assert all(finding.advice for finding in findings if finding.verdict != "ok")


def test_every_check_survives_a_machine_without_files(tmp_path: Path) -> None:
    assert examine(Host(tmp_path))


# The cgroup quota


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("400000 100000", 4.0)])
def test_a_quota_of_version_2_is_in_cores(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert cgroup_cores(Host(tmp_path)) == cores


def test_the_smallest_quota_on_the_way_up_holds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job.scope")
    write(tmp_path, "sys/fs/cgroup/user.slice/cpu.max", "50000 100000")
    write(tmp_path, "sys/fs/cgroup/user.slice/job.scope/cpu.max", "200000 100000")
    assert cgroup_cores(Host(tmp_path)) == 0.5


def test_in_a_container_the_quota_is_at_the_base_though_the_path_is_the_hosts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../docker/0123")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert cgroup_cores(Host(tmp_path)) == 1.0


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_a_quota_of_version_1_is_in_cores(tmp_path: Path, quota: str, cores: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker\n3:memory:/docker")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", quota)
    write(tmp_path, "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "100000")
    assert cgroup_cores(Host(tmp_path)) == cores


def test_a_quota_below_the_cores_is_worth_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    monkeypatch.setattr(cpu, "usable_cores", lambda: [0, 1])
    finding = only(list(cpu.quota(Host(tmp_path))))
    assert (finding.verdict, finding.value) == ("warn", "1.5 of 2 cores")
    monkeypatch.setattr(cpu, "usable_cores", lambda: [0])
    assert only(list(cpu.quota(Host(tmp_path)))).verdict == "ok"


# Cores, nodes, clock, machine


@pytest.mark.parametrize(
    ("usable", "ranges", "verdict"), [([0, 1, 2, 5], "0-2,5", "ok"), ([3], "3", "warn"), ([0, 2, 4], "0,2,4", "ok")]
)
def test_cores_are_named_as_the_kernel_names_them(
    usable: list[int], ranges: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "usable_cores", lambda: usable)
    finding = only(list(cpu.cores(Host())))
    assert f"({ranges})" in finding.value
    assert finding.verdict == verdict


def test_a_machine_that_reorders_stores_is_told_what_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    finding = only(list(cpu.machine(Host())))
    assert finding.verdict == "warn"
    assert "tcp" in finding.advice
    assert not list(cpu.fence(Host()))  # the number of the system call is that of x86-64


@pytest.mark.parametrize(("nodes", "verdict"), [(1, "ok"), (2, "warn")])
def test_memory_nodes_are_counted(tmp_path: Path, nodes: int, verdict: str) -> None:
    for number in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/power").mkdir()
    finding = only(list(cpu.numa(Host(tmp_path))))
    assert (finding.value, finding.verdict) == (str(nodes), verdict)


def test_a_clock_that_is_slow_to_read_is_worth_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    times = iter([0, cpu.CLOCK_READS * 1500])
    monkeypatch.setattr(cpu.time, "perf_counter_ns", lambda: next(times))
    finding = only(list(cpu.clock(Host(tmp_path))))
    assert (finding.value, finding.verdict) == ("hpet, 1500 ns to read", "warn")


# Memory


def test_shared_memory_that_is_not_mounted_is_bad(tmp_path: Path) -> None:
    assert only(list(memory.shared_memory(Host(tmp_path)))).verdict == "bad"


def test_shared_memory_without_room_is_bad_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Slab, shape: int, dtype: str) -> None:
        raise ShmFull("/dev/shm has no room")

    monkeypatch.setattr(Slab, "empty", full)
    finding = only(list(memory.shared_memory(Host())))
    assert finding.verdict == "bad"
    assert "no room" in finding.value
    assert "prpc gc" in finding.advice


def test_little_shared_memory_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHM_BYTES_SMALL", 1 << 60)
    assert only(list(memory.shared_memory(Host()))).verdict == "warn"


def test_leftovers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "find_garbage", lambda: ["/prpc.0.0.1.1.a", "/prpc.0.0.1.1.b"])
    finding = only(list(memory.garbage(Host())))
    assert (finding.value, finding.verdict) == ("2 segments of dead processes", "warn")


def test_huge_pages_are_read_where_the_kernel_shows_them(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never")
    write(tmp_path, "proc/meminfo", "MemTotal: 1 kB\nHugePages_Total:      16")
    assert only(list(memory.huge_pages(Host(tmp_path)))).value.startswith("shared memory: advise; reserved: 16")


# Limits


@pytest.mark.parametrize(("soft", "verdict"), [(64, "bad"), (512, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_found(soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert only(list(limits.open_files(Host()))).verdict == verdict


@pytest.mark.parametrize("has_device", [False, True])
def test_locked_memory_matters_only_beside_an_rdma_device(
    tmp_path: Path, has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_device:
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    finding = only(list(limits.locked_memory(Host(tmp_path))))
    assert (finding.value, finding.verdict) == ("8 MiB", "warn" if has_device else "ok")


def test_a_loopback_that_is_down_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    finding = only(list(limits.loopback(Host())))
    assert (finding.value, finding.verdict) == ("Cannot assign requested address", "bad")


@pytest.mark.parametrize(("mode", "text", "verdict"), [(0o600, "secret", "ok"), (0o644, "secret", "warn"), (0o600, "", "bad")])
def test_a_secret_file_is_for_its_owner_alone(
    tmp_path: Path, mode: int, text: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    monkeypatch.setenv("PRPC_SECRET_FILE", str(file))
    assert only(list(limits.secret(Host()))).verdict == verdict


# Devices, software


def test_rdma_ports_are_shown_with_their_state(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    libraries, found = devices.rdma(Host(tmp_path))
    assert libraries.fact == "RDMA libraries"
    assert found.value == "mlx5_0:1 active, mlx5_1:1 down"
    assert "not used by this version" in found.advice


def test_a_cuda_driver_is_shown_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5")
    monkeypatch.setattr(devices, "_cuda_devices", lambda: ["NVIDIA H200"])
    assert only(list(devices.cuda(Host(tmp_path)))).value == "driver 550.54.15; NVIDIA H200"


def test_nvidia_smi_that_hangs_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    assert "TimeoutExpired" in only(list(devices.cuda(Host(tmp_path)))).value


def test_missing_packages_are_named_with_the_extra_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_version", lambda name: "1.0" if name == "pyzmq" else None)
    bench = next(finding for finding in software.packages(Host()) if finding.fact == "extra bench")
    assert bench.value == "pyzmq 1.0; not installed: pynng, grpcio"
    assert "prpc[bench]" in bench.advice
