"""A step that is described once by a CallableOptions and run many times: what Keras makes of `fit`
and `predict`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prpc_engine.tensorflow.nodes import Edge


class OptionsCallable:
    """What `Session._make_callable_from_options` gives for a session of ours.

    options: a CallableOptions. Called with an array for each of its feeds, in their order, it
    returns a list with an array for each of its fetches. A `tensor_connection` puts one tensor in
    the place of another within the step. Raises errors of TensorFlow, as Session.run() does;
    KeyError and ValueError when the graph has no tensor or operation of a name.
    """

    def __init__(self, session: Any, options: Any) -> None:
        graph = session.graph
        self._session, self._run_options = (
            session,
            options.run_options if options.HasField("run_options") else None,
        )
        self._feeds = [_tensor(graph, name) for name in options.feed]
        self._fetches = [_tensor(graph, name) for name in options.fetch]
        self._targets = [graph.get_operation_by_name(name) for name in options.target]
        self._connections: tuple[tuple[Edge, Edge], ...] = tuple(
            (_edge(_tensor(graph, one.to_tensor)), _edge(_tensor(graph, one.from_tensor)))
            for one in options.tensor_connection
        )

    def __call__(self, *values: Any, run_metadata: Any = None) -> list[Any]:
        """Run the step."""
        if len(values) != len(self._feeds):
            raise ValueError(f"the step is fed {len(self._feeds)} arrays, and got {len(values)}")
        fed = {
            tensor: np.asarray(value, tensor.dtype.as_numpy_dtype)
            for tensor, value in zip(self._feeds, values, strict=True)
        }
        with self._session._prpc.connected(self._connections):
            fetched = self._session.run(
                [*self._fetches, *self._targets], fed, self._run_options, run_metadata
            )
        found: list[Any] = fetched[: len(self._fetches)]
        return found


def _tensor(graph: Any, name: str) -> Any:
    return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")


def _edge(tensor: Any) -> Edge:
    return tensor.op.name, tensor.value_index
