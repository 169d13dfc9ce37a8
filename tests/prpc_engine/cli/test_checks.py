"""The doctor's checks, on machines made of files."""

from __future__ import annotations

import errno
import resource
import socket
from pathlib import Path

import pytest

from prpc_engine.cli.checks import cpu, devices, examine, limits, memory, software
from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host, python_has_profiles
from prpc_engine.cuda.direct import DirectSupport
from prpc_engine.cuda.driver import CudaError
from shard import VerbsPort
from tests.held import at


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


# The cgroup's quota, which shard reads


def test_a_quota_below_the_cores_is_worth_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    finding = only(list(cpu.quota(Host(tmp_path, lambda: [0, 1]))))
    assert (finding.verdict, finding.value) == ("warn", "1.5 of 2 cores")
    assert only(list(cpu.quota(Host(tmp_path, lambda: [0])))).verdict == "ok"


# Cores, nodes, clock, machine


@pytest.mark.parametrize(
    ("usable", "ranges", "verdict"),
    [([0, 1, 2, 5], "0-2,5", "ok"), ([3], "3", "warn"), ([0, 2, 4], "0,2,4", "ok")],
)
def test_cores_are_named_as_the_kernel_names_them(
    usable: list[int], ranges: str, verdict: str
) -> None:
    finding = only(list(cpu.cores(Host(usable_cores=lambda: usable))))
    assert f"({ranges})" in finding.value
    assert finding.verdict == verdict


def test_a_machine_that_reorders_stores_is_told_what_still_works() -> None:
    host = Host(machine=lambda: "aarch64")
    finding = only(list(cpu.machine(host)))
    assert finding.verdict == "warn"
    assert "tcp" in finding.advice
    assert not list(cpu.fence(host))  # the number of the system call is that of x86-64


def test_hyper_threads_are_counted_beside_the_physical_cores(tmp_path: Path) -> None:
    host = Host(tmp_path, lambda: [0, 1, 2, 3])
    assert only(list(cpu.siblings(host))).value == "4, without hyper-threads"
    for number in range(4):
        name = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        write(tmp_path, name, f"{number % 2},{number % 2 + 2}")
    finding = only(list(cpu.siblings(host)))
    assert finding.value == "2, 4 hyper-threads on them"
    assert "more than 2 that poll" in finding.advice


def test_memory_nodes_of_our_cores_are_worth_a_warning_when_there_are_several(
    tmp_path: Path,
) -> None:
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1,4-5")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "2-3,6-7")
    finding = only(list(cpu.numa(Host(tmp_path, lambda: [0, 1, 2, 4]))))
    assert (finding.value, finding.verdict) == ("2 (node 0: cores 0-1,4, node 1: cores 2)", "warn")
    finding = only(list(cpu.numa(Host(tmp_path, lambda: [2, 3]))))
    assert (finding.value, finding.verdict) == ("1", "ok")


def test_a_clock_that_is_slow_to_read_is_worth_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    times = iter([0, cpu.CLOCK_READS * 1500])
    finding = only(list(cpu.clock(Host(tmp_path, clock_ns=lambda: next(times)))))
    assert (finding.value, finding.verdict) == ("hpet, 1500 ns to read", "warn")


# Memory


def test_a_machine_without_dev_shm_lacks_named_rings_alone(tmp_path: Path) -> None:
    finding = only(list(memory.shm_folder(Host(tmp_path))))
    assert (finding.verdict, "Ring.create" in finding.advice) == ("warn", True)
    assert only(list(memory.shared_memory(Host(tmp_path)))).verdict == "ok"


def test_no_room_for_shared_memory_is_bad_and_says_why() -> None:
    def be_full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with at("segment.opened", be_full):
        finding = only(list(memory.shared_memory(Host())))
    assert finding.verdict == "bad"
    assert "no memory" in finding.value
    assert "--memory" in finding.advice


