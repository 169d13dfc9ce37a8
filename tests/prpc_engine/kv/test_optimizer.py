"""Each formula against the same in float64, one value at a time, as the papers write it."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table import optimizer
from prpc_engine.kv.table.optimizer import (
    Adagrad,
    Adam,
    Add,
    Assign,
    Descent,
    Ftrl,
    Momentum,
    Optimizer,
    Sgd,
)
from prpc_engine.kv.table.schedule import Cosine, WarmUp

EVERY = [
    Assign(),
    Add(),
    Sgd(0.1),
    Momentum(0.1, 0.8),
    Momentum(0.1, 0.8, nesterov=True),
    Adagrad(0.05),
    Adagrad(0.5, 0.0, 1e-3),
    Adam(0.01),
    Adam(0.1, beta_1=0.0, beta_2=0.5, epsilon=1e-3),
    Ftrl(0.1),
    Ftrl(0.1, beta=0.5, l1=0.3, l2=0.2),
    Ftrl(Cosine(0.5, steps=12, final=0.1), beta=0.5, l1=0.3, l2=0.2),
    Adam(Cosine(0.1, steps=5)),
    Momentum(WarmUp(3, then=0.1)),
]


def reference(made: Optimizer, value: float, grads: list[float]) -> Iterator[float]:
    """The value after each gradient."""
    m = s = z = n = before = 0.0
    accumulator = made.initial_accumulator if isinstance(made, Adagrad) else 0.0
    for t, g in enumerate(grads, start=1):
        rate = made.rate_at(t - 1)
        if isinstance(made, Assign):
            value = g
        elif isinstance(made, Add):
            value += g
        elif isinstance(made, Sgd):
            value -= rate * g
        elif isinstance(made, Momentum):
            m = made.momentum * m + g
            value -= rate * (g + made.momentum * m if made.nesterov else m)
        elif isinstance(made, Adagrad):
            accumulator += g * g
            value -= rate * g / (math.sqrt(accumulator) + made.epsilon)
        elif isinstance(made, Adam):
            m = made.beta_1 * m + (1 - made.beta_1) * g
            s = made.beta_2 * s + (1 - made.beta_2) * g * g
            unbiased_m, unbiased_s = m / (1 - made.beta_1**t), s / (1 - made.beta_2**t)
            value -= rate * unbiased_m / (math.sqrt(unbiased_s) + made.epsilon)
        elif isinstance(made, Ftrl):
            n += g * g
            inverse = (made.beta + math.sqrt(n)) / rate  # of the learning rate of this value
            z += g - (inverse - (before or made.beta / rate)) * value
            before = inverse
            shrunk = 0.0 if abs(z) <= made.l1 else z - math.copysign(made.l1, z)
            value = -shrunk / (inverse + made.l2)
        yield value


def state_of(made: Optimizer, shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.full(shape, initial, np.float32) for initial in made.state_initial.values()]


@pytest.mark.parametrize("made", EVERY, ids=str)
@settings(max_examples=40)
@given(grads=st.lists(st.integers(-64, 64).map(lambda each: each / 8), min_size=1, max_size=12))
def test_it_does_what_its_formula_says_one_element_at_a_time(
    made: Optimizer, grads: list[float]
) -> None:
    values, state = np.array([0.25], np.float32), state_of(made, (1,))
    for t, wanted in enumerate(reference(made, 0.25, grads), start=1):
        made.apply(values, np.array(grads[t - 1 : t], np.float32), state, made.rate_at(t - 1), t)
        assert values[0] == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("made", [Sgd, Momentum, Adagrad, Adam, Ftrl])
def test_a_rate_that_falls_to_zero_ends_at_the_minimum_and_stays_there(
    made: type[Descent], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    falling = made(Cosine(0.3, steps=400))
    values, state = np.zeros(8, np.float32), state_of(falling, (8,))
    for step in range(500):
        grads = (values - 1 + 0.1 * rng.standard_normal(8)).astype(np.float32)
        falling.apply(values, grads, state, falling.rate_at(step), step + 1)
    np.testing.assert_allclose(values, 1, atol=0.1)


def test_each_row_has_its_own_count_of_steps() -> None:
    adam, counts = Adam(0.1), [1, 7, 1000]
    together, state = np.zeros((3, 2), np.float32), state_of(adam, (3, 2))
    adam.apply(
        together, np.ones((3, 2), np.float32), state, 0.1, np.array(counts, np.float32)[:, None]
    )
    for row, count in enumerate(counts):
        alone = np.zeros(2, np.float32)
        adam.apply(alone, np.ones(2, np.float32), state_of(adam, (2,)), 0.1, count)
        np.testing.assert_allclose(together[row], alone, rtol=1e-6)


def test_after_a_million_steps_the_means_are_divided_by_one() -> None:
    values, adam = np.zeros(1, np.float32), Adam(1.0)
    adam.apply(
        values,
        np.zeros(1, np.float32),
        [np.full(1, 10 / 9, np.float32), np.full(1, 1, np.float32)],
        1.0,
        10**6,
    )
    assert values[0] == pytest.approx(-1.0, rel=1e-3)


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_gradients_are_only_read_and_values_change_in_place(made: Optimizer) -> None:
    grads = np.ones((3, 2), np.float32)
    grads.flags.writeable = False
    values = np.zeros((3, 2), np.float32)
    made.apply(values, grads, state_of(made, (3, 2)), made.rate_at(0), 1)
    assert values.all()
    assert values.dtype == np.float32


@pytest.mark.parametrize(
    "made",
    [Sgd(1.0), Momentum(1.0), Adagrad(0.1, initial_accumulator=0), Adam(0.1), Add()],
    ids=str,
)
def test_a_zero_gradient_changes_nothing_even_where_nothing_has_accumulated(
    made: Optimizer,
) -> None:
    values = np.ones(4, np.float32)
    made.apply(values, np.zeros(4, np.float32), state_of(made, (4,)), made.rate_at(0), 1)
    assert values.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_a_spec_goes_there_and_back(made: Optimizer) -> None:
    assert optimizer.from_spec(made.to_spec()) == made
    assert optimizer.from_spec(made) is made


ALLOWED = "adagrad, adam, add, assign, ftrl, momentum, sgd"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "lamb", "learning_rate": 0.1}, f"'lamb' is not known; allowed: {ALLOWED}"),
        ({"learning_rate": 0.1}, f"None is not known; allowed: {ALLOWED}"),
        ("sgd", f'a dict with a "name" is allowed, where name is one of: {ALLOWED}'),
        ({"name": "sgd"}, "'sgd' needs the setting 'learning_rate'"),
        ({"name": "sgd", "learning_rate": 0.1, "lr": 1}, "no setting 'lr'; allowed: learning_rate"),
        ({"name": "sgd", "learning_rate": -1}, "learning_rate is -1; a finite number above 0"),
        (
            {"name": "sgd", "learning_rate": "0.1"},
            "learning_rate is '0.1'; a finite number above 0",
        ),
        ({"name": "sgd", "learning_rate": math.nan}, "learning_rate is nan"),
        ({"name": "sgd", "learning_rate": True}, "learning_rate is True"),
        (
            {"name": "sgd", "learning_rate": {"name": "cosine", "initial": 1}},
            "schedule 'cosine' needs the setting 'steps'",
        ),
        (
            {"name": "add", "learning_rate": 1},
            "'add' has no setting 'learning_rate'; allowed: none",
        ),
        (
            {"name": "momentum", "learning_rate": 1, "momentum": 1},
            "momentum is 1.0; a number below 1",
        ),
        ({"name": "momentum", "learning_rate": 1, "nesterov": 1}, "nesterov is 1; True or False"),
        ({"name": "adagrad", "learning_rate": 1, "initial_accumulator": -0.1}, "of at least 0"),
        (
            {"name": "adagrad", "learning_rate": 1, "epsilon": 0},
            "epsilon is 0; a finite number above 0",
        ),
        ({"name": "adam", "learning_rate": 1, "beta_2": 1}, "beta_2 is 1.0; a number below 1"),
        ({"name": "ftrl", "learning_rate": 1, "l1": -1}, "l1 is -1; a finite number of at least 0"),
    ],
)
def test_a_bad_spec_is_refused_with_what_is_allowed(spec: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer.from_spec(spec)
    assert said in str(caught.value)
