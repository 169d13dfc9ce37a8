"""What this environment sets: each setting, what holds, and where that comes from. Nothing is set
or decided here.

    group    its settings
    engine   of every node: PRPC_* variables
    file     of every node: the file that PRPC_CONFIG names
    task     of a task of a cluster: GRPC++'s variables and their twins (network.py)
    cluster  what follows from those for the cluster in TF_CONFIG: cores by the rule of Min, and the
             rule by which data is found

A setting that makes no sense has an error in place of its value, and the others are told all the
same. What a program passes as an argument goes before all of them.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.settings import network
from prpc_engine.settings.cluster_spec import parse_tf_config
from prpc_engine.settings.config import (
    POLLING_VARIABLE,
    TLS_VARIABLES,
    allow_from,
    limits_from,
    read_config,
    secret_from,
    slab_bytes_max,
    tcp_checksum_from,
    tls_from,
    transports_from,
)
from prpc_engine.settings.endpoint_map_file import load_data_endpoints
from prpc_engine.settings.user_secret import UserSecret
from shard import Slab, huge_page_policy, polling_enabled

DEFAULT = "default"
OF_TASKS: tuple[network.Variable[Any], ...] = (
    network.PS_CORES,
    network.WORKER_CORES,
    network.PS_POLLING,
    network.WORKER_POLLING,
    network.PS_UNPINNED,
    network.WORKER_UNPINNED,
    network.CONNECTION_TIMEOUT_MS,
    network.ENDPOINT_MAP_FOLDER,
    network.DATA_PORT_OFFSET,
    network.TASK_INDEX,
    network.PS_GRAPH_FUSION,
    network.FLOW_CONTROL_MAX,
    network.TENSOR_FUSE,
)
# Those that are read elsewhere and have no line here: a test's, where the user's secret is, a name
# for segments, and what only a TensorFlow task reads.
ELSEWHERE = ("PRPC_FAILPOINTS", "PRPC_HOME", "PRPC_JOB", "PRPC_TF_PLANE")


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
    return [*_of_engine(), *_of_file(), *_of_tasks(), *_of_cluster()]


def unread() -> dict[str, str]:
    """Each variable that is set, has a name like one of ours, and is read by nothing; with a text
    about it.
    """
    known = [*_ENGINE, "PRPC_CONFIG", *_SECRET, *TLS_VARIABLES.values(), *ELSEWHERE]
    known += [name for variable in OF_TASKS for name in variable.names]
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
    "PRPC_TRANSPORTS": ("transports", lambda: ", ".join(transports_from(None))),
    "PRPC_SLAB_BYTES_MAX": ("slab_bytes_max", slab_bytes_max),
    "PRPC_HUGE_PAGES": ("huge_pages", huge_page_policy),
    "PRPC_DEBUG_LEASES": ("debug_leases", _debug_leases),
    POLLING_VARIABLE: (
        "polling",
        lambda: polling_enabled(POLLING_VARIABLE, os.environ.get(POLLING_VARIABLE), default=False),
    ),
}
_SECRET = ("PRPC_SECRET_FILE", "PRPC_SECRET")


def _of_engine() -> Iterator[Setting]:
    for variable, (name, read) in _ENGINE.items():
        text = os.environ.get(variable)
        yield _setting(name, read, DEFAULT if text is None else f"{variable}={text!r}")
    # Never the secret itself.
    by = next((name for name in _SECRET if os.environ.get(name)), DEFAULT)
    yield _setting("secret", _secret_kind, by)


def _of_file() -> Iterator[Setting]:
    path = os.environ.get("PRPC_CONFIG", "")
    try:
        content = read_config(path) if path else {}
    except ConfigError as error:
        yield Setting("file", "", f"PRPC_CONFIG={path!r}", str(error))
        return

    def origin(section: str, name: str = "") -> str:
        table = content.get(section, {})
        is_there = name in table if name and isinstance(table, dict) else bool(table)
        return f"{path}: [{section}]" if is_there else DEFAULT

    try:
        limits = limits_from(None)
    except ConfigError as error:
        yield Setting("limits", "", origin("limits"), str(error))
    else:
        for name, value in asdict(limits).items():
            yield Setting(f"limits.{name}", str(value), origin("limits", name))
    yield _setting("transport.tcp_checksum", tcp_checksum_from, origin("transport", "tcp_checksum"))
    by = [f"{name}={os.environ[name]!r}" for name in TLS_VARIABLES.values() if os.environ.get(name)]
    yield _setting(
        "tls", lambda: tls_from(None, _secret_or_none()) or "none", ", ".join(by) or origin("tls")
    )
    yield _setting("allow", lambda: f"{len(allow_from(None).rules)} rules", origin("allow"))


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
            by = ", ".join(
                f"{one}={os.environ[one]!r}" for one in variable.names if one in os.environ
            )
            yield Setting(name, "", by, str(error))
        else:
            yield Setting(name, "none" if found.value is None else repr(found.value), found.origin)


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
        by = "TF_CONFIG, .endpoint_map, PRPC_DATA_PORT_OFFSET"
        yield _setting(
            "data goes by rule", lambda: load_data_endpoints(cluster, os.environ)[0].rule, by
        )
