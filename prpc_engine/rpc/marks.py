"""Which methods may be repeated when nobody knows whether they ran: what servers are registered
with, and what clients know.

    a client knows it from            says                     when
    its user (create_client)          idempotent               from the start; counts before what
                                                               others say
    the master's record of a server   idempotent or not, once  once it knows the servers
    a server that it asks (DESCRIBE)  idempotent or not, once  after a failure, where a record lacks
                                                               it

A method is idempotent where all servers say so, since any of them may be the one that runs it
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The names of the methods that are idempotent, and of those that are `once`.
Marks = tuple[tuple[str, ...], tuple[str, ...]]
# characters, of all marked methods of a server: the master keeps them, and tells every client
NAMES_LENGTH_MAX = 1 << 16


def marks_of(described: Mapping[str, Mapping[str, Any]]) -> Marks | None:
    """The marks in what Server.describe() tells; None where they are too many for the master's
    record.
    """
    idempotent, once = (
        tuple(sorted(name for name, each in described.items() if each[mark]))
        for mark in ("idempotent", "once")
    )
    return (idempotent, once) if sum(map(len, idempotent + once)) <= NAMES_LENGTH_MAX else None


class KnownMarks:
    """What one client knows. Thread-safe: each step replaces what it changes, or changes it at
    once.
    """

    def __init__(self, idempotent: Iterable[str]) -> None:
        self._idempotent: dict[str, bool] = dict.fromkeys(idempotent, True)
        self._once: frozenset[str] = frozenset()
        self._is_told = False
        self._registered: frozenset[str] | None = None  # None: the master cannot say

    def is_idempotent(self, method: str) -> bool | None:
        """None: the master cannot say, and no server was asked yet."""
        known = self._idempotent.get(method)
        if known is None and self._registered is not None:
            return method in self._registered
        return False if known is None and self._is_told else known

    def is_once(self, method: str) -> bool:
        """Whether a server tells repeated calls of it apart."""
        return method in self._once

    def learn(self, records: Iterable[Marks | None]) -> None:
        """What the master knows of the servers there are. When there are none, what those before
        could do is still good.
        """
        all_records = list(records)
        if all_records:
            told = [record for record in all_records if record is not None]
            self._once = self._once.union(*(once for _, once in told))
            is_whole = len(told) == len(all_records)
            self._registered = (
                frozenset.intersection(*(frozenset(one) for one, _ in told)) if is_whole else None
            )

    def told(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """What a server says of its methods."""
        self._is_told = True
        for name, each in described.items():
            self._idempotent.setdefault(name, bool(each["idempotent"]))
        self._once = self._once.union(name for name, each in described.items() if each.get("once"))
