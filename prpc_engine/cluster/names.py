"""What the tasks of a cluster call each other and themselves. No I/O here.

device  "/job:worker/task:1", as TensorFlow writes it: in send(to=...) and recv(source=...)
number  position of the task in the cluster, sorted by job and index: on the wire, where both sides
        have one cluster
plan    what all tasks must have alike: the fingerprint of the cluster, and where its data goes;
        compared when two meet
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import (
    EVALUATOR,
    TASKS_MAX,
    ClusterSpec,
    Task,
    TfConfig,
    parse_tf_config,
)
from prpc_engine.settings.config import check_number
from prpc_engine.settings.endpoint_map import DataEndpoints
from prpc_engine.settings.network import TASK_INDEX

# of SHA-256: enough to tell the clusters of a site apart, short enough to compare by eye
FINGERPRINT_CHARS = 12


def device(task: Task) -> str:
    """The task's name in send() and recv()."""
    return f"/job:{task.job}/task:{task.index}"


class Names:
    """The tasks of one cluster by number and by device name: every task numbers them alike.
    ConfigError for a device that none of them has.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.tasks: list[Task] = sorted(cluster.addresses)
        self._numbers = {device(task): number for number, task in enumerate(self.tasks)}

    def number(self, name: str) -> int:
        """Of the task with that device. Raises ConfigError, which lists what there is."""
        number = self._numbers.get(name) if isinstance(name, str) else None
        if number is None:
            raise self._no_such(name)
        return number

    def _no_such(self, name: object) -> ConfigError:
        jobs = "; ".join(
            f"/job:{job}/task:{_ranges(self.cluster.task_indices(job))}"
            for job in self.cluster.jobs
            if self.cluster.num_tasks(job)
        )
        return ConfigError(f"no task {name!r} in the cluster: there are {jobs}")


def plan_of(cluster: ClusterSpec, endpoints: DataEndpoints) -> str:
    """Two tasks can work together when this text is the same at both."""
    data = f"data by rule {endpoints.rule!r}"
    if endpoints.addresses:
        data += f" {_fingerprint(endpoints.addresses)}"
    return f"cluster {_fingerprint(cluster.addresses)} of {len(cluster.addresses)} tasks, {data}"


def _fingerprint(addresses: Mapping[Task, object]) -> str:
    text = "\n".join(f"{device(task)} {addresses[task]}" for task in sorted(addresses))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_CHARS]


def _ranges(indices: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def who_am_i(
    cluster: ClusterSpec | Mapping[str, object] | None,
    job_name: str | None,
    task_index: int | None,
    environ: Mapping[str, str],
) -> tuple[ClusterSpec, Task]:
    """The cluster, and which of its tasks this process is.

    What is None comes from TF_CONFIG when the cluster does; the index else from TASK_INDEX; and
    where there is one job, or one task of the job, from there. Raises ConfigError.
    """
    config: TfConfig | None = None
    if cluster is None:
        text = environ.get("TF_CONFIG")
        if text is None:
            raise ConfigError(
                "cluster=None, and TF_CONFIG is not set: pass a ClusterSpec or a dict, "
                "or set TF_CONFIG"
            )
        config = parse_tf_config(text)
    spec = config.cluster if config is not None else ClusterSpec(cluster or {})
    if not spec.addresses:
        raise ConfigError("the cluster has no task: {'worker': ['host:port']} is the smallest one")
    told = config.task if config is not None else None
    if job_name is None and told is not None:
        job_name = told.job
    if job_name is None:
        if len(spec.jobs) > 1:
            raise ConfigError(
                f"job_name=None: this process is of one of the jobs {', '.join(spec.jobs)}; "
                "say which"
            )
        job_name = spec.jobs[0]
    if job_name == EVALUATOR and job_name not in spec.jobs:
        raise ConfigError(
            "an evaluator that is not in the cluster has no Server: it reads checkpoints, "
            "and no task talks to it"
        )
    if task_index is None and told is not None and told.job == job_name:
        task_index = told.index
    if task_index is None:
        task_index = TASK_INDEX.find(environ).value
    if task_index is None:
        indices = spec.task_indices(job_name)
        if len(indices) != 1:
            raise ConfigError(
                f"task_index=None: job {job_name!r} has the tasks {_ranges(indices)}; say which, "
                "or set TASK_INDEX"
            )
        task_index = indices[0]
    check_number("task_index", task_index, 0, TASKS_MAX - 1)
    spec.task_address(job_name, task_index)
    return spec, Task(job_name, task_index)
