"""`prpc endpoint-map`: make an `.endpoint_map` for a cluster, or check the one that is there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from prpc_engine import cli
from prpc_engine.cli.commands import Command, path
from prpc_engine.cli.probe import probe_all
from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import PORT_MAX, Address
from prpc_engine.settings.cluster_spec import ClusterSpec, parse_tf_config
from prpc_engine.settings.config import check_number
from prpc_engine.settings.endpoint_map import (
    FILE_NAME,
    LINE_EXPECTED,
    EndpointMap,
    data_endpoints,
    render,
)
from prpc_engine.settings.endpoint_map_file import EndpointMapFile
from prpc_engine.settings.network import ENDPOINT_MAP_FOLDER, FoundValue
from prpc_engine.settings.node_config import network_of_process
from prpc_engine.settings.nodelist import expand_counts, expand_nodes

BASE_PORT = 2222  # what TensorFlow's own examples use
PORT_OFFSET = 1000  # from control to data; above the number of tasks on any one host
# a connection within a data centre takes a millisecond, a lost first packet one second more
TIMEOUT_S = 2.0
TIMEOUT_S_MAX = 60.0
TASKS_PER_NODE_MAX = PORT_OFFSET


class ClusterOptions(NamedTuple):
    """The cluster as the options of `make` describe it; None: not given."""

    ps_hosts: str | None
    worker_hosts: str | None
    slurm: bool
    hosts: str | None
    tasks_per_node: int | None
    base_port: int | None


@click.group(
    "endpoint-map",
    no_args_is_help=False,
    subcommand_metavar="<part> ...",
    help=f"{FILE_NAME} says where the data of each task of a TensorFlow-style cluster goes, one "
    "line a task: control host:port=data host:port. Without one, tasks tell each other.",
)
def run() -> None:
    """Make or check."""


@run.command(
    "make",
    cls=Command,
    short_help="write one for a cluster",
    help="Write a map for the cluster in TF_CONFIG, or the one that the options describe: data "
    "goes to the same host as control, at a port that is --port-offset higher. GRPC++ can read it "
    "too.",
)
@click.option("--ps-hosts", "--ps_hosts", metavar="H:P,...", help="control addresses of the ps")
@click.option(
    "--worker-hosts",
    "--worker_hosts",
    metavar="H:P,...",
    help="control addresses of the workers",
)
@click.option(
    "--slurm", is_flag=True, help="the nodes of this Slurm job, SLURM_TASKS_PER_NODE tasks on each"
)
@click.option(
    "--hosts", metavar="LIST", help="hosts, as Slurm writes them too: node[01-03,7],[fd00::1]"
)
@click.option(
    "--tasks-per-node",
    type=int,
    metavar="N",
    help="for --slurm and --hosts (default: Slurm's, else 1)",
)
@click.option(
    "--base-port",
    type=int,
    metavar="PORT",
    help=f"for --slurm and --hosts: control port of a host's first task (default: {BASE_PORT})",
)
@click.option(
    "--port-offset", type=int, default=PORT_OFFSET, metavar="N", help="from control to data"
)
@click.option(
    "-o",
    "--output",
    type=path(),
    metavar="FILE",
    help="where to write it (default: standard output)",
)
def make(port_offset: int, output: str | None, **cluster_options: Any) -> int:
    """Write it, or print it."""
    check_number("--port-offset", port_offset, 1 - PORT_MAX, PORT_MAX - 1)
    cluster = _cluster_from(ClusterOptions(**cluster_options), os.environ)
    if not cluster.addresses:
        raise ConfigError("the cluster has no tasks: a map needs one at least")
    text = render(cluster, data_endpoints(cluster, None, port_offset).addresses)
    if output is None:
        sys.stdout.write(text)
    else:
        _write(Path(output), text)
        print(f"{output}: {len(cluster.addresses)} tasks")
    return cli.OK


@run.command(
    "check",
    cls=Command,
    short_help="look at the one that is there",
    help="Read the map, hold it against the cluster in TF_CONFIG when there is one, look up its "
    "hosts and connect to its ports. Exit code 1 when one of them does not answer, 2 when the map "
    "or the cluster is wrong.",
)
@click.option(
    "--dir",
    "folder_name",
    type=path(),
    metavar="DIR",
    help=f"the folder it is in (default: {ENDPOINT_MAP_FOLDER.names[0]}, else this one)",
)
@click.option(
    "--no-probe", is_flag=True, help="do not connect: tasks that have not started cannot answer"
)
@click.option("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="for a connection")
def check(folder_name: str | None, no_probe: bool, timeout: float) -> int:
    """Look, tell."""
    if not 0 < timeout <= TIMEOUT_S_MAX:
        raise ConfigError(
            f"--timeout={timeout:g}: more than 0 and at most {TIMEOUT_S_MAX:g} seconds are allowed"
        )
    folder = (
        network_of_process(os.environ)["endpoint_map_folder"]
        if folder_name is None
        else FoundValue(folder_name, f"--dir={folder_name!r}")
    )
    file = EndpointMapFile.read(folder)
    endpoint_map = file.parse()
    if endpoint_map is None:
        raise ConfigError(
            f"{file.path} is not there: `prpc endpoint-map make -o {FILE_NAME}` writes one, "
            "--dir names another folder"
        )
    pairs = _pairs(endpoint_map, os.environ.get("TF_CONFIG"))
    answers = probe_all(
        (address for pair in pairs for address in pair), timeout, connect=not no_probe
    )
    for control, data in pairs:
        print(f"control {control}  {answers[control].text}")
        print(f"data    {data}  {answers[data].text}")
    good = sum(answer.ok for answer in answers.values())
    done = "resolve" if no_probe else "answer"
    print(
        f"{file.path}: {len(pairs)} tasks, {len(answers)} addresses: {good} {done}, "
        f"{len(answers) - good} do not"
    )
    return cli.OK if good == len(answers) else cli.FAILED


def _cluster_from(options: ClusterOptions, environ: Mapping[str, str]) -> ClusterSpec:
    """The cluster in the one place that was named; TF_CONFIG when none was."""
    by_address = options.ps_hosts is not None or options.worker_hosts is not None
    by_node = options.slurm or options.hosts is not None
    if by_address + options.slurm + (options.hosts is not None) > 1:
        raise ConfigError(
            "--ps-hosts with --worker-hosts, --slurm, --hosts: one of the three is allowed"
        )
    if not by_node and (options.tasks_per_node is not None or options.base_port is not None):
        raise ConfigError(
            "--tasks-per-node and --base-port are allowed with --slurm and --hosts alone"
        )
    if by_address:
        return ClusterSpec.from_hosts(ps=options.ps_hosts or "", worker=options.worker_hosts or "")
    if by_node:
        return _cluster_of_nodes(options, environ)
    if "TF_CONFIG" not in environ:
        raise ConfigError(
            "no cluster: set TF_CONFIG, or give --ps-hosts and --worker-hosts, --slurm, or --hosts"
        )
    return parse_tf_config(environ["TF_CONFIG"]).cluster


def _cluster_of_nodes(options: ClusterOptions, environ: Mapping[str, str]) -> ClusterSpec:
    """Tasks in the order of the nodes, those of one node at ports beside each other."""
    nodelist = environ.get("SLURM_JOB_NODELIST") if options.slurm else options.hosts
    if nodelist is None:
        raise ConfigError(
            "--slurm: SLURM_JOB_NODELIST is not set; it is within a job of Slurm, else use --hosts"
        )
    nodes = expand_nodes(nodelist)
    if options.tasks_per_node is not None:
        counts = [options.tasks_per_node] * len(nodes)
    elif options.slurm and "SLURM_TASKS_PER_NODE" in environ:
        counts = expand_counts(environ["SLURM_TASKS_PER_NODE"])
    else:
        counts = [1] * len(nodes)
    if len(counts) != len(nodes):
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']!r} is for {len(counts)} "
            "nodes, and SLURM_JOB_NODELIST="
            f"{nodelist!r} has {len(nodes)}; --tasks-per-node says it for all"
        )
    for count in set(counts):
        check_number("tasks per node", count, 1, TASKS_PER_NODE_MAX)
    base = check_number(
        "--base-port", BASE_PORT if options.base_port is None else options.base_port, 1, PORT_MAX
    )
    return ClusterSpec(
        {
            "task": [
                f"{node}:{base + local}"
                for node, count in zip(nodes, counts, strict=True)
                for local in range(count)
            ]
        }
    )


def _write(path: Path, text: str) -> None:
    """Replace the file at once: a task that starts meanwhile reads the old map or the new one. A
    pipe or a device is written to instead.
    """
    if not path.name:
        raise ConfigError(
            f"--output={str(path)!r} is not a file's name: one such as {FILE_NAME} is expected"
        )
    try:
        if path.exists() and not path.is_file():
            # a pipe without a reader raises ENXIO, and does not block
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            with open(path, "w", opener=lambda name, _: os.open(name, flags)) as file:
                file.write(text)
            return
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    file_path = Path(os.path.realpath(path))  # a link stays one
    written = file_path.with_name(f"{file_path.name}.{os.getpid()}")
    try:
        with open(
            written,
            "w",
            opener=lambda name, flags: os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o644),
        ) as file:
            file.write(text)
        written.replace(file_path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # it became the map, or could not be made
            written.unlink()


def _pairs(endpoint_map: EndpointMap, tf_config: str | None) -> list[tuple[Address, Address]]:
    """Control and data address of each task of the cluster; without one, of each entry. Raises
    ConfigError for what tasks would refuse: entries that share an address, tasks without an entry,
    and none at all."""
    if not endpoint_map.entries:
        raise ConfigError(f"{endpoint_map.file} has no line for any task: {LINE_EXPECTED}")
    if tf_config is None:
        cluster = ClusterSpec({"entry": [str(control) for control in endpoint_map.entries]})
    else:
        cluster = parse_tf_config(tf_config).cluster
        if not cluster.addresses:
            raise ConfigError(
                f"TF_CONFIG={tf_config!r:.100} has no cluster to hold the map against: name one, "
                "or unset it"
            )
    endpoints = data_endpoints(cluster, endpoint_map)
    for entry in endpoints.unused:
        print(
            f"{endpoint_map.file}:{entry.line}: {entry.control} is the address of no task in "
            "TF_CONFIG"
        )
    return [(control, endpoints.addresses[task]) for task, control in cluster.addresses.items()]
