"""What became of all that the network tests asked, as one line: 0 hangs, 0 wrong bytes, every loss
named.

outcome  what it was
right    every answer came, with the bytes that were sent
named    the connection or the call ended with a typed error that says why; what was answered before
         was right
unnamed  it ended with an error without a text, or with none
wrong    an answer has other bytes than were sent
unfound  the same, where a bit was inverted on purpose on a connection without a checksum: nobody
         promised to find it
hang     it did neither: no answer and no error within the tests' patience
"""

from __future__ import annotations

import collections

# of a test: {outcome: how many}, which the line at the end of the run is the sum of
PROPERTY = "network faults"
OUTCOMES = ("right", "named", "unnamed", "wrong", "unfound", "hang")


class Tally:
    """Of one run."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, outcome: str) -> None:
        assert outcome in OUTCOMES
        self.counts[outcome] += 1

    def ended(self, error: Exception | None, is_right: bool) -> None:
        """One that was answered, or lost."""
        if not is_right:
            self.add("wrong")
        elif error is not None:
            self.add("named" if str(error) else "unnamed")
        else:
            self.add("right")

    def holds(self) -> bool:
        """Whether nothing happened that must not."""
        return not any(self.counts[bad] for bad in ("unnamed", "wrong", "hang"))

    def line(self) -> str:
        found = self.counts
        return (
            f"{found.total()} cases: {found['hang']} hangs, {found['wrong']} wrong bytes, "
            f"{found['unnamed']} losses without a "
            f"name; {found['right']} right, {found['named']} losses named; "
            f"without a checksum {found['unfound']} inverted bits of payload were not found"
        )


TALLY = Tally()  # of this process
