"""Whatever bytes a peer sends: no crash, no hang, no memory over the limits, and no error but those
that name the peer's fault.

PRPC_FUZZ_INPUTS says how many inputs all targets get together: 100,000 when nobody does, 1,000,000
in `.ci/nightly fuzz`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.make_corpus import archives, frames, handshakes
from tests.fuzz.mutations import INPUT_BYTES_MAX, Mutator
from tests.fuzz.run import load_corpus
from tests.fuzz.targets import TARGETS

INPUTS = int(os.environ.get("PRPC_FUZZ_INPUTS", "100000"))
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_taken_or_refused_by_name(name: str, seed: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", name, str(INPUTS // len(TARGETS)), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("folder", "made"), [("frame", frames), ("handshake", handshakes), ("archive", archives)]
)
def test_the_saved_corpus_is_what_the_formats_are_today(folder: str, made: object) -> None:
    saved = {path.stem for path in (ROOT / "tests/fuzz/corpus" / folder).glob("*.bin")}
    assert callable(made)
    assert saved >= made().keys(), "run python -m tests.fuzz.make_corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_good_is_taken_so_that_hostile_bytes_get_far(name: str) -> None:
    target = TARGETS[name]
    taken = 0
    for data in load_corpus(target.corpus):
        try:
            target.feed(data)
            taken += 1
        except target.named:
            continue
    assert taken >= 2


def test_a_seed_always_makes_the_same_inputs() -> None:
    corpus = load_corpus("archive")
    one, two, other = Mutator(corpus, 1), Mutator(corpus, 1), Mutator(corpus, 2)
    made = [one.next() for _ in range(200)]
    assert made == [two.next() for _ in range(200)] != [other.next() for _ in range(200)]
    assert max(map(len, made)) <= INPUT_BYTES_MAX
    assert len(set(made)) > 150
