"""Variables about cores and networks: those that every node reads, and the NETWORK_* settings of a
role, as GRPC++ has them, cut to what a cluster can use. No I/O here.

    every node                variable             allowed                      default
    how many shards           PRPC_SHARDS          from 0 on, auto              0
    whether they poll         PRPC_ENABLE_POLLING  0, false, off, 1, true, on   false
    whether they are pinned   PRPC_PIN_CORES       the same                     see sections.py
    transports                PRPC_TRANSPORTS      names with commas            shm, unix, tcp
    the RDMA devices          PRPC_VERBS_DEVICE    device or device:port, with  the first usable one
                                                   commas; all

The settings connection_timeout_s, endpoint_map_folder, data_port_offset, flow_control_max and
tensor_fuse may also stand in section [network] of the file that PRPC_CONFIG names, which these
variables go before (node_config.py).

Each variable of GRPC++ has a twin of ours. Ours is looked at first; both are allowed when they say
the same. They are read once, when the task or server starts, and go before those of every node.
Those of other roles are not read. tensor_fuse has no variable there: it is a field of ConfigProto.

    setting               variable, and our name for it            allowed            default
    cores                 NETWORK_PS_CORE_NUMBER                   from 1 on          8
      of a ps             PRPC_PS_CORE_NUMBER
      of worker, chief    NETWORK_WORKER_CORE_NUMBER               from 1 on          2
                          PRPC_WORKER_CORE_NUMBER
      of others           none                                                        2
    polling               PS_ENABLE_POLLING                        0 false, 1 true    false
                          PRPC_PS_ENABLE_POLLING                   off, on
      of worker, chief    WORKER_ENABLE_POLLING                    the same           false
                          PRPC_WORKER_ENABLE_POLLING
    pin_cores: the        PS_DISABLE_PIN_CORES                     the same           true
      opposite of it      PRPC_PS_DISABLE_PIN_CORES
      of worker, chief    WORKER_DISABLE_PIN_CORES                 the same           true
                          PRPC_WORKER_DISABLE_PIN_CORES
    connection_timeout_s  NETWORK_MAX_CONNECTION_TIMEOUT           ms, 1 to a day     120000
                          PRPC_MAX_CONNECTION_TIMEOUT
    endpoint_map_folder   TF_SEASTAR_ENDPOINT_MAP_PATH             a folder           "", the
                          PRPC_ENDPOINT_MAP                                           working one
    data_port_offset      PRPC_DATA_PORT_OFFSET                    ports, not 0       none
    task_index            TASK_INDEX, PRPC_TASK_INDEX              from 0 on          none
    ps_graph_fusion: for  TF_ENABLE_PS_GRAPH_FUSION                0 false, 1 true    true
      a TensorFlow layer  PRPC_ENABLE_PS_GRAPH_FUSION              off, on
    flow_control_max: of  REMOTE_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE  from 1 on          none
      cluster/rendezvous  PRPC_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE
    tensor_fuse           PRPC_TENSOR_FUSE                         0 false, 1 true    false
                                                                   off, on

ps_graph_fusion merges the subgraphs of a ps that a worker runs: without a graph nothing is merged,
so nothing here acts on it.

The rule of Min: a task has at most as many cores as the cluster has tasks, itself among them,
whether the number is the default or asked for; and at least 1.

GRPC++ goes on with its default, and a line in the log, where a value makes no sense, and takes a
negative number for a huge one. Here every value is one of those allowed, or it is refused; an empty
one too, but for the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import PORT_MAX
from prpc_engine.settings.cluster_spec import CHIEF, EVALUATOR, PS, WORKER, ClusterSpec

INT64_MAX = (1 << 63) - 1
CONNECTION_TIMEOUT_S = 120.0
CONNECTION_TIMEOUT_MS_MAX = 86_400_000  # a day: who sets more means another unit
_NUMBER = re.compile(r"[+-]?[0-9]{1,4000}")  # no more than Python reads
# as shard.polling_enabled has them
_SWITCH = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}

DEFAULT = "default"  # as an origin

T = TypeVar("T")


@dataclass(frozen=True)
class FoundValue(Generic[T]):
    """A value and where it comes from: "NAME='text'", or "default"."""

    value: T
    origin: str


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A setting in the environment, under any of its names, ours first."""

    names: tuple[str, ...]
    read: Callable[[str, str], T]  # name, text -> value; raises ConfigError
    default: T

    def find(self, environ: Mapping[str, str]) -> FoundValue[T]:
        """What the environment says. Raises ConfigError for what is not allowed, and for names that
        disagree.
        """
        found = [
            FoundValue(self.read(name, environ[name]), f"{name}={environ[name]!r}")
            for name in self.names
            if name in environ
        ]
        for other in found[1:]:
            if other.value != found[0].value:
                raise ConfigError(
                    f"{found[0].origin} and {other.origin}: they are one setting; unset one, "
                    "or set both alike"
                )
        return found[0] if found else FoundValue(self.default, DEFAULT)


