import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.kv import optimizer
from prpc_engine.kv.optimizer import Adagrad, Sgd

gradients = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20)


def test_sgd_steps_against_the_gradient() -> None:
    values = np.array([1.0, 2.0], np.float32)
    Sgd(0.5).apply(values, np.array([2.0, -4.0], np.float32), [])
    assert values.tolist() == [0.0, 4.0]


@given(gradients, st.floats(0.001, 1), st.floats(0, 2))
def test_adagrad_does_what_its_formula_says_one_element_at_a_time(grads: list[float], rate: float, start: float) -> None:
    value, accumulator = 0.25, start
    values, state = np.array([value], np.float32), np.array([accumulator], np.float32)
    adagrad = Adagrad(rate, initial_accumulator=start, epsilon=1e-3)
    for grad in grads:
        accumulator += grad * grad
        value -= rate * grad / (math.sqrt(accumulator) + 1e-3)
        adagrad.apply(values, np.array([grad], np.float32), [state])
    assert state[0] == pytest.approx(accumulator, rel=1e-5, abs=1e-6)
    assert values[0] == pytest.approx(value, rel=1e-4, abs=1e-4)


def test_gradients_are_only_read_and_values_change_in_place() -> None:
    grads = np.ones((3, 2), np.float32)
    grads.flags.writeable = False
    for each in (Sgd(0.1), Adagrad(0.1)):
        values = np.zeros((3, 2), np.float32)
        state = [np.full((3, 2), initial, np.float32) for initial in each.state_initial]
        each.apply(values, grads, state)
        assert (values < 0).all()
        assert values.dtype == np.float32


def test_a_zero_gradient_changes_nothing_even_where_nothing_has_accumulated() -> None:
    values, state = np.ones(4, np.float32), np.zeros(4, np.float32)
    Adagrad(0.1, initial_accumulator=0).apply(values, np.zeros(4, np.float32), [state])
    assert values.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("made", [Sgd(0.1), Adagrad(0.05), Adagrad(0.5, 0.0, 1e-3)])
def test_a_spec_goes_there_and_back(made: optimizer.Optimizer) -> None:
    assert optimizer.from_spec(made.to_spec()) == made
    assert optimizer.from_spec(made) is made


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "adam", "learning_rate": 0.1}, "'adam' is not known; allowed: adagrad, sgd"),
        ({"learning_rate": 0.1}, "None is not known; allowed: adagrad, sgd"),
        ("sgd", 'a dict with a "name" is allowed, where name is one of: adagrad, sgd'),
        ({"name": "sgd"}, "'sgd' needs the setting 'learning_rate'"),
        ({"name": "sgd", "learning_rate": 0.1, "lr": 1}, "no setting 'lr'; allowed: learning_rate"),
        ({"name": "sgd", "learning_rate": -1}, "learning_rate is -1; a finite number above 0"),
        ({"name": "sgd", "learning_rate": "0.1"}, "learning_rate is '0.1'; a finite number above 0"),
        ({"name": "sgd", "learning_rate": math.nan}, "learning_rate is nan"),
        ({"name": "sgd", "learning_rate": True}, "learning_rate is True"),
        ({"name": "adagrad", "learning_rate": 1, "initial_accumulator": -0.1}, "of at least 0"),
        ({"name": "adagrad", "learning_rate": 1, "epsilon": 0}, "epsilon is 0; a finite number above 0"),
    ],
)
def test_a_bad_spec_is_refused_with_what_is_allowed(spec: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer.from_spec(spec)
    assert said in str(caught.value)
