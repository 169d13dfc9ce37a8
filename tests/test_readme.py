"""README.md keeps what it shows: its code runs and prints what stands below it, and its commands
are those of CI.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.pasted import run_pasted

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_code_runs_as_pasted_and_prints_what_stands_below_it(tmp_path: Path) -> None:
    (code,) = blocks("python")
    printed = blocks("text")[0]
    ran = run_pasted(code, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == printed


def test_the_code_is_about_twenty_lines() -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 22


def test_each_of_the_two_commands_is_one_line() -> None:
    demo, tests = blocks("sh")
    for command, ending in (
        (demo, ".venv/bin/prpc demo\n"),
        (tests, ".venv/bin/pytest -n auto -m 'not slow'\n"),
    ):
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && ")
        assert command.endswith(f" && {ending}")


def test_ci_takes_its_commands_from_here() -> None:
    """.ci/run reads the first sh block under a heading; those headings are there."""
    script = (ROOT / ".ci" / "run").read_text()
    headings = re.findall(r"readme_command '(.+?)'", script)
    assert len(headings) == 2
    for heading in headings:
        assert len(re.findall(rf"^#+ .*{heading}.*$", README, re.MULTILINE)) == 1


def test_every_file_it_points_at_is_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing
