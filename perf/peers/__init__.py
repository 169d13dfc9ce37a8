"""Who this engine is measured beside: one file a peer, one face for all, ours included.

A peer's file imports its library at the top, so it is itself imported only where that library is
known to be there: by `open_peer`, in the measuring process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from ..harness import Place, Role
from .face import Job, Peer


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Enough to list a peer, and to open it where it is installed."""

    name: str
    file: str  # module of this package, whose class `Connected` is the peer
    module: str | None = None  # what must be importable
    distribution: str | None = None
    role: Role = "peer"
    options: dict[str, object] = field(default_factory=dict)


PIPE = PeerInfo("multiprocessing.Pipe", "pipe")
TCP_SPINNING = PeerInfo("raw tcp, spinning", "tcp_raw", role="limit", options={"spin": True})
TCP_BLOCKING = PeerInfo("raw tcp, blocking", "tcp_raw", role="limit", options={"spin": False})
ZMQ_IPC = PeerInfo("pyzmq ipc", "zmq", "zmq", "pyzmq", options={"scheme": "ipc"})
ZMQ_TCP = PeerInfo("pyzmq tcp", "zmq", "zmq", "pyzmq", options={"scheme": "tcp"})
NNG = PeerInfo("pynng ipc", "nng", "pynng", "pynng", options={"scheme": "ipc"})
NNG_TCP = PeerInfo("pynng tcp", "nng", "pynng", "pynng", options={"scheme": "tcp"})
GRPC = PeerInfo("grpcio", "grpc", "grpc", "grpcio")
GRPC_AIO = PeerInfo("grpcio aio", "grpc_asyncio", "grpc", "grpcio")
TORCH_RPC = PeerInfo("torch.distributed.rpc", "torch_rpc", "torch", "torch")
MPI4PY = PeerInfo("mpi4py", "mpi", "mpi4py", "mpi4py")
ICEORYX_POLLING = PeerInfo(
    "iceoryx2, polling", "iceoryx", "iceoryx2", "iceoryx2", options={"waiting": False}
)
ICEORYX_WAITING = PeerInfo(
    "iceoryx2, waiting", "iceoryx", "iceoryx2", "iceoryx2", options={"waiting": True}
)

SHM_POLLING = PeerInfo(
    "prpc shm, polling", "prpc", role="ours", options={"transport": "shm", "polling": True}
)
SHM_PARKING = PeerInfo(
    "prpc shm, parking", "prpc", role="ours", options={"transport": "shm", "polling": False}
)
UNIX_POLLING = PeerInfo(
    "prpc unix, polling", "prpc", role="ours", options={"transport": "unix", "polling": True}
)
UNIX_PARKING = PeerInfo(
    "prpc unix, parking", "prpc", role="ours", options={"transport": "unix", "polling": False}
)
TCP_POLLING = PeerInfo(
    "prpc tcp, polling", "prpc", role="ours", options={"transport": "tcp", "polling": True}
)
TCP_PARKING = PeerInfo(
    "prpc tcp, parking", "prpc", role="ours", options={"transport": "tcp", "polling": False}
)
SHM_TASK = PeerInfo(
    "prpc shm, polling, async def",
    "prpc",
    role="ours",
    options={"transport": "shm", "polling": True, "is_async": True},
)
SHM_ASYNCIO = PeerInfo(
    "prpc shm, asyncio", "prpc_asyncio", role="ours", options={"transport": "shm", "polling": False}
)

REMOTE_POLLING = PeerInfo(
    "prpc remote shm, polling",
    "prpc_remote",
    role="ours",
    options={"transport": "shm", "polling": True},
)
REMOTE_PARKING = PeerInfo(
    "prpc remote shm, parking",
    "prpc_remote",
    role="ours",
    options={"transport": "shm", "polling": False},
)
REMOTE_TCP = PeerInfo(
    "prpc remote tcp, polling",
    "prpc_remote",
    role="ours",
    options={"transport": "tcp", "polling": True},
)
REMOTE_SLAB = PeerInfo(
    "prpc remote shm, slab array",
    "prpc_remote",
    role="ours",
    options={"transport": "shm", "polling": True, "is_slab": True},
)

OURS = [SHM_POLLING, SHM_PARKING, TCP_POLLING, TCP_PARKING]
PEERS = [PIPE, TCP_SPINNING, TCP_BLOCKING, ZMQ_IPC, ZMQ_TCP, NNG, GRPC]


def open_peer(info: PeerInfo, place: Place, job: Job) -> Peer:
    """Start the peer's server and connect to it. The caller closes the peer."""
    peer: Peer = importlib.import_module(f".{info.file}", __package__).Connected(
        place, job, **info.options
    )
    return peer
