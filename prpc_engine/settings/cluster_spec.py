"""Who is in a job: its tasks by name, and the control address of each; with the face of
tf.train.ClusterSpec. No I/O here.

    cluster = job -> tasks
    job     = a letter, then letters, digits and "_"
    tasks   = a list of addresses, or task index -> address where some indices are missing
    address = host:port (address.py); one task an address. Port 0 only for a cluster of one task:
    nobody else has to find it

TF_CONFIG is JSON; keys that are not named here belong to others and are passed over:

    {"cluster": {"chief": ["h:p"], "ps": [...], "worker": [...]},  at most one of chief and master,
                                                                   with exactly one task
     "task": {"type": "worker", "index": 0}}                       of the cluster; or an evaluator,
                                                                   which need not be in it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address

PS, WORKER, CHIEF, MASTER, EVALUATOR = "ps", "worker", "chief", "master", "evaluator"
TASKS_MAX = 65536  # of one job; job_tasks() makes a list as long as the largest index
_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,254}")  # what TensorFlow's device names allow


@dataclass(frozen=True, order=True)
class Task:
    """A task's name within its cluster."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


class ClusterSpec:
    """An immutable cluster; from {"ps": ["h:p", ...], "worker": {0: "h:p", 3: "h:p"}} or another
    one. Raises ConfigError.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Any]) -> None:
        given = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"cluster = {given!r}: job names with their tasks are expected, "
                f"such as {{'worker': ['h:2222']}}"
            )
        self._jobs = {_checked_job(job): _checked_tasks(job, tasks) for job, tasks in given.items()}
        count = sum(map(len, self._jobs.values()))
        addresses: dict[Task, Address] = {}
        owners: dict[Address, Task] = {}
        for job, tasks in self._jobs.items():
            for index, text in tasks.items():
                task = Task(job, index)
                try:
                    address = Address.parse(text, port_min=0 if count == 1 else 1)
                except ConfigError as error:
                    raise ConfigError(f"cluster: {task}: {error}") from error
                if address in owners:
                    raise ConfigError(
                        f"cluster: {owners[address]} and {task} are both at {text}: "
                        "every task needs an address of its own"
                    )
                owners[address] = task
                addresses[task] = address
        # of the control ports, in the order given
        self.addresses: Mapping[Task, Address] = MappingProxyType(addresses)

    @classmethod
    def from_hosts(cls, **hosts: str) -> ClusterSpec:
        """What flags such as --ps_hosts and --worker_hosts carry: from_hosts(ps="h:p,h:p",
        worker="h:p"). "": no such job.
        """
        return cls(
            {
                job: [part.strip() for part in text.split(",")]
                for job, text in hosts.items()
                if text.strip()
            }
        )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order given."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Each job's addresses as given: a list, or index -> address where indices are missing."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """How many tasks the job has. Raises ConfigError when there is no such job."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the job's tasks, in order.
        Raises ConfigError when there is no such job.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Where that task's control port is, as given. Raises ConfigError when there is no such job
        or task.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ConfigError(
                f"no task {task_index!r} in job {job_name!r}: its tasks are {_listed(tasks)}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The job's addresses by index, None for an index that is missing. Raises ConfigError when
        there is no such job.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.addresses.items()))

    def __reduce__(self) -> tuple[type[ClusterSpec], tuple[Mapping[str, Any]]]:
        return ClusterSpec, (self.as_dict(),)

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ConfigError(
                f"no job {job_name!r} in the cluster: there are {_listed(self._jobs)}"
            )
        return self._jobs[job_name]


@dataclass(frozen=True)
class TfConfig:
    """What TF_CONFIG says; `task` None: it does not say which task this is."""

    cluster: ClusterSpec
    task: Task | None = None


def parse_tf_config(text: str) -> TfConfig:
    """The text of TF_CONFIG; without a cluster in it (a job of one process) the cluster is empty.
    Raises ConfigError.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
        if not isinstance(content, dict):
            raise ConfigError('{"cluster": {...}, "task": {...}} is expected')
        cluster = ClusterSpec(content.get("cluster", {}))
        _check_chief(cluster)
        return TfConfig(
            cluster, _task_from(content["task"], cluster) if "task" in content else None
        )
    except ConfigError as error:
        raise ConfigError(f"TF_CONFIG: {error}") from error
    except (ValueError, RecursionError) as error:
        # ValueError: no JSON, or a number of thousands of digits
        raise ConfigError(f"TF_CONFIG is no JSON: {error}") from error


def _checked_job(job: object) -> str:
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        raise ConfigError(
            f"cluster: job name {job!r}: a letter, then letters, digits and '_' are allowed, "
            "such as ps or worker"
        )
    return job


def _checked_tasks(job: str, tasks: object) -> dict[int, str]:
    """Index -> address, in the order of the indices."""
    if isinstance(tasks, Mapping):
        indices = [_checked_index(job, index) for index in tasks]
        texts: list[object] = list(tasks.values())
    elif isinstance(tasks, list | tuple):
        indices, texts = list(range(len(tasks))), list(tasks)
    else:
        raise ConfigError(
            f"cluster: job {job} = {tasks!r}: a list of addresses, or task index -> address, "
            "is expected"
        )
    if len(indices) > TASKS_MAX:
        raise ConfigError(
            f"cluster: job {job} has {len(indices)} tasks: at most {TASKS_MAX} are allowed"
        )
    checked: dict[int, str] = {}
    for index, text in sorted(zip(indices, texts, strict=True), key=lambda pair: pair[0]):
        if not isinstance(text, str):
            raise ConfigError(
                f"cluster: {Task(job, index)} = {text!r}: a str is expected, "
                "such as 'ps0.example:2222'"
            )
        if index in checked:
            raise ConfigError(
                f"cluster: {Task(job, index)} is there twice, at {checked[index]} and at {text}: "
                "one is allowed"
            )
        checked[index] = text
    return checked


def _checked_index(job: str, index: object) -> int:
    """An int from 0 on, or its digits: JSON has no other keys."""
    number = int(index) if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index) else index
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < TASKS_MAX:
        raise ConfigError(
            f"task index {index!r} of job {job}: a whole number from 0 to {TASKS_MAX - 1} is "
            "allowed"
        )
    return number


def _check_chief(cluster: ClusterSpec) -> None:
    chiefs = [job for job in (CHIEF, MASTER) if job in cluster.jobs]
    if len(chiefs) > 1:
        raise ConfigError("cluster: a chief and a master: one of the two is allowed")
    for job in chiefs:
        if cluster.num_tasks(job) != 1:
            raise ConfigError(
                f"cluster: {job} has {cluster.num_tasks(job)} tasks: exactly one is allowed"
            )


def _task_from(given: object, cluster: ClusterSpec) -> Task:
    if not isinstance(given, dict) or not {"type", "index"} <= given.keys():
        raise ConfigError(f'task = {given!r}: {{"type": ..., "index": ...}} is expected')
    job = given["type"]
    allowed = dict.fromkeys([*cluster.jobs, EVALUATOR])
    if not isinstance(job, str) or (cluster and job not in allowed):
        raise ConfigError(f"task.type = {job!r}: allowed are {', '.join(allowed)}")
    index = _checked_index(job, given["index"])
    if job in cluster.jobs:
        cluster.task_address(job, index)
    return Task(job, index)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a name stand twice, and Python would keep the last one."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigError(
            f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one "
            "object: once is allowed"
        )
    return content


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things)) or "none"
