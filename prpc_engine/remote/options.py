"""What init_rpc() is told beside names and ranks; with the names that torch.distributed.rpc has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from prpc_engine.cuda.placement import HOST
from prpc_engine.errors import ConfigError, is_number
from prpc_engine.remote.device_maps import DeviceMap, index_of
from prpc_engine.settings.config import LEASE_S_MAX, LEASE_S_MIN, TIMEOUT_S_MAX, check_seconds
from prpc_engine.settings.node_config import NodeConfig
from shard import is_count

RPC_TIMEOUT_S = 60.0  # torch's
THREADS_MAX = 256
# A program of torch's may hold the interpreter for long, in an import or a large pickle, and is not
# dead for that. A process that ends on the master's host is missed at once all the same.
LEASE_S = 30.0


class BackendType(Enum):
    """Accepted and without effect: there is one engine."""

    TENSORPIPE = "tensorpipe"


@dataclass
class Options:
    """Of one worker. Raises ConfigError for what is not possible.

    num_worker_threads  threads for functions that block or compute for long; others run in the
                        engine's own thread (running.py)
    rpc_timeout         seconds that a call may take, where it says nothing itself; 0: as long as
                        the connection lasts
    init_method         as the argument of init_rpc(), which goes before it
    polling             never sleep while waiting: lowest latency for a whole core; None: else
                        PRPC_ENABLE_POLLING
    only_exposed        serve functions and classes that are decorated with @expose, and unpickle
                        nothing
    init_timeout_s      for all workers to come to init_rpc(), and for the master to answer
    shutdown_timeout_s  for all workers to come to shutdown()
    lease_s             how long a worker outlives its silence: a host that vanished, or a process
                        that was stopped, is missed after so many seconds
    config              all other settings, as NodeConfig.load() made them; None: of the file that
                        PRPC_CONFIG names and the environment
    device_maps         by the name of a peer, {our device: its device}: see set_device_map()
    devices             CUDA devices of this worker; those of the maps must be among them. Empty:
                        all that it sees
    share_devices       let processes of this host open device memory of this one (CUDA IPC), for
                        what device_maps send; False: it goes by the host
    gpu_direct          let RDMA devices read and write device memory of this worker (GPUDirect),
                        for what device_maps send to and from other hosts over verbs. Never run on
                        such hardware: see docs/guides/rdma.md
    """

    num_worker_threads: int = 16
    rpc_timeout: float = RPC_TIMEOUT_S
    init_method: str = ""
    device_maps: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    devices: list[Any] = field(default_factory=list)
    polling: bool | None = None
    only_exposed: bool = False
    init_timeout_s: float = 300.0
    shutdown_timeout_s: float = TIMEOUT_S_MAX
    lease_s: float = LEASE_S
    config: NodeConfig | None = None
    share_devices: bool = True
    gpu_direct: bool = False
    _transports: list[str] | None = None  # torch's own, without effect
    _channels: list[str] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """As they may have been changed since they were made."""
        threads = self.num_worker_threads
        if not is_count(threads, 1) or threads > THREADS_MAX:
            raise ConfigError(
                f"num_worker_threads={threads!r:.100}: 1 to {THREADS_MAX} are allowed"
            )
        for name in ("only_exposed", "share_devices", "gpu_direct"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r:.100}: True or False is allowed")
        check_seconds("rpc_timeout", self.rpc_timeout)
        check_seconds("init_timeout_s", self.init_timeout_s)
        check_seconds("shutdown_timeout_s", self.shutdown_timeout_s)
        if not is_number(self.lease_s) or not LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX:
            raise ConfigError(
                f"lease_s={self.lease_s!r}: {LEASE_S_MIN} to {LEASE_S_MAX:.0f} seconds are allowed"
            )
        self.device_maps = DeviceMap.of(self.device_maps)
        self.devices = [index_of(device) for device in self.devices]
        if HOST in self.devices or len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"devices={self.devices}: each CUDA device once, and not the CPU")

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Tensors of our device `ours` arrive at worker `to` on its device `theirs`, for each
        {ours: theirs}; what it returns on `theirs` arrives on `ours`.

        A device is a number, "cuda:1", a torch.device, or "cpu". `to`: "*" is for all workers that
        have no map of their own. Adds to what was set before.
        Raises ConfigError, a ValueError, for a map that is not one to one.
        """
        maps = DeviceMap.of(self.device_maps)
        maps.add(to, device_map)
        self.device_maps = maps

    def set_devices(self, devices: Sequence[Any]) -> None:
        """torch's name for setting `devices`. Raises ConfigError."""
        self.devices = list(devices)
        self.check()


def timeout_of(given: float | None, default: float) -> float | None:
    """Seconds for the engine: None waits for ever. `given`: what a verb was passed, None or
    torch's -1.0 for nothing. Raises ConfigError.
    """
    seconds = default if given is None or given == -1.0 else given
    check_seconds("timeout", seconds)
    return float(seconds) or None
