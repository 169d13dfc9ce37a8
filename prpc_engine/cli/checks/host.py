"""The machine as files, /proc and /sys or a copy of them somewhere else, and as what it answers."""

from __future__ import annotations

import platform
import resource
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prpc_engine.cuda.direct import DirectSupport, direct_support
from shard import VerbsPort, find_garbage, usable_cores, verbs_dmabuf_refusal, verbs_refusal


def version_of(distribution: str) -> str | None:
    """Of an installed distribution; None: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def python_has_profiles(options: str | None = None, base: str = sys.base_prefix) -> bool:
    """Whether a Python was compiled with profiles of itself at work, as those of distributions,
    conda and python.org's containers are; one of `pyenv install` or of a plain ./configure is not.

    options  what its ./configure was given; None: that of this one
    base     where it is installed. A distribution's, in /usr, does not tell of its profiles
    """
    if options is None:
        options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return "--enable-optimizations" in options or base == "/usr"


@dataclass(frozen=True)
class Host:
    """The machine that `prpc doctor` examines: tests show it one that is not there.

    root          where its files lie
    usable_cores  those that this process may run on
    machine       its architecture
    clock_ns      by which the reading of another clock is timed
    limit         the soft and the hard limit of a resource; -1: there is none
    garbage       named segments of dead processes
    listen        a socket that listens at an address
    version_of    an installed distribution's version
    has_profiles  whether this Python was compiled with profiles
    cuda          what the CUDA driver says of each device of this process
    verbs         why this process cannot use RDMA verbs, whatever the ports are
    dmabuf        why an RDMA port registers no memory of other devices
    patience_s    for a program that is run; nvidia-smi takes some seconds where the driver has to
                  wake a device first
    """

    root: Path = Path("/")
    usable_cores: Callable[[], list[int]] = usable_cores
    machine: Callable[[], str] = platform.machine
    clock_ns: Callable[[], int] = time.perf_counter_ns
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    garbage: Callable[[], list[str]] = find_garbage
    listen: Callable[[tuple[str, int]], socket.socket] = socket.create_server
    version_of: Callable[[str], str | None] = version_of
    has_profiles: Callable[[], bool] = python_has_profiles
    cuda: Callable[[], list[DirectSupport]] = direct_support
    verbs: Callable[[Path], str | None] = verbs_refusal
    dmabuf: Callable[[VerbsPort], str | None] = verbs_dmabuf_refusal
    patience_s: float = 10.0

    def path(self, name: str) -> Path:
        """`name` as on that machine, such as "proc/cpuinfo"."""
        return self.root / name

    def read(self, name: str) -> str | None:
        """A small file's text without the white space around it; None when it is not there or not
        ours to read.
        """
        try:
            return self.path(name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def entries(self, name: str) -> list[str]:
        """Names in a folder, sorted; none when it is not there."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []
