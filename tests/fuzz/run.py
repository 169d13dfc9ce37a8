"""One target under so many hostile inputs, in a process of its own with little memory to spare.

    python -m tests.fuzz.run TARGET INPUTS SEED

Exit status 0: every input was taken or refused by a named error. 1: one was not; it is printed in
hex, to be saved as corpus/TARGET/found-*.bin. Killed with all stacks printed: one input took
HANG_S.

Memory: the address space may grow by SPARE_BYTES over what it is when everything is imported. The
limits of a message in targets.py come to 2 MiB; an input that reserves what a length in it says,
without a look at the limits, ends in MemoryError.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
import warnings
from pathlib import Path

from tests.fuzz.mutations import Mutator
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SPARE_BYTES = 64 << 20
HANG_S = 30.0
INPUTS_PER_ALARM = 500  # they take some 30 ms


def load_corpus(folder: str) -> list[bytes]:
    """In order of the names, so that a seed means the same everywhere."""
    return [path.read_bytes() for path in sorted((CORPUS / folder).glob("*.bin"))]


def bound_memory() -> None:
    """From here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(name: str, inputs: int, seed: int) -> int:
    """The exit status."""
    target = TARGETS[name]
    corpus = load_corpus(target.corpus)
    mutator = Mutator(corpus, seed)
    # numpy's on a value that it was given: nobody may cause output here
    warnings.simplefilter("error")
    # the files as they are; and what they import is imported before memory is bounded
    for data in corpus:
        if not _feed(name, data):
            return 1
    bound_memory()
    refused = 0
    started = time.perf_counter()
    for number in range(inputs):
        if number % INPUTS_PER_ALARM == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        data = mutator.next()
        try:
            target.feed(data)
        except target.named:
            refused += 1
        except BaseException as error:
            return _found(name, data, error)
    faulthandler.cancel_dump_traceback_later()
    print(
        f"{name}: {inputs} inputs, {refused} refused, {time.perf_counter() - started:.1f} s, "
        f"seed {seed}"
    )
    return 0


def _feed(name: str, data: bytes) -> bool:
    try:
        TARGETS[name].feed(data)
    except TARGETS[name].named:
        return True
    except BaseException as error:
        _found(name, data, error)
        return False
    return True


def _found(name: str, data: bytes, error: BaseException) -> int:
    print(f"{name}: {type(error).__name__}: {str(error)[:500]}\n{data.hex()}")
    return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
