"""`.endpoint_map`: from the control address of each task, as the cluster has it, to where its data
goes. No I/O here.

    file    = { line "\\n" }     "\\r", spaces and tabs around a line, a key and a value do not
                                 count
    line    = [ key "=" value ] [ "#" comment ]
    key     = a control address  that of the task in the cluster
    value   = a data address     where other tasks connect to it for data; the task itself takes
                                 only the port of it
    address = address.py

What GRPC++ reads, this reads in the same way; comments, empty lines, spaces and "[IPv6]:port" are
more than GRPC++ allows, so `prpc endpoint-map make` writes none of them.

    two lines for one key      the same value: one entry; different ones: refused, with both lines
    a key that no task has     passed over, and listed in DataEndpoints.unused

Where the data of a job goes is found by one of three rules; all tasks must come to the same one:

    rule      when                        the data address of a task is
    file      there is a file             what the file says; every task of the cluster must be in
                                          it
    offset    no file, and a port offset  host of the control address, its port + the offset
    exchange  neither                     not known beforehand: the task listens at any free port,
                                          and tells whoever connects to its control address
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import ClusterSpec, Task

FILE_NAME = ".endpoint_map"
LINE_EXPECTED = "control host:port=data host:port expected, such as ps0:2222=ps0:3333"
NAMED_MAX = 8  # tasks named in one error: enough to see what they have in common

Rule = Literal["file", "offset", "exchange"]


@dataclass(frozen=True)
class Entry:
    """One line of a map."""

    control: Address
    data: Address
    line: int  # from 1 on


@dataclass(frozen=True)
class EndpointMap:
    """What a file says."""

    entries: Mapping[Address, Entry]  # by control address, in the order of the file
    file: str  # its name, for errors

    @classmethod
    def parse(cls, text: str, file: str) -> EndpointMap:
        """The text of a file of that name. Raises ConfigError: file:line, what was read, what is
        allowed.
        """
        entries: dict[Address, Entry] = {}
        for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
            line = raw.partition("#")[0].strip(" \t\r")
            if not line:
                continue
            try:
                entry = _parse_line(line, number)
            except ConfigError as error:
                raise ConfigError(f"{file}:{number}: {error}") from error
            known = entries.setdefault(entry.control, entry)
            if known.data != entry.data:
                raise ConfigError(
                    f"{file}:{number}: {entry.control} is sent to {entry.data} here and to "
                    f"{known.data} in line {known.line}: "
                    "one data address for each control address is allowed; "
                    "take one of the lines out"
                )
        return cls(MappingProxyType(entries), file)


@dataclass(frozen=True)
class DataEndpoints:
    """Where the data of a cluster goes: the rule that said so, and what it said.

    addresses  of each task; empty by rule "exchange"
    unused     entries of the file for which there is no task: another job's, or a mistyped key
    """

    rule: Rule
    addresses: Mapping[Task, Address]
    unused: tuple[Entry, ...] = ()


def data_endpoints(
    cluster: ClusterSpec, endpoint_map: EndpointMap | None, port_offset: int | None = None
) -> DataEndpoints:
    """The data addresses of a cluster, by the rules at the top of this file.

    Raises ConfigError where both a file and an offset are given, where tasks lack an entry, and
    where two of the addresses that tasks listen at are one.
    """
    if endpoint_map is not None:
        if port_offset is not None:
            raise ConfigError(
                f"{endpoint_map.file} and a port offset of {port_offset}: one of the two is allowed"
            )
        return _by_file(cluster, endpoint_map)
    if port_offset is not None:
        return DataEndpoints("offset", _by_offset(cluster, port_offset))
    return DataEndpoints("exchange", MappingProxyType({}))


def render(cluster: ClusterSpec, addresses: Mapping[Task, Address]) -> str:
    """The text of a file that says so, which GRPC++ can read too: its keys are the texts in the
    cluster, letter by letter.
    """
    return "".join(
        f"{cluster.task_address(task.job, task.index)}={data}\n" for task, data in addresses.items()
    )


def _by_offset(cluster: ClusterSpec, port_offset: int) -> Mapping[Task, Address]:
    addresses = {}
    for task, control in cluster.addresses.items():
        try:
            addresses[task] = control.moved(port_offset)
        except ConfigError as error:
            raise ConfigError(f"port offset {port_offset}: data of {task}: {error}") from error
    return _checked(addresses, cluster, dict.fromkeys(addresses, f"port offset {port_offset}"))


def _by_file(cluster: ClusterSpec, endpoint_map: EndpointMap) -> DataEndpoints:
    entries = endpoint_map.entries
    missing = [
        f"{task} ({control})"
        for task, control in cluster.addresses.items()
        if control not in entries
    ]
    if missing:
        more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
        raise ConfigError(
            f"{endpoint_map.file} has no line for {', '.join(missing[:NAMED_MAX])}{more}: "
            "every task of the cluster needs one, "
            "whose key is its address as the cluster has it, not one that it resolves to"
        )
    of_task = {task: entries[control] for task, control in cluster.addresses.items()}
    where = {task: f"{endpoint_map.file}:{entry.line}" for task, entry in of_task.items()}
    addresses = _checked({task: entry.data for task, entry in of_task.items()}, cluster, where)
    controls = set(cluster.addresses.values())
    return DataEndpoints(
        "file", addresses, tuple(entry for key, entry in entries.items() if key not in controls)
    )


def _checked(
    addresses: dict[Task, Address], cluster: ClusterSpec, where: Mapping[Task, str]
) -> Mapping[Task, Address]:
    """Nobody listens for data where somebody listens already.
    `where` it was said, for the errors.
    """
    controlled_by = {control: task for task, control in cluster.addresses.items()}
    taken_by: dict[Address, Task] = {}
    for task, data in addresses.items():
        if data in controlled_by:
            raise ConfigError(
                f"{where[task]}: data of {task} goes to {data}, the control address of "
                f"{controlled_by[data]}: "
                "no address can be both"
            )
        other = taken_by.setdefault(data, task)
        if other != task:
            raise ConfigError(
                f"{where[task]}: data of {task} goes to {data}, and so does that of {other} "
                f"({where[other]}): "
                "every task needs a data address of its own"
            )
    return MappingProxyType(addresses)


def _parse_line(line: str, number: int) -> Entry:
    parts = [part.strip(" \t") for part in line.split("=")]
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"{line!r} is no entry: {LINE_EXPECTED}")
    control, data = map(Address.parse, parts)
    return Entry(control, data, number)
