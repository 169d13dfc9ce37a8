"""Tensors that come after their receiver has given up waiting: kept for whoever receives them in
that step next. No I/O here.

A tensor is taken from its source once, and its transfer may take longer than its receiver waits. So
a request whose deadline passes, or that is cancelled, stays under way as a straggler, and its
source is told that nobody waits.

    event                             straggler              tensors
    expect()                          under way
    settle() with tensors: they were  over                   kept; dropped, and logged, where there
      taken                                                  is no room
    settle() without: they were not,  over                   at the source still, or lost with the
      or the connection was lost                             connection
    forget(): the step ends           settled for who waits  dropped, and those that come later too
    take()                            waited for before      handed out, once

Bounds: as many stragglers as calls may be in flight, and the tensors by bytes and by count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from prpc_engine.cluster.rendezvous import Tensor
from shard import Future

TENSORS_MAX = 65536  # kept: dead tensors and empty ones have no bytes that could be counted

logger = logging.getLogger("prpc")


class Straggler(Future, kw_only=True):
    """A receive whose deadline has passed while its request was under way. It is done when the
    answer has come, with whatever that was, so that a tensor which comes late is not lost.
    """

    source: int
    step: int
    keys: Sequence[str]


@dataclass
class _Step:
    """By source and key."""

    stragglers: dict[tuple[int, str], list[Straggler]] = field(default_factory=dict)
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class Late:
    """Keeps tensors that came after their receiver had given up, for who receives them in that step
    next.

    guard        the lock of what is kept
    bytes_max    of all tensors kept; those beyond it are dropped, and a warning says so
    tensors_max  how many are kept, likewise

    Owned by a Server; thread-safe. Tasks go by their numbers (names.py). Events: the table at the
    file's head.
    """

    def __init__(
        self,
        guard: AbstractContextManager[Any],
        bytes_max: int,
        tensors_max: int = TENSORS_MAX,
    ) -> None:
        self._guard = guard
        self._tensors_max = tensors_max
        self._bytes_max = bytes_max
        self._steps: dict[int, _Step] = {}  # those in which there is something
        self._count = 0  # of the tensors
        self.nbytes = 0

    @property
    def steps(self) -> int:
        """In how many there is something."""
        return len(self._steps)

    def expect(self, source: int, step: int, keys: Sequence[str]) -> Straggler:
        """A request for these has a receiver no more. settle() it when its answer comes."""
        straggler = Straggler(source=source, step=step, keys=keys)
        with self._guard:
            there = self._steps.setdefault(step, _Step())
            for key in keys:
                there.stragglers.setdefault((source, key), []).append(straggler)
        return straggler

    def settle(self, straggler: Straggler, tensors: Sequence[Tensor] | None) -> None:
        """Its answer has come; None: without tensors. Those of a step that is over are dropped."""
        source, step = straggler.source, straggler.step
        with self._guard:
            there = self._steps.get(step)
            is_wanted = there is not None and self._remove(there, straggler)
            found = (
                dict(zip(straggler.keys, tensors, strict=False)) if is_wanted and tensors else {}
            )
            is_kept = there is None or self._keep(there, source, found)
            self._drop_if_empty(step)
        if not is_kept:
            logger.warning(
                "%d tensors of step %d came after their deadline and are lost: "
                "%d bytes of such tensors wait, %d may "
                "(bytes_max), or %d tensors; begin another step",
                len(found),
                step,
                self.nbytes,
                self._bytes_max,
                self._tensors_max,
            )
        straggler.set_result(None)

    def keep(self, source: int, step: int, tensors: dict[str, Tensor]) -> None:
        """These were taken, and are not wanted now after all."""
        self.settle(self.expect(source, step, list(tensors)), list(tensors.values()))

    def waits_for(self, source: int, step: int, keys: Sequence[str]) -> list[Straggler] | None:
        """The stragglers to wait for before these are taken; None: neither is one of them under
        way, nor is a tensor here.
        """
        if not self._steps:
            return None
        with self._guard:
            there = self._steps.get(step)
            if there is None:
                return None
            found = dict.fromkeys(
                one for key in keys for one in there.stragglers.get((source, key), ())
            )
            is_here = any((source, key) in there.tensors for key in keys)
        return list(found) if found or is_here else None

    def take(self, source: int, step: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Those of them that are here."""
        with self._guard:
            there = self._steps.get(step)
            if there is None:
                return {}
            found = {
                key: there.tensors.pop((source, key))
                for key in keys
                if (source, key) in there.tensors
            }
            self._count -= len(found)
            self.nbytes -= _bytes_of(found.values())
            self._drop_if_empty(step)
        return found

    def forget(self, step: int) -> None:
        """It is over."""
        if not self._steps:
            return
        with self._guard:
            there = self._steps.pop(step, None)
            if there is None:
                return
            self._count -= len(there.tensors)
            self.nbytes -= _bytes_of(there.tensors.values())
            stragglers = dict.fromkeys(
                one for several in there.stragglers.values() for one in several
            )
        for one in stragglers:
            one.set_result(None)

    # -- under the guard ---------------------------------------------------------------------------

    def _remove(self, there: _Step, straggler: Straggler) -> bool:
        """Whether it was expected."""
        is_wanted = False
        for key in straggler.keys:
            place = straggler.source, key
            several = there.stragglers.get(place, [])
            if straggler in several:
                is_wanted = True
                several.remove(straggler)
                if not several:
                    del there.stragglers[place]
        return is_wanted

    def _keep(self, there: _Step, source: int, tensors: dict[str, Tensor]) -> bool:
        tensors = {
            key: tensor for key, tensor in tensors.items() if (source, key) not in there.tensors
        }
        nbytes = _bytes_of(tensors.values())
        if self.nbytes + nbytes > self._bytes_max or self._count + len(tensors) > self._tensors_max:
            return not tensors
        there.tensors.update({(source, key): tensor for key, tensor in tensors.items()})
        self._count += len(tensors)
        self.nbytes += nbytes
        return True

    def _drop_if_empty(self, step: int) -> None:
        there = self._steps.get(step)
        if there is not None and not there.stragglers and not there.tensors:
            del self._steps[step]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