def test_a_small_cgroup_is_worth_a_warning_and_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", str(128 << 20))
    write(tmp_path, "sys/fs/cgroup/job/memory.current", str(28 << 20))
    finding = only(list(memory.shared_memory(Host(tmp_path))))
    assert finding.verdict == "warn"
    assert finding.value == "84 MiB may be taken of 128 MiB (cgroup /job)"


def test_leftovers_are_counted() -> None:
    left = ["/prpc.0.0.1.1.a", "/prpc.0.0.1.1.b"]
    finding = only(list(memory.garbage(Host(garbage=lambda: left))))
    assert (finding.value, finding.verdict) == ("2 segments of dead processes", "warn")


def test_huge_pages_that_are_offered_are_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size [advise] never deny force",
    )
    assert only(list(memory.huge_pages(Host(tmp_path)))).value == "transparent"
    write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "16")
    finding = only(list(memory.huge_pages(Host(tmp_path))))
    assert (finding.value, finding.verdict) == ("transparent; 32 MiB reserved and free", "ok")


@pytest.mark.parametrize(
    ("switch", "value", "verdict", "advice"),
    [
        (None, "none offered", "ok", "slabs grow some three times faster: `echo advise > "),
        ("never", "none offered; PRPC_HUGE_PAGES=never", "ok", ""),
        ("require", "none offered; PRPC_HUGE_PAGES=require", "bad", "sysctl vm.nr_hugepages=N"),
        ("maybe", "PRPC_HUGE_PAGES='maybe': allowed are auto, never, require", "bad", "unset it"),
    ],
)
def test_where_no_huge_pages_are_offered_the_doctor_says_how_unless_nobody_wants_any(
    tmp_path: Path,
    switch: str | None,
    value: str,
    verdict: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if switch is None:
        monkeypatch.delenv("PRPC_HUGE_PAGES", raising=False)
    else:
        monkeypatch.setenv("PRPC_HUGE_PAGES", switch)
    finding = only(list(memory.huge_pages(Host(tmp_path))))
    assert value in finding.value
    assert finding.verdict == verdict
    assert advice in finding.advice


# Limits


@pytest.mark.parametrize(
    ("soft", "verdict"), [(64, "bad"), (512, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_found(soft: int, verdict: str) -> None:
    host = Host(limit=lambda which: (soft, resource.RLIM_INFINITY))
    assert only(list(limits.open_files(host))).verdict == verdict


@pytest.mark.parametrize("has_device", [False, True])
def test_locked_memory_matters_only_beside_an_rdma_device(tmp_path: Path, has_device: bool) -> None:
    if has_device:
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    host = Host(tmp_path, limit=lambda which: (8 << 20, 8 << 20))
    finding = only(list(limits.locked_memory(host)))
    assert (finding.value, finding.verdict) == ("8 MiB", "warn" if has_device else "ok")


def test_a_loopback_that_is_down_is_bad() -> None:
    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    finding = only(list(limits.loopback(Host(listen=refuse))))
    assert (finding.value, finding.verdict) == ("Cannot assign requested address", "bad")


LONG = "a secret of this test"


@pytest.mark.parametrize(
    ("mode", "text", "verdict"),
    [
        (0o600, LONG, "ok"),
        (0o640, LONG, "ok"),  # as of a TLS key
        (0o644, LONG, "warn"),
        (0o600, "", "bad"),
        (0o600, "short", "bad"),
    ],
)
def test_a_secret_file_is_for_its_owner_and_group_alone(
    tmp_path: Path, mode: int, text: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    monkeypatch.setenv("PRPC_SECRET_FILE", str(file))
    assert only(list(limits.secret(Host()))).verdict == verdict


# Devices, software


def port(root: Path, device: str, state: str, gid: str = "") -> None:
    folder = f"sys/class/infiniband/{device}/ports/1"
    write(root, f"{folder}/state", state)
    write(root, f"{folder}/link_layer", "Ethernet")
    if gid:
        write(root, f"{folder}/gids/0", gid)
        write(root, f"{folder}/gid_attrs/types/0", "RoCE v2")


def test_rdma_ports_are_shown_with_what_they_are_and_which_would_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RDMAV_FORK_SAFE", raising=False)
    port(tmp_path, "mlx5_0", "1: DOWN")
    port(tmp_path, "mlx5_1", "4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0005")
    write(tmp_path, "etc/libibverbs.d/mlx5.driver", "driver mlx5\n")
    libraries, found = devices.rdma(Host(tmp_path))
    assert "drivers mlx5" in libraries.value
    assert (libraries.fact, libraries.verdict) == ("RDMA libraries", "warn")
    assert found.value == "mlx5_1:1 RoCE v2, 10.0.0.5; mlx5_0:1: it is down"
    assert found.advice == (
        "verbs would use mlx5_1:1, where PRPC_TRANSPORTS names it, as in shm,unix,verbs,tcp"
    )


def test_the_gid_that_is_shown_is_the_one_that_the_setting_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port(tmp_path, "mlx5_0", "4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0005")
    folder = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, f"{folder}/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0006")
    write(tmp_path, f"{folder}/gid_attrs/types/1", "RoCE v2")
    write(tmp_path, "prpc.toml", "[transport]\nverbs_gid_index = 1")
    monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "prpc.toml"))
    _, found, *_ = devices.rdma(Host(tmp_path))
    assert found.value == "mlx5_0:1 RoCE v2, 10.0.0.6"


@pytest.mark.parametrize(
    ("wanted", "told", "verdict"),
    [
        (None, "mlx5_1:1 (PRPC_VERBS_DEVICE=all: read arrays over 2), where", "ok"),
        ("mlx5_2", "mlx5_2:1, where", "ok"),
        ("mlx5_2,mlx5_1", "mlx5_2:1 for messages and read arrays over mlx5_2:1 and mlx5_1:1", "ok"),
        ("all", "mlx5_1:1 for messages and read arrays over mlx5_1:1 and mlx5_2:1, where", "warn"),
        ("mlx5_0,mlx5_1", "mlx5_1:1, where", "warn"),
        ("mlx5_0", "none of them, where", "warn"),
    ],
)
def test_the_rails_that_verbs_would_use_are_those_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, told: str, verdict: str
) -> None:
    if wanted is None:
        monkeypatch.delenv("PRPC_VERBS_DEVICE", raising=False)
    else:
        monkeypatch.setenv("PRPC_VERBS_DEVICE", wanted)
    port(tmp_path, "mlx5_0", "1: DOWN")
    for number in (1, 2):
        gid = f"0000:0000:0000:0000:0000:ffff:0a00:000{number}"
        port(tmp_path, f"mlx5_{number}", "4: ACTIVE", gid)
    _, found, *_ = devices.rdma(Host(tmp_path))
    assert found.advice.startswith(f"verbs would use {told}")
    assert found.verdict == verdict
    assert ("; mlx5_0:1 is not used: it is down" in found.advice) == (verdict == "warn")


@pytest.mark.parametrize("transports", ["verbs", "verbs,tcp", None])
@pytest.mark.parametrize(
    ("setting", "value", "states", "told"),
    [
        (None, "", [], "no RDMA device: the kernel has no ib_uverbs"),
        (None, "", ["1: DOWN"], "verbs would use none of them"),
        (
            "PRPC_VERBS_DEVICE",
            "nosuch",
            ["4: ACTIVE"],
            "no RDMA device 'nosuch': mlx5_0:1 are there",
        ),
        (
            "verbs_gid_index",
            "5",
            ["4: ACTIVE"],
            "mlx5_0:1 is not used: row 5 of its table of GIDs is",
        ),
        ("verbs_gid_index", "0", ["4: ACTIVE"], None),
    ],
)
def test_verbs_that_cannot_work_is_bad_where_no_other_transport_is_wanted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transports: str | None,
    setting: str | None,
    value: str,
    states: list[str],
    told: str | None,
) -> None:
    """And only there: the others go on without it."""
    monkeypatch.delenv("PRPC_VERBS_DEVICE", raising=False)
    if transports is None:
        monkeypatch.delenv("PRPC_TRANSPORTS", raising=False)
    else:
        monkeypatch.setenv("PRPC_TRANSPORTS", transports)
    if setting == "verbs_gid_index":
        write(tmp_path, "prpc.toml", f"[transport]\n{setting} = {value}")
        monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "prpc.toml"))
    elif setting is not None:
        monkeypatch.setenv(setting, value)
    for number, state in enumerate(states):
        port(tmp_path, f"mlx5_{number}", state, "0000:0000:0000:0000:0000:ffff:0a00:0005")
    _, found, *_ = devices.rdma(Host(tmp_path))
    assert found.fact == "RDMA devices"
    is_bad = transports == "verbs" and told is not None
    assert (found.verdict == "bad") == is_bad
    assert ("PRPC_TRANSPORTS names verbs alone" in found.advice) == is_bad
    if told is not None and (is_bad or states):
        assert told in found.advice


