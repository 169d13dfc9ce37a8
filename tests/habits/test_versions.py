"""CONTRIBUTING.md says which numbers the wire and the files have: those of the code."""

from __future__ import annotations

import ast
import importlib
import re

from tests.imports import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROW = re.compile(r"^\| [^|]+ \| `([\w.]+)\.([A-Z_]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
# By what a number of a format is named in this code.
NAMES = re.compile(r"^([A-Z_]*VERSION|FORMAT|FORMATS_READ) = [\d(]", re.MULTILINE)


def test_each_number_that_is_told_is_the_code_s() -> None:
    rows = ROW.findall(TEXT)
    assert len(rows) == 9
    for module, name, told in rows:
        found = getattr(importlib.import_module(module), name)
        assert found == ast.literal_eval(told), f"{module}.{name}"


def test_each_number_of_the_code_is_told() -> None:
    told = {f"{module}.{name}" for module, name, _ in ROW.findall(TEXT)}
    found = set()
    for top in ("shard", "prpc_engine"):
        for path in (ROOT / top).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {f"{module}.{name}" for name in NAMES.findall(path.read_text())}
    assert len(found) >= 6
    assert found <= told
