"""`prpc launch`: one command as scheduler, servers and workers on this machine, with an exit code
that tells the truth.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from prpc_engine import cli
from prpc_engine.cli.commands import command
from prpc_engine.pslite.launch import launch
from prpc_engine.settings.config import check_number

REPEATS_MAX = 1_000_000  # as `launch` bounds restarts


@command(
    "launch",
    "Run a command as one scheduler, SERVERS servers and WORKERS workers, with DMLC_ROLE and its "
    "kin set and a free port for the scheduler. When a process fails the rest is ended, and its "
    "exit code is that of the job; 124: the time was over.",
    options_metavar="-s SERVERS -w WORKERS [OPTIONS]",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-s", "--servers", type=int, required=True, metavar="SERVERS", help="server processes"
)
@click.option(
    "-w", "--workers", type=int, required=True, metavar="WORKERS", help="worker processes"
)
@click.option(
    "--timeout-s",
    type=float,
    metavar="SECONDS",
    help="for each run of the job (default: no limit)",
)
@click.option(
    "--customers",
    is_flag=True,
    help="one worker process, which starts WORKERS customers; the role is its last argument",
)
@click.option(
    "--joint",
    is_flag=True,
    help="processes that are a server and a worker each (-s and -w are equal)",
)
@click.option(
    "--restarts",
    type=int,
    default=0,
    metavar="N",
    help="start a server or worker again that a signal ends, or that ends with 254, N times in all "
    "at most, with DMLC_NUM_ATTEMPT counted up",
)
@click.option(
    "--repeat", type=int, default=1, metavar="N", help="run the job N times, or until it fails"
)
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND ...")
def run(
    servers: int,
    workers: int,
    timeout_s: float | None,
    customers: bool,
    joint: bool,
    restarts: int,
    repeat: int,
    command_line: tuple[str, ...],
) -> int:
    """The exit code of the first process that failed, or 0."""
    check_number("--repeat", repeat, 1, REPEATS_MAX)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for number in range(1, repeat + 1):
            report = launch(
                command_line,
                servers,
                workers,
                timeout_s,
                customers,
                joint=joint,
                restarts=restarts,
            )
            if report.code:
                run_of = f"run {number} of {repeat}: " if repeat > 1 else ""
                print(f"prpc launch: {run_of}{report}", file=sys.stderr)
                return report.code
    finally:
        signal.signal(signal.SIGTERM, before)
    return cli.OK


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
