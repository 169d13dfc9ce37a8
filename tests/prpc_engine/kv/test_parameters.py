"""Parameters by name in one dense table: what a step does, what it costs, and who may take part."""

from __future__ import annotations

import numpy as np
import pytest

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.local import LocalService
from prpc_engine.kv.parameters import Parameters

SGD = {"name": "sgd", "learning_rate": 0.5}
START = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, np.float32), "scale": np.float32(2)}


def make(servers: int = 2) -> tuple[LocalService, TableWorker, TableWorker]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    one, other = (TableWorker(service, expected_servers=servers) for _ in range(2))
    return service, one, other


def test_a_step_is_one_message_to_each_server_and_all_workers_see_it() -> None:
    service, one, other = make(3)
    mine = Parameters(one, "model", START, SGD, split_bytes_min=0)
    theirs = Parameters(other, "model", START, SGD, split_bytes_min=0)
    service.calls.clear()
    for name, grads in mine.grads.items():
        grads[...] = START[name]
    mine.step()
    assert len(service.calls) == 3
    theirs.pull()
    for name, start in START.items():
        np.testing.assert_allclose(mine.values[name], start / 2)
        np.testing.assert_array_equal(mine.values[name], theirs.values[name])
    assert not theirs.values["w"].flags.owndata


@pytest.mark.parametrize(
    "start",
    [START | {"b": np.zeros(2, np.float32)}, START | {"b": np.ones((2, 1))}, {"c": START["w"]}],
    ids=["value", "shape", "name"],
)
def test_a_worker_that_starts_otherwise_is_refused(start: dict[str, np.ndarray]) -> None:
    _, one, other = make()
    Parameters(one, "model", START, SGD)
    with pytest.raises(ConfigError, match="give all of them the same seed"):
        Parameters(other, "model", start, SGD)


def test_what_is_no_array_of_floats_is_refused_by_name() -> None:
    _, one, _ = make()
    with pytest.raises(BadArguments, match=r"parameter 'step' is int64\[\]"):
        Parameters(one, "model", START | {"step": np.int64(3)}, SGD)
    with pytest.raises(BadArguments, match="there are none"):
        Parameters(one, "model", {}, SGD)
