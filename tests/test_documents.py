"""ARCHITECTURE.md, docs/decisions and docs/reference name files, modules and members that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.imports import ROOT, modules_of
from tests.packages import DOCUMENT, ORDER

DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
PAGES = [
    DOCUMENT,
    *sorted(DECISIONS.glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
HEADINGS = ["Context", "Choice", "Figure", "Consequences"]
TOPS = ("shard", "prpc_engine", "tests", "perf")
MODULES = {module.name: module for module in modules_of(*TOPS)}
FILE_NAMES = {path.name for top in TOPS for path in (ROOT / top).rglob("*.py")}
COLUMNS_MAX = 100  # of prose; a row of a table is one line


@functools.cache
def members() -> dict[str, set[str]]:
    """By class of ours: its methods, and what is assigned in it or to `self` in it. Not made as the
    file is imported: each worker of a run imports all files, and one runs this one.
    """
    found: dict[str, set[str]] = {}
    for module in MODULES.values():
        for node in module.classes:
            names = found.setdefault(node.name, set())
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.attr)
    return found


def too_wide(text: str) -> list[str]:
    """Its lines of more than COLUMNS_MAX."""
    return [line for line in text.splitlines() if len(line) > COLUMNS_MAX]


def words_of(text: str) -> list[str]:
    """What stands in backticks outside of fenced blocks, cut at spaces: `pytest tests/x.py` is two
    words.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [word for span in re.findall(r"`([^`]+)`", text) for word in span.split()]


def is_missing(word: str) -> bool:
    """Whether a word names a file, a module or a member of a class that is not there.

    A file named without its folder may be in any; of other kinds than .py it may be an example.
    """
    if re.fullmatch(r"\w+\.py", word):
        return word not in FILE_NAMES
    if re.fullmatch(rf"({'|'.join(TOPS)}|docs|configs)/[\w./-]*", word):
        return not (ROOT / word).exists()
    if re.fullmatch(rf"({'|'.join(TOPS)})(\.\w+)+", word):
        module, _, name = word.rpartition(".")
        exports = module in MODULES and re.search(rf"\b{name}\b", MODULES[module].source)
        return word not in MODULES and not exports
    if member := re.fullmatch(r"([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)(\(\))?", word):
        return member[2] not in members().get(member[1], ())
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_module_and_member_that_a_page_names_is_there(page: Path) -> None:
    missing = sorted({word for word in words_of(page.read_text()) if is_missing(word)})
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing + broken


def test_the_pages_name_enough_for_that_to_mean_something() -> None:
    words = [word for page in PAGES for word in words_of(page.read_text())]
    assert len({word for word in words if "/" in word and word.endswith(".py")}) > 100
    assert len(RECORDS) > 30


@pytest.mark.parametrize(
    "word",
    [
        "shard/rings.py",
        "prpc_engine/nothing/",
        "shard.NoSuchName",
        "tests.no_module",
        "perf.bench_ring.nothing",
        "Peer.ask",
    ],
)
def test_what_finds_missing_names_finds_one(word: str) -> None:
    assert is_missing(word)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_decision_says_when_why_what_and_how_much(record: Path) -> None:
    text = record.read_text()
    number = record.name[:4]
    assert re.match(rf"# {number}\. \S.+\n\nDate: 20\d\d-\d\d-\d\d\n", text)
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    assert parts[1::2] == HEADINGS
    assert all(part.strip() for part in parts[2::2]), "each heading has a text"
    assert not [line for line in too_wide(text) if not line.startswith("|")]


def test_each_number_is_one_decision_and_the_index_has_them_all_by_title() -> None:
    index = " ".join((DECISIONS / "README.md").read_text().split())
    numbers = [record.name[:4] for record in RECORDS]
    assert len(numbers) == len(set(numbers))
    titles = {
        record: record.read_text().partition("\n")[0].partition(". ")[2] for record in RECORDS
    }
    missing = [
        record.name
        for record in RECORDS
        if f"[{record.name[:4]}]({record.name}) **{titles[record]}.**" not in index
    ]
    assert not missing


def test_architecture_is_two_pages_beside_the_drawing_and_its_table_names_packages() -> None:
    lines = DOCUMENT.read_text().splitlines()
    assert len(lines) - len(ORDER) <= 142
    assert not too_wide(DOCUMENT.read_text())
    table = DOCUMENT.read_text().partition("## Where do I look for")[2]
    packages = [
        name
        for row in re.findall(r"^\| .* \| (.*) \|$", table, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", row)
    ]
    assert len(packages) > 15
    assert set(packages) <= set(ORDER)
