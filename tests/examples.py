"""How many examples a property is tried with: PRPC_TEST_EXAMPLES times as many as its test says. A
fifth where the same runs elsewhere in full: by README's command, since .ci/run tries all before a
change is taken, and on each other Python there. More at night.
"""

from __future__ import annotations

import os

VARIABLE = "PRPC_TEST_EXAMPLES"
LEAST = 10
SHARE = float(os.environ.get(VARIABLE) or 0.2)


def examples(count: int) -> int:
    """That many times the share, LEAST at least."""
    return max(LEAST, int(count * SHARE))
