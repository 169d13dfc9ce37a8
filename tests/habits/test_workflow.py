"""The workflow runs what .ci/run has, and the other targets name it: all are read here as text.

A parser of YAML would be one more package to install; the two lists that matter are one line each.
"""

from __future__ import annotations

import re

from tests.imports import ROOT

WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
SCRIPT = (ROOT / ".ci" / "run").read_text()
OWN = "3.11"  # the Python of the stages


def found(pattern: str, text: str) -> re.Match[str]:
    """The only place where a pattern is, at the beginning of a line."""
    (match,) = re.finditer(pattern, text, re.MULTILINE)
    return match


STAGES = found(r"^STAGES=\((.*)\)", SCRIPT)[1].split()
PYTHONS = found(r"^PYTHONS=\((.*)\)", SCRIPT)[1].split()
LISTED = found(r"^        stage: \[(.*)\]", WORKFLOW)[1].split(", ")
INCLUDED = re.findall(r'^          - \{stage: (\w+), python: "([\d.]+)"\}', WORKFLOW, re.MULTILINE)


def test_each_stage_is_a_job_and_each_job_a_stage() -> None:
    assert sorted({*LISTED, *(stage for stage, _ in INCLUDED)}) == sorted(STAGES)
    assert len(set(LISTED)) == len(LISTED)


def test_each_python_is_a_job_of_its_own() -> None:
    assert {stage for stage, _ in INCLUDED} == {"pythons"}
    assert [OWN, *(python for _, python in INCLUDED)] == sorted(
        PYTHONS, key=lambda each: each != OWN
    )
    assert found(r'^        python: \["([\d.]+)"\]', WORKFLOW)[1] == OWN


def test_pyproject_allows_the_first_of_these_pythons() -> None:
    allowed = found(r'^requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert allowed[1] == PYTHONS[0]


def test_a_job_may_read_and_has_no_secret() -> None:
    assert found(r"^permissions:\n((?: .*\n)+)", WORKFLOW)[1].split() == ["contents:", "read"]
    assert "secrets" not in WORKFLOW
    assert "pull_request_target" not in WORKFLOW, "it would run others' code with our rights"
    assert "persist-credentials: false" in WORKFLOW


def test_a_job_has_more_time_than_its_stage() -> None:
    limits = map(
        int, re.findall(r"\[\w+\]=(\d+)", found(r"^declare -A LIMIT_S=\((.*)\)", SCRIPT)[1])
    )
    assert int(found(r"^    timeout-minutes: (\d+)", WORKFLOW)[1]) * 60 > max(limits)


def test_each_stage_is_a_target_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert found(r"^STAGES := (.*)$", makefile)[1].split() == STAGES


def test_no_entry_of_the_matrix_is_written_in_another_form() -> None:
    """Then the tests above would not see it."""
    matrix = found(r"^      matrix:\n((?:        .*\n)+)", WORKFLOW)[1]
    entries = [line for line in matrix.splitlines() if line.startswith("          ")]
    assert len(entries) == len(INCLUDED)
    keys = [line.split(":")[0].strip() for line in matrix.splitlines() if line not in entries]
    assert keys == ["stage", "python", "include"]
