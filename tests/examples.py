"""How many examples a property is tried with: PRPC_TEST_EXAMPLES times as many as its test says. A
tenth or so where the same runs elsewhere in full, more at night.
"""

from __future__ import annotations

import os

VARIABLE = "PRPC_TEST_EXAMPLES"
LEAST = 10
SHARE = float(os.environ.get(VARIABLE) or 1.0)


def examples(count: int) -> int:
    """That many times the share, LEAST at least."""
    return max(LEAST, int(count * SHARE))
