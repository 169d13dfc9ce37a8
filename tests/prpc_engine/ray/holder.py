"""A process that holds arrays, as `python -m`: holder NAME NBYTES. It writes where, as JSON, then
does what each line says: "let go", or ends with its input.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from prpc_engine.ray.held_arrays import HeldArrays


def main() -> None:
    name, nbytes = sys.argv[1], int(sys.argv[2])
    held = HeldArrays()
    held.hold(name, [np.full(nbytes, number, np.uint8) for number in (1, 2)])
    print(json.dumps(held.holder), flush=True)
    for line in sys.stdin:
        if line.strip() == "let go":
            held.let_go(name)
        print(json.dumps(held.names), flush=True)
    held.close()


if __name__ == "__main__":
    main()
