"""How large the workloads are: a share that every change can afford, and with PRPC_WORKLOADS=full
those of pRPC's own tests.

PRPC_WORKLOADS=0.5 takes half of the full sizes. What is scaled are counts, never what is sent or
asserted.
"""

from __future__ import annotations

import os

VARIABLE = "PRPC_WORKLOADS"
KIB, MIB = 1 << 10, 1 << 20


def _share(text: str) -> float | None:
    """Of the full sizes; None: those of every change."""
    if not text:
        return None
    if text == "full":
        return 1.0
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{VARIABLE}={text!r}: 'full', or a share above 0 up to 1 is allowed")
    return share


SHARE = _share(os.environ.get(VARIABLE, ""))


def scaled(usual: int, full: int) -> int:
    """`usual` for every change, else the share of `full` that was asked for, at least `usual`."""
    return usual if SHARE is None else max(usual, int(full * SHARE))


def bound_s(usual: float) -> float:
    """How long something of scaled size may take before it counts as hung: generous, and more for
    the full sizes.
    """
    return usual if SHARE is None else usual * 60.0
