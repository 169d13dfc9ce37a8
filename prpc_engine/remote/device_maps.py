"""Which GPU of a peer the tensors of our GPUs are for. No I/O, and no CUDA is needed.

    worker "a"                             worker "b"
    options.set_device_map("b", {0: 1})
    rpc_sync("b", f, args=(x,))  x on cuda:0   ->   f gets it on cuda:1
    the answer on cuda:0                       <-   what f returns on cuda:1 (the inverse)

A device is a number, "cuda:1", "cpu", or a torch.device. One to one, so that the inverse is one
map, too; what no map names goes by the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prpc_engine.cuda.placement import HOST
from prpc_engine.errors import ConfigError

Devices = Mapping[int, int]
DEVICES_MAX = 1024
ANYBODY = "*"  # the map for peers that have none; no worker has that name
_CUDA = re.compile(r"cuda:([0-9]{1,4})")
_ALLOWED = 'a number, "cuda:1", "cpu" or a torch.device with an index is allowed'


def index_of(device: Any) -> int:
    """The number of a CUDA device; HOST for the CPU. Raises ConfigError."""
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    found: int | None = None
    if isinstance(device, int) and not isinstance(device, bool):
        found = int(device)
    elif isinstance(device, str):
        named = _CUDA.fullmatch(device)
        found = HOST if device == "cpu" else int(named[1]) if named else None
        if found == HOST:
            return HOST
    elif kind == "cpu":
        return HOST
    elif kind == "cuda" and isinstance(index, int):
        found = index
    if found is None or not 0 <= found < DEVICES_MAX:
        raise ConfigError(f"device {device!r:.60}: {_ALLOWED}")
    return found


def name_of(device: int) -> str:
    """For texts."""
    return "cpu" if device == HOST else f"cuda:{device}"


def inverse(devices: Devices) -> dict[int, int]:
    """For answers."""
    return {theirs: ours for ours, theirs in devices.items()}


class DeviceMap(Mapping[str, Devices]):
    """Of one worker, by the name of its peer.

    DeviceMap("b", {0: 1}), or in parallel lists as torchrpc has them:
    DeviceMap(our_name, peer_name_list, our_device_list, peer_device_list).
    """

    def __init__(
        self,
        peer: str = "",
        devices: Mapping[Any, Any] | Sequence[str] = (),
        our_devices: Sequence[Any] = (),
        peer_devices: Sequence[Any] = (),
    ) -> None:
        """Raises ConfigError, a ValueError, for lists of different lengths, what is no device, and
        maps that are not one to one.
        """
        self._of_peer: dict[str, dict[int, int]] = {}
        if isinstance(devices, Mapping):
            self.add(peer, devices)
            return
        if not len(devices) == len(our_devices) == len(peer_devices):
            raise ConfigError(
                f"DeviceMap: {len(devices)} peers, {len(our_devices)} devices of ours and "
                f"{len(peer_devices)} of theirs: lists of one length are expected"
            )
        for name, ours, theirs in zip(devices, our_devices, peer_devices, strict=True):
            self.add(name, {ours: theirs})

    @classmethod
    def of(cls, maps: Mapping[str, Mapping[Any, Any]]) -> DeviceMap:
        """Of maps by peer. Raises ConfigError."""
        if not isinstance(maps, Mapping):
            raise ConfigError(
                f"device_maps={maps!r:.100}: a dict of the names of peers is expected, with a dict "
                "of devices each"
            )
        made = cls()
        if isinstance(maps, DeviceMap):
            made._of_peer.update(maps._of_peer)
            return made
        for peer, devices in maps.items():
            made.add(peer, devices)
        return made

    def add(self, peer: str, devices: Mapping[Any, Any]) -> None:
        """More devices for a peer; one that is named again goes elsewhere from now on. Raises
        ConfigError, and then changes nothing.
        """
        if not isinstance(peer, str) or not isinstance(devices, Mapping):
            raise ConfigError(
                f"device map {devices!r:.100} for {peer!r:.100}: the name of a worker and a dict "
                "of devices are expected"
            )
        merged = {
            **self._of_peer.get(peer, {}),
            **{index_of(ours): index_of(theirs) for ours, theirs in devices.items()},
        }
        for theirs in merged.values():
            sources = [name_of(ours) for ours, target in merged.items() if target == theirs]
            if len(sources) > 1:
                raise ConfigError(
                    f"device map for {peer!r}: {' and '.join(sources)} both go to its "
                    f"{name_of(theirs)}; a map is one to one, so that answers find back"
                )
        self._of_peer[peer] = merged

    def __getitem__(self, peer: str) -> Devices:
        return self._of_peer[peer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_peer)

    def __len__(self) -> int:
        return len(self._of_peer)

    def __repr__(self) -> str:
        return f"DeviceMap.of({self._of_peer})"

    def of_peer(self, peer: str) -> Devices | None:
        """Its map, else that of ANYBODY."""
        found = self._of_peer.get(peer)
        return self._of_peer.get(ANYBODY) if found is None else found

    def lines(self, our_name: str) -> list[str]:
        """As torchrpc prints it: "a : cuda:0 --> b : cuda:1"."""
        return [
            f"{our_name} : {name_of(ours)} --> {peer} : {name_of(theirs)}"
            for peer, devices in self._of_peer.items()
            for ours, theirs in devices.items()
        ]
