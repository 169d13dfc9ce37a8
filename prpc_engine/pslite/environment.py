"""What the DMLC_* and PS_* variables say of this process's place in a job.

    variable                                 default     meaning
    DMLC_ROLE                                required    scheduler, server, worker, or joint: a
                                                         server and a worker in one
    DMLC_NUM_SERVER, DMLC_NUM_WORKER         required    how many there are
    DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT      required    where the scheduler listens
    DMLC_RANK                                any         the rank wanted; start() sets it to the one
                                                         given
    DMLC_GROUP_SIZE                          1           instances in each server and worker
                                                         process, each with a node id; more than 1
                                                         need a rank
    DMLC_NODE_HOST, else DMLC_INTERFACE      see below   this node's address, or the interface that
                                                         has it
    PORT, DMLC_PORT                          0           this node's tcp port; 0: any free one
    DMLC_PS_VAN_TYPE, else DMLC_ENABLE_RDMA  zmq         zmq and p3: shared memory, else a Unix
                                                         socket, else tcp; ibverbs, and 1: RDMA
                                                         before tcp; or one of these alone: shm,
                                                         unix, tcp
    DMLC_LOCAL                               0           1: within this host only, so not tcp
    DMLC_USE_KUBERNETES                      0           1: the scheduler listens at every address
    DMLC_LOCKLESS_QUEUE                      0           1: threads that wait never sleep (the
                                                         engine's polling)
    PS_HEARTBEAT_TIMEOUT                     0           seconds after which a silent host is dead;
                                                         0: the engine's 5
    PS_RESEND, PS_RESEND_TIMEOUT             0, 1000 ms  1: a message that was not answered in that
                                                         time is sent again
    PS_DROP_MSG, PS_DROP_SEED                0 %, 0      test hook: messages lost here, each by a
                                                         draw of its own
    PS_VERBOSE                               0           1: the log tells who comes and goes; 2: all
                                                         that it can
    BYTEPS_ORDERED_HOSTS                     none        host[:port],...: without DMLC_RANK a node
                                                         has the rank of its host; one host for each
                                                         server, and for each worker
    DMLC_NUM_PORTS, DMLC_ENABLE_UCX,         1, 0, 0     that is the only value allowed
    BYTEPS_ENABLE_MIXED_MODE

The address is, where neither variable is set, the one from which this host reaches the scheduler. A
variable that is empty is as one that is not set. What ps-lite reads beside these
(PS_HEARTBEAT_INTERVAL, DMLC_PS_WATER_MARK, other BYTEPS_*, ...) is about its own insides, and is
not read here. Polling, pinning and shards have the variables of every role, which postoffice.py
reads (settings/node_config.py).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from prpc_engine.errors import ConfigError
from prpc_engine.pslite.ids import JOINT, ROLES
from prpc_engine.settings.address import Address

NODES_MAX = 4096  # of one role
WITHIN_HOST = ("shm", "unix")  # in order of preference
ANY = (*WITHIN_HOST, "tcp")
RDMA = (*WITHIN_HOST, "verbs", "tcp")
TRANSPORTS = {
    **dict.fromkeys(("zmq", "p3", "0"), ANY),
    **dict.fromkeys(("ibverbs", "1"), RDMA),
    **{one: (one,) for one in ("shm", "unix", "tcp")},
}
GROUP_SIZE_MAX = 64
VERBOSE_MAX = 9  # more than 2 is as 2
NOT_HERE = {  # what a job may ask for only as it is there: (the one value allowed, why)
    "DMLC_NUM_PORTS": ("1", "a node has one port here"),
    "DMLC_ENABLE_UCX": ("0", "there is no transport over UCX here"),
    "BYTEPS_ENABLE_MIXED_MODE": ("0", "ranks do not follow hosts here: give them by DMLC_RANK"),
}
REQUIRED = (
    "DMLC_ROLE",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
)


@dataclass(frozen=True)
class JobSettings:
    """Job settings say which place this process has in a job, as from_environment() reads it.

    dead_after_s: seconds after which a silent host is dead; None: the engine's own. drop_percent,
    drop_seed: a test hook that loses messages. from_environment() raises ConfigError, which names
    the variable. Variables and defaults: the table at the file's head.
    """

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
    verbose: int

    @property
    def roles(self) -> tuple[str, ...]:
        """Those that this process has: a joint one has two."""
        return ("server", "worker") if self.role == JOINT else (self.role,)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], role: str | None = None, rank: int = -1
    ) -> JobSettings:
        """`role` and `rank` go before what the environment says. Raises ConfigError, which names
        the variable.
        """
        given = dict(environment)
        if role is not None:
            given["DMLC_ROLE"] = role
        missing = [name for name in REQUIRED if not given.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} must be set: start processes by `prpc launch`, "
                "or set what it sets"
            )
        role = given["DMLC_ROLE"]
        if role not in (*ROLES, JOINT):
            raise ConfigError(f"DMLC_ROLE={role!r}: {', '.join((*ROLES, JOINT))} are allowed")
        for name, (only, why) in NOT_HERE.items():
            if (given.get(name) or only) != only:
                raise ConfigError(f"{name}={given[name]!r}: {why}; leave it at {only}")
        servers, workers = (
            _number(given, f"DMLC_NUM_{which}", 1, 1, NODES_MAX) for which in ("SERVER", "WORKER")
        )
        uri, port = given["DMLC_PS_ROOT_URI"], _number(given, "DMLC_PS_ROOT_PORT", 0, 1, 65535)
        root = _address("DMLC_PS_ROOT_URI", uri, port)
        group_size = _number(given, "DMLC_GROUP_SIZE", 1, 1, GROUP_SIZE_MAX)
        count = {"server": servers, "worker": workers, JOINT: min(servers, workers)}.get(role, 1)
        wanted = (
            rank
            if rank >= 0 or role == "scheduler"
            else _number(given, "DMLC_RANK", -1, -1, NODES_MAX)
        )
        host, own_port = (
            _own_host(given, root),
            _number(given, "DMLC_PORT" if given.get("DMLC_PORT") else "PORT", 0, 0, 65535),
        )
        if wanted < 0 and role != "scheduler" and given.get("BYTEPS_ORDERED_HOSTS"):
            wanted = _rank_of_host(given["BYTEPS_ORDERED_HOSTS"], role, count, host, own_port)
        if wanted >= count:
            raise ConfigError(
                f"rank {wanted} (argument, or DMLC_RANK) of a job with {count} {role}s: "
                f"0 to {count - 1} are allowed"
            )
        if group_size > 1 and wanted < 0 and role != "scheduler":
            raise ConfigError(
                f"DMLC_GROUP_SIZE={group_size}: instances of one {role} stay together, "
                "so give it a DMLC_RANK"
            )
        silent_s = _number(given, "PS_HEARTBEAT_TIMEOUT", 0, 0, 86400)
        resend_ms = _number(given, "PS_RESEND_TIMEOUT", 1000, 1, 3_600_000)
        return cls(
            role=role,
            servers=servers,
            workers=workers,
            group_size=group_size,
            root=root,
            rank=wanted,
            host=host,
            port=own_port,
            transports=_transports(given),
            scheduler_host="0.0.0.0" if _flag(given, "DMLC_USE_KUBERNETES") else root.host,
            dead_after_s=float(silent_s) if silent_s else None,
            resend_s=resend_ms / 1000 if _flag(given, "PS_RESEND") else 0.0,
            drop_percent=_number(given, "PS_DROP_MSG", 0, 0, 100),
            drop_seed=_number(given, "PS_DROP_SEED", 0, 0, 1 << 62),
            polling=_flag(given, "DMLC_LOCKLESS_QUEUE"),
            verbose=_number(given, "PS_VERBOSE", 0, 0, VERBOSE_MAX),
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


def _address(name: str, host: str, port: int) -> Address:
    """Of a host that the variable `name` has: a name, or an address, of IPv6 with or without
    brackets.
    """
    try:
        return Address.parse(
            f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}",
            port_min=0,
        )
    except ConfigError as error:
        raise ConfigError(f"{name}={host!r}: {error}") from error


def _transports(given: Mapping[str, str]) -> tuple[str, ...]:
    name = "DMLC_PS_VAN_TYPE" if given.get("DMLC_PS_VAN_TYPE") else "DMLC_ENABLE_RDMA"
    van = given.get(name) or "zmq"
    if van not in TRANSPORTS:
        raise ConfigError(
            f"{name}={van!r}: {', '.join(TRANSPORTS)} are allowed; "
            "there is no transport over UCX or libfabric here"
        )
    return WITHIN_HOST if _flag(given, "DMLC_LOCAL") else TRANSPORTS[van]


def _own_host(given: Mapping[str, str], root: Address) -> str:
    if given.get("DMLC_NODE_HOST"):
        return _address("DMLC_NODE_HOST", given["DMLC_NODE_HOST"], 0).host
    prefix = given.get("DMLC_INTERFACE")
    if prefix:
        interfaces = psutil.net_if_addrs()
        for name in sorted(interfaces):
            for one in interfaces[name]:
                if name.startswith(prefix) and one.family == socket.AF_INET:
                    return str(one.address)
        raise ConfigError(
            f"DMLC_INTERFACE={prefix!r}: no interface with an IPv4 address begins so; "
            f"there are {sorted(interfaces)}"
        )
    if root.host == "localhost" or _is_loopback(root.host):
        return root.host
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            root.host, root.port, type=socket.SOCK_DGRAM
        )[0]
        # connecting a datagram socket sends nothing: it only looks at the routes
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"DMLC_PS_ROOT_URI={root.host!r} cannot be reached ({error.strerror}); "
            "or set DMLC_NODE_HOST"
        ) from error


def _rank_of_host(ordered: str, role: str, count: int, host: str, port: int) -> int:
    """This node's place among BYTEPS_ORDERED_HOSTS."""
    hosts = [each.strip() for each in ordered.split(",")]
    here = [rank for rank, each in enumerate(hosts) if each in (host, str(Address(host, port)))]
    if len(set(hosts)) != count or len(hosts) != count or len(here) != 1:
        raise ConfigError(
            f"BYTEPS_ORDERED_HOSTS={ordered!r}: {count} different hosts are allowed, "
            f"one for each {role}, and one of them is "
            f"this node's, {host} (DMLC_NODE_HOST) or {Address(host, port)}; or give it a DMLC_RANK"
        )
    return here[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
