"""What has changed between two runs: the rule of perf/change.py, on made-up figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from perf.change import (
    BadLine,
    Change,
    Host,
    change,
    changes,
    earlier,
    line_of,
    line_record,
    lines_of,
)

MACHINE = {
    "cpu_model": "A CPU",
    "cores": [0, 1],
    "kernel": "6.1",
    "python": "3.11.7",
    "oversubscribed": "",
}
HERE = Host("A CPU", 2, "6.1", "3.11.7")


def result(
    candidate: str,
    each: list[float],
    *,
    role: str = "ours",
    figure: str = "p50_ns",
    commit: str = "aaaa",
    version: str | None = None,
    machine: Mapping[str, Any] = MACHINE,
) -> dict[str, Any]:
    """One candidate of a run, as `--json` prints it."""
    middle = sorted(each)[len(each) // 2]
    own = figure not in ("p50_ns", "ops_per_s")
    return {
        "kind": "result",
        "commit": commit,
        "date": "2026-11-23T05:00:00Z",
        "machine": dict(machine),
        "bench": "rpc",
        "case": "call, 64 B",
        "candidate": candidate,
        "role": role,
        "state": "ok",
        "version": version,
        "repeats": len(each),
        "p50_ns": middle if figure == "p50_ns" else None,
        "ops_per_s": middle if figure == "ops_per_s" else None,
        "figures": {figure: middle} if own else {},
        "each": {figure: each},
    }


def compared(
    then: list[dict[str, Any]], now: list[dict[str, Any]], commit: str | None = None
) -> Change:
    """The only figure of two runs."""
    (found,) = changes(lines_of(then), now, commit)
    return found


def test_a_line_has_ours_beside_the_peer_of_the_same_run() -> None:
    run = [result("ours", [9.0, 10.0, 12.0]), result("pipe", [90.0, 100.0, 60.0], role="peer")]
    (line,) = lines_of(run)
    assert (line.case, line.candidate, line.figure, line.unit) == (
        "call, 64 B",
        "ours",
        "p50_ns",
        "ns",
    )
    assert (line.ours, line.ours_low, line.ours_high) == (10.0, 9.0, 12.0)
    assert (line.peer, line.peers_figure, line.ratio) == ("pipe", 90.0, 10 / 90)
    assert (line.ratio_low, line.ratio_high) == (9 / 90, 12 / 60), "the repeats go pair by pair"
    assert line.machine == HERE
    assert line_of(as_json(line_record(line))) == line


def test_the_peer_is_one_that_every_machine_has() -> None:
    ours = result("ours", [1.0] * 3)
    installed = result("pyzmq", [2.0] * 3, role="peer", version="27.0")
    pipe = result("pipe", [3.0] * 3, role="peer")
    limit = result("flags", [0.5] * 3, role="limit")
    assert [line.peer for line in lines_of([ours, installed, limit, pipe])] == ["pipe"]
    assert [line.peer for line in lines_of([ours, limit, installed])] == ["pyzmq"]
    assert [line.peer for line in lines_of([ours, limit])] == ["flags"]
    assert [line.peer for line in lines_of([ours])] == [None]


def test_a_peer_that_failed_or_of_another_case_is_not_compared_with() -> None:
    failed = {**result("pipe", [3.0] * 3, role="peer"), "state": "failed"}
    elsewhere = {**result("socket", [3.0] * 3, role="peer"), "case": "idle"}
    (line,) = lines_of([result("ours", [1.0] * 3), failed, elsewhere])
    assert (line.peer, line.ratio) == (None, None)


@pytest.mark.parametrize(
    ("figure", "now", "verdict"),
    [
        ("p50_ns", [11.0, 12.0, 13.0], "the same"),  # 12 was seen then
        ("p50_ns", [12.5, 13.0, 14.0], "worse"),
        ("p50_ns", [6.0, 7.0, 8.0], "better"),
        ("ops_per_s", [12.5, 13.0, 14.0], "better"),
        ("ops_per_s", [6.0, 7.0, 8.0], "worse"),
        ("client_cpu_percent", [12.5, 13.0, 14.0], "worse"),
    ],
)
def test_a_figure_has_changed_where_the_ranges_of_the_repeats_do_not_meet(
    figure: str, now: list[float], verdict: str
) -> None:
    pipe = result("pipe", [100.0] * 3, role="peer", figure=figure)
    then = [result("ours", [9.0, 10.0, 12.0], figure=figure), pipe]
    found = compared(then, [result("ours", now, figure=figure), pipe])
    assert (found.by_ratio, found.by_figure, found.why) == (verdict, verdict, "")


def test_a_machine_that_was_slow_for_both_changes_the_figure_and_not_the_ratio() -> None:
    then = [result("ours", [9.0, 10.0, 12.0]), result("pipe", [90.0, 100.0, 120.0], role="peer")]
    now = [result("ours", [18.0, 20.0, 24.0]), result("pipe", [180.0, 200.0, 240.0], role="peer")]
    found = compared(then, now)
    assert (found.by_ratio, found.by_figure) == ("the same", "worse")


@pytest.mark.parametrize(
    "other", [{"cpu_model": "B CPU"}, {"cores": [0]}, {"kernel": "6.2"}, {"python": "3.12.1"}]
)
def test_figures_of_another_machine_are_not_compared_and_ratios_are(other: dict[str, Any]) -> None:
    pipe = result("pipe", [100.0] * 3, role="peer")
    then = [result("ours", [9.0, 10.0, 12.0], machine={**MACHINE, **other}), pipe]
    found = compared(then, [result("ours", [20.0, 21.0, 22.0]), pipe])
    assert (found.by_ratio, found.by_figure) == ("worse", "unknown")
    assert "another machine" in found.why


def test_the_peer_of_the_earlier_line_is_taken_where_it_was_measured_again() -> None:
    zmq = result("pyzmq", [50.0] * 3, role="peer", version="27.0")
    pipe = result("pipe", [100.0] * 3, role="peer")
    ours = result("ours", [9.0, 10.0, 12.0])
    found = compared([ours, zmq], [ours, pipe, zmq])
    assert (found.now.peer, found.by_ratio) == ("pyzmq", "the same")
    found = compared([ours, zmq], [ours, pipe])
    assert (found.by_ratio, found.by_figure) == ("unknown", "the same")
    assert found.why == "pyzmq was not measured now"
    assert compared([ours], [ours, pipe]).why == "no peer was measured then"


def test_two_repeats_say_nothing() -> None:
    pipe = result("pipe", [100.0] * 2, role="peer")
    found = compared([result("ours", [9.0, 10.0]), pipe], [result("ours", [50.0, 60.0]), pipe])
    assert (found.by_ratio, found.by_figure) == ("unknown", "unknown")
    assert "3 wanted" in found.why


def test_a_run_whose_repeats_were_not_kept_has_no_verdict() -> None:
    bare = {**result("ours", [9.0, 10.0, 12.0]), "each": {}}
    (line,) = lines_of([bare])
    assert (line.ours_low, line.ratio_low) == (None, None)
    assert change(line, line).by_figure == "unknown"


def test_a_figure_that_no_line_has_is_said_to_be_new() -> None:
    then = lines_of([result("another way", [1.0] * 3)])
    (found,) = changes(then, [result("ours", [1.0] * 3)])
    assert found.then is None
    assert "no earlier line" in found.why


def test_the_earlier_line_is_the_last_of_this_machine_or_else_the_last() -> None:
    far = {**MACHINE, "cpu_model": "B CPU"}
    history = lines_of(
        [
            result("ours", [1.0] * 3, commit="aaaa"),
            result("ours", [2.0] * 3, commit="bbbb"),
            result("ours", [3.0] * 3, commit="cccc", machine=far),
        ]
    )
    key = history[0].key

    def commit(machine: Host, wanted: str | None = None) -> str | None:
        line = earlier(history, key, machine, wanted)
        return line.commit if line else None

    assert commit(HERE) == "bbbb"
    assert commit(Host("B CPU", 2, "6.1", "3.11.7")) == "cccc"
    assert commit(Host("C CPU", 2, "6.1", "3.11.7")) == "cccc"
    assert commit(HERE, "aa") == "aaaa"
    assert commit(HERE, "cccc") == "cccc"
    assert commit(HERE, "dddd") is None


def test_what_only_counts_or_describes_is_not_kept() -> None:
    record = result("ours", [1.0] * 3, figure="messages")
    assert lines_of([record]) == []
    (line,) = lines_of([{**record, "figures": {"messages": 3.0, "server_bytes": 4.0}}])
    assert line.figure == "server_bytes"


@pytest.mark.parametrize("missing", ["commit", "each", "machine", "state"])
def test_a_result_of_another_release_is_refused_with_the_field_it_lacks(missing: str) -> None:
    record = result("ours", [1.0] * 3)
    del record[missing]
    with pytest.raises(BadLine, match=missing):
        lines_of([record])


def as_json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("ours", "x", "got `str` - at `$.ours`"),
        ("ours", None, "got `null` - at `$.ours`"),
        ("ours_low", [1], "got `array` - at `$.ours_low`"),
        pytest.param("ours", 10**400, "out of range - at `$.ours`", id="a huge figure"),
        ("ours", float("inf"), "malformed"),
        ("ratio", float("nan"), "malformed"),
        ("ours_low", 99.0, "ours_low 99.0 is not below ours_high 12.0"),
        ("ours_low", None, "ours_low None is not below"),
        ("repeats", -5, ">= 1 - at `$.repeats`"),
        pytest.param("repeats", 10**400, "<= 1000000 - at `$.repeats`", id="huge repeats"),
        ("date", 5, "`$.date`"),
        ("date", "yesterday", "`$.date`"),
        ("machine", "x", "got `str` - at `$.machine`"),
        ("machine", {"cpu_model": "A CPU"}, "missing required field `cores` - at `$.machine`"),
        ("commit", "../../x", "`$.commit`"),
        ("commit", "aaaa\n", "`$.commit`"),
        ("case", "\x1b[31mRED", "cannot be printed"),
        pytest.param("case", "x" * 5000, "length <= 1000 - at `$.case`", id="a long case"),
        ("doubt", "all is well\u202e", "cannot be printed"),
        ("colour", 1, "unknown field `colour`"),
    ],
)
def test_a_line_that_no_run_wrote_is_refused_by_the_field(
    field: str, value: object, why: str
) -> None:
    (line,) = lines_of([result("ours", [9.0, 10.0, 12.0])])
    with pytest.raises(BadLine) as raised:
        line_of(as_json({**line_record(line), field: value}))
    assert why in str(raised.value)
    assert str(raised.value).startswith("no line of a history: ")
    assert str(raised.value).isprintable(), "one line, and no escape of a terminal"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("each", None, "`$.each`"),
        ("each", {"p50_ns": ["x"]}, "`$.each[...][0]`"),
        ("p50_ns", float("nan"), "`$.p50_ns`"),
        ("machine", 5, "`$.machine`"),
        ("repeats", -1, "`$.repeats`"),
        ("candidate", "a\nb", "cannot be printed"),
        ("repeats", 0, "`$.repeats`"),
    ],
)
def test_a_result_that_no_run_printed_is_refused_by_the_field(
    field: str, value: object, why: str
) -> None:
    with pytest.raises(BadLine) as raised:
        lines_of([{**result("ours", [1.0] * 3), field: value}])
    assert why in str(raised.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"{}", b'{"commit": "\xff"}', b"[" * 100_000])
def test_what_is_no_object_is_no_line(text: bytes) -> None:
    with pytest.raises(BadLine, match="no line of a history"):
        line_of(text)
