"""Fragments of changelog.d/, the releases made from them, and the version that all state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import prpc_engine
from tests.imports import ROOT
from tests.scripts import script

TEXT = """# Changelog

Words before.

## [Unreleased]

### Added

- By hand.

### Fixed

- A slow start.
"""


@pytest.fixture(scope="module")
def changelog() -> ModuleType:
    return script("changelog")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with two fragments."""
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").write_text("# About\n")
    (tmp_path / "changelog.d" / "bench-compare.added.md").write_text("Runs are\ncompared.\n")
    (tmp_path / "changelog.d" / "0042.removed.md").write_text(
        "Breaking: `old()` is gone; call `new()`.\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(TEXT)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    (tmp_path / "prpc_engine").mkdir()
    (tmp_path / "prpc_engine" / "release.py").write_text('VERSION = "0.1.0"\n')
    return tmp_path


def test_all_fragments_of_this_tree_are_well_formed(changelog: ModuleType) -> None:
    assert changelog.complaints(changelog.files_of(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a thing.added.md", "A thing.", "slug"),
        ("thing.added.txt", "A thing.", "slug"),
        ("thing.md", "A thing.", "slug"),
        ("Thing.added.md", "A thing.", "slug"),
        ("thing.fxied.md", "A thing.", "there are: added, changed, fixed, removed"),
        ("thing.added.md", "\n", "empty"),
        ("thing.added.md", "- A thing.", "begins with '-'"),
        ("thing.added.md", "## A thing.", "begins with '#'"),
        ("thing.added.md", "A thing", "full stop"),
        ("thing.added.md", "A thing.\n\nAnother.", "second file"),
        ("thing.added.md", "A thing. " * 40 + "End.", "at most 150"),
        ("thing.added.md", "Breaking: a thing.", "what breaks is changed or removed"),
        ("thing.changed.md", "breaking: a thing.", "'Breaking: ' is the word"),
        ("thing.changed.md", "BREAKING:a thing.", "'Breaking: ' is the word"),
        ("thing.removed.md", "A thing is gone.", "say what to use instead"),
    ],
)
def test_a_malformed_fragment_is_named_with_what_is_wrong(
    changelog: ModuleType, name: str, text: str, why: str
) -> None:
    (complaint,) = changelog.complaints({name: text, "fine.fixed.md": "Fine."})
    assert complaint.startswith(name)
    assert why in complaint


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(b"A \xff thing."), "no UTF-8"),
        (lambda path: path.mkdir(), "no regular file"),
        (lambda path: path.symlink_to("/etc/hostname"), "no regular file"),
        (lambda path: path.symlink_to("nowhere"), "no regular file"),
    ],
)
@pytest.mark.parametrize("command", [["check"], ["show"], ["release", "0.2.0"]])
def test_what_is_no_text_is_told_in_one_line(
    changelog: ModuleType,
    tree: Path,
    spoil: Callable[[Path], object],
    why: str,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(tree / "changelog.d" / "a.added.md")
    assert changelog.main(command, tree) == 1
    told = capsys.readouterr().err
    assert told.startswith("changelog.d/a.added.md is ")
    assert why in told
    assert told.count("\n") == 1


def test_an_entry_may_begin_in_bold(changelog: ModuleType) -> None:
    assert (
        changelog.complaints(
            {"0012.changed.md": "**There is always a secret.** Its file is `~/.prpc/secret`."}
        )
        == []
    )


def test_a_release_moves_what_was_unreleased_and_the_fragments(
    changelog: ModuleType, tree: Path
) -> None:
    changelog.release(tree, "0.2.0", "2026-11-23")
    assert (tree / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nWords before.\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-23\n\n"
        "### Added\n\n- Runs are\n  compared.\n- By hand.\n\n"
        "### Changed: what users must look at\n\n- `old()` is gone; call `new()`.\n\n"
        "### Fixed\n\n- A slow start.\n"
    )
    assert [path.name for path in (tree / "changelog.d").iterdir()] == ["README.md"]
    assert 'version = "0.2.0"' in (tree / "pyproject.toml").read_text()
    assert (tree / "prpc_engine" / "release.py").read_text() == 'VERSION = "0.2.0"\n'


def test_a_second_release_leaves_the_first_as_it_is(changelog: ModuleType, tree: Path) -> None:
    changelog.release(tree, "0.2.0", "2026-11-23")
    first = (tree / "CHANGELOG.md").read_text().partition("## [0.2.0]")[2]
    (tree / "changelog.d" / "later.fixed.md").write_text("A later thing.\n")
    changelog.release(tree, "0.2.1", "2026-12-01")
    text = (tree / "CHANGELOG.md").read_text()
    assert (
        "## [Unreleased]\n\n## [0.2.1] - 2026-12-01\n\n### Fixed\n\n- A later thing.\n\n## [0.2.0]"
        in text
    )
    assert text.endswith(first)
    assert changelog.newest_version(text) == "0.2.1"


@pytest.mark.parametrize(
    ("spoil", "version", "why"),
    [
        (lambda tree: None, "1.0", "three numbers"),
        (lambda tree: None, "0.02.0", "three numbers"),
        (
            lambda tree: (tree / "CHANGELOG.md").write_text(
                "## [Unreleased]\n\n## [0.2.0] - 2026-01-01\n"
            ),
            "0.2.0",
            "not after",
        ),
        (lambda tree: (tree / "CHANGELOG.md").write_text("# Changelog\n"), "0.2.0", "Unreleased"),
        (lambda tree: (tree / "changelog.d" / "x.added.md").write_text(""), "0.2.0", "empty"),
        (
            lambda tree: (tree / "pyproject.toml").write_text("[project]\n"),
            "0.2.0",
            "pyproject.toml",
        ),
    ],
)
def test_a_release_that_cannot_be_made_changes_nothing(
    changelog: ModuleType,
    tree: Path,
    spoil: Callable[[Path], object],
    version: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(tree)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert changelog.main(["release", version], tree) == 1
    assert why in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before


def test_show_prints_what_a_release_would_say_and_keeps_the_fragments(
    changelog: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changelog.main(["show"], tree) == 0
    assert capsys.readouterr().out.startswith("### Added\n\n- Runs are\n  compared.\n- By hand.\n")
    assert changelog.main(["check"], tree) == 0
    assert "2 fragments" in capsys.readouterr().out


def test_the_changelog_of_this_tree_can_be_released(changelog: ModuleType) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    files = changelog.files_of(ROOT)
    if not files and not changelog.unreleased(text, []):
        pytest.skip("nothing is unreleased: this is a release")
    new = changelog.released(
        text, [changelog.fragment(name, files[name]) for name in files], "99.0.0", "2099-01-01"
    )
    kept = [line for line in text.splitlines() if line.startswith("- ")]
    assert all(line in new.splitlines() for line in kept)


def test_package_pyproject_command_and_changelog_state_one_version(changelog: ModuleType) -> None:
    """Before the first release the changelog has none: the version is the one to come."""
    stated = {
        name: line.search((ROOT / name).read_text())[1] for name, line in changelog.STATED.items()
    }
    told = subprocess.run(
        [sys.executable, "-m", "prpc_engine.cli", "version", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert set(stated.values()) == {prpc_engine.__version__, json.loads(told.stdout)["prpc"]}
    assert prpc_engine.__version__ == (
        changelog.newest_version((ROOT / "CHANGELOG.md").read_text()) or "0.1.0"
    )


def test_releases_stand_in_the_changelog_from_the_newest_to_the_oldest(
    changelog: ModuleType,
) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [changelog.HEADING.fullmatch(f"## {heading}") for heading in headings[1:]]
    assert all(released), "## [X.Y.Z] - YYYY-MM-DD expected"
    versions = [changelog.numbers(found[1]) for found in released]
    assert versions == sorted(set(versions), reverse=True)
