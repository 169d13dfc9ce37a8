"""What the DMLC_* and PS_* variables say of this process's place in a job.

    variable                                     default      meaning
    DMLC_ROLE                                    required     scheduler, server, worker, or joint: a server and a worker in one
    DMLC_NUM_SERVER, DMLC_NUM_WORKER             required     how many there are
    DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT          required     where the scheduler listens
    DMLC_RANK                                    any          the rank wanted; start() sets it to the one given
    DMLC_GROUP_SIZE                              1            instances in each server and worker process, each with a node id;
                                                              more than 1 need a rank
    DMLC_NODE_HOST, else DMLC_INTERFACE          see below    this node's address, or the interface that has it
    PORT, DMLC_PORT                              0            this node's tcp port; 0: any free one
    DMLC_PS_VAN_TYPE, else DMLC_ENABLE_RDMA      zmq          zmq and p3: shared memory, else tcp; shm; tcp
    DMLC_LOCAL                                   0            1: shared memory only
    DMLC_USE_KUBERNETES                          0            1: the scheduler listens at every address
    DMLC_LOCKLESS_QUEUE                          0            1: threads that wait never sleep (the engine's polling)
    PS_HEARTBEAT_TIMEOUT                         0            seconds after which a silent host is dead; 0: the engine's 5
    PS_RESEND, PS_RESEND_TIMEOUT                 0, 1000 ms   1: a message that was not answered in that time is sent again
    PS_DROP_MSG, PS_DROP_SEED                    0 %, 0       test hook: messages lost here, each by a draw of its own

The address is, where neither variable is set, the one from which this host reaches the scheduler. What ps-lite reads beside these
(PS_VERBOSE, PS_HEARTBEAT_INTERVAL, DMLC_PS_WATER_MARK, BYTEPS_*, ...) is about its own insides, and is not read here.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from prpc_engine.address import Address
from prpc_engine.errors import ConfigError
from prpc_engine.kv.pslite.ids import JOINT, ROLES

NODES_MAX = 4096  # of one role
TRANSPORTS = {"zmq": ("shm", "tcp"), "p3": ("shm", "tcp"), "0": ("shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}
GROUP_SIZE_MAX = 64
REQUIRED = ("DMLC_ROLE", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


@dataclass(frozen=True)
class Settings:
    """See the file's head."""

    role: str
    servers: int
    workers: int
    group_size: int  # instances of each server and worker
    root: Address
    rank: int  # -1: any
    host: str
    port: int
    transports: tuple[str, ...]
    scheduler_host: str  # what the scheduler binds
    dead_after_s: float | None
    resend_s: float  # 0: never
    drop_percent: int
    drop_seed: int
    polling: bool

    @property
    def roles(self) -> tuple[str, ...]:
        """Those that this process has: a joint one has two."""
        return ("server", "worker") if self.role == JOINT else (self.role,)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], role: str | None = None, rank: int = -1) -> Settings:
        """`role` and `rank` go before what the environment says. Raises ConfigError, which names the variable."""
        given = dict(environment)
        if role is not None:
            given["DMLC_ROLE"] = role
        missing = [name for name in REQUIRED if not given.get(name)]
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be set: start processes by `prpc launch`, or set what it sets")
        role = given["DMLC_ROLE"]
        if role not in (*ROLES, JOINT):
            raise ConfigError(f"DMLC_ROLE={role!r}: {', '.join((*ROLES, JOINT))} are allowed")
        if given.get("DMLC_NUM_PORTS", "1") != "1":
            raise ConfigError(f"DMLC_NUM_PORTS={given['DMLC_NUM_PORTS']!r}: a node has one port here; leave it at 1")
        servers, workers = (_number(given, f"DMLC_NUM_{which}", 1, 1, NODES_MAX) for which in ("SERVER", "WORKER"))
        uri, port = given["DMLC_PS_ROOT_URI"], _number(given, "DMLC_PS_ROOT_PORT", 0, 1, 65535)
        root = Address.parse(f"[{uri}]:{port}" if ":" in uri else f"{uri}:{port}")
        group_size = _number(given, "DMLC_GROUP_SIZE", 1, 1, GROUP_SIZE_MAX)
        count = {"server": servers, "worker": workers, JOINT: min(servers, workers)}.get(role, 1)
        wanted = rank if rank >= 0 or role == "scheduler" else _number(given, "DMLC_RANK", -1, -1, NODES_MAX)
        if wanted >= count:
            raise ConfigError(
                f"rank {wanted} (argument, or DMLC_RANK) of a job with {count} {role}s: 0 to {count - 1} are allowed"
            )
        if group_size > 1 and wanted < 0 and role != "scheduler":
            raise ConfigError(f"DMLC_GROUP_SIZE={group_size}: instances of one {role} stay together, so give it a DMLC_RANK")
        silent_s = _number(given, "PS_HEARTBEAT_TIMEOUT", 0, 0, 86400)
        return cls(
            role=role,
            servers=servers,
            workers=workers,
            group_size=group_size,
            root=root,
            rank=wanted,
            host=_own_host(given, root),
            port=_number(given, "DMLC_PORT" if "DMLC_PORT" in given else "PORT", 0, 0, 65535),
            transports=_transports(given),
            scheduler_host="0.0.0.0" if _flag(given, "DMLC_USE_KUBERNETES") else root.host,
            dead_after_s=float(silent_s) if silent_s else None,
            resend_s=_number(given, "PS_RESEND_TIMEOUT", 1000, 1, 3_600_000) / 1000 if _flag(given, "PS_RESEND") else 0.0,
            drop_percent=_number(given, "PS_DROP_MSG", 0, 0, 100),
            drop_seed=_number(given, "PS_DROP_SEED", 0, 0, 1 << 62),
            polling=_flag(given, "DMLC_LOCKLESS_QUEUE"),
        )


def _number(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name) or str(default)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ConfigError(f"{name}={text!r}: a whole number from {least} to {most} is allowed")
    return value


def _flag(given: Mapping[str, str], name: str) -> bool:
    return bool(_number(given, name, 0, 0, 1))


def _transports(given: Mapping[str, str]) -> tuple[str, ...]:
    if _flag(given, "DMLC_LOCAL"):
        return ("shm",)
    name = "DMLC_PS_VAN_TYPE" if given.get("DMLC_PS_VAN_TYPE") else "DMLC_ENABLE_RDMA"
    van = given.get(name) or "zmq"
    if van not in TRANSPORTS:
        raise ConfigError(f"{name}={van!r}: {', '.join(TRANSPORTS)} are allowed; there is no transport over RDMA or UCX here")
    return TRANSPORTS[van]


def _own_host(given: Mapping[str, str], root: Address) -> str:
    if given.get("DMLC_NODE_HOST"):
        return given["DMLC_NODE_HOST"]
    prefix = given.get("DMLC_INTERFACE")
    if prefix:
        interfaces = psutil.net_if_addrs()
        for name in sorted(interfaces):
            for one in interfaces[name]:
                if name.startswith(prefix) and one.family == socket.AF_INET:
                    return str(one.address)
        raise ConfigError(
            f"DMLC_INTERFACE={prefix!r}: no interface with an IPv4 address begins so; there are {sorted(interfaces)}"
        )
    if root.host == "localhost" or _is_loopback(root.host):
        return root.host
    try:
        family, kind, _, _, address = socket.getaddrinfo(root.host, root.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing: it only looks at the routes
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"DMLC_PS_ROOT_URI={root.host!r} cannot be reached ({error.strerror}); or set DMLC_NODE_HOST"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
