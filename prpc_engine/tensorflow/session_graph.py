"""The graph of a session of TensorFlow's own, which only grows: GraphDefs are added to it by what
TensorFlow's Python package has of its C interface.

tf.import_graph_def() is the same, and then makes a Python object of each node, which takes ten
times as long: 1.3 s for the 6,764 nodes of the own part of Wide & Deep. A part needs none: it is
run by the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensorflow.python.client import pywrap_tf_session as tf_session
from tensorflow.python.framework import c_api_util, ops
from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.tensorflow.nodes import Edge


class AddedNode(NamedTuple):
    """A node of the graph."""

    name: str
    operation: Any  # a TF_Operation, which lives as long as the graph

    def output(self, index: int) -> Any:
        """A TF_Output."""
        return c_api_util.tf_output(self.operation, index)

    @property
    def outputs(self) -> list[Any]:
        """All of them."""
        count = tf_session.TF_OperationNumOutputs(self.operation)
        return [self.output(index) for index in range(count)]


class SessionGraph:
    """Adds nodes to a graph that it makes. One thread at a time, and none while its session is
    told of them.
    """

    def __init__(self) -> None:
        self.graph = ops.Graph()
        self.size = 0  # nodes
        self._numbers = 0

    def add(
        self, definition: Any, kind: str, inputs: Mapping[Edge, Any], wanted: Sequence[str]
    ) -> list[AddedNode]:
        """Add the nodes of a GraphDef under "<kind><k>/", with k another one each time. Returns
        those that are `wanted`, by their names in it.

        inputs: a TF_Output for each edge that does not come from a node of the GraphDef

        Raises ValueError for a bad GraphDef.
        """
        self._numbers += 1
        scoped = c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        tf_session.TF_ImportGraphDefOptionsSetPrefix(options, f"{kind}{self._numbers}")
        for (name, index), output in inputs.items():
            tf_session.TF_ImportGraphDefOptionsAddInputMapping(options, name, index, output)
        for name in wanted:
            tf_session.TF_ImportGraphDefOptionsAddReturnOperation(options, name)
        with (
            self.graph._c_graph.get() as graph,
            c_api_util.tf_buffer(definition.SerializeToString()) as serialized,
        ):
            try:
                results = c_api_util.ScopedTFImportGraphDefResults(
                    tf_session.TF_GraphImportGraphDefWithResults(graph, serialized, options)
                )
            except tf_errors.InvalidArgumentError as error:
                raise ValueError(error.message) from None
        self.size += len(definition.node)
        found = tf_session.TF_ImportGraphDefResultsReturnOperations(results.results)
        return [AddedNode(tf_session.TF_OperationName(one), one) for one in found]
