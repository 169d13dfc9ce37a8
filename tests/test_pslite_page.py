"""docs/pslite.md keeps what it says: its program runs and prints what stands below it, and every
name in it exists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine import pslite
from prpc_engine.pslite import environment
from tests.pasted import TIMEOUT_S, without_stalls

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pslite.md"
TEXT = PAGE.read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
(LAUNCH,) = re.findall(r"`prpc (launch .*) -- python train.py`", TEXT)


@pytest.mark.slow
def test_the_program_prints_what_stands_below_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "prpc_engine.cli",
            *LAUNCH.split(),
            "--",
            sys.executable,
            "train.py",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    # by roles that are there before it
    said = re.sub(r"(?m)^waiting for the master at .*\n", "", without_stalls(ran.stderr))
    assert (ran.returncode, said, ran.stdout) == (0, "", PRINTED)


def test_every_test_it_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 20
    texts = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in texts[file]] == []


def test_every_function_class_and_member_it_names_is_there_and_none_is_left_out() -> None:
    members = re.findall(r"`([A-Z]\w+)\.([a-z]\w+)[`(]", TEXT)
    assert len(members) > 25
    sources = "".join(path.read_text() for path in Path(pslite.__path__[0]).glob("*.py"))
    missing = [
        f"{holder}.{member}"
        for holder, member in members
        if not hasattr(getattr(pslite, holder), member) and f"self.{member} = " not in sources
    ]
    assert missing == []
    named = set(re.findall(r"`(\w+)[`(.]", TEXT))
    assert set(pslite.__all__) - named == set()


def test_every_variable_that_is_read_is_named() -> None:
    assert environment.__doc__ is not None
    read = set(re.findall(r"\b(?:DMLC|PS)_[A-Z_]+\b|\bPORT\b", environment.__doc__))
    assert len(read) > 15
    assert {name for name in read if name not in TEXT} == set()


def test_every_file_it_points_at_is_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    assert not [
        target for target in targets if "://" not in target and not (PAGE.parent / target).exists()
    ]
