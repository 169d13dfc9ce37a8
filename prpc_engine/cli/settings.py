"""What this environment sets: each setting, what holds, and where that comes from. Nothing is set
or decided here.

    group    its settings
    node     those of NodeConfig, by section: the file that PRPC_CONFIG names, and PRPC_* variables
    engine   of every process: PRPC_* variables that are in no section
    task     of a task of a cluster, and of who does the same elsewhere: GRPC++'s variables and
             their twins (network.py)
    role     of a ps and a worker: the shards, polling and pinning that they get of all that
    cluster  what follows from those for the cluster in TF_CONFIG: cores by the rule of Min, and the
             rule by which data is found

A setting that makes no sense has an error in place of its value, and the others are told all the
same. What a program passes as an argument goes before all of them.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.settings import layers, network
from prpc_engine.settings.allow import AllowList
from prpc_engine.settings.cluster_spec import PS, WORKER, ClusterSpec, parse_tf_config
from prpc_engine.settings.config import (
    SECRET_VARIABLES,
    TLS_VARIABLES,
    secret_from,
    secret_variable,
    slab_bytes_max,
)
from prpc_engine.settings.config_file import ConfigFile
from prpc_engine.settings.endpoint_map_file import load_data_endpoints
from prpc_engine.settings.layers import Found
from prpc_engine.settings.network import DEFAULT
from prpc_engine.settings.node_config import (
    NodeConfig,
    limits_of,
    network_of_process,
    tls_of,
    value_of,
)
from prpc_engine.settings.sections import SECTIONS
from prpc_engine.settings.user_secret import UserSecret
from shard import Slab, huge_page_policy

OF_TASKS: tuple[network.Variable[Any], ...] = (
    network.PS_CORES,
    network.WORKER_CORES,
    network.PS_POLLING,
    network.WORKER_POLLING,
    network.PS_UNPINNED,
    network.WORKER_UNPINNED,
    network.TASK_INDEX,
    network.PS_GRAPH_FUSION,
)
IN_SECTIONS = network.OF_NODES | network.OF_NETWORK
PINNING = "shards.pin_cores"
# Those that are read elsewhere and have no line here: a test's, where the user's secret is, a name
# for segments, and what only a TensorFlow task reads.
ELSEWHERE = ("PRPC_DING", "PRPC_FAILPOINTS", "PRPC_HOME", "PRPC_JOB", "PRPC_TF_PLANE")


@dataclass(frozen=True)
class Setting:
    """`origin`: "NAME='text'", "FILE: [section]" or "default". `error` "": it is right, and `value`
    holds.
    """

    name: str
    value: str
    origin: str
    error: str = ""


def all_settings() -> list[Setting]:
    """Of this process's environment, in the order of the table."""
    return [*_of_node(), *_of_engine(), *_of_tasks(), *_of_roles(), *_of_cluster()]


def unread() -> dict[str, str]:
    """Each variable that is set, has a name like one of ours, and is read by nothing; with a text
    about it.
    """
    known = [*_ENGINE, "PRPC_CONFIG", *SECRET_VARIABLES, *TLS_VARIABLES.values(), *ELSEWHERE]
    variables = (*IN_SECTIONS.values(), *OF_TASKS)
    known += [name for variable in variables for name in variable.names]
    found = {}
    for name in sorted(os.environ.keys() - set(known)):
        if name in network.UNREAD:
            found[name] = f"{name} has no effect, {network.UNREAD[name]}"
        elif name.startswith("PRPC_") and not name.startswith("PRPC_TEST_"):
            # those are read by tests
            close = difflib.get_close_matches(name, known, 1)
            found[name] = f"nothing reads {name}" + (f": is {close[0]} meant?" if close else "")
    return found


def _setting(name: str, read: Callable[[], object], origin: str) -> Setting:
    try:
        return Setting(name, str(read()), origin)
    except ValueError as error:  # ConfigError among them
        return Setting(name, "", origin, str(error))


def _debug_leases() -> bool:
    with contextlib.closing(Slab()) as slab:
        return slab.debug


# variable -> what it sets, and how it is read
_ENGINE: dict[str, tuple[str, Callable[[], object]]] = {
    "PRPC_SLAB_BYTES_MAX": ("slab_bytes_max", slab_bytes_max),
    "PRPC_HUGE_PAGES": ("huge_pages", huge_page_policy),
    "PRPC_DEBUG_LEASES": ("debug_leases", _debug_leases),
}


def _of_engine() -> Iterator[Setting]:
    for variable, (name, read) in _ENGINE.items():
        text = os.environ.get(variable)
        yield _setting(name, read, DEFAULT if text is None else f"{variable}={text!r}")


