"""What `prpc top` shows of two looks at a job, as rows. No I/O and no clock here.

    column        of one process: a node, a shard, or the master
    who           "rank 2", "rank 2, shard", "master"
    process       its pid; None where it did not answer
    served_per_s  requests and notifications whose handlers ran or were queued, of all its servers
    made_per_s    requests that it sent
    p50_us        of its handlers between the two looks, an upper bound within a factor of two; None
      p99_us      without RpcService(timing=True), and where nothing ran
    running       handlers that run as tasks now
    queued        requests that wait for one of those to end
    failures      handlers that raised, so far
    rejected      requests that were refused, so far
    in_mb_s       that came over its connections
    out_mb_s      that left
    outbox        messages that wait for their peers to read
    leases        of its slab's blocks, held by peers
    leased_mb     in those blocks
    lease_age_s   of the oldest
    classes       {name: what it did between the two looks} of the classes of its work: latency,
                  bulk, those of the user; of those that have ever had some, of latency where there
                  are others: alone it is not timed
      busy_pct      of the time, its steps ran
      steps_per_s   that ended: plain functions, and the pieces of a task between two awaits
      waiting       in its queue now
    waits_for     {who: calls} that it has in flight, where there are any
    error         why it did not answer, else ""

A process is known by its first address, which is of one incarnation. Rates are None where it was
not there at the first look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shard import quantile_ns

HEADINGS = (
    ("who", "who"),
    ("process", "pid"),
    ("served_per_s", "served/s"),
    ("made_per_s", "made/s"),
    ("p50_us", "p50 us"),
    ("p99_us", "p99 us"),
    ("running", "running"),
    ("queued", "queued"),
    ("failures", "failed"),
    ("rejected", "refused"),
    ("in_mb_s", "in MB/s"),
    ("out_mb_s", "out MB/s"),
    ("outbox", "outbox"),
    ("leases", "leases"),
    ("leased_mb", "leased MB"),
    ("lease_age_s", "oldest s"),
    ("classes", "classes"),
    ("waits_for", "waits for"),
)


@dataclass(frozen=True)
class NodeAnswer:
    """What one process said at one look: `figures` as about.py has them, or why there are none."""

    who: str
    addresses: tuple[str, ...]
    figures: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class ClassRow:
    """What one class of work of a process did between two looks. None: it was not there at the
    first one.
    """

    busy_pct: float | None
    steps_per_s: float | None
    waiting: int

    def __str__(self) -> str:
        return f"{_cell(self.busy_pct)} %, {_cell(self.steps_per_s)}/s, {self.waiting} wait"


@dataclass(frozen=True)
class Row:
    """What `prpc top` shows of one process: what it did between two looks, and how it stands.

    Made by rows(). None: there is nothing to tell it from. Columns and units: the list at the
    file's head.
    """

    who: str
    process: int | None = None
    served_per_s: float | None = None
    made_per_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    running: int = 0
    queued: int = 0
    failures: int = 0
    rejected: int = 0
    in_mb_s: float | None = None
    out_mb_s: float | None = None
    outbox: int = 0
    leases: int = 0
    leased_mb: float = 0.0
    lease_age_s: float = 0.0
    classes: Mapping[str, ClassRow] = field(default_factory=dict)
    waits_for: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def rows(before: Iterable[NodeAnswer], now: Iterable[NodeAnswer], elapsed_s: float) -> list[Row]:
    """A row for each process of the second look, in its order; the first was `elapsed_s` before."""
    earlier = {answer.addresses[0]: answer.figures for answer in before}
    answers = list(now)
    names = {address: answer.who for answer in answers for address in answer.addresses}
    return [_row(answer, earlier.get(answer.addresses[0]), elapsed_s, names) for answer in answers]


def _row(
    answer: NodeAnswer,
    earlier: Mapping[str, Any] | None,
    elapsed_s: float,
    names: Mapping[str, str],
) -> Row:
    figures = answer.figures
    if figures is None:
        return Row(answer.who, error=answer.error)
    servers, slab = figures["servers"].values(), figures["slab"]
    rates: list[float | None] = [None] * 4
    if earlier is not None:
        # A connection that ends in the middle of its bytes' being counted may count a few fewer:
        # less than before is nothing.
        pairs = zip(_totals(figures), _totals(earlier), strict=True)
        rates = [max(0, total - before) / elapsed_s for total, before in pairs]
    served, made, bytes_in, bytes_out = rates
    buckets = _buckets(figures, earlier)
    return Row(
        answer.who,
        int(figures["process"].split("/")[-2]),
        served,
        made,
        _quantile_us(buckets, 0.5),
        _quantile_us(buckets, 0.99),
        sum(server["tasks"] for server in servers),
        sum(server["queued"] for server in servers),
        sum(server["failures"] for server in servers),
        sum(server["rejected"] for server in servers),
        None if bytes_in is None else bytes_in / 1e6,
        None if bytes_out is None else bytes_out / 1e6,
        sum(peer["outbox_messages"] for peer in figures["peers"]),
        slab["leases"],
        slab["leased_bytes"] / 1e6,
        slab["lease_age_s_max"],
        _classes(figures, earlier, elapsed_s),
        _waits(figures["peers"], names),
    )


def _totals(figures: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Requests served and made, bytes received and sent."""
    # What went over connections that are over counts on: rates are of all, and never fall.
    peers = [*figures["peers"], *figures["ended"].values()]
    return (
        sum(server["requests"] for server in figures["servers"].values()),
        sum(peer["requests"] for peer in peers),
        sum(peer["traffic"]["bytes_received"] for peer in peers),
        sum(peer["traffic"]["bytes_sent"] for peer in peers),
    )


def _buckets(figures: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> list[int]:
    """How many handlers took how long since then, of all servers and methods."""
    total: list[int] = []
    for sign, one in ((1, figures), (-1, earlier)):
        for server in one["servers"].values() if one is not None else ():
            for timing in server["timings"].values():
                total = [
                    count + sign * more
                    for count, more in zip_longest(total, timing["buckets"], fillvalue=0)
                ]
    return [max(0, count) for count in total]


def _quantile_us(buckets: list[int], share: float) -> float | None:
    return quantile_ns(buckets, share) / 1e3 if any(buckets) else None


def _classes(
    figures: Mapping[str, Any], earlier: Mapping[str, Any] | None, elapsed_s: float
) -> dict[str, ClassRow]:
    before = {one["name"]: one for one in (earlier or {}).get("classes", ())}
    found = {}
    for one in figures["classes"]:
        if one["steps"] or one["waiting"]:
            busy_pct = steps_per_s = None
            if earlier is not None:
                # one that is new has done all of it since
                was = before.get(one["name"], {"busy_ns": 0, "steps": 0})
                busy_pct = (one["busy_ns"] - was["busy_ns"]) / 1e7 / elapsed_s
                steps_per_s = (one["steps"] - was["steps"]) / elapsed_s
            found[one["name"]] = ClassRow(busy_pct, steps_per_s, one["waiting"])
    return found


def _waits(peers: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, int]:
    waits: dict[str, int] = {}
    for peer in peers:
        if peer["in_flight"]:
            choice = peer["choice"]
            who = names.get(choice["node"] if choice is not None else peer["peer"], peer["peer"])
            waits[who] = waits.get(who, 0) + peer["in_flight"]
    return waits


def cells(row: Row) -> list[str]:
    """For people, in the order of HEADINGS."""
    if row.error:
        return [row.who, "silent", *["-"] * (len(HEADINGS) - 2)]
    return [_cell(getattr(row, name)) for name, _ in HEADINGS]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({what})" for name, what in value.items())
    return str(value)
