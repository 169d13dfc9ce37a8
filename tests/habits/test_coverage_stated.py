"""Coverage of the deciders: each is measured or named, each is stated, and a loss is told."""

from __future__ import annotations

import pytest

from tests.imports import ROOT
from tests.scripts import script
from tests.test_architecture import PURE

SCRIPT = script("check_coverage")
Figure = SCRIPT.Figure
STATED = SCRIPT.stated(SCRIPT.DOCUMENT.read_text())


def test_each_pure_module_is_measured_or_said_to_be_tested_elsewhere() -> None:
    measured = SCRIPT.modules()
    assert len(set(measured)) == len(measured)
    assert not set(measured) & set(SCRIPT.ELSEWHERE)
    assert PURE.issubset({*measured, *SCRIPT.ELSEWHERE})


def test_each_measured_module_is_stated() -> None:
    assert list(STATED) == SCRIPT.modules()


def test_the_tests_that_count_are_there() -> None:
    for decider in SCRIPT.DECIDERS.values():
        for path in decider.tests:
            assert (ROOT / "tests" / path).exists(), path


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        (Figure(90, 100), "90 % of its lines, and 95 % is stated"),
        (Figure(100, 79), "79 % of its branches, and 80 % is stated"),
    ],
)
def test_a_module_below_what_is_stated_is_named(figure: tuple[int, int], why: str) -> None:
    (complaint,) = SCRIPT.complaints({"a.b": figure}, {"a.b": Figure(95, 80)})
    assert complaint == f"a.b: {why}"
    assert SCRIPT.complaints({"a.b": Figure(95, 80)}, {"a.b": Figure(95, 80)}) == []
    assert "not stated" in SCRIPT.complaints({"a.c": Figure(95, 80)}, {})[0]


def test_a_report_of_coverage_becomes_whole_percents_rounded_down() -> None:
    summary = {
        "num_statements": 3,
        "covered_lines": 2,
        "num_branches": 0,
        "covered_branches": 0,
    }
    report = {"files": {"a/b.py": {"summary": summary}, "a/__init__.py": {"summary": summary}}}
    assert SCRIPT.figures_of(report, ["a.b", "a"]) == dict.fromkeys(
        ["a.b", "a"], Figure(66, 100, 3, 0)
    )
    with pytest.raises(KeyError):
        SCRIPT.figures_of(report, ["a.c"])


def test_what_is_written_is_read_again() -> None:
    measured = {name: Figure(99, 98, 10, 20) for name in SCRIPT.modules()}
    read = SCRIPT.stated(SCRIPT.table(measured, "2026-11-23"))
    assert read == {name: Figure(99, 98) for name in SCRIPT.modules()}
