"""`prpc launch`: one command as scheduler, servers and workers on this machine, with an exit code
that tells the truth.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from prpc_engine import cli
from prpc_engine.pslite.launch import launch
from prpc_engine.settings.config import check_number

if TYPE_CHECKING:
    from prpc_engine.cli import Commands


REPEATS_MAX = 1_000_000  # as `launch` bounds restarts


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "launch",
        help=cli.COMMANDS["launch"],
        usage="prpc launch -s SERVERS -w WORKERS [--timeout-s SECONDS] [--customers] [--joint] "
        "[--restarts N] [--repeat N] "
        "-- COMMAND ...",
        description="Run a command as one scheduler, SERVERS servers and WORKERS workers, "
        "with DMLC_ROLE and its kin set and a "
        "free port for the scheduler. When a process fails the rest is ended, "
        "and its exit code is that of the job; 124: the "
        "time was over.",
    )
    parser.add_argument(
        "-s", "--servers", type=int, required=True, metavar="SERVERS", help="server processes"
    )
    parser.add_argument(
        "-w", "--workers", type=int, required=True, metavar="WORKERS", help="worker processes"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        metavar="SECONDS",
        help="for each run of the job (default: no limit)",
    )
    parser.add_argument(
        "--customers",
        action="store_true",
        help="one worker process, which starts WORKERS customers; the role is its last argument",
    )
    parser.add_argument(
        "--joint",
        action="store_true",
        help="processes that are a server and a worker each (-s and -w are equal)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a server or worker again that a signal ends, or that ends with 254, "
        "N times in all at most, with "
        "DMLC_NUM_ATTEMPT counted up (default: 0)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the job N times, or until it fails (default: 1)",
    )
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, behind --"
    )


def run(args: argparse.Namespace) -> int:
    """The exit code of the first process that failed, or 0."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    check_number("--repeat", args.repeat, 1, REPEATS_MAX)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for number in range(1, args.repeat + 1):
            report = launch(
                command,
                args.servers,
                args.workers,
                args.timeout_s,
                args.customers,
                joint=args.joint,
                restarts=args.restarts,
            )
            if report.code:
                run_of = f"run {number} of {args.repeat}: " if args.repeat > 1 else ""
                print(f"prpc launch: {run_of}{report}", file=sys.stderr)
                return report.code
    finally:
        signal.signal(signal.SIGTERM, before)
    return cli.OK


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