def _of_node() -> Iterator[Setting]:
    path = os.environ.get("PRPC_CONFIG", "")
    found: dict[str, Found] = {}
    try:
        found = layers.of_file(ConfigFile.read(path))
    except ConfigError as error:
        yield Setting("file", "", f"PRPC_CONFIG={path!r}", str(error))
    wrong = {}
    for name, variable in IN_SECTIONS.items():
        try:
            one = variable.find(os.environ)
        except ConfigError as error:
            wrong[name] = Setting(name, "", _as_set(variable), str(error))
        else:
            if one.origin != DEFAULT:
                found[name] = Found(one.value, one.origin, one.origin)
    with contextlib.suppress(ConfigError):  # which value_of() raises again
        layers.settle_count(found, None, [])
    for section, kind in SECTIONS.items():
        for name in (f"{section}.{field}" for field in kind.__struct_fields__):
            yield wrong.get(name) or _setting(
                name, partial(_shown, name, found), _origin(found, name)
            )
    try:
        limits = limits_of(found)
    except ConfigError as error:
        by = next(one.origin for name, one in found.items() if name.startswith("limits."))
        yield Setting("limits", "", by, str(error))
    else:
        for name, value in asdict(limits).items():
            yield Setting(f"limits.{name}", str(value), _origin(found, f"limits.{name}"))
    # Never the secret itself.
    yield _setting("secret", _secret_kind, secret_variable() or DEFAULT)
    try:
        found.update(layers.tls_of_environment())
    except ConfigError as error:
        given = [name for name in TLS_VARIABLES.values() if name in os.environ]
        by = ", ".join(f"{name}={os.environ[name]!r}" for name in given)
        yield Setting("tls", "", by, str(error))
    else:
        yield _setting(
            "tls", lambda: tls_of(found, _secret_or_none()) or "none", _origin(found, "tls")
        )
    allow = found["allow"].value if "allow" in found else AllowList()
    yield Setting("allow", f"{len(allow.rules)} rules", _origin(found, "allow"))


def _as_set(variable: network.Variable[Any]) -> str:
    return ", ".join(f"{one}={os.environ[one]!r}" for one in variable.names if one in os.environ)


def _origin(found: Mapping[str, Found], name: str) -> str:
    return found[name].origin if name in found else DEFAULT


def _shown(name: str, found: Mapping[str, Found]) -> str:
    """A value as it stands in the file, without Python's signs for lists."""
    return _text(name, value_of(name, found))


def _text(name: str, value: Any) -> str:
    if name == PINNING and value is None:
        return "each shard stays on one core"
    if name == layers.ENDPOINT_MAP and not value:
        return "the working directory"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(getattr(value, "kind", value))


def _secret_kind() -> str:
    secret = secret_from(None)
    return (
        "this user's own on this host"
        if isinstance(secret, UserSecret)
        else "set"
        if secret
        else "none"
    )


def _secret_or_none() -> bytes:
    with contextlib.suppress(ConfigError):  # which is told of the secret
        return secret_from(None)
    return b"?"


def _of_tasks() -> Iterator[Setting]:
    for variable in OF_TASKS:
        name = variable.names[-1]
        try:
            found = variable.find(os.environ)
        except ConfigError as error:
            yield Setting(name, "", _as_set(variable), str(error))
        else:
            yield Setting(name, "none" if found.value is None else repr(found.value), found.origin)


def _of_roles() -> Iterator[Setting]:
    tasks = None
    with contextlib.suppress(ConfigError):  # which is told of TF_CONFIG
        text = os.environ.get("TF_CONFIG")
        tasks = None if text is None else len(parse_tf_config(text).cluster.addresses) or None
    for role in (PS, WORKER):
        with contextlib.suppress(ConfigError):  # nothing holds: such a process does not start
            config = NodeConfig.load(role, tasks, secret=secret_from(None))
            for name in ("shards.count", "shards.polling", PINNING):
                value = getattr(config.shards, name.partition(".")[2])
                yield Setting(f"{name} of {role}", _text(name, value), config.origins[name])


def _of_cluster() -> Iterator[Setting]:
    text = os.environ.get("TF_CONFIG")
    if text is None:
        return
    try:
        cluster = parse_tf_config(text).cluster
    except ConfigError as error:
        yield Setting("TF_CONFIG", "", "TF_CONFIG", str(error))
        return
    for job in cluster.jobs:
        with contextlib.suppress(ConfigError):  # which is told of its variable
            settings = network.NetworkSettings.for_task(cluster, job, os.environ)
            yield Setting(f"cores of {job}", str(settings.cores), settings.origins["cores"])
    if cluster.addresses:
        by = "TF_CONFIG, .endpoint_map, network.data_port_offset"
        yield _setting("data goes by rule", partial(_rule, cluster), by)


def _rule(cluster: ClusterSpec) -> str:
    said = network_of_process(os.environ)
    folder, port_offset = said["endpoint_map_folder"], said["data_port_offset"]
    return load_data_endpoints(cluster, folder, port_offset.value)[0].rule
