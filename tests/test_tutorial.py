"""shard/README.md keeps what it shows: each program runs as pasted into a file, and prints what
stands below it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shard
from tests.pasted import run_pasted

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "shard" / "README.md"
TEXT = TUTORIAL.read_text()
PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\nprints\n\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def programs() -> dict[str, tuple[str, str | None]]:
    """Code, and what it should print, by the heading it stands under."""
    found = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        for match in PROGRAM.finditer(section):
            assert heading not in found, f"two programs under {heading!r}"
            found[heading] = match["code"], match["printed"]
    return found


PROGRAMS = programs()


@pytest.mark.slow
@pytest.mark.parametrize("heading", PROGRAMS)
def test_a_program_runs_as_pasted_and_prints_what_stands_below_it(
    heading: str, tmp_path: Path
) -> None:
    code, printed = PROGRAMS[heading]
    ran = run_pasted(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed
    assert "Traceback" not in ran.stderr
    assert "Warning" not in ran.stderr


def test_every_program_is_run() -> None:
    assert len(PROGRAMS) == len(re.findall(r"^```python$", TEXT, re.MULTILINE)) >= 7
    assert all('if __name__ == "__main__":' in code for code, _ in PROGRAMS.values())


def test_every_name_of_shard_that_it_speaks_of_is_exported() -> None:
    named = set(
        re.findall(r"\bshard\.([A-Za-z_]\w*)", "".join(code for code, _ in PROGRAMS.values()))
    )
    assert named <= set(shard.__all__), named - set(shard.__all__)


def test_every_file_it_points_at_is_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    assert not [
        target
        for target in targets
        if "://" not in target and not (TUTORIAL.parent / target).exists()
    ]
