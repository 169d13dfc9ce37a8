"""A program with a /dev/shm of its own: a tmpfs of any size and kind, in a mount namespace that
ends with the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def run_with_own_shm(options: str, program: str) -> None:
    """Run `program` where /dev/shm is a tmpfs mounted with `options`. Fails with its output unless
    it ends well.
    """
    returncode, output = end_with_own_shm(options, program)
    assert returncode == 0, f"exit code {returncode}\n{output}"


def end_with_own_shm(options: str, program: str) -> tuple[int, str]:
    """As run_with_own_shm(), whatever the end: the exit code (minus the signal that killed it), and
    what it wrote.
    """
    namespace = ["--mount"] if os.getuid() == 0 else ["--user", "--map-root-user", "--mount"]
    mount = (
        f'mount -t tmpfs -o {options} tmpfs /dev/shm && echo mounted && exec "$0" -W error -c "$1"'
    )
    ran = subprocess.run(
        ["unshare", *namespace, "sh", "-c", mount, sys.executable, program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if not ran.stdout.startswith("mounted\n"):
        pytest.fail(
            f"this machine lets us have no /dev/shm of our own ({ran.stdout.strip()}): "
            "run the test as root, or where "
            "`unshare --user --map-root-user --mount` is allowed, or deselect it",
            pytrace=False,
        )
    return ran.returncode, ran.stdout.removeprefix("mounted\n")
