import math

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table import schedule
from prpc_engine.kv.table.schedule import Cosine, Exponential, Polynomial, Schedule, WarmUp


@pytest.mark.parametrize(
    ("made", "rates"),
    [
        (
            Exponential(0.8, factor=0.5, steps=10),
            {0: 0.8, 5: 0.8 * math.sqrt(0.5), 10: 0.4, 20: 0.2},
        ),
        (Polynomial(1.0, steps=10), {0: 1.0, 4: 0.6, 10: 0.0, 11: 0.0}),
        (Polynomial(1.0, steps=10, final=0.2, power=2), {0: 1.0, 5: 0.4, 10: 0.2, 1000: 0.2}),
        (Cosine(1.0, steps=8), {0: 1.0, 2: 0.5 + math.sqrt(0.125), 4: 0.5, 8: 0.0, 9: 0.0}),
        (Cosine(1.0, steps=8, final=0.5), {0: 1.0, 4: 0.75, 100: 0.5}),
        (WarmUp(3, then=0.4), {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 99: 0.4}),
        (WarmUp(1, then=Polynomial(1.0, steps=2)), {0: 0.5, 1: 1.0, 2: 0.5, 3: 0.0}),
    ],
    ids=str,
)
def test_the_rate_of_a_step_is_what_the_formula_says(
    made: Schedule, rates: dict[int, float]
) -> None:
    assert {step: made.at(step) for step in rates} == pytest.approx(rates, abs=1e-12)
    assert schedule.from_spec("rate", schedule.to_spec(made)) == made


def test_a_number_is_a_rate_that_stays() -> None:
    assert schedule.rate_at(schedule.from_spec("rate", 0.25), 10**9) == 0.25
    assert schedule.to_spec(0.25) == 0.25


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"name": "stairs"},
            "'stairs' is not known; allowed: cosine, exponential, polynomial, warm_up",
        ),
        (
            {"name": "cosine", "initial": 1.0, "steps": 0},
            "'cosine': steps is 0; a whole number from 1",
        ),
        (
            {"name": "cosine", "initial": 0.0, "steps": 1},
            "'cosine': initial is 0.0; a finite number above 0",
        ),
        (
            {"name": "polynomial", "initial": 1.0, "steps": 1, "final": -1},
            "final is -1; a finite number of at least 0",
        ),
        (
            {"name": "warm_up", "steps": 1, "then": "fast"},
            "then is 'fast'; a finite number above 0",
        ),
        ([0.1], "rate is [0.1]; a finite number above 0"),
    ],
)
def test_a_bad_schedule_is_refused_with_what_is_allowed(spec: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule.from_spec("rate", spec)
    assert said in str(caught.value)
