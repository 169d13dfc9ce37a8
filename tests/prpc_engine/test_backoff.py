"""The pause after failures in a row: doubling, bounded, spread by chance."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine import errors
from prpc_engine.client.retry import RETRY_BACKOFF
from prpc_engine.rpc.backoff import Backoff


def test_a_backoff_doubles_up_to_its_bound_and_starts_from_nothing() -> None:
    backoff = Backoff(first_s=0.1, max_s=1.0)
    assert [backoff.bound_s(failures) for failures in range(7)] == [
        0.0,
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
    ]
    assert backoff.bound_s(100_000) == 1.0


@given(failures=st.integers(0, 10_000), chance=st.floats(0.0, 1.0), certain=st.floats(0.0, 1.0))
def test_a_delay_is_a_random_part_of_the_bound_and_its_certain_share_at_least(
    failures: int, chance: float, certain: float
) -> None:
    backoff = Backoff(first_s=0.05, max_s=5.0, certain=certain)
    bound_s = backoff.bound_s(failures)
    assert certain * bound_s * 0.999999 <= backoff.delay_s(failures, chance) <= bound_s * 1.000001


def test_a_hundred_clients_that_try_again_come_spread_over_the_whole_bound(seed: int) -> None:
    random = Random(seed)
    delays = sorted(RETRY_BACKOFF.delay_s(8, random.random()) for _ in range(100))
    assert RETRY_BACKOFF.bound_s(8) == RETRY_BACKOFF.max_s
    assert delays[10] < RETRY_BACKOFF.max_s * 0.35 and delays[90] > RETRY_BACKOFF.max_s * 0.65


@pytest.mark.parametrize(
    ("first_s", "max_s", "certain"), [(-1.0, 1.0, 0.0), (2.0, 1.0, 0.0), (0.1, 1.0, 1.5)]
)
def test_a_backoff_that_cannot_be_is_refused(first_s: float, max_s: float, certain: float) -> None:
    with pytest.raises(errors.ConfigError, match="0 <= first_s <= max_s and 0 <= certain <= 1"):
        Backoff(first_s, max_s, certain)
