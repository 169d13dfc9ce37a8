"""A TensorFlow cluster on this machine: one script as ps, workers, chief and evaluator, each in a
process of its own.

    a task                 is told by
    its place, the others  TF_CONFIG, as Estimator and TFConfigClusterResolver read it
                           with `flags`: --job_name, --task_index, --ps_hosts and --worker_hosts
                           too, behind the script's own arguments, as the examples of TensorFlow 1
                           read them
    ps                     serves: it gets SIGTERM when all others have ended with 0; what else
                           follows what: local_job.py

Control ports are free ones of this machine, found beforehand; data ports follow as in any cluster
(endpoint_map.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from prpc_engine.settings.cluster_spec import CHIEF, EVALUATOR, PS, WORKER
from prpc_engine.settings.config import check_number
from prpc_engine.settings.local_job import JobReport, LocalJob, reserved_ports

TASKS_MAX = 256  # of each job: TensorFlow takes some 300 MB a process
HOST = "127.0.0.1"


def run_cluster(
    command: Sequence[str],
    tasks: Mapping[str, int],
    flags: bool = False,
    timeout_s: float | None = None,
) -> JobReport:
    """Run the command as so many tasks of each job, until all but the ps have ended. Raises
    ConfigError.
    """
    for job, count in tasks.items():
        check_number(f"tasks of {job}", count, 0, 1 if job in (CHIEF, EVALUATOR) else TASKS_MAX)
    check_number(
        f"tasks of {CHIEF} and {WORKER}",
        tasks.get(CHIEF, 0) + tasks.get(WORKER, 0),
        1,
        TASKS_MAX + 1,
    )
    with reserved_ports(sum(tasks.values())) as reserved, LocalJob(timeout_s) as job_of_all:
        ports = iter(reserved)
        cluster = {
            job: [f"{HOST}:{next(ports)}" for _ in range(count)]
            for job, count in tasks.items()
            if count
        }
        # it talks to nobody: its place is beside the cluster
        evaluators = cluster.pop(EVALUATOR, [])
        for job, hosts in {**cluster, EVALUATOR: evaluators}.items():
            for index in range(len(hosts)):
                place = {"cluster": cluster, "task": {"type": job, "index": index}}
                arguments = [*command, *(_flags(cluster, job, index) if flags else ())]
                job_of_all.start(
                    f"{job} {index}",
                    arguments,
                    {**os.environ, "TF_CONFIG": json.dumps(place)},
                    serves=job == PS,
                )
        counts = ", ".join(f"{count} {job}" for job, count in tasks.items() if count)
        print(f"prpc run: tasks started: {counts}", file=sys.stderr)
        return job_of_all.run()


def _flags(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> list[str]:
    hosts = [
        f"--{job_name}_hosts={','.join(cluster.get(job_name, ()))}" for job_name in (PS, WORKER)
    ]
    return [f"--job_name={job}", f"--task_index={index}", *hosts]