def _number(text: str) -> int | None:
    """A whole number, a larger one than an int64 as the largest; None: it is none."""
    digits = text.strip()
    if not _NUMBER.fullmatch(digits):
        return None
    return max(-INT64_MAX, min(int(digits), INT64_MAX))


def _whole(least: int, most: int = INT64_MAX) -> Callable[[str, str], int]:
    allowed = f"{least} on" if most == INT64_MAX else f"{least} to {most}"

    def read(name: str, text: str) -> int:
        number = _number(text)
        if number is None or not least <= number <= most:
            raise ConfigError(
                f"{name}={text!r:.100}: a whole number from {allowed} is allowed; "
                "unset it for the default"
            )
        return number

    return read


def _switch(name: str, text: str) -> bool:
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ConfigError(
            f"{name}={text!r}: 0, false, off, 1, true and on are allowed, in any case; "
            "unset it for the default"
        ) from None


def _ports(name: str, text: str) -> int:
    ports = _whole(-PORT_MAX, PORT_MAX)(name, text)
    if not ports:
        raise ConfigError(
            f"{name}={text!r}: data and control would share a port; "
            "any other number of ports is allowed"
        )
    return ports


def _milliseconds(name: str, text: str) -> float:
    return _whole(1, CONNECTION_TIMEOUT_MS_MAX)(name, text) / 1e3


