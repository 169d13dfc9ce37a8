"""What has changed between two runs of a benchmark: lines of perf/history/ and the rule for them.

A line is one figure of one way of ours in one case, beside the figure of a peer in the same run:

    field                        meaning
    commit                       of the tree that was measured; "+" at its end: with changes that no
                                 commit has; "v0.1.0" where the package was installed
    date                         of the measurement, UTC
    machine                      cpu_model, cores that the run could use, kernel, python
    doubt                        why the figures are doubtful; "" where nothing spoke against them
    bench, case, candidate       what was measured; candidate: which way of ours
    figure, unit                 p50_ns; ops_per_s where operations overlap; else what the case has
    ours, ours_low, ours_high    median, least and most over the repeats
    peer, peers_figure           the peer's name, and its figure of this run
    ratio                        ours / peers_figure
    ratio_low, ratio_high        least and most of the repeats, pair by pair
    repeats                      fresh processes of each candidate, in turn: a, b, a, b

The peer of a case is the first that needs no package of others (a pipe, a raw socket), so that
every machine has it; else the first peer, else the first limit. A comparison takes the peer that
the earlier line has, if it was measured again.

The rule: a figure has changed when the ranges of the repeats, then and now, do not meet. Two runs
that differ by nothing but chance come apart so once in 126 times with five repeats each, once in 10
with three (--quick): 2 / binomial(2n, n). Fewer than three say nothing. Ratios are compared between
any two runs: what slows a machine slows the peer too. Figures themselves are compared only where
`machine` is the same.

No files, no clock and no git in this file; history_file.py has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPEATS_MIN = 3  # in both runs: of two, one pair in three comes apart by chance
Verdict = Literal["better", "worse", "the same", "unknown"]
Key = tuple[str, str, str, str]  # bench, case, candidate, figure
Record = Mapping[str, Any]
# Units by the end of a figure's name. What has none of these counts or describes, and is not kept.
UNITS = {"_per_s": "1/s", "_ns": "ns", "_bytes": "B", "_percent": "%"}


class BadLine(ValueError):
    """What was read is no line of a history, or no result of a run."""


@dataclass(frozen=True, slots=True)
class Host:
    """What must be equal before figures of two runs are compared by themselves."""

    cpu_model: str
    cores: int
    kernel: str
    python: str

    def __str__(self) -> str:
        return f"{self.cpu_model}, {self.cores} cores, Linux {self.kernel}, Python {self.python}"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure; the fields are those of the table above, in its order."""

    commit: str
    date: str
    machine: Host
    doubt: str
    bench: str
    case: str
    candidate: str
    figure: str
    unit: str
    ours: float
    ours_low: float | None
    ours_high: float | None
    peer: str | None
    peers_figure: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    repeats: int

    @property
    def key(self) -> Key:
        """What the same figure of another run has too."""
        return self.bench, self.case, self.candidate, self.figure


@dataclass(frozen=True, slots=True)
class Change:
    """A figure then and now."""

    then: Line | None  # None: nothing to compare with
    now: Line
    by_ratio: Verdict
    by_figure: Verdict
    why: str  # what could not be compared, and why; "" where all could


def line_record(line: Line) -> dict[str, Any]:
    """A line as plain values, for JSON."""
    return asdict(line)


