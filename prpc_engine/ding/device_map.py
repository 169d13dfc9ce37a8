"""The device maps of torchrpc's command line. No I/O; nothing here moves data between devices yet.

    map    = entry *( "," entry )         --cuda-device-map 1_0_1,2_0_2
    entry  = node "_" local "_" remote    our GPU `local` sends to GPU `remote` of that node
    list   = gpu *( "," gpu )             --local-cuda-devices 0,1: one for each worker of a launch

All are decimal numbers; GPUs are counted as the process sees them (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prpc_engine.errors import ConfigError

MAP_ALLOWED = "NODE_LOCALGPU_PEERGPU[,...] is allowed, such as 1_0_1,2_0_2"
_ENTRY = re.compile(r"([0-9]{1,6})_([0-9]{1,4})_([0-9]{1,4})")
_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class DeviceMapEntry:
    """Tensors of our GPU `local` arrive on GPU `remote` of that node."""

    node: int
    local: int
    remote: int


def parse_device_map(text: str) -> tuple[DeviceMapEntry, ...]:
    """The entries in order. Raises ConfigError, also where two of our GPUs have one target, or one
    of ours has two.
    """
    entries = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"--cuda-device-map: {part!r} in {text!r:.200}: {MAP_ALLOWED}")
        entries.append(DeviceMapEntry(*map(int, found.groups())))
    for name, ends in (
        ("our GPU", [(one.node, one.local) for one in entries]),
        ("GPU of that node", [(one.node, one.remote) for one in entries]),
    ):
        for node, gpu in ends:
            if ends.count((node, gpu)) > 1:
                raise ConfigError(
                    f"--cuda-device-map {text!r:.200}: {name} {gpu} stands twice for node {node}; "
                    "a map is one to one"
                )
    return tuple(entries)


def parse_devices(text: str | Sequence[int] | None, workers: int) -> tuple[int, ...]:
    """One GPU a worker; None: 0, 1, ... Raises ConfigError."""
    if text is None:
        return tuple(range(workers))
    parts = text.split(",") if isinstance(text, str) else [str(one) for one in text]
    if not all(_NUMBER.fullmatch(part.strip()) for part in parts) or len(parts) != workers:
        raise ConfigError(
            f"--local-cuda-devices {text!r:.200}: a list of {workers} numbers is expected, "
            "one for each worker"
        )
    return tuple(int(part) for part in parts)