def _shards(name: str, text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    number = _number(text)
    if number is None or number < 0:
        raise ConfigError(
            f'{name}={text!r:.100}: a whole number from 0 on is allowed, or "auto"; '
            "unset it for the default"
        )
    return number


def _names(name: str, text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(","))


# Of every node, whatever its role.
TRANSPORTS: Variable[tuple[str, ...] | None] = Variable(("PRPC_TRANSPORTS",), _names, None)
SHARDS: Variable[int | str] = Variable(("PRPC_SHARDS",), _shards, 0)
POLLING = Variable(("PRPC_ENABLE_POLLING",), _switch, False)
PIN_CORES: Variable[bool | None] = Variable(("PRPC_PIN_CORES",), _switch, None)
VERBS_DEVICE: Variable[str | None] = Variable(("PRPC_VERBS_DEVICE",), lambda name, text: text, None)
OF_NODES: dict[str, Variable[Any]] = {  # by the names of NodeConfig's settings
    "node.transports": TRANSPORTS,
    "shards.count": SHARDS,
    "shards.polling": POLLING,
    "shards.pin_cores": PIN_CORES,
    "transport.verbs_device": VERBS_DEVICE,
}
# Of a role.
PS_CORES = Variable(("PRPC_PS_CORE_NUMBER", "NETWORK_PS_CORE_NUMBER"), _whole(1), 8)
WORKER_CORES = Variable(("PRPC_WORKER_CORE_NUMBER", "NETWORK_WORKER_CORE_NUMBER"), _whole(1), 2)
OTHER_CORES = Variable((), _whole(1), 2)
PS_POLLING = Variable(("PRPC_PS_ENABLE_POLLING", "PS_ENABLE_POLLING"), _switch, False)
WORKER_POLLING = Variable(("PRPC_WORKER_ENABLE_POLLING", "WORKER_ENABLE_POLLING"), _switch, False)
PS_UNPINNED = Variable(("PRPC_PS_DISABLE_PIN_CORES", "PS_DISABLE_PIN_CORES"), _switch, True)
WORKER_UNPINNED = Variable(
    ("PRPC_WORKER_DISABLE_PIN_CORES", "WORKER_DISABLE_PIN_CORES"), _switch, True
)
CONNECTION_TIMEOUT = Variable(
    ("PRPC_MAX_CONNECTION_TIMEOUT", "NETWORK_MAX_CONNECTION_TIMEOUT"),
    _milliseconds,
    CONNECTION_TIMEOUT_S,
)
ENDPOINT_MAP_FOLDER = Variable(
    ("PRPC_ENDPOINT_MAP", "TF_SEASTAR_ENDPOINT_MAP_PATH"), lambda name, text: text, ""
)
DATA_PORT_OFFSET: Variable[int | None] = Variable(("PRPC_DATA_PORT_OFFSET",), _ports, None)
TASK_INDEX: Variable[int | None] = Variable(("PRPC_TASK_INDEX", "TASK_INDEX"), _whole(0), None)
PS_GRAPH_FUSION = Variable(
    ("PRPC_ENABLE_PS_GRAPH_FUSION", "TF_ENABLE_PS_GRAPH_FUSION"), _switch, True
)
FLOW_CONTROL_MAX: Variable[int | None] = Variable(
    ("PRPC_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE", "REMOTE_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE"),
    _whole(1),
    None,
)
TENSOR_FUSE = Variable(("PRPC_TENSOR_FUSE",), _switch, False)
# Of every role, and settings of NodeConfig: section [network].
OF_NETWORK: dict[str, Variable[Any]] = {
    "network.connection_timeout_s": CONNECTION_TIMEOUT,
    "network.endpoint_map_folder": ENDPOINT_MAP_FOLDER,
    "network.data_port_offset": DATA_PORT_OFFSET,
    "network.flow_control_max": FLOW_CONTROL_MAX,
    "network.tensor_fuse": TENSOR_FUSE,
}


class RoleVariables(NamedTuple):
    """What a role reads of the cores that communicate;
    `unpinned` says the opposite of pin_cores.
    """

    cores: Variable[int]
    polling: Variable[bool]
    unpinned: Variable[bool]


def of_role(role: str) -> RoleVariables:
    """The variables of a job, or of what does the same elsewhere: PS of a server of tables."""
    if role in (WORKER, CHIEF):
        return RoleVariables(WORKER_CORES, WORKER_POLLING, WORKER_UNPINNED)
    return RoleVariables(PS_CORES if role == PS else OTHER_CORES, PS_POLLING, PS_UNPINNED)


def found_in(environ: Mapping[str, str], role: str = "") -> dict[str, FoundValue[Any]]:
    """The settings of NodeConfig that are set in the environment, by name; those of the role, ""
    for none, above those of every node. "cores" is the role's number. Raises ConfigError.
    """
    found = {name: variable.find(environ) for name, variable in OF_NODES.items()}
    if role:
        variables = of_role(role)
        found["cores"], unpinned = variables.cores.find(environ), variables.unpinned.find(environ)
        asked = {
            "shards.polling": variables.polling.find(environ),
            "shards.pin_cores": FoundValue(not unpinned.value, unpinned.origin),
        }
        found.update({name: one for name, one in asked.items() if one.origin != DEFAULT})
        found.update({name: variable.find(environ) for name, variable in OF_NETWORK.items()})
    return {name: one for name, one in found.items() if one.origin != DEFAULT}


# Set by older versions and launch scripts, and read by nothing: whoever sets them is told, once.
UNREAD = {
    "SEASTAR_CORE_NUMBER": "it was for grpc+seastar",
    "PS_DEFAULT_CORE_NUM": "GRPC++ does not read it either",
    "WORKER_DEFAULT_CORE_NUM": "GRPC++ does not read it either",
}


@dataclass(frozen=True)
class NetworkSettings:
    """Says how one task uses cores, connections and files, as its NETWORK_* variables ask for. Made
    by for_task().

    Variables, what they allow, and defaults: the table at the file's head.
    """

    cores: int  # communication shards of the task
    polling: bool  # they spin, and want a core each
    pin_cores: bool  # each is kept on a core that no other task of the host takes
    # how long a call waits for a connection to come back, when it has no timeout of its own
    connection_timeout_s: float
    endpoint_map_folder: str  # "": the working directory
    data_port_offset: int | None  # ports from control to data, where there is no .endpoint_map
    task_index: int | None  # what the launcher says; a task knows its index by its arguments
    ps_graph_fusion: bool  # for the run-graph mode of a TensorFlow layer
    flow_control_max: int | None  # for the rendezvous: how much may wait there; None: its own bound
    tensor_fuse: bool  # receives of one source and step leave together
    origins: Mapping[str, str]  # of each setting above: where it comes from, and what cut it
    unread: tuple[str, ...]  # a line for the log about each variable that is set and has no effect

    @classmethod
    def for_task(
        cls,
        cluster: ClusterSpec,
        job_name: str,
        environ: Mapping[str, str],
        network: Mapping[str, FoundValue[Any]] = MappingProxyType({}),
    ) -> NetworkSettings:
        """What a task of that job uses. `network`: what holds of the settings in section [network],
        by name, where more than the environment was asked. Raises ConfigError: name, value and what
        is allowed; also for a job that is not there.
        """
        jobs = dict.fromkeys((*cluster.jobs, EVALUATOR))
        if job_name not in jobs:
            raise ConfigError(f"no job {job_name!r} in the cluster: there are {', '.join(jobs)}")
        connections = len(cluster.addresses)
        asked, of_cores = of_role(job_name).cores.find(environ), found_in(environ, job_name)
        cores = FoundValue(
            max(1, min(asked.value, connections)),
            f"{asked.origin}: min({asked.value}, {connections} tasks in the cluster)",
        )
        off = FoundValue(False, DEFAULT)
        found: dict[str, FoundValue[Any]] = {
            "cores": cores,
            "polling": of_cores.get("shards.polling", off),
            "pin_cores": of_cores.get("shards.pin_cores", off),
            "task_index": TASK_INDEX.find(environ),
            "ps_graph_fusion": PS_GRAPH_FUSION.find(environ),
        }
        for name, variable in OF_NETWORK.items():
            field = name.partition(".")[2]
            found[field] = network.get(field) or variable.find(environ)
        return cls(
            **{name: setting.value for name, setting in found.items()},
            origins=MappingProxyType({name: setting.origin for name, setting in found.items()}),
            unread=tuple(
                f"{name}={environ[name]!r} has no effect, {why}: there are {PS_CORES.names[-1]} "
                f"and {WORKER_CORES.names[-1]}"
                for name, why in UNREAD.items()
                if name in environ
            ),
        )
