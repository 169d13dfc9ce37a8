"""docs/prpc.md keeps what it says: its programs run and print what stands below them, and every
name in it exists.
"""

from __future__ import annotations

import re
import select
import subprocess
from pathlib import Path

import pytest

import prpc_engine
import shard
from prpc_engine import accumulator
from prpc_engine.settings import network
from prpc_engine.settings.sections import SETTING_OF
from tests.pasted import ENVIRONMENT, PYTHON, TIMEOUT_S, run_pasted, without_stalls

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "prpc.md"
TEXT = PAGE.read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TESTS = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
MEMBERS = sorted(set(re.findall(r"`([A-Z]\w+)\.([a-z]\w+)[`(]", TEXT)))


@pytest.mark.slow
def test_the_client_gets_what_the_server_of_the_page_answers(tmp_path: Path) -> None:
    server, client = tmp_path / "server.py", tmp_path / "client.py"
    server.write_text(PROGRAMS[0])
    client.write_text(PROGRAMS[1])
    with subprocess.Popen(
        [*PYTHON, str(server)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    ) as serving:
        try:
            assert serving.stdout is not None
            assert select.select([serving.stdout], [], [], TIMEOUT_S)[0], "the server did not start"
            address = serving.stdout.readline().strip()
            asked = subprocess.run(
                [*PYTHON, str(client), address],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                cwd=tmp_path,
                env=ENVIRONMENT,
            )
            assert (asked.returncode, without_stalls(asked.stderr), asked.stdout) == (
                0,
                "",
                PRINTED[0],
            )
            _, complaints = serving.communicate(timeout=TIMEOUT_S)
            assert (serving.returncode, without_stalls(complaints)) == (0, "")
        finally:
            serving.kill()


@pytest.mark.parametrize("number", range(2, len(PROGRAMS)))
def test_a_program_prints_what_stands_below_it(number: int, tmp_path: Path) -> None:
    ran = run_pasted(PROGRAMS[number], tmp_path)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", PRINTED[number - 1])


def test_every_program_has_its_output() -> None:
    assert len(PROGRAMS) == len(PRINTED) + 1 == 4, (
        "the server prints an address, which is another one each time"
    )


def test_every_test_it_names_is_there() -> None:
    assert len(TESTS) > 60
    texts = {file: (ROOT / "tests" / file).read_text() for file, _ in TESTS}
    assert [f"{file}::{name}" for file, name in TESTS if f"def {name}(" not in texts[file]] == []


def test_every_weakness_and_every_member_of_a_class_it_names_is_there() -> None:
    assert [int(number) for number in re.findall(r"^\*\*W(\d+), ", TEXT, re.MULTILINE)] == list(
        range(1, 27)
    )
    assert len(MEMBERS) > 80
    holders = {**vars(shard), **vars(accumulator), **vars(prpc_engine)}
    missing = [
        f"{holder}.{member}"
        for holder, member in MEMBERS
        if not hasattr(holders.get(holder), member)
    ]
    assert missing == []


def test_every_file_it_points_at_is_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    assert not [
        target for target in targets if "://" not in target and not (PAGE.parent / target).exists()
    ]


def test_the_table_of_variables_names_those_of_every_node_and_their_settings() -> None:
    rows = {name: row for row in TEXT.splitlines() for name in re.findall(r"^\| `(PRPC_\w+)`", row)}
    for setting, variable in network.OF_NODES.items():
        section, _, key = setting.partition(".")
        arguments = [name for name, one in SETTING_OF.items() if one == setting]
        [row] = {rows[name] for name in variable.names}
        assert [name for name in arguments if f"`{name}=`" not in row] == []
        assert f"[{section}] {key}" in row
