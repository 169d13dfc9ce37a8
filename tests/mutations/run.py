"""Breaks one promise after the other in a copy of this tree, and looks whether the tests named
beside it notice.

    python -m tests.mutations.run                  all; some minutes a mutation
    python -m tests.mutations.run lease ledger     those with one of these words in their names

Prints a line a mutation, and the survivors again at the end. Exit code: 0 none survived, 1 some
did, 2 none is named so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.places import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900  # a mutation may make a test wait for what never comes
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")


def survives(mutation: Mutation, tree: Path) -> bool:
    """Whether its tests pass though the promise is broken in `tree`; the tree is as before then."""
    path = tree / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                *mutation.tests.split(),
            ],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False  # a hang is noticed, too
    finally:
        path.write_text(text)
    return ran.returncode == 0


def main(words: list[str]) -> int:
    """See the file's head."""
    wanted = [one for one in MUTATIONS if not words or any(word in one.name for word in words)]
    if not wanted:
        print(
            f"no mutation has one of these words in its name: {', '.join(words)}", file=sys.stderr
        )
        return 2
    survivors = []
    with tempfile.TemporaryDirectory(prefix="prpc-mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        for number, mutation in enumerate(wanted, 1):
            has_survived = survives(mutation, tree)
            print(
                f"{number}/{len(wanted)} {'SURVIVED' if has_survived else 'found'}: "
                f"{mutation.name}",
                flush=True,
            )
            if has_survived:
                survivors.append(mutation)
    for mutation in survivors:
        print(f"survivor: {mutation.name} ({mutation.file}); not noticed by {mutation.tests}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
