"""`prpc completion`: what a shell is offered when Tab is pressed behind `prpc`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine import cli
from prpc_engine.cli import bench
from prpc_engine.cli.completion import SHELLS
from tests.prpc_engine.cli.test_commands import ROOT, TIMEOUT_S, prpc

# What bash does at Tab behind the words of each line: it calls the function that `complete` names.
TAB = """
eval "$(prpc completion bash)"
while IFS= read -r line; do
  IFS=, read -ra words <<<"$line,"
  COMP_WORDS=(prpc "${words[@]}")
  COMP_CWORD=${#words[@]}
  COMPREPLY=()
  _prpc_completion prpc
  echo "${COMPREPLY[*]}"
done
"""
OFFERED = [
    (["d"], {"demo", "doctor"}),
    (["gc", "--d"], {"--dry-run"}),
    (["bench", "r"], {name for name in bench.SUBJECTS if name.startswith("r")}),
    (["endpoint-map", ""], {"check", "make"}),
    (["endpoint-map", "make", "--ps"], {"--ps-hosts", "--ps_hosts"}),
    (["launch", "-s", "1", "--ti"], {"--timeout-s"}),
    (["completion", ""], set(SHELLS)),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_offers_what_may_follow(tmp_path: Path, subtests: pytest.Subtests) -> None:
    script = tmp_path / "prpc"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prpc_engine.cli "$@"\n')
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", TAB],
        input="".join(f"{','.join(words)}\n" for words, _ in OFFERED),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    for (words, expected), line in zip(OFFERED, ran.stdout.splitlines(), strict=True):
        with subtests.test(words=words):
            assert set(line.split()) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_the_program_that_it_asks(shell: str) -> None:
    ran = prpc("completion", shell)
    assert (ran.returncode, ran.stderr) == (cli.OK, "")
    assert f"{cli.COMPLETION_VARIABLE}={shell}_complete" in ran.stdout


def test_every_command_is_offered_with_what_it_does() -> None:
    ran = prpc(_PRPC_COMPLETE="fish_complete", COMP_WORDS="prpc ", COMP_CWORD="")
    assert ran.stderr == ""
    for name, summary in cli.COMMANDS.items():
        assert f"plain,{name}\t" in ran.stdout
        assert summary.partition(":")[0][:20] in ran.stdout


def test_what_is_behind_the_command_of_launch_is_left_to_the_shell() -> None:
    words = "prpc launch -s 1 -w 1 -- python --t"
    ran = prpc(_PRPC_COMPLETE="bash_complete", COMP_WORDS=words.replace(" ", "\n"), COMP_CWORD="8")
    assert ran.stdout.strip() == ""
