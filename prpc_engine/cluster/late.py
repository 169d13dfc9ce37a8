"""Tensors that come after their receiver has given up waiting: kept for whoever receives them in that step next. No I/O here.

A tensor is taken from its source once, and its transfer may take longer than its receiver waits. So a request whose deadline
passes, or that is cancelled, stays under way as a straggler, and its source is told that nobody waits.

    event                                     straggler                 tensors
    expect()                                  under way
    settle() with tensors: they were taken    over                      kept; dropped, and logged, where there is no room
    settle() without: they were not, or the   over                      at the source still, or lost with the connection
      connection was lost
    forget(): the step ends                   settled for who waits     dropped, and those that come later too
    take()                                    waited for before         handed out, once

Bounds: as many stragglers as calls may be in flight, and the tensors by bytes and by count.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from prpc_engine.cluster.rendezvous import Tensor
from shard import Future

TENSORS_MAX = 65536  # kept: dead tensors and empty ones have no bytes that could be counted

logger = logging.getLogger("prpc")


class Straggler(Future, kw_only=True):
    """A request that nobody waits for; done when its answer has come, whatever that was."""

    source: int
    step: int
    keys: Sequence[str]


class Late:
    """See the file's head. Thread-safe: the lock is handed in. Tasks go by their numbers."""

    def __init__(self, guard: AbstractContextManager[Any], bytes_max: int) -> None:
        self._guard = guard
        self._bytes_max = bytes_max
        self._stragglers: dict[Straggler, None] = {}
        self._tensors: dict[tuple[int, int, str], Tensor] = {}  # by source, step and key
        self.nbytes = 0

    def expect(self, source: int, step: int, keys: Sequence[str]) -> Straggler:
        """A request for these has a receiver no more. settle() it when its answer comes."""
        straggler = Straggler(source=source, step=step, keys=keys)
        with self._guard:
            self._stragglers[straggler] = None
        return straggler

    def settle(self, straggler: Straggler, tensors: Sequence[Tensor] | None) -> None:
        """Its answer has come; None: without tensors. Those of a step that is over are dropped."""
        with self._guard:
            is_wanted = self._stragglers.pop(straggler, straggler) is None
            found = dict(zip(straggler.keys, tensors, strict=False)) if is_wanted and tensors else {}
            is_kept = self._keep(straggler.source, straggler.step, found)
        if not is_kept:
            logger.warning(
                "%d tensors of step %d came after their deadline and are lost: %d bytes of such tensors wait, %d may "
                "(bytes_max), or %d tensors; begin another step",
                len(found),
                straggler.step,
                self.nbytes,
                self._bytes_max,
                TENSORS_MAX,
            )
        straggler.set_result(None)

    def keep(self, source: int, step: int, tensors: dict[str, Tensor]) -> None:
        """These were taken, and are not wanted now after all."""
        self.settle(self.expect(source, step, list(tensors)), list(tensors.values()))

    def _keep(self, source: int, step: int, tensors: dict[str, Tensor]) -> bool:
        nbytes = sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
        if self.nbytes + nbytes > self._bytes_max or len(self._tensors) + len(tensors) > TENSORS_MAX:
            return not tensors
        self._tensors.update({(source, step, key): tensor for key, tensor in tensors.items()})
        self.nbytes += nbytes
        return True

    def waits_for(self, source: int, step: int, keys: Sequence[str]) -> list[Straggler] | None:
        """The stragglers to wait for before these are taken; None: neither is one of them under way, nor is a tensor here."""
        if not self._stragglers and not self._tensors:
            return None
        wanted = set(keys)
        with self._guard:
            found = [
                one for one in self._stragglers if one.step == step and one.source == source and not wanted.isdisjoint(one.keys)
            ]
            is_here = any((source, step, key) in self._tensors for key in keys)
        return found if found or is_here else None

    def take(self, source: int, step: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Those of them that are here."""
        with self._guard:
            found = {key: self._tensors.pop((source, step, key)) for key in keys if (source, step, key) in self._tensors}
            self.nbytes -= sum(tensor.nbytes for tensor in found.values() if tensor is not None)
        return found

    def forget(self, step: int) -> None:
        """It is over."""
        if not self._stragglers and not self._tensors:
            return
        with self._guard:
            stragglers = [one for one in self._stragglers if one.step == step]
            for one in stragglers:
                del self._stragglers[one]
            places = [place for place in self._tensors if place[1] == step]
            dropped = [self._tensors.pop(place) for place in places]
            self.nbytes -= sum(tensor.nbytes for tensor in dropped if tensor is not None)
        for one in stragglers:
            one.set_result(None)