def test_libraries_that_cannot_be_used_are_bad_where_verbs_alone_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, verbs=lambda root: "pyverbs is not installed")
    port(tmp_path, "mlx5_0", "4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0005")
    for transports, verdict in [("verbs", "bad"), ("verbs,tcp", "warn")]:
        monkeypatch.setenv("PRPC_TRANSPORTS", transports)
        libraries, *_ = devices.rdma(host)
        assert libraries.verdict == verdict
        assert libraries.advice.startswith("pyverbs is not installed")
        assert ("add tcp" in libraries.advice) == (verdict == "bad")


def test_packets_of_an_ethernet_port_are_as_large_as_its_network_device_lets_them(
    tmp_path: Path,
) -> None:
    port(tmp_path, "mlx5_1", "4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0005")
    write(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "eth1\n")
    for mtu, told in [("1500", 1024), ("9000", 4096), ("4192", 4096), ("4191", 2048)]:
        write(tmp_path, "sys/class/net/eth1/mtu", mtu)
        _, found, *more = devices.rdma(Host(tmp_path))
        assert found.value.endswith(f"10.0.0.5, packets of {told} bytes")
        assert [one.fact for one in more if one.fact == "RDMA packets"] == (
            ["RDMA packets"] if told < 4096 else []
        )


def test_a_variable_that_makes_forks_die_is_named_beside_an_rdma_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMAV_FORK_SAFE", "1")
    assert [one.fact for one in devices.rdma(Host(tmp_path))] == ["RDMA libraries", "RDMA devices"]
    port(tmp_path, "mlx5_0", "1: DOWN")
    *_, devices_found, forks = devices.rdma(Host(tmp_path))
    assert devices_found.advice.startswith("verbs would use none of them")
    assert forks.verdict == "warn" and "RDMAV_FORK_SAFE" in forks.value


