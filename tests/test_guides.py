"""docs/guides/: every program runs as pasted into a file, prints what stands below it, and uses
public names alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pasted import run_pasted

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\nprints\n\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# What programs import: the faces, and the modules that are public by their own name.
PARTS = (
    r"accumulator|cluster|ding|kv|kv\.jax|kv\.pslite|kv\.torch|metrics|ray|remote|simulation|"
    r"support|tensorflow|topics|vllm"
)
PUBLIC = rf"(?:shard|prpc_engine(?:\.(?:{PARTS}))?)"


def programs() -> list[tuple[Path, str, str | None]]:
    """Guide, code, and what it should print."""
    return [
        (guide, match["code"], match["printed"])
        for guide in GUIDES
        for match in PROGRAM.finditer(guide.read_text())
    ]


PROGRAMS = programs()
NAMES = [f"{guide.stem}-{number}" for number, (guide, _, _) in enumerate(PROGRAMS)]


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "code", "printed"), PROGRAMS, ids=NAMES)
def test_a_program_runs_as_pasted_and_prints_what_stands_below_it(
    guide: Path, code: str, printed: str | None, tmp_path: Path
) -> None:
    ran = run_pasted(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    if printed is not None:
        assert ran.stdout == printed
    assert "Traceback" not in ran.stderr
    assert "Warning" not in ran.stderr


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_program_of_a_guide_is_run_and_most_say_what_they_print(guide: Path) -> None:
    found = [printed for path, _, printed in PROGRAMS if path == guide]
    assert len(found) == len(re.findall(r"^```python$", guide.read_text(), re.MULTILINE)) >= 1
    assert any(found)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_programs_import_public_names_alone(guide: Path) -> None:
    imported = re.findall(
        r"^\s*(?:from|import) ((?:shard|prpc_engine)[\w.]*)", guide.read_text(), re.MULTILINE
    )
    assert imported
    assert not [name for name in imported if not re.fullmatch(PUBLIC, name)]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_file_that_a_guide_points_at_is_there(guide: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", guide.read_text())
    assert not [
        target for target in targets if "://" not in target and not (guide.parent / target).exists()
    ]


def test_there_is_a_guide_for_each_subject() -> None:
    assert {guide.stem for guide in GUIDES} == {
        "calls",
        "arrays",
        "tables",
        "checkpoints",
        "consistency",
        "clusters",
        "ding",
        "hosts",
        "metrics",
        "pslite",
        "ray",
        "rdma",
        "remote",
        "shards",
        "simulation",
        "topics",
    }
