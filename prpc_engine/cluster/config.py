"""What a Server is told beside its place in the cluster. The NETWORK_* variables say the rest
(settings/network.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prpc_engine.cluster.rendezvous import BYTES_MAX, TENSORS_MAX
from prpc_engine.errors import ConfigError
from prpc_engine.settings.config import TlsSettings, check_number
from prpc_engine.settings.sections import SHARDS_MAX
from shard import Limits


@dataclass(frozen=True)
class ServerConfig:
    """Raises ConfigError; a Server it is given to does so for the rest.

    tensor_fuse  receives of one source and step leave together (fuse.py). None: as PRPC_TENSOR_FUSE
                 says, else not
    shards       processes that answer receives over tcp, all at the task's data port (relay.py);
                 None: as many as NETWORK_PS_CORE_NUMBER or NETWORK_WORKER_CORE_NUMBER say, where
                 it is set (1: none), else as PRPC_SHARDS or the file say, else 0; at most as many
                 as this process has cores
    transports   for data, in order of preference; None: shm, unix, tcp. Control is tcp
    secret       the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET, else this user's on this
                 host; or NO_SECRET
    limits, tls  as of RpcService
    tensors_max  tensors and requests that may wait here; None: as
                 REMOTE_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE says, else 65,536
    bytes_max    of the tensors that may wait here

    connection_timeout_s  how long a call waits for a task that is not up; None: as
                          NETWORK_MAX_CONNECTION_TIMEOUT says, else 120
    endpoint_map_folder   where `.endpoint_map` is; None: as TF_SEASTAR_ENDPOINT_MAP_PATH says, else
                          the working directory
    data_port_offset      ports from control to data, where there is no such file; None: as
                          PRPC_DATA_PORT_OFFSET says, else the tasks tell each other

    What the environment does not say either may stand in section [network] of the file that
    PRPC_CONFIG names.
    """

    tensor_fuse: bool | None = None
    shards: int | None = None
    transports: Sequence[str] | None = None
    secret: bytes | str | None = field(default=None, repr=False)
    limits: Limits | None = None
    tls: TlsSettings | None = None
    tensors_max: int | None = None
    bytes_max: int = BYTES_MAX
    connection_timeout_s: float | None = None
    endpoint_map_folder: str | None = None
    data_port_offset: int | None = None

    def __post_init__(self) -> None:
        if self.tensor_fuse not in (None, True, False):
            raise ConfigError(f"tensor_fuse={self.tensor_fuse!r}: True, False and None are allowed")
        if self.shards is not None:
            check_number("shards", self.shards, 0, SHARDS_MAX)
        if self.tensors_max is not None:
            check_number("tensors_max", self.tensors_max, 1, TENSORS_MAX << 10)
        check_number("bytes_max", self.bytes_max, 1, 1 << 62)