COULD = DirectSupport(is_readable=True, has_dmabuf=True)
BY_ADDRESS = DirectSupport(is_readable=True, has_dmabuf=False)
NEITHER = DirectSupport(is_readable=False, has_dmabuf=False)


@pytest.mark.parametrize(
    ("state", "found", "registers", "module", "why"),
    [
        ("1: DOWN", [COULD], True, None, "no RDMA port may be used"),
        ("4: ACTIVE", [], True, "nvidia_peermem", "this process sees no CUDA device"),
        ("4: ACTIVE", [NEITHER], True, "nvidia_peermem", "the CUDA driver lets no other device"),
        ("4: ACTIVE", [BY_ADDRESS], True, None, "gives no dma-buf, and the kernel has no nvidia_p"),
        ("4: ACTIVE", [COULD], False, None, "mlx5_0:1 cannot; and the kernel has no nvidia_peerm"),
        ("4: ACTIVE", [BY_ADDRESS], False, "nv_peer_mem", None),
        ("4: ACTIVE", [COULD], False, "nvidia_peermem", None),
        ("4: ACTIVE", [NEITHER, COULD], True, None, None),
    ],
)
def test_gpudirect_is_said_to_be_possible_only_where_both_drivers_say_so(
    tmp_path: Path,
    state: str,
    found: list[DirectSupport],
    registers: bool,
    module: str | None,
    why: str | None,
) -> None:
    port(tmp_path, "mlx5_0", state, "0000:0000:0000:0000:0000:ffff:0a00:0005")
    if module is not None:
        (tmp_path / "sys/module" / module).mkdir(parents=True)

    def dmabuf(asked: VerbsPort) -> str | None:
        return None if registers else f"{asked} cannot"

    (told,) = devices.gpudirect(Host(tmp_path, cuda=lambda: found, dmabuf=dmabuf))
    assert (told.fact, told.verdict) == ("GPUDirect", "ok")
    if why is None:
        assert told.value == "the drivers say that they could"
        assert told.advice.startswith("nothing was tried; Options(gpu_direct=True)")
    else:
        assert told.value == "no"
        assert why in told.advice
        assert told.advice.endswith("; tensors of CUDA devices go by the host's memory")


