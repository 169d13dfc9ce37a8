"""The functions that a part calls, under names that say what they do. No I/O here.

The graph of a task knows a function by its name alone, and names are counted in the process that
made them: those of two scripts are the same, and their bodies are not. So a function leaves its
session's graph under another name:

    its own name, "_", a hash of its body and of all that it calls, without devices and colocation

Equal functions of several workers still are one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any


class Functions:
    """The functions of one graph's library, which are brought into the library of another graph
    under names that say what they do.
    """

    def __init__(self, library: Any) -> None:
        self._functions = {one.signature.name: one for one in library.function}
        self._gradients = {one.function_name: one for one in library.gradient}
        self._bare: dict[str, Any] = {}  # without devices
        self._names: dict[str, str] = {}  # the new ones

    def bring(self, nodes: Sequence[Any], library: Any) -> None:
        """Add what these nodes call, and what that calls, to a library; the nodes then name it as
        it is called there.
        """
        for name in self._reached(name for node in nodes for name in called(node)):
            function = library.function.add()
            function.CopyFrom(self._without_devices(name))
            function.signature.name = self._name(name)
            for node in function.node_def:
                self._rename(node)
            if name in self._gradients:
                wanted = self._gradients[name].gradient_func
                library.gradient.add(
                    function_name=self._name(name), gradient_func=self._name(wanted)
                )
        for node in nodes:
            self._rename(node)

    def _reached(self, names: Iterable[str]) -> list[str]:
        wanted, taken = list(names), dict[str, None]()
        while wanted:
            name = wanted.pop()
            if name in taken or name not in self._functions:
                continue
            taken[name] = None
            for node in self._functions[name].node_def:
                wanted.extend(called(node))
            if name in self._gradients:
                wanted.append(self._gradients[name].gradient_func)
        return list(taken)

    def _without_devices(self, name: str) -> Any:
        bare = self._bare.get(name)
        if bare is None:
            bare = self._bare[name] = type(self._functions[name])()
            bare.CopyFrom(self._functions[name])
            for node in bare.node_def:
                node.device = ""
                node.attr.pop("_class", None)
        return bare

    def _name(self, name: str) -> str:
        """The new one; that of an op stays."""
        if name not in self._functions:
            return name
        found = self._names.get(name)
        if found is None:
            bodies = (
                self._without_devices(one).SerializeToString(deterministic=True)
                for one in sorted(self._reached([name]))
            )
            found = self._names[name] = (
                f"{name}_{hashlib.sha256(b''.join(bodies)).hexdigest()[:16]}"
            )
        return found

    def _rename(self, node: Any) -> None:
        node.op = self._name(node.op)
        for value in node.attr.values():
            kind = value.WhichOneof("value")
            if kind == "func":
                value.func.name = self._name(value.func.name)
            elif kind == "list":
                for one in value.list.func:
                    one.name = self._name(one.name)


def called(definition: Any) -> Iterable[str]:
    """The names of what a NodeDef calls: its op, and the functions among its attributes."""
    yield definition.op
    for value in definition.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            for one in value.list.func:
                yield one.name
