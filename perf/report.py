"""Results as JSON records, and records as the markdown tables of RESULTS.md.

prpc bench rpc --json > rpc.jsonl
python -m perf.report rpc.jsonl [more.jsonl]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import units
from .change import Change, line_record
from .harness import Result, as_record
from .history_file import Stamp
from .machine import Machine
from .targets import Target, Verdict

Record = dict[str, Any]


def result_record(result: Result, facts: Machine, stamp: Stamp) -> Record:
    """One line of JSON: a result, what was measured and when, and the machine."""
    return {"kind": "result", **as_record(result), **asdict(stamp), "machine": asdict(facts)}


def change_record(change: Change) -> Record:
    """One line of JSON: a figure then and now, and the two verdicts."""
    return {
        "kind": "change",
        "then": None if change.then is None else line_record(change.then),
        "now": line_record(change.now),
        "by_ratio": change.by_ratio,
        "by_figure": change.by_figure,
        "why": change.why,
    }


def verdict_record(verdict: Verdict, bench: str) -> Record:
    """One line of JSON: a target, and whether it was met."""
    target = asdict(verdict.target)
    return {
        "kind": "target",
        "bench": bench,
        "case": target.pop("case"),
        "candidate": target.pop("candidate"),
        "figure": target.pop("figure"),
        "must_be": target.pop("kind"),
        **target,
        "measured": verdict.measured,
        "met": verdict.met,
    }


def records(
    results: Sequence[Result],
    verdicts: Sequence[Verdict],
    facts: Machine,
    stamp: Stamp,
    bench: str,
) -> list[Record]:
    """All of a run."""
    return [result_record(result, facts, stamp) for result in results] + [
        verdict_record(verdict, bench) for verdict in verdicts
    ]


def target_text(target: Target) -> str:
    """A target in words."""
    bound = bound_text(target, target.bound)
    return (
        f"{target.case}: {target.candidate}, {figure_text(target.figure)} {target.kind} {bound}"
        + (f" that of {target.against}" if target.against else "")
    )


def figure_text(name: str) -> str:
    """A figure's name in words."""
    words = {"p50_ns": "p50", "p99_ns": "p99", "ops_per_s": "rate", "bytes_per_s": "bytes/s"}
    return words.get(
        name,
        name.removesuffix("_ns").removesuffix("_bytes").replace("_percent", " %").replace("_", " "),
    )


def value_text(name: str, value: float | None) -> str:
    """A figure's value in the unit that its name ends in."""
    if name.endswith("_ns"):
        return units.duration(value)
    if name.endswith("_bytes"):
        return units.amount(value, "B")
    if name.endswith("_per_s"):
        return units.amount(value, "/s")
    return "-" if value is None else f"{value:.2f}" + (" %" if name.endswith("_percent") else "")


def bound_text(target: Target, value: float | None) -> str:
    """A value in the target's unit."""
    if value is None:
        return "not measured"
    if target.against is not None:
        return units.times(value)
    return value_text(target.figure, value)


def markdown(lines: Iterable[Record]) -> str:
    """Tables: one per case, then one of targets."""
    lines = list(lines)
    results = [line for line in lines if line["kind"] == "result"]
    verdicts = [line for line in lines if line["kind"] == "target"]
    text = []
    machines = {json.dumps(line["machine"], sort_keys=True): line["machine"] for line in results}
    for facts in machines.values():
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        text.append(
            f"{facts['cpu_model']}, cores {', '.join(map(str, facts['cores']))}, "
            f"Linux {facts['kernel']}, "
            f"Python {facts['python']}, {packages}. Before the run {facts['busy_percent']} % busy"
            + (
                f"; **oversubscribed: {facts['oversubscribed']}**."
                if facts["oversubscribed"]
                else "."
            )
        )
    for bench, case in dict.fromkeys((line["bench"], line["case"]) for line in results):
        text += ["", f"### {bench}: {case}", ""]
        text += _case_table(
            [line for line in results if (line["bench"], line["case"]) == (bench, case)]
        )
    if verdicts:
        text += ["", "### Targets", "", "| target | measured | met |", "|---|---|---|"]
    for line in verdicts:
        target = Target(
            line["case"],
            line["candidate"],
            line["figure"],
            line["must_be"],
            line["bound"],
            line["against"],
        )
        met = {True: "yes", False: "**no**", None: "not measured"}[line["met"]]
        text.append(f"| {target_text(target)} | {bound_text(target, line['measured'])} | {met} |")
    return "\n".join(text) + "\n"


def _case_table(lines: list[Record]) -> list[str]:
    figures = list(dict.fromkeys(name for line in lines for name in line["figures"]))
    timed = any(line["ops_per_s"] is not None for line in lines)
    columns = ["p50", "p99", "p99.9", "rate", "bytes/s"] if timed else []
    columns += [figure_text(name) for name in figures]
    rows = ["| candidate | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for line in lines:
        name = f"**{line['candidate']}**" if line["role"] == "ours" else line["candidate"]
        if line["role"] == "limit":
            name += " (limit)"
        if line["state"] != "ok":
            rows.append(f"| {name} | {line['state']}" + " |" * len(columns))
            continue
        cells = []
        if timed:
            cells = [units.duration(line[key]) for key in ("p50_ns", "p99_ns", "p999_ns")]
            cells += [
                units.amount(line["ops_per_s"], "/s"),
                units.amount(line["bytes_per_s"], "B/s"),
            ]
        cells += [value_text(key, line["figures"].get(key)) for key in figures]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


if __name__ == "__main__":
    given = [
        json.loads(line)
        for path in sys.argv[1:]
        for line in Path(path).read_text().splitlines()
        if line.strip()
    ]
    print(markdown(given), end="")