def test_gpudirect_is_not_spoken_of_where_there_is_neither_kind_of_device(tmp_path: Path) -> None:
    assert not list(devices.gpudirect(Host(tmp_path)))
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA Kernel Module  580.1")
    (told,) = devices.gpudirect(Host(tmp_path))
    assert told.advice.startswith("no RDMA port may be used")


def test_a_cuda_driver_that_fails_is_named(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0005")

    def fails() -> list[DirectSupport]:
        raise CudaError("cuDeviceGetAttribute: out of memory", 2)

    (told,) = devices.gpudirect(Host(tmp_path, cuda=fails))
    assert told.advice.startswith("the CUDA driver does not say: cuDeviceGetAttribute: out of mem")


def test_a_cuda_driver_is_shown_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5",
    )
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho NVIDIA H200\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert only(list(devices.cuda(Host(tmp_path)))).value == "driver 550.54.15; NVIDIA H200"


def test_nvidia_smi_that_hangs_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "TimeoutExpired" in only(list(devices.cuda(Host(tmp_path, patience_s=0.2)))).value


@pytest.mark.parametrize(("has_profiles", "verdict"), [(True, "ok"), (False, "warn")])
def test_a_python_that_was_built_without_profiles_is_told(has_profiles: bool, verdict: str) -> None:
    host = Host(has_profiles=lambda: has_profiles)
    python = next(finding for finding in software.packages(host) if finding.fact == "python")
    assert python.verdict == verdict
    assert ("--enable-optimizations" in python.value) == (not has_profiles)
    assert ("pyenv install" in python.advice) == (not has_profiles)


@pytest.mark.parametrize(
    ("options", "base", "expected"),
    [
        ("'--enable-shared' '--enable-optimizations' '--with-lto'", "/opt/conda", True),
        ("'--enable-shared'", "/usr", True),  # Debian's says nothing of its profiles
        ("'--prefix=/opt/python'", "/opt/python", False),
        ("", "/opt/python", False),
    ],
)
def test_how_a_python_was_built_is_read_from_its_configuration(
    options: str, base: str, expected: bool
) -> None:
    assert python_has_profiles(options, base) is expected


def test_missing_packages_are_named_with_the_extra_that_brings_them() -> None:
    host = Host(version_of=lambda name: "1.0" if name == "pyzmq" else None)
    bench = next(finding for finding in software.packages(host) if finding.fact == "extra bench")
    assert bench.value == "pyzmq 1.0; not installed: pynng, grpcio, mpi4py, mpich, iceoryx2"
    assert "prpc-engine[bench]" in bench.advice
