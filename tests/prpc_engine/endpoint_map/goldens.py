"""Texts that users read, as files: a change of one is seen in the diff of its file."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    """The text of one file."""
    return (FOLDER / name).read_text()


def golden_lines(name: str) -> dict[str, str]:
    """A file with lines "case: text", by case."""
    return dict(line.split(": ", 1) for line in golden(name).splitlines())
