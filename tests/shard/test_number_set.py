"""Numbers kept as ranges: the same answers as a set gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shard.group.number_set import NumberSet


@given(st.lists(st.integers(0, 40)))
def test_it_holds_what_a_set_holds_in_as_few_ranges_as_there_are(numbers: list[int]) -> None:
    kept, plain = NumberSet(), set[int]()
    for number in numbers:
        kept.add(number)
        plain.add(number)
        assert [each for each in range(-1, 42) if each in kept] == sorted(plain)
    assert len(kept) == sum(each - 1 not in plain for each in plain)


def test_numbers_in_order_are_one_range() -> None:
    kept = NumberSet()
    for number in range(1000):
        kept.add(number)
    assert len(kept) == 1
