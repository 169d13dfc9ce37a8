"""Breaks one promise after the other in a copy of this tree, and looks whether the tests named
beside it notice.

    python -m tests.mutations.run                  all; some minutes a mutation
    python -m tests.mutations.run lease ledger     those with one of these words in their names
    python -m tests.mutations.run --simulation     defects of simulated.py: scenarios of the
                                                   simulation must find them, by their seeds alone
    python -m tests.mutations.run --simulation watch

Prints a line a mutation, and the survivors again at the end; of a defect that was found, how many
seeds that took. A seed that fails without the defect, too, has not found it. Exit code: 0 none
survived, 1 some did, 2 none is named so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.mutations.places import MUTATIONS, Mutation
from tests.mutations.simulated import DEFECTS, NONE_FAILED, SEEDS_MAX, Defect

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900  # a mutation may make a test wait for what never comes
SEEDS_LIMIT_S = 3600  # SEEDS_MAX of the scenario that takes longest
Change = TypeVar("Change", Mutation, Defect)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")


def survives(mutation: Mutation, tree: Path) -> str | None:
    """Which tests pass though the promise is broken in `tree`; None: they notice."""
    pytest = ("pytest", "-q", "-x", "-p", "no:cacheprovider")
    try:
        code, _ = run_module((*pytest, *mutation.tests.split()), tree, LIMIT_S)
    except subprocess.TimeoutExpired:
        return None  # a hang is noticed, too
    return None if code else mutation.tests


def is_missed(defect: Defect, tree: Path) -> str | None:
    """Which seeds pass though the defect is in `tree`; None: one of them fails by it."""
    module = "tests.mutations.simulated"
    try:
        code, said = run_module((module, defect.scenario, "0", str(SEEDS_MAX)), tree, SEEDS_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{defect.scenario} in {SEEDS_LIMIT_S} s"
    if code:
        return f"{SEEDS_MAX} seeds of {defect.scenario}" if code == NONE_FAILED else "it cannot run"
    seed, _, error = said.partition(" ")
    code, _ = run_module((module, defect.scenario, seed, str(int(seed) + 1)), ROOT, LIMIT_S)
    if code != NONE_FAILED:
        return f"{defect.scenario}: seed {seed} fails without it, too"
    print(f"{int(seed) + 1} seeds of {defect.scenario} (stated: {defect.seeds}): {error:.100}")
    return None


def run_module(arguments: Sequence[str], tree: Path, limit_s: float) -> tuple[int, str]:
    """Its exit code and the first line that it printed, run with that tree. Raises
    subprocess.TimeoutExpired.
    """
    ran = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PRPC_TEST_EXAMPLES": "1",  # README's command tries fewer
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return ran.returncode, ran.stdout.partition("\n")[0]


def find_survivors(
    wanted: Sequence[Change], survives: Callable[[Change, Path], str | None]
) -> list[str]:
    """What is said of each that survives in a copy of this tree."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="prpc-mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        for number, one in enumerate(wanted, 1):
            path = tree / one.file
            text = path.read_text()
            path.write_text(text.replace(one.old, one.new))
            missed = survives(one, tree)
            path.write_text(text)
            result = "found" if missed is None else "SURVIVED"
            print(f"{number}/{len(wanted)} {result}: {one.name}", flush=True)
            if missed is not None:
                survivors.append(f"survivor: {one.name} ({one.file}); not noticed by {missed}")
    return survivors


def main(arguments: list[str]) -> int:
    """See the file's head."""
    simulation = "--simulation" in arguments
    words = [word for word in arguments if word != "--simulation"]

    def is_wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    mutations = [one for one in MUTATIONS if is_wanted(one.name)]
    defects = [one for one in DEFECTS if is_wanted(one.name)]
    if not (defects if simulation else mutations):
        print(
            f"no mutation has one of these words in its name: {', '.join(words)}", file=sys.stderr
        )
        return 2
    if simulation:
        survivors = find_survivors(defects, is_missed)
    else:
        survivors = find_survivors(mutations, survives)
    for survivor in survivors:
        print(survivor)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
