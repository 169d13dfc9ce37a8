"""Runs the unit tests of what decides under coverage.py, and compares with what is stated.

python .ci/check_coverage.py            fails where a module has fewer lines or branches than stated
python .ci/check_coverage.py --write    states in docs/reference/coverage.md what was measured

DECIDERS says which modules, and which tests count: the files that are about them, and not those of
whole jobs, which pass through most lines and look at few of them. Every module of PURE
(tests/test_architecture.py) stands in DECIDERS or in ELSEWHERE. Whole percents, rounded down, and
hypothesis with a fixed seed: the same tree gives the same figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "coverage.md"
BEGIN = "<!-- made by python .ci/check_coverage.py --write -->\n"
END = "<!-- end -->"
ROW = re.compile(r"^\| [^|]+ \| `([\w.]+)` \| (\d+) % of \d+ \| (\d+) % of \d+ \|$", re.MULTILINE)
WORKERS = 2
HYPOTHESIS_SEED = 0


class Decider(NamedTuple):
    """One idea: its modules, and its unit tests below tests/."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


class Figure(NamedTuple):
    """What the tests of a module reach."""

    lines_percent: int
    branches_percent: int
    lines: int = 0
    branches: int = 0


def _below(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names.split())


def _tests(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names.split())


DECIDERS = {
    "ring layout": Decider(
        ("shard.memory.ring",), _tests("shard", "ring ring_model ring_corruption")
    ),
    "frames, handshake, lanes": Decider(
        _below("shard.transport", "frame handshake identity lanes"),
        _tests("shard", "frame handshake lanes liars"),
    ),
    "timers": Decider(("shard.loop.timers",), _tests("shard", "timers")),
    "codec": Decider(
        (
            "prpc_engine.archive",
            *_below(
                "prpc_engine.archive",
                "classes codec compression decoder dtypes encoder exporters items keys lazy "
                "pickles reducers wire",
            ),
        ),
        _tests(
            "prpc_engine",
            "archive archive_arrays archive_classes archive_compression archive_hostile "
            "archive_keys archive_lazy archive_memory archive_pickle",
        ),
    ),
    "call state and messages": Decider(
        _below("prpc_engine.rpc", "call loss message once paths send_queue"),
        _tests("prpc_engine", "call message once once_window paths pending"),
    ),
    "numbers seen": Decider(
        ("prpc_engine.idempotency_window",), _tests("prpc_engine", "idempotency_window")
    ),
    "flow control": Decider(
        ("prpc_engine.rpc.flow_control",), _tests("prpc_engine", "flow_control")
    ),
    "retry, hedge, balance": Decider(
        _below("prpc_engine.client", "balance hedge retry"),
        _tests("prpc_engine", "balance hedge retry"),
    ),
    "registry, locks and barriers": Decider(
        _below("prpc_engine.master", "history locks_and_barriers namespace registry tree"),
        _tests("prpc_engine", "history registry locks_and_barriers journal"),
    ),
    "addresses and clusters": Decider(
        _below("prpc_engine.settings", "address allow cluster_spec endpoint_map network nodelist"),
        (*_tests("prpc_engine", "addresses allow"), "prpc_engine/endpoint_map"),
    ),
    "rendezvous of a cluster": Decider(
        _below("prpc_engine.cluster", "fuse rendezvous verbs"),
        _tests("prpc_engine/cluster", "fuse rendezvous verbs"),
    ),
    "events of DI-engine": Decider(
        _below("prpc_engine.ding", "device_map greeting inlet outlet place"),
        _tests("ding", "inlet outlet words"),
    ),
    "topics": Decider(
        _below("prpc_engine.topics", "backlog deltas tree"),
        _tests("prpc_engine/topics", "backlog deltas tree"),
    ),
    "queues with vLLM's face": Decider(
        _below("prpc_engine.vllm", "readers"),
        _tests("prpc_engine/vllm", "readers"),
    ),
    "pauses between attempts": Decider(
        (
            "prpc_engine.rpc.backoff",
            "prpc_engine.cluster.patience",
            "prpc_engine.kv.client.recovery_pace",
        ),
        (
            *_tests("prpc_engine", "backoff"),
            *_tests("prpc_engine/cluster", "patience"),
            *_tests("prpc_engine/kv", "recovery_pace"),
        ),
    ),
    "aggregators": Decider(
        _below(
            "prpc_engine.accumulator",
            "aggregator auc flushing histogram moments numeric outbox topk window",
        ),
        _tests("prpc_engine/accumulator", "aggregators sketches flushing outbox extreme_values"),
    ),
    "tables": Decider(
        _below(
            "prpc_engine.kv.table",
            "admission compression eviction index optimizer partition row_store schedule table",
        ),
        _tests(
            "prpc_engine/kv", "compression eviction index optimizer partition rows schedule table"
        ),
    ),
    "consistency rules": Decider(
        _below("prpc_engine.kv.consistency", "consistency durable ledger progress skew"),
        _tests("prpc_engine/kv", "consistency durable ledger progress skew"),
    ),
    "placement": Decider(
        ("prpc_engine.kv.schema.placement",), _tests("prpc_engine/kv", "placement")
    ),
    "the cut of a checkpoint": Decider(
        ("prpc_engine.kv.checkpoint.cut",), _tests("prpc_engine/kv/checkpoint", "cut")
    ),
    "ps-lite": Decider(
        _below(
            "prpc_engine.pslite", "barriers default_handle ids outbox pairs reliable slicer wire"
        ),
        _tests("prpc_engine/kv/pslite", "deciders"),
    ),
    "`prpc top`": Decider(
        _below("prpc_engine.cli", "top_table top_view"),
        _tests("prpc_engine/cli", "top top_view"),
    ),
}

