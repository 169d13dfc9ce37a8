import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table import initializer
from prpc_engine.kv.table.initializer import Constant, Uniform


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_row_depends_on_its_key_and_the_seed_alone(key: int, seed: int) -> None:
    uniform = Uniform(0.1, seed)
    alone = uniform.rows(np.array([key]), 5)
    in_company = uniform.rows(np.array([1, 2, key, key, 3]), 5)
    np.testing.assert_array_equal(in_company[2:4], np.concatenate([alone, alone]))


def test_uniform_is_uniform() -> None:
    rows = Uniform(2.0).rows(np.arange(50_000), 4)
    assert rows.dtype == np.float32
    assert rows.min() >= -2.0
    assert rows.max() < 2.0
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(rows.std(axis=0), 2 / 3**0.5, atol=0.03)
    correlation = np.corrcoef(rows.T) - np.eye(4)
    assert np.abs(correlation).max() < 0.03


def test_another_seed_gives_other_rows() -> None:
    keys = np.arange(100)
    assert (Uniform(1.0, seed=1).rows(keys, 3) != Uniform(1.0, seed=2).rows(keys, 3)).mean() > 0.99


def test_each_column_may_have_its_own_scale() -> None:
    rows = Uniform([0.0, 1.0, 10.0]).rows(np.arange(1000), 3)
    assert (rows[:, 0] == 0).all()
    assert 0.9 < np.abs(rows[:, 1]).max() <= 1
    assert 9 < np.abs(rows[:, 2]).max() <= 10


def test_constant_is_constant() -> None:
    assert Constant(0.5).rows(np.arange(2), 3).tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize("made", [Constant(), Constant(1.5), Uniform(0.1, 7), Uniform([0.0, 0.1])])
def test_a_spec_goes_there_and_back(made: initializer.Initializer) -> None:
    assert initializer.from_spec(made.to_spec()) == made


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "zeros"}, "'zeros' is not known; allowed: constant, uniform"),
        ({"name": "uniform"}, "needs the setting 'scale'"),
        ({"name": "uniform", "scale": -1}, "of at least 0"),
        ({"name": "uniform", "scale": "1"}, "scale is '1'"),
        ({"name": "uniform", "scale": [0.1, None]}, "scale is None"),
        ({"name": "uniform", "scale": 1, "seed": -1}, "seed is -1"),
        ({"name": "constant", "value": float("inf")}, "value is inf"),
    ],
)
def test_a_bad_spec_is_refused_with_what_is_allowed(spec: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        initializer.from_spec(spec)
    assert said in str(caught.value)


def test_a_wrong_number_of_scales_is_told_before_any_row_is_made() -> None:
    with pytest.raises(ConfigError, match="2 scales for rows of 3 columns"):
        Uniform([0.1, 0.2]).check_width(3)
