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

What a field may hold stands at the classes below, so that a file of others, or a damaged one, is
refused by the field's name, and no text of it reaches a terminal as more than text.

No files, no clock and no git in this file; history_file.py has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

REPEATS_MIN = 3  # in both runs: of two, one pair in three comes apart by chance
Verdict = Literal["better", "worse", "the same", "unknown"]
Key = tuple[str, str, str, str]  # bench, case, candidate, figure
Record = Mapping[str, Any]
# Far above any figure (thirty years in ns, an exabyte), and far below where ratios lose digits.
FIGURE_MAX = 1e18
CORES_MAX = 4096  # Linux knows no more by default on any machine
REPEATS_MAX = 1_000_000  # a benchmark may count what it repeats within one process
TEXT_LENGTH_MAX = 1000  # a doubt with all its reasons has some 200
# Units by the end of a figure's name. What has none of these counts or describes, and is not kept.
UNITS = {"_per_s": "1/s", "_ns": "ns", "_bytes": "B", "_percent": "%"}


Figure = Annotated[float, msgspec.Meta(ge=-FIGURE_MAX, le=FIGURE_MAX)]  # neither nan nor inf
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]
Commit = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._-]{1,64}\+?\Z")]
Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")]


class BadLine(ValueError):
    """What was read is no line of a history, or no result of a run."""


class _Plain(msgspec.Struct, frozen=True):
    """A record whose texts are one line each, without what would steer a terminal."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"{name} {value!r} has characters that cannot be printed")


class Host(_Plain, frozen=True, forbid_unknown_fields=True):
    """What must be equal before figures of two runs are compared by themselves."""

    cpu_model: Text
    cores: Annotated[int, msgspec.Meta(ge=1, le=CORES_MAX)]
    kernel: Text
    python: Text

    def __str__(self) -> str:
        return f"{self.cpu_model}, {self.cores} cores, Linux {self.kernel}, Python {self.python}"


class Line(_Plain, frozen=True, forbid_unknown_fields=True):
    """One figure; the fields are those of the table above, in its order."""

    commit: Commit
    date: Date
    machine: Host
    doubt: Text
    bench: Text
    case: Text
    candidate: Text
    figure: Text
    unit: Text
    ours: Figure
    ours_low: Figure | None
    ours_high: Figure | None
    peer: Text | None
    peers_figure: Figure | None
    ratio: Figure | None
    ratio_low: Figure | None
    ratio_high: Figure | None
    repeats: Annotated[int, msgspec.Meta(ge=1, le=REPEATS_MAX)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ours", "ratio"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if (low is None) != (high is None) or (low is not None and low > high):
                raise ValueError(f"{name}_low {low} is not below {name}_high {high}")

    @property
    def key(self) -> Key:
        """What the same figure of another run has too."""
        return self.bench, self.case, self.candidate, self.figure


class _Facts(_Plain, frozen=True):
    """Of perf.machine.Machine, what a line keeps."""

    cpu_model: Text
    cores: Annotated[list[int], msgspec.Meta(min_length=1, max_length=CORES_MAX)]
    kernel: Text
    python: Text
    oversubscribed: Text


class Measured(_Plain, frozen=True):
    """A result as `prpc bench --json` prints it: the fields that a line is made of."""

    commit: Commit
    date: Date
    machine: _Facts
    bench: Text
    case: Text
    candidate: Text
    role: Literal["ours", "peer", "limit", "given"]
    state: Text
    version: Text | None
    repeats: Annotated[int, msgspec.Meta(ge=0, le=REPEATS_MAX)]
    p50_ns: Figure | None
    ops_per_s: Figure | None
    figures: dict[str, Figure]
    each: dict[str, list[Figure]]

    @property
    def kept(self) -> list[str]:
        """The names of the figures that are kept."""
        if self.p50_ns is not None:
            return ["p50_ns"]
        if self.ops_per_s is not None:
            return ["ops_per_s"]
        return [name for name in self.figures if unit_of(name)]

    def value(self, figure: str) -> float:
        """A figure's median; 0.0 where the result has none."""
        own = {"p50_ns": self.p50_ns, "ops_per_s": self.ops_per_s}
        return own.get(figure, self.figures.get(figure)) or 0.0


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
    plain: dict[str, Any] = msgspec.to_builtins(line)
    return plain


def line_of(text: bytes) -> Line:
    """The line that stands there as JSON. Raises BadLine."""
    try:
        return msgspec.json.decode(text, type=Line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"no line of a history: {error}") from error


def lines_of(
    results: Iterable[Record], peers: Mapping[Key, str | None] | None = None
) -> list[Line]:
    """The lines of one run, from its `result` records. Raises BadLine.

    `peers` names whom to take for a figure, where it was measured.
    """
    measured = [_measured(record) for record in results if record.get("kind") == "result"]
    good = [each for each in measured if each.state == "ok"]
    try:
        return [
            msgspec.convert(_fields(each, figure, good, peers or {}), type=Line)
            for each in good
            if each.role == "ours"
            for figure in each.kept
        ]
    except ValueError as error:
        raise BadLine(f"results that make no line of a history: {error}") from error


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


def _measured(record: Record) -> Measured:
    try:
        return msgspec.convert(record, type=Measured)
    except (ValueError, OverflowError) as error:
        raise BadLine(
            f"no result as `prpc bench --json` of this release writes it: {error}"
        ) from error


def _fields(
    ours: Measured, figure: str, good: list[Measured], peers: Mapping[Key, str | None]
) -> Record:
    """Of the line of one figure."""
    peer = _peer(ours, figure, good, peers.get((ours.bench, ours.case, ours.candidate, figure)))
    peers_figure = peer.value(figure) if peer is not None else None
    each = ours.each.get(figure, [])
    others = peer.each.get(figure, []) if peer is not None else []
    ratios = [mine / other for mine, other in zip(each, others, strict=False) if other]
    facts = ours.machine
    return {
        "commit": ours.commit,
        "date": ours.date,
        "machine": Host(facts.cpu_model, len(facts.cores), facts.kernel, facts.python),
        "doubt": facts.oversubscribed,
        "bench": ours.bench,
        "case": ours.case,
        "candidate": ours.candidate,
        "figure": figure,
        "unit": unit_of(figure),
        "ours": ours.value(figure),
        "ours_low": min(each, default=None),
        "ours_high": max(each, default=None),
        "peer": peer.candidate if peer is not None else None,
        "peers_figure": peers_figure,
        "ratio": ours.value(figure) / peers_figure if peers_figure else None,
        "ratio_low": min(ratios, default=None),
        "ratio_high": max(ratios, default=None),
        "repeats": ours.repeats,
    }


def _peer(ours: Measured, figure: str, good: list[Measured], wanted: str | None) -> Measured | None:
    """Whom a result is compared with, in its own run."""
    others = [
        other
        for other in good
        if (other.bench, other.case) == (ours.bench, ours.case)
        and other.role in ("peer", "limit")
        and other.value(figure)
    ]
    peers = [other for other in others if other.role == "peer"]
    everywhere = [other for other in peers if other.version is None]
    named = [other for other in others if other.candidate == wanted]
    return next(iter(named or everywhere or peers or others), None)
