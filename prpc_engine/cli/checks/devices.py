"""Network and graphics devices, and what this version does with them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host


def rdma(host: Host) -> Iterator[Finding]:
    """Libraries, and devices with the state of their ports."""
    libraries = [name for name in ("ibverbs", "rdmacm") if ctypes.util.find_library(name)]
    if importlib.util.find_spec("pyverbs") is not None:
        libraries.append("pyverbs")
    devices = []
    for device in host.entries("sys/class/infiniband"):
        for port in host.entries(f"sys/class/infiniband/{device}/ports"):
            state = host.read(f"sys/class/infiniband/{device}/ports/{port}/state") or "unknown"
            devices.append(f"{device}:{port} {state.rpartition(' ')[2].lower()}")
    yield Finding("RDMA libraries", ", ".join(libraries) or "none")
    if devices:
        yield Finding(
            "RDMA devices",
            ", ".join(devices),
            "ok",
            "not used by this version: it speaks tcp between hosts",
        )
    else:
        yield Finding("RDMA devices", "none")


def cuda(host: Host) -> Iterator[Finding]:
    """The driver, and the devices that nvidia-smi names."""
    driver = host.read("proc/driver/nvidia/version")
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
