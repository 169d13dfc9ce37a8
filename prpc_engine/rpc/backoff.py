"""How long to pause after failures in a row. No I/O, no clock, no randomness of its own: the chance
is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from prpc_engine.errors import ConfigError
from shard import is_finite

# of a microsecond, even: longer than any max_s; and 2.0**1024 is an OverflowError
_DOUBLINGS_MAX = 64


@dataclass(frozen=True)
class Backoff:
    """How long to pause after failures in a row: a random part of a bound that doubles, so that
    callers do not come all at once.

    first_s  the bound after the first failure, in seconds
    max_s    where doubling ends
    certain  the share of the bound that is always waited; 0.0 is full jitter, which spreads callers
             best

    It counts nothing: who pauses keeps the number of its failures, and sets it to 0 after a
    success.

    Raises ConfigError for times below zero and shares outside 0 to 1.
    """

    first_s: float
    max_s: float
    certain: float = 0.0

    def __post_init__(self) -> None:
        are_numbers = all(
            is_finite(value, 0.0) for value in (self.first_s, self.max_s, self.certain)
        )
        if not (are_numbers and self.first_s <= self.max_s and self.certain <= 1.0):
            raise ConfigError(f"{self}: 0 <= first_s <= max_s and 0 <= certain <= 1 are allowed")

    def bound_s(self, failures: int) -> float:
        """The longest pause after so many failures in a row, in seconds; 0.0 after none. The pause
        itself of who comes alone, and needs no chance.
        """
        if failures < 1:
            return 0.0
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))

    def delay_s(self, failures: int, chance: float) -> float:
        """The pause after so many failures in a row, in seconds. chance: from 0.0 to 1.0, where it
        lies in what it may be.
        """
        return self.bound_s(failures) * (self.certain + (1.0 - self.certain) * chance)
