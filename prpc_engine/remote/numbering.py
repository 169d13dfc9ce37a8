"""The numbers that a worker gives, 1, 2, ... for each owner: to the values that it has others make,
and to the references that it passes on. An owner that has heard of all of them up to one remembers
that one alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from prpc_engine import errors
from prpc_engine.remote.current import ValueAddress
from prpc_engine.remote.references import ForkId


class _Series:
    """1, 2, ... of one owner, and again what was not used: the owner would wait for that one, and
    remember each that comes after.
    """

    def __init__(self) -> None:
        self._next = itertools.count(1).__next__  # atomic
        self._unused: list[int] = []

    def take(self) -> int:
        if self._unused:
            with contextlib.suppress(IndexError):  # another thread was faster
                return self._unused.pop()
        return self._next()

    def give_back(self, number: int) -> None:
        self._unused.append(number)


class Numbering:
    """Of the worker with that incarnation. Any thread may call."""

    def __init__(self, incarnation: int) -> None:
        self._me = incarnation
        # by the incarnation of the owner
        self._values: dict[int, _Series] = {}
        self._forks: dict[int, _Series] = {}

    def fork(self, owner: int) -> ForkId:
        """Of one more reference to a value of the owner with that incarnation."""
        return self._me, self._forks.setdefault(owner, _Series()).take()

    def address(self, owner: int, incarnation: int) -> ValueAddress:
        """Of one more value of that owner."""
        number = self._values.setdefault(incarnation, _Series()).take()
        return ValueAddress(owner, incarnation, (self._me, number))

    @contextlib.contextmanager
    def sending(self, address: ValueAddress, fork_id: ForkId) -> Iterator[None]:
        """The creation of that value, with its first reference, is sent here; where that raises an
        RpcError, nothing was, and the numbers are for others.
        """
        try:
            yield
        except errors.RpcError:
            self._values[address.incarnation].give_back(address.value_id[1])
            self._forks[address.incarnation].give_back(fork_id[1])
            raise
