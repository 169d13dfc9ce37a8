"""docs/grpcpp.md keeps what it says: its programs run and print what stands below them, and every
name in it exists.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.cli.commands import load
from prpc_engine.settings import network
from tests.pasted import run_pasted

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "grpcpp.md"
TEXT = PAGE.read_text()
TIMEOUT_S = 120.0
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:prpc )(\S+)([^#\n]*)", TEXT, re.MULTILINE)
TESTS = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
}
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)


def variables() -> dict[str, str]:
    """Every name that network.py reads, and the first line of the table that it stands in."""
    rows = [
        line
        for line in SECTIONS["Variables"].partition("**The rule of Min**")[0].splitlines()
        if line.startswith("| ") and not line.startswith("| there")
    ]
    return {
        name: row
        for row in rows
        for name in re.findall(r"`([A-Z][A-Z0-9_]{4,})`", "|".join(row.split("|")[:3]))
    }


def variables_of_tasks() -> list[network.Variable[object]]:
    """Those of every node stand in prpc.md."""
    found = [one for one in vars(network).values() if isinstance(one, network.Variable)]
    return [one for one in found if one not in network.OF_NODES.values()]


def test_the_table_names_every_variable_that_is_read_and_no_other() -> None:
    read = variables_of_tasks()
    assert len(read) > 10
    assert set(variables()) == {name for one in read for name in one.names} | set(network.UNREAD)


def test_each_row_has_the_names_of_one_setting_and_its_default() -> None:
    for one in variables_of_tasks():
        if one.names:
            rows = {variables()[name] for name in one.names}
            assert len(rows) == 1, one.names
            default = {None: "none", "": "the working directory"}.get(
                one.default, str(one.default).lower()
            )
            if one is network.CONNECTION_TIMEOUT:
                default = f"{network.CONNECTION_TIMEOUT_S * 1e3:.0f}"  # ms there
            if one is network.FLOW_CONTROL_MAX:
                default = "65536"  # of the rendezvous, where nobody says anything
            assert rows.pop().split("|")[3].strip() == default, one.names


def test_the_variables_outside_the_table_are_there_too() -> None:
    known = "\n".join(path.read_text() for path in (ROOT / "prpc_engine").rglob("*.py"))
    assert [name for name in set(re.findall(r"\bPRPC_[A-Z_]+\b", TEXT)) if name not in known] == []


@pytest.mark.parametrize(
    ("file", "what", "section"),
    [("server", "PROTOCOLS", "Protocols"), ("plane", "PLANES", "`tensor_fuse`")],
    ids=["protocols", "planes"],
)
def test_all_names_that_are_taken_are_told(file: str, what: str, section: str) -> None:
    found = re.search(
        rf"^{what}\b[^\n]* = [({{](.*?)[)}}](?:  #[^\n]*)?$",
        (ROOT / f"prpc_engine/tensorflow/{file}.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found
    names = re.findall(r'"([^"]+)"', found[1])
    assert names
    assert [name for name in names if name not in SECTIONS[section]] == []


def test_a_script_prints_what_stands_below_it(tmp_path: Path) -> None:
    ran = run_pasted(PROGRAMS[1], tmp_path)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", PRINTED[1])
    assert len(PROGRAMS) == len(PRINTED) == 2


@needs_tensorflow
def test_a_cluster_prints_what_stands_below_its_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[0])
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "prpc_engine.cli",
            "run",
            "--ps",
            "1",
            "--workers",
            "1",
            "--protocol",
            "grpc",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert (ran.returncode, ran.stdout) == (0, PRINTED[0]), ran.stderr


def test_every_command_on_it_is_understood() -> None:
    assert {name for name, _ in COMMANDS} == {"run"}
    for name, rest in COMMANDS:
        context = load(name).make_context(name, rest.split())
        assert context.params["script"].endswith(".py"), rest


def test_every_test_it_names_is_there() -> None:
    assert len(TESTS) > 15
    texts = {file: (ROOT / "tests" / file).read_text() for file, _ in TESTS}
    assert [f"{file}::{name}" for file, name in TESTS if f"def {name}(" not in texts[file]] == []


def test_every_file_it_points_at_is_there() -> None:
    targets = [
        *re.findall(r"\]\(([^)#]+)\)", TEXT),
        *(f"../{one}" for one in re.findall(r"examples/\w+\.py", TEXT)),
    ]
    assert targets
    assert not [
        target for target in targets if "://" not in target and not (PAGE.parent / target).exists()
    ]