def line_of(record: Record) -> Line:
    """The line that became that record. Raises BadLine."""
    try:
        fields = dict(record)
        return Line(machine=Host(**fields.pop("machine")), **fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadLine(f"no line of a history: {error}") from error


def lines_of(
    results: Iterable[Record], peers: Mapping[Key, str | None] | None = None
) -> list[Line]:
    """The lines of one run, from its `result` records. Raises BadLine.

    `peers` names whom to take for a figure, where it was measured.
    """
    measured = [record for record in results if record.get("kind") == "result"]
    try:
        good = [record for record in measured if record["state"] == "ok"]
        return [
            _line(record, figure, good, peers or {})
            for record in good
            if record["role"] == "ours"
            for figure in figures_of(record)
        ]
    except KeyError as error:
        raise BadLine(
            f"a result without {error}: `prpc bench --json` of this release writes it"
        ) from error


def figures_of(record: Record) -> list[str]:
    """The names of a result's figures that are kept."""
    if record["p50_ns"] is not None:
        return ["p50_ns"]
    if record["ops_per_s"] is not None:
        return ["ops_per_s"]
    return [name for name in record["figures"] if unit_of(name)]


def unit_of(figure: str) -> str:
    """The unit that a figure's name ends in, or ""."""
    return next((unit for end, unit in UNITS.items() if figure.endswith(end)), "")


def more_is_better(figure: str) -> bool:
    """Whether a larger value is an improvement."""
    return figure.endswith("_per_s")


def earlier(
    history: Sequence[Line], key: Key, machine: Host, commit: str | None = None
) -> Line | None:
    """The line to compare with: the last of this machine, else the last; of `commit` if given."""
    lines = [line for line in history if line.key == key]
    if commit is not None:
        lines = [line for line in lines if line.commit.startswith(commit)]
    here = [line for line in lines if line.machine == machine]
    return next(iter((here or lines)[-1:]), None)


def changes(
    history: Sequence[Line], results: Iterable[Record], commit: str | None = None
) -> list[Change]:
    """Each figure of a run beside the same one of the history. Raises BadLine."""
    records = list(results)
    then = {
        line.key: earlier(history, line.key, line.machine, commit) for line in lines_of(records)
    }
    peers = {key: line.peer for key, line in then.items() if line is not None}
    return [change(then[line.key], line) for line in lines_of(records, peers)]


def change(then: Line | None, now: Line) -> Change:
    """The rule of this file's head, for one figure."""
    if then is None:
        return Change(None, now, "unknown", "unknown", "no earlier line of this figure")
    if min(then.repeats, now.repeats) < REPEATS_MIN:
        why = f"{then.repeats} repeats then, {now.repeats} now: {REPEATS_MIN} wanted of both"
        return Change(then, now, "unknown", "unknown", why)
    reasons = []
    by_ratio: Verdict = "unknown"
    if then.peer is None:
        reasons.append("no peer was measured then")
    elif then.peer != now.peer:
        reasons.append(f"{then.peer} was not measured now")
    else:
        by_ratio = _verdict(
            now.figure,
            (then.ratio, then.ratio_low, then.ratio_high),
            (now.ratio, now.ratio_low, now.ratio_high),
        )
    by_figure: Verdict = "unknown"
    if then.machine != now.machine:
        reasons.append(f"then on another machine: {then.machine}")
    else:
        by_figure = _verdict(
            now.figure,
            (then.ours, then.ours_low, then.ours_high),
            (now.ours, now.ours_low, now.ours_high),
        )
    return Change(then, now, by_ratio, by_figure, "; ".join(reasons))


_Range = tuple[float | None, float | None, float | None]  # median, least, most


def _verdict(figure: str, then: _Range, now: _Range) -> Verdict:
    if None in then or None in now:
        return "unknown"
    (then_mid, then_low, then_high), (now_mid, now_low, now_high) = then, now
    assert then_mid is not None and then_low is not None and then_high is not None
    assert now_mid is not None and now_low is not None and now_high is not None
    if now_low <= then_high and then_low <= now_high:
        return "the same"
    return "better" if (now_mid > then_mid) == more_is_better(figure) else "worse"


def _line(record: Record, figure: str, good: list[Record], peers: Mapping[Key, str | None]) -> Line:
    key = (record["bench"], record["case"], record["candidate"], figure)
    ours, each = _value(record, figure), [float(value) for value in record["each"].get(figure, [])]
    peer = _peer(record, figure, good, peers.get(key))
    peers_figure = _value(peer, figure) if peer is not None else None
    ratios = []
    if peer is not None:
        others = peer["each"].get(figure, [])
        ratios = [float(mine / other) for mine, other in zip(each, others, strict=False) if other]
    facts = record["machine"]
    return Line(
        commit=record["commit"],
        date=record["date"],
        machine=Host(facts["cpu_model"], len(facts["cores"]), facts["kernel"], facts["python"]),
        doubt=facts["oversubscribed"],
        bench=record["bench"],
        case=record["case"],
        candidate=record["candidate"],
        figure=figure,
        unit=unit_of(figure),
        ours=ours,
        ours_low=min(each, default=None),
        ours_high=max(each, default=None),
        peer=peer["candidate"] if peer is not None else None,
        peers_figure=peers_figure,
        ratio=ours / peers_figure if peers_figure else None,
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        repeats=record["repeats"],
    )


def _peer(record: Record, figure: str, good: list[Record], wanted: str | None) -> Record | None:
    """Whom a result is compared with, in its own run."""
    others = [
        other
        for other in good
        if (other["bench"], other["case"]) == (record["bench"], record["case"])
        and other["role"] in ("peer", "limit")
        and _value(other, figure)
    ]
    peers = [other for other in others if other["role"] == "peer"]
    everywhere = [other for other in peers if other["version"] is None]
    named = [other for other in others if other["candidate"] == wanted]
    return next(iter(named or everywhere or peers or others), None)


def _value(record: Record, figure: str) -> float:
    """A figure's median; 0.0 where the result has none."""
    value = record[figure] if figure in record else record["figures"].get(figure)
    return float(value) if value is not None else 0.0
