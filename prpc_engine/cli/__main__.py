"""`python -m prpc_engine.cli`: the same as `prpc`, where no script is installed."""

from __future__ import annotations

import sys

from prpc_engine.cli import main

if __name__ == "__main__":  # and not again in every process that is spawned from here
    sys.exit(main())
