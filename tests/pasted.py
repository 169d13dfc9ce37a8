"""A program of a page, run as its reader pastes it into a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120.0
PYTHON = (sys.executable, "-W", "error", "-X", "dev")
# Of development mode all but the allocator's guards, which are for extension modules: it fills all
# that a table reserves, and that took as long as all else these programs do.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "pymalloc"}
# What a machine that is busy enough makes of any handler: it may lack a core for as long as the
# budget.
STALLS = re.compile(
    r"^.* \(pid \d+\): .* (?:has held the reactor for|let the reactor go on after) .*\n(?:  .*\n)*",
    re.MULTILINE,
)


def run_pasted(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """To its end, in that folder, with every warning an error. Its stderr is without reports of
    stalls. Once more where somebody was given the port meanwhile that it had found free.
    """
    script = folder / "pasted.py"
    script.write_text(code)
    ran = _run(script)
    if "errors.AddressInUse: " in ran.stderr:
        ran = _run(script)
    ran.stderr = without_stalls(ran.stderr)
    return ran


def _run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, str(script)],
        cwd=script.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def without_stalls(stderr: str) -> str:
    """What else was said."""
    return STALLS.sub("", stderr)
