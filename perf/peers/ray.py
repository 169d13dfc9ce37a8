"""Actors of Ray that touch an array: by Ray's object store, by a compiled graph, which keeps a
channel to each, and by our transport for its direct transfers.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine.ray

Touch = Callable[[NDArray[Any]], float]
Fan = Callable[[NDArray[Any]], list[float]]
TRANSPORT = "prpc_numpy"
# A channel's messages are of one size at most: the array and what its pickle adds.
EXTRA_BYTES = 1 << 20


def _readers(touch: Touch, count: int, exits: contextlib.ExitStack) -> tuple[Any, list[Any]]:
    """Ray, and so many actors that are up."""
    ray: Any = importlib.import_module("ray")
    prpc_engine.ray.register(TRANSPORT, np.ndarray)
    folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp"))
    ray.init(
        num_cpus=count + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
    )
    exits.callback(ray.shutdown)

    class Reader:
        def touch(self, array: Any) -> float:
            return touch(array[0] if isinstance(array, list) else array)

    reader = ray.remote(enable_tensor_transport=True)(Reader)
    actors = [reader.remote() for _ in range(count)]
    ray.get([actor.touch.remote(np.ones(1, np.float32)) for actor in actors])
    return ray, actors


def fan_store(touch: Touch, count: int, exits: contextlib.ExitStack) -> Fan:
    """ray.put(), and a call to each with the reference."""
    ray, actors = _readers(touch, count, exits)

    def fan(array: NDArray[Any]) -> list[float]:
        reference = ray.put(array)
        answers: list[float] = ray.get([actor.touch.remote(reference) for actor in actors])
        return answers

    return fan


def fan_transport(touch: Touch, count: int, exits: contextlib.ExitStack) -> Fan:
    """The same with our transport."""
    ray, actors = _readers(touch, count, exits)

    def fan(array: NDArray[Any]) -> list[float]:
        reference = ray.put([array], _tensor_transport=TRANSPORT)
        answers: list[float] = ray.get([actor.touch.remote(reference) for actor in actors])
        return answers

    return fan


def fan_graph(touch: Touch, count: int, exits: contextlib.ExitStack, nbytes: int) -> Fan:
    """A compiled graph: one channel from here to all, one back from each."""
    ray, actors = _readers(touch, count, exits)
    dag: Any = importlib.import_module("ray.dag")
    with dag.InputNode() as given:
        graph = dag.MultiOutputNode([actor.touch.bind(given) for actor in actors])
    compiled = graph.experimental_compile(_buffer_size_bytes=nbytes + EXTRA_BYTES)
    exits.callback(compiled.teardown)

    def fan(array: NDArray[Any]) -> list[float]:
        answers: list[float] = ray.get(compiled.execute(array))
        return answers

    return fan
