"""Which keys get a row: those pushed to often enough, as counted in a sketch of fixed size.

    counters  uint8[DEPTH, width]  a key has one in each line, at positions made of its hash; its
                                   count is the least of them

Most keys of a click log come once, and a row for each would be most of the memory. Exact counts
would need memory for each of them, too, so a count-min sketch counts (Cormode and Muthukrishnan,
2005), with conservative update (Estan and Varghese, 2002: only the least counters rise). It may
count a key too high, never too low, until the counters have taken AGING_ADDITIONS each on average:
then all are halved, as in TinyLFU (Einziger, Friedman, Manes, 2017), and a key that comes slowly
may wait longer. Both ways only the moment is approximate at which a key gets its row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.table.mix import mix64
from prpc_engine.kv.table.spec import checked_count, configured

DEPTH = 4
MIN_COUNT_MAX = 127  # so that a counter of 8 bits holds it, and twice as much
WIDTH_BITS_MAX = 30
AGING_ADDITIONS = 8
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Admission:
    """A key gets its row with the push that is its `min_count`-th; the gradients before are
    dropped, and counted as refused.

    width_bits: the sketch has DEPTH lines of 2 ** width_bits counters of one byte (20: 4 MiB, good
    for a million keys).
    """

    min_count: int
    width_bits: int = 20

    def __post_init__(self) -> None:
        checked_count("admission: min_count", self.min_count, at_least=1, at_most=MIN_COUNT_MAX)
        checked_count("admission: width_bits", self.width_bits, at_least=1, at_most=WIDTH_BITS_MAX)

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal one."""
        return asdict(self)


def from_spec(spec: object) -> Admission | None:
    """{"min_count": 3} -> Admission(3), None -> None; ConfigError lists what is allowed."""
    return None if spec is None else configured("admission", Admission, spec)


class Doorkeeper:
    """Counts pushes of each key of one table in a sketch of fixed size, and so decides which keys
    get a row. A count may be too high, when keys share counters, never too low until all are
    halved.
    """

    def __init__(self, admission: Admission) -> None:
        self._min_count = admission.min_count
        self._mask = np.uint64(2**admission.width_bits - 1)
        self.counters = np.zeros((DEPTH, 2**admission.width_bits), np.uint8)
        self.additions = 0  # since they were halved last; then the half of those

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return self.counters.nbytes

    def admit(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Count one push for each key (int64[n], none twice), and say which may have a row now:
        bool[n].
        """
        admitted: npt.NDArray[np.bool_] = self.count(keys) >= self._min_count
        return admitted

    def load(self, counters: npt.NDArray[np.uint8]) -> None:
        """Count as high as these do, too: several sketches, of other keys each, may come together
        in one.
        """
        np.maximum(self.counters, counters, out=self.counters)

    def count(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """Count one push for each key (int64[n], none twice), and say how many those are now:
        uint8[n].
        """
        # mixed again: the bits of the first are the index's and the partition's
        hashed = mix64(mix64(keys))
        stride = (hashed >> np.uint64(32)) | np.uint64(1)
        places = [
            ((hashed + np.uint64(line) * stride) & self._mask).view(np.int64)
            for line in range(DEPTH)
        ]
        count = np.minimum.reduce(
            [counters[place] for counters, place in zip(self.counters, places, strict=True)]
        )
        count = np.minimum(count, 254) + np.uint8(1)
        for counters, place in zip(self.counters, places, strict=True):
            # two keys may share a counter: the greater count stays
            np.maximum.at(counters, place, count)
        self.additions += len(keys)
        if self.additions > AGING_ADDITIONS << int(self._mask).bit_length():
            self.counters >>= 1
            self.additions //= 2
        counted: npt.NDArray[np.uint8] = count
        return counted
