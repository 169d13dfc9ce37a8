"""`prpc run`: a script of TensorFlow with protocol="prpc", unchanged; as one task, or as a whole
cluster on this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from prpc_engine import cli
from prpc_engine.cli.local_cluster import run_cluster
from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import CHIEF, EVALUATOR, PS, WORKER

if TYPE_CHECKING:
    from prpc_engine.cli import Commands


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "run",
        help=cli.COMMANDS["run"],
        usage="prpc run [--protocol NAME] [--ps N --workers N [--chief] [--evaluator] [--flags] "
        "[--timeout-s S]] SCRIPT ...",
        description='Run a script of TensorFlow that may say protocol="prpc", '
        "and one that names no protocol as if it did. With "
        "--workers: as a whole cluster on this machine, each task told its place by TF_CONFIG. "
        "When a task fails the rest is "
        "ended, and its exit code is that of the job; 124: the time was over.",
    )
    parser.add_argument(
        "--protocol",
        default="prpc",
        metavar="NAME",
        help="where the script names none (default: %(default)s)",
    )
    parser.add_argument(
        "--ps", type=int, default=0, metavar="N", help="parameter servers (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="workers (default: 0, run the script here)",
    )
    parser.add_argument(
        "--chief", action="store_true", help="a chief besides, as Estimator wants one"
    )
    parser.add_argument("--evaluator", action="store_true", help="an evaluator besides")
    parser.add_argument(
        "--flags",
        action="store_true",
        help="add --job_name, --task_index, --ps_hosts and --worker_hosts to the arguments",
    )
    parser.add_argument(
        "--timeout-s", type=float, metavar="S", help="for the whole cluster (default: no limit)"
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments"
    )


def run(args: argparse.Namespace) -> int:
    """The script's exit code; of a cluster, that of the first task that failed, or 0."""
    if not os.path.isfile(args.script):
        raise ConfigError(f"{args.script!r} is not there: a script of Python is expected")
    command = [
        sys.executable,
        "-m",
        "prpc_engine.tensorflow",
        "--protocol",
        args.protocol,
        args.script,
        *args.arguments,
    ]
    if not (args.ps or args.workers or args.chief or args.evaluator):
        if args.flags or args.timeout_s is not None:
            raise ConfigError(
                "--flags and --timeout-s are for a whole cluster on this machine: "
                "--workers says how large"
            )
        sys.stdout.flush()
        # an ordinary process of the script's own, tracebacks, signals and all
        os.execv(sys.executable, command)
    tasks = {
        PS: args.ps,
        CHIEF: int(args.chief),
        WORKER: args.workers,
        EVALUATOR: int(args.evaluator),
    }
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_cluster(command, tasks, args.flags, args.timeout_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"prpc run: {report}", file=sys.stderr)
    return report.code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
