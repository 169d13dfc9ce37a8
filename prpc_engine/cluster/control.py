"""What two tasks tell each other when they meet, at the control address of the one that is asked.
No I/O here.

hello(plan, task, incarnation)  ->  [plan, task, incarnation, data addresses]
describe()                      ->  [plan, task, [[job, index, control, data], ...]]

plan         names.py: they must be the same, or the two tasks would not mean the same by a task's
             number
task         the device of who speaks: an address that leads to another task is found at once
incarnation  of its process, random: another one later means that the task was started again
data         most preferred first; a tcp one counts only by rule "exchange", and only its port: see
             data_addresses()

describe() is for who is no task of the cluster and knows one address of it (visitor.py): all tasks,
with their control addresses, and by rule "file" or "offset" their data addresses, else "".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from prpc_engine.cluster.names import device
from prpc_engine.errors import ConfigError, RpcError
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import ClusterSpec, Task

CONTROL_TARGET, DATA_TARGET = 3, 4  # below what a master gives to servers
HELLO, DESCRIBE, RECEIVE, ABORT = "hello", "describe", "receive", "abort"
ToldTask = tuple[str, int, str, str]  # job, index, control address, data address or ""
ToldTasks = Sequence[ToldTask]


@dataclass(frozen=True)
class Facts:
    """What a task answers to hello() at its control port: which cluster and task it is, which
    incarnation, and where its data goes.
    """

    plan: str
    task: str
    incarnation: int
    data: tuple[str, ...]

    @classmethod
    def read(cls, answer: object, address: Address) -> Facts:
        """An answer to hello(). Raises RpcError for anything else."""
        match answer:
            case [str(plan), str(task), int(incarnation), [*data]] if data and all(
                isinstance(one, str) for one in data
            ):
                return cls(plan, task, incarnation, tuple(map(str, data)))
        raise RpcError(f"{address} answers, but not as a task of a cluster does: {answer!r:.100}")


@dataclass(frozen=True)
class Description:
    """A cluster, as one of its tasks, `task`, tells it."""

    plan: str
    task: str
    cluster: ClusterSpec
    data: Mapping[Task, Address]

    @classmethod
    def read(cls, answer: object, address: Address) -> Description:
        """An answer to describe(). Raises RpcError for anything else."""
        try:
            plan, task, told = msgspec.convert(answer, tuple[str, str, list[ToldTask]])
            jobs: dict[str, dict[int, str]] = {}
            for job, index, control, _ in told:
                jobs.setdefault(job, {})[index] = control
            data = {Task(job, index): Address.parse(at) for job, index, _, at in told if at}
            cluster = ClusterSpec(jobs)
            if task in map(device, cluster.addresses):
                return cls(plan, task, cluster, data)
        except (msgspec.ValidationError, ConfigError):
            pass  # refused below, with what was told
        raise RpcError(f"{address} answers, but not as a task of a cluster does: {answer!r:.100}")


def told_of(cluster: ClusterSpec, data: Mapping[Task, Address]) -> ToldTasks:
    """What describe() tells of the tasks."""
    return tuple(
        (task.job, task.index, str(address), str(data.get(task, "")))
        for task, address in sorted(cluster.addresses.items())
    )


def check_plan(ours: str, our_task: str, theirs: str, their_task: str) -> None:
    """Raises ConfigError where two tasks were started with different plans."""
    if ours != theirs:
        raise ConfigError(
            f"{our_task} and {their_task} do not have the same cluster: {our_task} has {ours}; "
            f"{their_task} has {theirs}. Start "
            "all tasks with one ClusterSpec, and one .endpoint_map or PRPC_DATA_PORT_OFFSET"
        )


def check_task(facts: Facts, expected: str, address: Address) -> None:
    """Raises ConfigError where another task answers at the address."""
    if facts.task != expected:
        raise ConfigError(
            f"{facts.task} answers at {address}, which is the address of {expected} in the "
            "cluster: mend the cluster"
        )


def data_addresses(facts: Facts, control: Address, data: Address | None) -> list[str]:
    """Where to connect to for the task's data. `data`: by rule "file" or "offset". By rule
    "exchange", the host is the one that we reached its control port at: it may listen at all of its
    addresses, and does not know which of them we can reach."""
    found = []
    for told in facts.data:
        if told.startswith("tcp://"):
            address = data or Address(control.host, int(told.rpartition(":")[2]))
            told = f"tcp://{address}"
        found.append(told)
    return found
