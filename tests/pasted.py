"""A program of a page, run as its reader pastes it into a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120.0
PYTHON = (sys.executable, "-W", "error", "-X", "dev")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_pasted(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """To its end, in that folder, with every warning an error."""
    script = folder / "pasted.py"
    script.write_text(code)
    return subprocess.run(
        [*PYTHON, str(script)], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