# Pure too, and without unit tests of their own: what tests them.
PROCESSES = "tests of whole processes"
ELSEWHERE = {
    "prpc_engine.archive.tensor_reducers": "tests with torch and JAX (stage tensors)",
    "prpc_engine.archive.tensors": "tests with torch, JAX and TensorFlow (stage tensors)",
    **dict.fromkeys(
        _below(
            "prpc_engine.tensorflow",
            "functions nodes partition place rewrite tracing traffic transfers",
        ),
        "tests with TensorFlow (stage tensorflow)",
    ),
    **dict.fromkeys(
        (
            *_below("shard", "loop.queues one_line transport.refusals"),
            *_below("prpc_engine.cluster", "control names receipt"),
            *_below("prpc_engine.rpc", "failure_codes marks method"),
            *_below("prpc_engine.kv.checkpoint", "chain gate manifest"),
            *_below("prpc_engine.kv", "consistency.epochs schema.layout table.changes"),
            *_below("prpc_engine.master", "opening refusals registration session_states"),
        ),
        PROCESSES,
    ),
}


def modules() -> list[str]:
    """All that is measured, in the order of the table."""
    return [module for decider in DECIDERS.values() for module in decider.modules]


def figures_of(report: Mapping[str, object], names: Iterable[str]) -> dict[str, Figure]:
    """Module -> figure, from the report of `coverage json`.
    Raises KeyError for a module without.
    """
    files: Mapping[str, Mapping[str, Mapping[str, int]]] = report["files"]  # type: ignore[assignment]
    found = {}
    for name in names:
        path = name.replace(".", "/")
        entry = files[f"{path}.py"] if f"{path}.py" in files else files[f"{path}/__init__.py"]
        summary = entry["summary"]
        lines, branches = summary["num_statements"], summary["num_branches"]
        found[name] = Figure(
            100 * summary["covered_lines"] // lines if lines else 100,
            100 * summary["covered_branches"] // branches if branches else 100,
            lines,
            branches,
        )
    return found


def stated(text: str) -> dict[str, Figure]:
    """Module -> figure, from the table of the document."""
    return {row[1]: Figure(int(row[2]), int(row[3])) for row in ROW.finditer(text)}


def complaints(measured: Mapping[str, Figure], wanted: Mapping[str, Figure]) -> list[str]:
    """Where less is reached than stated, and what is not stated at all."""
    found = []
    for name, figure in measured.items():
        if name not in wanted:
            found.append(f"{name} is not stated: --write does that")
            continue
        pairs = {
            "lines": (figure.lines_percent, wanted[name].lines_percent),
            "branches": (figure.branches_percent, wanted[name].branches_percent),
        }
        for what, (now, then) in pairs.items():
            if now < then:
                found.append(f"{name}: {now} % of its {what}, and {then} % is stated")
    return found


def table(measured: Mapping[str, Figure], date: str) -> str:
    """The measured figures as the document has them."""
    rows = [
        f"Measured on {date} with Python {platform.python_version()}: `make coverage`.",
        "",
        "| decider | module | lines | branches |",
        "|---|---|---:|---:|",
    ]
    for title, decider in DECIDERS.items():
        for name in decider.modules:
            each = measured[name]
            rows.append(
                f"| {title} | `{name}` | {each.lines_percent} % of {each.lines} "
                f"| {each.branches_percent} % of {each.branches} |"
            )
    return "\n".join(rows) + "\n"


def measure() -> dict[str, Figure]:
    """Run the tests under coverage.py. Raises subprocess.CalledProcessError where one fails."""
    tests = dict.fromkeys(f"tests/{path}" for each in DECIDERS.values() for path in each.tests)
    with tempfile.TemporaryDirectory(prefix="prpc-coverage-") as folder:
        environment = {
            **os.environ,
            "COVERAGE_FILE": f"{folder}/data",
            "PRPC_TEST_EXAMPLES": "1",  # README's command tries fewer
        }

        def coverage(*arguments: str) -> None:
            command = [sys.executable, "-m", "coverage", *arguments]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)

        workers = ("-n", str(WORKERS), "--dist", "loadfile")
        options = (*workers, "-q", f"--hypothesis-seed={HYPOTHESIS_SEED}")
        coverage("run", "-m", "pytest", *options, *tests)
        coverage("combine", "--quiet")
        coverage("json", "--quiet", "-o", f"{folder}/report.json")
        return figures_of(json.loads(Path(folder, "report.json").read_text()), modules())


def main() -> int:
    """0 when all is as stated, 1 when not, 2 without coverage.py."""
    parser = argparse.ArgumentParser(description="Coverage of what decides, beside what is stated.")
    parser.add_argument("--write", action="store_true", help="state what was measured")
    given = parser.parse_args()
    try:
        import coverage  # noqa: F401
    except ImportError:
        wanted = f"{sys.executable} -m pip install 'coverage>=7.10'"
        print(f"coverage.py is not installed here: {wanted}", file=sys.stderr)
        return 2
    measured = measure()
    text = DOCUMENT.read_text()
    wrong = complaints(measured, stated(text))
    if given.write:
        before, _, rest = text.partition(BEGIN)
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        after = rest[rest.index(END) :]
        DOCUMENT.write_text(f"{before}{BEGIN}{table(measured, today)}{after}")
        print("\n".join(["stated anew; before:", *wrong]) if wrong else "stated anew")
        return 0
    print(table(measured, datetime.date.today().isoformat()))
    print("\n".join(wrong) or "all modules reach what is stated")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
