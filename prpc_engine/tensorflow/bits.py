"""A step that is run bit by bit (`Session.partial_run`): which of its nodes each bit runs. No I/O
here.

    what was asked for          in a bit
    a fetch or a target that    runs, with all that it needs, whether this bit asks for it or not:
      needs no feed to come       as soon as it can, as with TensorFlow's own servers
    any other                   waits for a bit with its feeds

    a node that has run         in a later bit
    a constant, a handle, an    is there again: it has no effect
      alias of a handle
    any other                   never runs again: its values that are still needed were kept, and
                                  are fed; nothing waits for it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prpc_engine.tensorflow.nodes import (
    PLACEHOLDERS,
    REF,
    RESOURCE,
    VARIANT,
    Edge,
    Graph,
    text_of,
)
from prpc_engine.tensorflow.partition import ALIASES, is_constant


class Refused(ValueError):
    """A bit asks for what this step does not have, or not yet."""


class Unkept(ValueError):
    """What has run makes something that cannot be kept for a later bit."""


class Bit(NamedTuple):
    """What is run at once."""

    nodes: set[str]
    done: frozenset[str]  # that have run before, and never do again
    targets: list[str]
    results: list[Edge]  # fetches of the user's
    kept: list[Edge]  # fetched for later bits
    feeds: dict[Edge, Any]  # arrays


class _Needed(NamedTuple):
    nodes: set[str]
    known: set[Edge]  # what they take that was fed, or kept
    missing: set[Edge]  # that are to be fed


class StepInBits:
    """What a step has run, and the values that it has.

    graph    as it is when the step is set up
    targets  nodes that it is to run; fetches, feeds: edges that it may be asked for, and fed

    One thread at a time.
    """

    def __init__(
        self, graph: Graph, targets: Iterable[str], fetches: Iterable[Edge], feeds: Iterable[Edge]
    ) -> None:
        self._graph = graph
        self._targets = dict.fromkeys(targets)  # that have not run
        self._fetches = dict.fromkeys(fetches)  # that were not given out
        self._feeds = dict.fromkeys(feeds)  # that were not fed
        self._all_fetches, self._all_feeds = frozenset(self._fetches), frozenset(self._feeds)
        self._results: dict[Edge, Any] = {}  # of fetches
        self._known: dict[Edge, Any] = {}  # what was fed, and what was kept
        self._done: set[str] = set()

    @property
    def is_over(self) -> bool:
        """All of it has run, and its values were given out."""
        return not (self._targets or self._fetches or self._feeds)

    def next_bit(self, fetches: Sequence[Edge], feeds: Mapping[Edge, Any]) -> Bit | None:
        """What is to run now, for ran(); None: nothing. Raises Refused, and has changed nothing
        then; and Unkept.
        """
        _check("fetch", fetches, self._all_fetches, self._fetches)
        _check("feed", feeds, self._all_feeds, self._feeds)
        for edge, value in feeds.items():
            del self._feeds[edge]
            self._known[edge] = value
        of_fetches = [
            (edge, self._needed([edge], ())) for edge in self._fetches if edge not in self._results
        ]
        of_targets = [(name, self._needed((), [name])) for name in self._targets]
        late = {edge for edge, needed in of_fetches if needed.missing}
        for edge in fetches:
            if edge in late:
                for fed in feeds:
                    del self._known[fed]
                    self._feeds[fed] = None
                raise Refused(f"the fetch {text_of(edge)} needs what has not been fed so far")
        needs = [one for _, one in of_fetches] + [one for _, one in of_targets]
        now = [one for one in needs if not one.missing]
        if not now:
            return None
        nodes = set[str]().union(*(one.nodes for one in now))
        later = set[str]().union(*(one.nodes for one in needs if one.missing))
        known = set[Edge]().union(*(one.known for one in now))
        return Bit(
            nodes,
            frozenset(self._done),
            [name for name, needed in of_targets if not needed.missing],
            [edge for edge, _ in of_fetches if edge not in late],
            self._to_keep(nodes, later),
            {edge: value for edge, value in self._known.items() if edge in known},
        )

    def graph_of(self, bit: Bit) -> Graph:
        """In which nothing waits for what has run before."""
        return self._graph.without_waits(bit.nodes, bit.done)

    def ran(self, bit: Bit, values: Sequence[Any]) -> None:
        """It has, and fetched its results and what is kept."""
        count = len(bit.results)
        self._results.update(zip(bit.results, values[:count], strict=True))
        self._done |= self._ended(bit.nodes)
        self._known.update(zip(bit.kept, values[count:], strict=True))
        for name in bit.targets:
            del self._targets[name]

    def give_out(self, fetches: Sequence[Edge]) -> list[Any]:
        """The values of these, once."""
        for edge in fetches:
            del self._fetches[edge]
        return [self._results[edge] for edge in fetches]

    def _needed(self, edges: Iterable[Edge], names: Iterable[str]) -> _Needed:
        found = _Needed(set(), set(), set())
        waiting = list(names)

        def take(taken: Iterable[Edge]) -> None:
            for edge in taken:
                if edge in self._known:
                    found.known.add(edge)
                elif edge in self._feeds:
                    found.missing.add(edge)
                else:
                    waiting.append(edge[0])

        take(edges)
        while waiting:
            name = waiting.pop()
            if name in found.nodes:
                continue
            found.nodes.add(name)
            node = self._graph.nodes[name]
            take(node.inputs)
            for one in node.controls:
                if self._graph.nodes[one].op in PLACEHOLDERS:
                    take([(one, 0)])
                elif one not in self._done:
                    waiting.append(one)
        return found

    def _ended(self, nodes: Collection[str]) -> set[str]:
        """Those of nodes that have run which never run again."""
        return {name for name in nodes if not self._is_there_again(name)}

    def _is_there_again(self, name: str) -> bool:
        node = self._graph.nodes[name]
        is_alias = node.op in ALIASES and all(
            kind == RESOURCE or kind >= REF for kind in node.out_types
        )
        return is_alias or node.is_handle or is_constant(node)

    def _to_keep(self, now: set[str], later: set[str]) -> list[Edge]:
        """Of what runs now, the values that the rest takes."""
        ended = self._ended(now)
        found: dict[Edge, None] = {}
        for name in sorted(later - ended):
            node = self._graph.nodes[name]
            for edge, kind in zip(node.inputs, node.in_types, strict=True):
                if edge[0] not in ended or edge in self._known:
                    continue
                if kind in (RESOURCE, VARIANT) or kind >= REF:
                    raise Unkept(
                        f"{text_of(edge)!r}, which {name!r} takes in a later partial_run(), cannot "
                        "be kept until then: fetch both at once"
                    )
                found[edge] = None
        return list(found)


def _check(
    kind: str, edges: Iterable[Edge], declared: Collection[Edge], left: Collection[Edge]
) -> None:
    for edge in edges:
        if edge not in declared:
            raise Refused(f"the {kind} {text_of(edge)} was not specified in partial_run_setup()")
        if edge not in left:
            done = "fed" if kind == "feed" else "fetched"
            raise Refused(f"the {kind} {text_of(edge)} has already been {done}")
