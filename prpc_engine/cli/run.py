"""`prpc run`: a script of TensorFlow with protocol="prpc", unchanged; as one task, or as a whole
cluster on this machine.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import click

from prpc_engine.cli.commands import command, path
from prpc_engine.cli.local_cluster import run_cluster
from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import CHIEF, EVALUATOR, PS, WORKER


@command(
    "run",
    'Run a script of TensorFlow that may say protocol="prpc", and one that names no protocol as if '
    "it did. With --workers: as a whole cluster on this machine, each task told its place by "
    "TF_CONFIG. When a task fails the rest is ended, and its exit code is that of the job; 124: "
    "the time was over.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--protocol", default="prpc", metavar="NAME", help="where the script names none")
@click.option("--ps", type=int, default=0, metavar="N", help="parameter servers")
@click.option("--workers", type=int, default=0, metavar="N", help="workers; 0: run the script here")
@click.option("--chief", is_flag=True, help="a chief besides, as Estimator wants one")
@click.option("--evaluator", is_flag=True, help="an evaluator besides")
@click.option(
    "--flags",
    is_flag=True,
    help="add --job_name, --task_index, --ps_hosts and --worker_hosts to the arguments",
)
@click.option(
    "--timeout-s", type=float, metavar="S", help="for the whole cluster (default: no limit)"
)
@click.argument("script", type=path(), metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT ...]")
def run(
    protocol: str,
    ps: int,
    workers: int,
    chief: bool,
    evaluator: bool,
    flags: bool,
    timeout_s: float | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """The script's exit code; of a cluster, that of the first task that failed, or 0."""
    if not os.path.isfile(script):
        raise ConfigError(f"{script!r} is not there: a script of Python is expected")
    command = [
        sys.executable,
        "-m",
        "prpc_engine.tensorflow",
        "--protocol",
        protocol,
        script,
        *arguments,
    ]
    if not (ps or workers or chief or evaluator):
        if flags or timeout_s is not None:
            raise ConfigError(
                "--flags and --timeout-s are for a whole cluster on this machine: "
                "--workers says how large"
            )
        sys.stdout.flush()
        # an ordinary process of the script's own, tracebacks, signals and all
        os.execv(sys.executable, command)
    tasks = {
        PS: ps,
        CHIEF: int(chief),
        WORKER: workers,
        EVALUATOR: int(evaluator),
    }
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_cluster(command, tasks, flags, timeout_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"prpc run: {report}", file=sys.stderr)
    return report.code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
