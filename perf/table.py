"""Results in the terminal: every candidate beside ours, with ratios."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prpc_engine.cli.console import make_console

from . import units
from .change import REPEATS_MIN, Change
from .harness import Result
from .machine import Machine
from .report import bound_text, figure_text, target_text, value_text
from .targets import Verdict

WIDTH_PIPED = 190  # where no terminal says how wide it is
STYLES = {"ours": "bold green", "peer": "", "limit": "cyan", "given": "dim"}


def _console() -> Console:
    """Printing raises BrokenPipeError when the reader has gone."""
    console = make_console()
    if not console.is_terminal:
        console.width = WIDTH_PIPED
    return console


def show_machine(facts: Machine) -> None:
    """Two lines that say what the figures were measured on."""
    console = _console()
    packages = "  ".join(f"{name} {version}" for name, version in facts.packages.items())
    console.print(
        f"[dim]{escape(facts.cpu_model)}, {len(facts.cores)} cores, Linux {facts.kernel}, "
        f"Python {facts.python}; "
        f"{facts.busy_percent} % busy before the run\n{packages}[/dim]",
        highlight=False,
    )
    if facts.oversubscribed:
        warn(facts.oversubscribed)


def warn(text: str) -> None:
    """A line that puts the figures in doubt."""
    _console().print(f"[yellow]Figures are doubtful: {escape(text)}[/yellow]", highlight=False)


def show_case(results: list[Result]) -> None:
    """One table. The last column compares with the first of ours: how many times its time, or its
    rate.
    """
    ours = next((r for r in results if r.role == "ours" and r.state == "ok"), None)
    figures = list(dict.fromkeys(name for result in results for name in result.figures))
    timed = any(result.ops_per_s is not None for result in results)
    table = Table(
        title=f"{results[0].bench}: {results[0].case}", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("candidate", no_wrap=True)
    headings = ["p50", "over repeats", "p99", "p99.9", "rate", "bytes/s"] if timed else []
    for heading in [*headings, *map(figure_text, figures)]:
        table.add_column(heading, justify="right", no_wrap=True)
    if timed and ours:
        table.add_column(f"beside {ours.candidate}", justify="right")
    notes = []
    for result in results:
        name = result.candidate + (f" {result.version}" if result.version else "")
        name += "  (limit)" if result.role == "limit" else ""
        if result.state != "ok":
            notes.append((result.candidate, result.state, result.note))
            table.add_row(
                escape(name), result.state, style="red" if result.state == "failed" else "dim"
            )
            continue
        cells: list[str] = []
        if timed:
            cells = [
                units.duration(result.p50_ns),
                f"{units.duration(result.p50_ns_low)} to {units.duration(result.p50_ns_high)}"
                if result.p50_ns_low
                else "-",
                units.duration(result.p99_ns),
                units.duration(result.p999_ns),
                units.amount(result.ops_per_s, "/s"),
                units.amount(result.bytes_per_s, "B/s"),
            ]
        cells += [value_text(key, result.figures.get(key)) for key in figures]
        if timed and ours:
            cells.append(beside(result, ours))
        table.add_row(escape(name), *cells, style=STYLES[result.role])
    console = _console()
    console.print(table)
    for candidate, state, note in notes:
        lines = [line for line in note.splitlines() if line.strip()] or [""]
        # of a traceback the error itself; JSON has it whole
        text = f"{candidate}, {state}: {lines[-1].strip()}"
        console.print(escape(text), style="red" if state == "failed" else "dim", highlight=False)


def beside(result: Result, ours: Result) -> str:
    """`result` in terms of `ours`: its time, or where none was taken its rate."""
    if result is ours:
        return ""
    if result.p50_ns and ours.p50_ns:
        return f"{units.times(result.p50_ns / ours.p50_ns)} the time"
    if result.ops_per_s and ours.ops_per_s:
        return f"{units.times(result.ops_per_s / ours.ops_per_s)} the rate"
    return "-"


def show_verdicts(verdicts: list[Verdict]) -> None:
    """What was to be shown, and whether it was."""
    if not verdicts:
        return
    table = Table(title="targets", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "target", "measured"):
        table.add_column(heading, no_wrap=heading != "target")
    for verdict in verdicts:
        mark, style = {True: ("met", "green"), False: ("missed", "red"), None: ("?", "dim")}[
            verdict.met
        ]
        table.add_row(
            mark,
            escape(target_text(verdict.target)),
            bound_text(verdict.target, verdict.measured),
            style=style,
        )
    _console().print(table)


RULE = (
    "Changed: the ranges of the repeats, then and now, do not meet. Chance does that once in 126 "
    f"with 5 repeats in both runs, once in 10 with 3; fewer than {REPEATS_MIN} say nothing. Ratios "
    "are of one run each, and compare across machines; times and rates only on the same machine."
)
VERDICT_STYLES = {"better": "green", "worse": "bold red", "the same": "", "unknown": "dim"}


def show_changes(changes: list[Change]) -> None:
    """One table: each figure and its ratio to the peer's of the same run, then and now."""
    console = _console()
    table = Table(title="then and now", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    table.add_column("candidate", no_wrap=True)
    table.add_column("then at", no_wrap=True)
    for heading in ("figure", "then", "now", "change", "ratio to", "then", "now", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in changes:
        then, now = each.then, each.now
        table.add_row(
            escape(now.case),
            escape(now.candidate),
            f"{then.commit} {then.date[:10]}" if then else "-",
            figure_text(now.figure),
            value_text(now.figure, then.ours) if then else "-",
            value_text(now.figure, now.ours),
            _verdict_text(each.by_figure),
            escape(now.peer or "-"),
            units.times(then.ratio) if then else "-",
            units.times(now.ratio),
            _verdict_text(each.by_ratio),
        )
    console.print(table)
    reasons: dict[str, int] = {}
    for each in changes:
        if each.why:
            reasons[each.why] = reasons.get(each.why, 0) + 1
    doubts = [each.then.doubt for each in changes if each.then] + [
        each.now.doubt for each in changes
    ]
    for doubt in filter(None, dict.fromkeys(doubts)):
        warn(doubt)
    for why, count in reasons.items():
        console.print(escape(f"{count} of {len(changes)}: {why}"), style="dim", highlight=False)
    console.print(RULE, style="dim", highlight=False)


def _verdict_text(verdict: str) -> str:
    style = VERDICT_STYLES[verdict]
    text = "?" if verdict == "unknown" else verdict
    return f"[{style}]{text}[/{style}]" if style else text
