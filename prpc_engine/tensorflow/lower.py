"""Functional control flow (If, Case, While, calls of functions) becomes plain nodes, where no task
can run it as one op.

    handles that the op takes                          the op
    of the own task, or none                           stays as it is
    of one other task; it takes and gives no variants  stays as it is, and runs there
    of several tasks; of another one, and there are    is lowered: Switch and Merge, Enter and Exit,
      variants, as with a gradient                     and the bodies' own ops, each of which has a
                                                       place of its own
    any; a seeded random kernel is in its function     is lowered, too: TensorFlow does that before
                                                       it runs a graph, so that the kernel is one of
                                                       the graph's, which goes on from step to step

TensorFlow's optimizer lowers, as it does in any session: the nodes have the names that they have on
its own servers. What functions do besides their values is done, as there: "prpc_ran_<k>", a target
of the step, comes after all that one of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.functions import called
from prpc_engine.tensorflow.nodes import (
    RESOURCE,
    VARIANT,
    Edge,
    Graph,
    GraphNode,
    has_random_state,
    is_seeded,
    text_of,
)
from prpc_engine.tensorflow.partition import ALIASES, Unsupported
from prpc_engine.tensorflow.place import Places

BRANCHING = frozenset({"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"})
FUNCTIONAL = BRANCHING | {"PartitionedCall", "StatefulPartitionedCall"}
# in front of what passes arguments and results on; TensorFlow ties those of one call to one another
PASSES = "Func/"
_LOWER = "_lower_using_switch_merge"


def lowered(
    graph: Graph,
    placer: Places,
    own: Task,
    fetches: Sequence[Edge],
    targets: Sequence[str],
    feeds: Sequence[Edge],
) -> tuple[Graph, list[Edge], list[str]]:
    """The graph of a step in which no op is of several tasks, and its fetches and targets; the same
    ones, when nothing is to be done. Raises Misplaced and Unsupported."""
    needed = graph.needed(fetches, targets, feeds)
    functional = [
        name for name, node in graph.nodes.items() if name in needed and node.op in FUNCTIONAL
    ]
    random = _Random(graph)
    chosen = {
        name
        for name in functional
        if random.is_in(graph.nodes[name]) or _is_of_several(graph, placer, own, graph.nodes[name])
    }
    if not chosen:
        return graph, list(fetches), list(targets)
    for name, _ in feeds:
        if graph.nodes[name].op in FUNCTIONAL:  # its users would not see what is fed
            raise Unsupported(
                f"{name!r}, a function, is fed in a step in which {min(chosen)!r} is lowered: "
                "feed an Identity of it"
            )
    definition = graph_pb2.GraphDef(
        versions=graph.definition.versions, library=graph.definition.library
    )
    # with what is fed: it keeps its name and type
    needed = graph.needed([*fetches, *feeds], targets, ())
    for name, node in graph.nodes.items():
        if name in needed:
            copy = definition.node.add()
            copy.CopyFrom(node.definition)
            if node.op in BRANCHING:
                copy.attr[_LOWER].b = name in chosen
    wanted = [
        edge if edge[0] not in functional else _add_fetch(definition, graph, edge)
        for edge in fetches
    ]
    run = [name for name in targets if name not in functional]
    for name in functional:
        run.append(f"prpc_ran_{len(run)}")
        definition.node.add(name=run[-1], op="NoOp", input=[f"^{name}"])
    kept = [name for name, _ in (*wanted, *feeds)] + run
    return Graph(_optimized(definition, kept), graph.signature_of), wanted, run


class _Random:
    """Finds calls of functions that have a seeded random kernel in them, or in what they call."""

    def __init__(self, graph: Graph) -> None:
        self._signature_of = graph.signature_of
        self._functions = {
            function.signature.name: function for function in graph.definition.library.function
        }
        self._known: dict[str, bool] = {}

    def is_in(self, node: GraphNode) -> bool:
        """Whether one of its functions has one."""
        return any(map(self._has, called(node.definition)))

    def _has(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = False  # while it is looked at: a function may call itself
            function = self._functions.get(name)
            self._known[name] = function is not None and any(
                self._is_random(node) or any(map(self._has, called(node)))
                for node in function.node_def
            )
        return self._known[name]

    def _is_random(self, definition: Any) -> bool:
        if not is_seeded(definition):
            return False
        signature = self._signature_of(definition.op)
        return signature is not None and has_random_state(definition, signature)


def _optimized(definition: Any, kept: Sequence[str]) -> Any:
    """The graph with the functions of its marked ops, and of its calls, in their places. Nodes that
    are `kept` remain.
    """
    meta = meta_graph_pb2.MetaGraphDef(graph_def=definition)
    meta.collection_def["train_op"].node_list.value.extend(dict.fromkeys(kept))
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.min_graph_nodes = -1
    rewrites.optimizers.append("function")
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    # also where it sees no use of their effects
    rewrites.function_optimization = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    found = tf_optimizer.OptimizeGraph(config, meta)
    for node in found.node:
        if node.name.startswith(PASSES):
            node.attr.pop("_class", None)
    return found


def _add_fetch(definition: Any, graph: Graph, edge: Edge) -> Edge:
    """In place of an output of an op that is lowered: of one that is fetched, its handles would
    have to be values, too.
    """
    node = definition.node.add(
        name=f"prpc_fetch_{len(definition.node)}", op="Identity", input=[text_of(edge)]
    )
    node.attr["T"].type = graph.nodes[edge[0]].out_types[edge[1]]
    return node.name, 0


def _is_of_several(graph: Graph, placer: Places, own: Task, node: GraphNode) -> bool:
    """Whether no one task can run it."""
    handles = {
        _root(graph, edge)
        for edge, kind in zip(node.inputs, node.in_types, strict=True)
        if kind == RESOURCE
    }
    if any(graph.nodes[name].op in FUNCTIONAL for name in handles):
        return True  # whose it is, only the function says
    with_them = [
        one for name in handles for one in graph.nodes[name].colocated() if one in graph.nodes
    ]
    places = placer.place(graph, dict.fromkeys([*sorted(handles), *with_them]))
    tasks = {places[name] for name in handles}
    return len(tasks) > 1 or (not tasks <= {own} and VARIANT in (*node.in_types, *node.out_types))


def _root(graph: Graph, edge: Edge) -> str:
    """The node that makes a handle."""
    node = graph.nodes[edge[0]]
    while node.op in ALIASES:
        node = graph.nodes[node.inputs[0][0]]
    return node.name
