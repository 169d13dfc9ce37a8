"""What the package needs of its interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("how", ["sys._is_gil_enabled = lambda: False", "sys.abiflags = 't'"])
def test_a_python_without_the_gil_is_refused_by_name_at_import(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {how}; import shard"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: this package does not run on a free-threaded Python yet"
    )
