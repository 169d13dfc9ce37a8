"""`prpc bench SUBJECT`: run one benchmark, show its tables or print JSON lines."""

from __future__ import annotations

import argparse
import importlib
import json as json_text
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from prpc_engine.errors import ConfigError

from . import change, harness, history_file, machine, plot, report, table
from .child import sigterm_as_ctrl_c
from .targets import judge
from .timing import FULL, QUICK, Effort

SUBJECTS = (
    *(
        "ring",
        "shard",
        "growth",
        "rpc",
        "call",
        "start",
        "clients",
        "connections",
        "cores",
        "mixed",
        "tls",
        "rdma",
        "failure",
        "recovery",
        "simulation",
    ),
    *(
        "tensor",
        "transfer",
        "p2p",
        "fanout",
        "weights",
        "fuse",
        "kv",
        "pslite",
        "checkpoint",
        "tensorflow",
        "ding",
    ),
)
# 130: 128 + SIGINT; 141: 128 + SIGPIPE, the reader of the output has gone
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_READER_GONE = 0, 1, 130, 141


class BadChoice(ValueError):
    """There is no benchmark, case or plot of that name."""


def _plain(value: Any) -> Any:
    """A number of numpy's, as JSON has it."""
    return value.item()


def main(
    subject: str,
    *,
    json: bool = False,
    quick: bool = False,
    markdown: bool = False,
    pinned: bool = True,
    case: str | None = None,
    plot_path: Path | None = None,
    record: bool = False,
    compare: str | None = None,
    finished: Path | None = None,
    folder: Path = history_file.FOLDER,
) -> int:
    """Run a benchmark; the exit code: 0, 1 when a candidate of ours failed or no plot can be drawn,
    130 after Ctrl-C or SIGTERM.

    `plot_path` is where curves go, of a benchmark that has some: its module has a draw(results,
    path). `case` keeps only cases with that text in their name. A target that is missed is shown,
    and is no failure: it is judged by people, who know what else the machine was doing. So is a
    figure that has become worse.

    `record` appends the figures to perf/history/. `compare` shows them beside earlier ones: "" the
    last of this machine, else a commit, or a file. `finished` is a run that --json printed, to take
    in place of measuring. `folder` holds the histories. Raises ConfigError where one of these three
    cannot be had.
    """
    if subject not in SUBJECTS:
        raise BadChoice(f"no benchmark named {subject!r}; there are: {', '.join(SUBJECTS)}")
    if quick and record:
        raise ConfigError(
            "--record keeps figures for good, and --quick's are too coarse for that: give one of "
            "them; --quick --json > FILE keeps a quick run"
        )
    # Whatever can be refused is, before anything is measured.
    given = None if finished is None else history_file.read_run(finished, subject)
    past = None if compare is None else history_file.past(subject, compare, folder)
    path = history_file.file_of(subject, folder)
    if record:
        history_file.check_writable(folder)
        history_file.read(path)
    if given is not None:
        code, run = EXIT_OK, given
    else:
        code, run = measure(
            subject, QUICK if quick else FULL, json, markdown, pinned, case, plot_path
        )
    try:
        if past is not None:
            changes = change.changes(past[0], run, past[1])
            if json:
                _print_records(map(report.change_record, changes))
            else:
                table.show_changes(changes)
        if record and run:
            lines = change.lines_of(run)
            history_file.check_new(lines, history_file.read(path), path)
            history_file.append(lines, subject, folder)
            print(f"{len(lines)} lines appended to {path}", file=sys.stderr)
    except change.BadLine as error:
        raise ConfigError(f"this run of {subject}: {error}") from error
    return code


def measure(
    subject: str,
    effort: Effort,
    json: bool,
    markdown: bool,
    pinned: bool,
    case: str | None,
    plot_path: Path | None,
) -> tuple[int, list[report.Record]]:
    """Run a benchmark and show it: main()'s exit code, and the records of the results."""
    bench: ModuleType = importlib.import_module(f".bench_{subject}", __package__)
    draws = hasattr(bench, "draw")
    if plot_path is not None:
        if not draws:
            raise BadChoice(f"{subject!r} has no curves to plot; growth and transfer have")
        try:
            plot.check_possible()
        except plot.NoPlot as reason:
            print(reason, file=sys.stderr)
            return EXIT_FAILED, []
    facts = machine.facts()
    stamp = history_file.stamp()
    before = machine.cpu_seconds()
    results: list[harness.Result] = []
    chosen = [each for each in bench.CASES if case is None or case in str(each)]
    if not chosen:
        raise BadChoice(
            f"no case of {subject!r} has {case!r} in its name: {', '.join(map(str, bench.CASES))}"
        )
    if not json and not markdown:
        table.show_machine(facts)
    try:
        with sigterm_as_ctrl_c():
            for each in chosen:
                with harness.progress_line() as progress:
                    measured = bench.run(each, effort, progress=progress, pinned=pinned)
                results += measured
                if json:
                    _print_records(report.result_record(one, facts, stamp) for one in measured)
                elif not markdown:
                    table.show_case(measured)
    except KeyboardInterrupt:
        print("interrupted: all processes of the benchmark have ended", file=sys.stderr)
        return EXIT_INTERRUPTED, []
    names = {str(each) for each in chosen}
    verdicts = judge([target for target in bench.TARGETS if target.case in names], results)
    _, steal_percent = machine.percent_between(before, machine.cpu_seconds())
    if json:
        _print_records(report.verdict_record(verdict, subject) for verdict in verdicts)
    elif markdown:
        print(report.markdown(report.records(results, verdicts, facts, stamp, subject)))
    else:
        table.show_verdicts(verdicts)
        if steal_percent > machine.STEAL_PERCENT_MAX:
            table.warn(f"the hypervisor took {steal_percent:.0f} % of the cores during the run")
        if draws and plot_path is None:
            print(
                f"As curves: python -m perf.bench_{subject} --plot {subject}.svg "
                f"({plot.HOW_TO_GET})"
            )
    if plot_path is not None:
        bench.draw(results, plot_path)
    failed = any(result.role == "ours" and result.state == "failed" for result in results)
    # As --json prints it, numpy's numbers as numbers: what --from reads back is the same.
    run = [json_text.loads(_json(report.result_record(result, facts, stamp))) for result in results]
    return EXIT_FAILED if failed else EXIT_OK, run


def _print_records(records: Iterable[report.Record]) -> None:
    for record in records:
        print(_json(record), flush=True)


def _json(record: report.Record) -> str:
    return json_text.dumps(record, default=_plain)


def command_line(subject: str) -> int:
    """`python -m perf.bench_<subject>`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m perf.bench_{subject}", description=f"benchmark: {subject}"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON lines: one per candidate and case, then one per target",
    )
    parser.add_argument("--markdown", action="store_true", help="the tables of RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--unpinned", action="store_true", help="leave the cores to the kernel")
    parser.add_argument("--case", help="only cases with this text in their name")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PATH",
        help="curves to this .svg, .png or .pdf; growth, transfer",
    )
    given = parser.parse_args()
    try:
        code = main(
            subject,
            json=given.json,
            quick=given.quick,
            markdown=given.markdown,
            pinned=not given.unpinned,
            case=given.case,
            plot_path=given.plot,
        )
        sys.stdout.flush()
    except (BadChoice, ConfigError) as error:  # of the case, the plot or the machine
        parser.error(str(error))
    except BrokenPipeError:  # as `prpc bench` ends; what is buffered still has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_GONE
    return code
