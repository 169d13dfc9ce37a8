"""A whole job on this machine: one command as scheduler, servers and workers, watched until all
have ended (local_job.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from prpc_engine.errors import ConfigError
from prpc_engine.pslite.environment import NODES_MAX
from prpc_engine.pslite.ids import JOINT, name_of, node_id
from prpc_engine.settings.local_job import JobReport, LocalJob, reserved_ports

RESTARTS_MAX = 1_000_000  # so that a command that always dies ends some time
ATTEMPT = "DMLC_NUM_ATTEMPT"


def launch(
    command: Sequence[str],
    servers: int,
    workers: int,
    timeout_s: float | None = None,
    customers: bool = False,
    environment: Mapping[str, str] | None = None,
    joint: bool = False,
    restarts: int = 0,
) -> JobReport:
    """Run `command` in each role, with the DMLC_* variables set, until all have ended.

    timeout_s  for the whole job, in seconds; None: no limit
    customers  one worker process for all workers (their number is DMLC_NUM_WORKER as usual: it
               starts that many customers), and the role as each command's last argument
    joint      processes that are a server and a worker each: as many of the one as of the other
    restarts   how often, all together, servers and workers are started again that die by a signal
               or end with START_AGAIN: under their rank, with DMLC_NUM_ATTEMPT, 0 at first, counted
               up. Such a process comes back by start_async(), since the others have passed
               start()'s barrier

    Raises ConfigError for counts that are not possible, and a command that cannot be run."""
    if not command:
        raise ConfigError("there is no command to run: prpc launch -s 2 -w 4 -- python train.py")
    for name, count in (("servers", servers), ("workers", workers)):
        if not 1 <= count <= NODES_MAX:
            raise ConfigError(f"{count} {name}: 1 to {NODES_MAX} are allowed")
    if joint and (servers != workers or customers):
        raise ConfigError(
            f"{servers} servers and {workers} workers: joint processes have as many of both, "
            "and one customer each"
        )
    if not 0 <= restarts <= RESTARTS_MAX:
        raise ConfigError(f"{restarts} restarts: 0 to {RESTARTS_MAX} are allowed")
    common = dict(os.environ if environment is None else environment)
    common.update(
        DMLC_NUM_SERVER=str(servers), DMLC_NUM_WORKER=str(workers), DMLC_PS_ROOT_URI="127.0.0.1"
    )
    roles = ["scheduler"]
    roles += (
        [JOINT] * servers
        if joint
        else ["server"] * servers + ["worker"] * (1 if customers else workers)
    )
    with reserved_ports(1) as (port,), LocalJob(timeout_s, restarts) as job:
        common.update(DMLC_PS_ROOT_PORT=str(port))
        ranks = dict.fromkeys(roles, 0)
        for role in roles:
            arguments = [*command, role] if customers else list(command)
            name = (
                f"{JOINT} {ranks[role]}" if role == JOINT else name_of(node_id(role, ranks[role]))
            )
            # a job without its scheduler is over
            attempts = None if role == "scheduler" else ATTEMPT
            job.start(
                name,
                arguments,
                {**common, "DMLC_ROLE": role, "DMLC_RANK": str(ranks[role])},
                attempt_variable=attempts,
            )
            ranks[role] += 1
        return job.run()
