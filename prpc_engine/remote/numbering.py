"""The numbers that a worker gives: to the values that it has others make, 1, 2, ... for each owner,
and to the references that it passes on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from prpc_engine import errors
from prpc_engine.remote.current import ValueAddress
from prpc_engine.remote.references import ForkId


class Numbering:
    """Of the worker with that incarnation. Any thread may call."""

    def __init__(self, incarnation: int) -> None:
        self._me = incarnation
        self._next_fork = itertools.count(1).__next__
        self._numbers: dict[int, itertools.count[int]] = {}  # by owner
        # Of creations that were not sent, by owner: it would wait for them, and remember each that
        # comes after.
        self._unused: dict[int, list[int]] = {}

    def fork(self) -> ForkId:
        """Of one more reference."""
        return self._me, self._next_fork()

    def address(self, owner: int, incarnation: int) -> ValueAddress:
        """Of one more value of that owner."""
        unused = self._unused.get(incarnation)
        if unused:
            with contextlib.suppress(IndexError):  # another thread was faster
                return ValueAddress(owner, incarnation, (self._me, unused.pop()))
        numbers = self._numbers.setdefault(incarnation, itertools.count(1))
        return ValueAddress(owner, incarnation, (self._me, next(numbers)))

    @contextlib.contextmanager
    def sending(self, address: ValueAddress) -> Iterator[None]:
        """The creation of that value is sent here; where that raises an RpcError, nothing was, and
        its number is for another one.
        """
        try:
            yield
        except errors.RpcError:
            self._unused.setdefault(address.incarnation, []).append(address.value_id[1])
            raise
