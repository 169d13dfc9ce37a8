"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# ok: nothing to do. warn: works, and could work better, or will surprise somebody. bad: the engine
# does not work so.
Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """`fact` is what was looked at, `value` what was found, `advice` what to do ("" when nothing
    is).
    """

    fact: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""
