"""The matrix of random faults, small: what it promises, and that its command counts what must not
be.
"""

from __future__ import annotations

import pytest

from tests.network import matrix
from tests.network.tally import Tally

CASES = 150


@pytest.mark.slow
def test_whatever_happens_nothing_hangs_no_byte_is_wrong_and_every_loss_is_named(
    one_seed: int,
) -> None:
    before = sum(matrix.TALLY.counts.values())
    tally = matrix.run(CASES, one_seed)
    assert sum(tally.counts.values()) == before + CASES
    assert tally.holds(), tally.line()


def test_a_tally_holds_until_a_wrong_byte_a_hang_or_a_loss_without_a_name() -> None:
    for error, is_right in [(None, False), (ValueError(""), True), (ValueError("told"), False)]:
        tally = Tally()
        tally.ended(None, True)
        tally.ended(ValueError("told"), True)
        assert tally.holds()
        tally.ended(error, is_right)
        assert not tally.holds()
    hanging = Tally()
    hanging.add("hang")
    assert not hanging.holds()
    assert hanging.line().startswith(
        "1 cases: 1 hangs, 0 wrong bytes, 0 losses without a name; 0 right, 0 losses named;"
    )
