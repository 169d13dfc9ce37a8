"""`python -m prpc_engine.tensorflow [--protocol NAME] SCRIPT ARGUMENTS`: as
`python SCRIPT ARGUMENTS`, with install() before.

A server whose script names no protocol gets the one that is named here. Nothing of the script is
changed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import prpc_engine.tensorflow as prpc_tf


def main() -> None:
    """What the script raises goes through, as its exit code does."""
    parser = argparse.ArgumentParser(prog="python -m prpc_engine.tensorflow")
    parser.add_argument(
        "--protocol",
        default="prpc",
        help="of servers whose script names none (default: %(default)s)",
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        prpc_tf.install(args.protocol)
    except ImportError as error:
        sys.exit(f"prpc: {error}")
    sys.argv[:] = [args.script, *args.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
