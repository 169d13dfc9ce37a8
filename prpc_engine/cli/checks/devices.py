"""Network and graphics devices, and what this version does with them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from prpc_engine.cuda.direct import PEER_MODULES, direct_refusal
from prpc_engine.errors import ConfigError
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.sections import TransportSection
from prpc_engine.settings.user_secret import NO_SECRET
from shard import ShardError, VerbsPort, verbs_ports, verbs_providers, verbs_rails

MTU_MAX = 4096
NVIDIA = "proc/driver/nvidia/version"  # there while the driver is loaded
NO_PORT = "none of them"
ALL = "all"  # as verbs_device has it
ALONE = (
    "PRPC_TRANSPORTS names verbs alone, so nothing starts here: add tcp, as in shm,unix,verbs,tcp, "
    "or mend this"
)
# Of libibverbs, under both of its names: it marks registered memory as not to be had in a fork.
FORK_SAFE = ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE")


def rdma(host: Host) -> Iterator[Finding]:
    """Libraries, devices with their ports, which of these verbs would use and why not the others,
    and what forks would do. What keeps verbs from working is bad where verbs alone is wanted.
    """
    config = _config()
    is_needed = config is not None and set(config.node.transports) == {"verbs"}
    libraries = [name for name in ("ibverbs", "rdmacm") if ctypes.util.find_library(name)]
    if importlib.util.find_spec("pyverbs") is not None:
        libraries.append("pyverbs")
    if found := verbs_providers(host.root):
        libraries.append(f"drivers {' '.join(found)}")
    gid_index = None if config is None else config.transport.verbs_gid_index
    ports = verbs_ports(host.root, gid_index)
    refusal = host.verbs(host.root) if ports else None
    yield Finding(
        "RDMA libraries",
        ", ".join(libraries) or "none",
        "ok" if refusal is None else "bad" if is_needed else "warn",
        "" if refusal is None else refusal + (f"; {ALONE}" if is_needed else ""),
    )
    would, left_out = _rails(host, None if config is None else config.transport)
    if not ports:
        if is_needed:
            yield Finding("RDMA devices", "none", "bad", "; ".join([*left_out, ALONE]))
        else:
            yield Finding("RDMA devices", "none")
        return
    told = [
        f"{port}: {port.fault}"
        if port.fault
        else f"{port} {port.link}, {port.address}"
        + (f", packets of {port.mtu} bytes" if port.mtu else "")
        for port in ports
    ]
    is_bad = is_needed and would == NO_PORT
    advice = [
        f"verbs would use {would}, where PRPC_TRANSPORTS names it, as in shm,unix,verbs,tcp",
        *left_out,
        *([ALONE] if is_bad else []),
    ]
    yield Finding(
        "RDMA devices",
        "; ".join(told),
        "bad" if is_bad else "warn" if left_out else "ok",
        "; ".join(advice),
    )
    if any(0 < port.mtu < MTU_MAX and not port.fault for port in ports):
        yield Finding(
            "RDMA packets",
            f"of less than {MTU_MAX} bytes",
            "ok",
            "a network device with an MTU of 4200 gives packets of 4096, and so fewer of them",
        )
    asked = [name for name in FORK_SAFE if os.environ.get(name)]
    if asked:
        yield Finding(
            "RDMA and forks",
            f"{' and '.join(asked)} set",
            "warn",
            "unset it: with it a forked process dies when it touches memory that is registered; "
            "kernels since 5.12 need no such help, and our processes are spawned",
        )


def _config() -> NodeConfig | None:
    """The settings that hold here."""
    try:
        return NodeConfig.load(secret=NO_SECRET)
    except ConfigError:  # another check says what is wrong
        return None


def _rails(host: Host, section: TransportSection | None) -> tuple[str, list[str]]:
    """Which ports verbs would use, by the settings that hold here, and why not those that they name
    beside them.
    """
    section = section or TransportSection()
    wanted, gid_index = section.verbs_device, section.verbs_gid_index
    found = verbs_ports(host.root, gid_index)
    try:
        ports, left_out = verbs_rails(wanted, host.root, gid_index)
    except ShardError as error:
        # without a setting, what is wrong with each port stands beside it
        is_news = not found or wanted is not None or gid_index is not None
        return NO_PORT, [str(error)] if is_news else []
    names = [str(port) for port in ports]
    if len(names) > 1:
        return f"{names[0]} for messages and read arrays over {' and '.join(names)}", left_out
    together = len(verbs_rails(ALL, host.root, gid_index)[0])  # not all of them may be
    if wanted is None and together > 1:
        return f"{names[0]} (PRPC_VERBS_DEVICE=all: read arrays over {together})", left_out
    return names[0], left_out


def cuda(host: Host) -> Iterator[Finding]:
    """The driver, and the devices that nvidia-smi names."""
    driver = host.read(NVIDIA)
    names = _cuda_devices(host.patience_s)
    if driver is None and not names:
        yield Finding("CUDA", "none")
        return
    version = driver.splitlines()[0].partition("Module")[2].split()[:1] if driver else []
    value = "; ".join([f"driver {version[0]}" if version else "driver of unknown version", *names])
    yield Finding(
        "CUDA",
        value,
        "ok",
        "device maps of prpc_engine.remote send its tensors; try it: python -m perf.gpu_check",
    )


def gpudirect(host: Host) -> Iterator[Finding]:
    """Whether an RDMA device could read memory of CUDA devices, where there are any of either."""
    ports = verbs_ports(host.root)
    if not ports and host.read(NVIDIA) is None:
        return
    why = _why_not_direct(host, [port for port in ports if not port.fault])
    yield Finding(
        "GPUDirect",
        "no" if why else "the drivers say that they could",
        "ok",
        f"{why}; tensors of CUDA devices go by the host's memory"
        if why
        else "nothing was tried; Options(gpu_direct=True) of prpc_engine.remote has it used",
    )


def _why_not_direct(host: Host, usable: list[VerbsPort]) -> str | None:
    if not usable:
        return "no RDMA port may be used"
    try:
        found = host.cuda()
    except ShardError as error:
        return f"the CUDA driver does not say: {error}"
    has_module = any(host.path(f"sys/module/{name}").exists() for name in PEER_MODULES)
    asked = any(device.has_dmabuf for device in found) and not has_module
    return direct_refusal(found, host.dmabuf(usable[0]) if asked else None, has_module)


def _cuda_devices(timeout_s: float) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        listed = subprocess.run(
            [command, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer ({type(error).__name__})"]
    return (
        [line.strip() for line in listed.stdout.splitlines() if line.strip()]
        if listed.returncode == 0
        else []
    )
