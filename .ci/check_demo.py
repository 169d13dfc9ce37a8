"""Does the report that `prpc demo --json FILE` wrote say what it must? Exit code 1 and why, when it
does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

AUC_DIFFERENCE_MAX = 0.005
AUC_OF_GUESSING = 0.5


def complaints(report: dict[str, object]) -> list[str]:
    """What is wrong with the report."""
    auc, baseline = report.get("auc"), report.get("auc_baseline")
    if not isinstance(auc, float) or not isinstance(baseline, float):
        return [
            f"auc is {auc!r}, auc_baseline is {baseline!r}: two numbers expected; "
            f"the report has {sorted(report)}"
        ]
    found = []
    if abs(auc - baseline) > AUC_DIFFERENCE_MAX:
        found.append(
            f"AUC {auc:.4f}, one process reaches {baseline:.4f}: "
            f"more than {AUC_DIFFERENCE_MAX} apart"
        )
    if auc <= AUC_OF_GUESSING:
        found.append(f"AUC {auc:.4f} is no better than guessing")
    return found


if __name__ == "__main__":
    wrong = complaints(json.loads(Path(sys.argv[1]).read_text()))
    print("\n".join(wrong) or "the report agrees with the baseline")
    sys.exit(1 if wrong else 0)
