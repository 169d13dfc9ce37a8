"""Runs tests with threads that sleep before statements at random, to find races.

    python -m tests.races.run [SEED] [-- ARGUMENTS OF PYTEST]
    python -m tests.races.run 17 -- -n 2 tests/prpc_engine/test_session.py

Without a seed one is drawn and printed. Deadlines count as ever: what fails by one alone says that
everything is some five times slower, and no more. Exit code: that of pytest.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> None:
    """Become pytest."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    seed = " ".join(arguments[:at]) or str(secrets.randbits(32))
    print(f"races: seed {seed}", flush=True)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ.update(RACES_SEED=seed, PYTHONPATH=path)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", *arguments[at + 1 :]])


if __name__ == "__main__":
    main(sys.argv[1:])
