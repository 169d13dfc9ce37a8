"""Which pushes a partition has applied: so that one which comes again, over another connection or
from another process, is not applied again. No I/O and no clock.

A push is known by its client, one incarnation of a worker, and by its number there: 1, 2, 3, ... of
each partition. What is kept of a client:

    floor     every number up to it is settled: applied, or so old that nobody sends it again
    highest   the greatest number applied
    above     the numbers applied above the floor: few, since most pushes come in order
    node      who pushed the first of them, of those that this ledger has noted itself

    a number                                  is
    up to highest - WINDOW                    FORGOTTEN: it may have been applied
    up to floor, or in above                  APPLIED
    any other                                 NEW

Invariant: floor >= highest - WINDOW. A worker keeps its pushes that have no answer within WINDOW
numbers of its newest, so what it sends again is never FORGOTTEN. Clients are bounded by
CLIENTS_MAX: the one that has pushed least recently is forgotten as a whole, and what it sends after
that counts as NEW.

As arrays, for checkpoints and replicas: client uint64[n], floor int64[n], highest int64[n], and
above uint8[n, WINDOW / 8], whose bit i, lowest first, says that highest - WINDOW + 1 + i is
settled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# pushes of one client under way at one partition: at 25 us each a tenth of a second of them
WINDOW = 4096
# each some 300 bytes here, and half a KiB in a checkpoint; more workers than a job has, restarts
# and all
CLIENTS_MAX = 4096
NEW, APPLIED, FORGOTTEN = range(3)
_BITS = np.arange(1 - WINDOW, 1)  # what bit i stands for, beside the highest


class LedgerNode(NamedTuple):
    """The node that a client is part of: its number, and its name for texts."""

    number: int
    name: str


class _Client:
    __slots__ = ("above", "floor", "highest", "node")

    def __init__(self, node: LedgerNode | None) -> None:
        self.floor = self.highest = 0
        self.above: set[int] = set()
        self.node = node


def nobody() -> None:
    """Whoever pushes is not known here: of a replica, which the primary tells."""


class Ledger:
    """A ledger knows which pushes a partition has applied, so that none is applied twice.

    Owned by one partition. clients_max: how many clients it remembers; of more, the one that has
    pushed least recently is forgotten. pusher: says who pushes, and is asked once for each client;
    None from it: not known. What find() answers, and what is kept: the tables at the file's head.
    """

    def __init__(
        self, clients_max: int = CLIENTS_MAX, pusher: Callable[[], LedgerNode | None] = nobody
    ) -> None:
        self.pusher = pusher
        self._clients: OrderedDict[int, _Client] = OrderedDict()  # who pushed last is last
        self._clients_max = clients_max
        self.clients_forgotten = 0

    def __len__(self) -> int:
        """Clients."""
        return len(self._clients)

    def find(self, client: int, sequence: int) -> int:
        """NEW, APPLIED or FORGOTTEN."""
        known = self._clients.get(client)
        if known is None or sequence > known.highest:
            return NEW
        if sequence <= known.highest - WINDOW:
            return FORGOTTEN
        return APPLIED if sequence <= known.floor or sequence in known.above else NEW

    def note(self, client: int, sequence: int) -> None:
        """A push that find() called NEW has been applied."""
        known = self._clients.get(client)
        if known is None:
            known = self._add(client, self.pusher())
        else:
            self._clients.move_to_end(client)
        if sequence == known.floor + 1 and not known.above:
            known.floor = known.highest = sequence
            return
        known.above.add(sequence)
        known.highest = max(known.highest, sequence)
        self._settle(known)

    def highest(self, client: int) -> int:
        """The greatest number applied of that client; 0: none."""
        known = self._clients.get(client)
        return known.highest if known is not None else 0

    def pushes(self) -> Iterator[tuple[int, LedgerNode | None, int]]:
        """Of each client: its number, its node if that is known, and how many pushes it has had
        applied.
        """
        for client, known in self._clients.items():
            yield client, known.node, known.highest

    def _add(self, client: int, node: LedgerNode | None) -> _Client:
        known = self._clients[client] = _Client(node)
        if len(self._clients) > self._clients_max:
            self._clients.popitem(last=False)
            self.clients_forgotten += 1
        return known

    def _settle(self, known: _Client) -> None:
        """Raise the floor over what is settled."""
        lowest = known.highest - WINDOW
        if known.floor < lowest - WINDOW:  # nothing of before is left
            known.floor = lowest
            known.above = {each for each in known.above if each > lowest}
        while known.floor < lowest:
            known.floor += 1
            known.above.discard(known.floor)
        while known.floor + 1 in known.above:
            known.floor += 1
            known.above.remove(known.floor)

    # -- as arrays ---------------------------------------------------------------------------------

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything, as the file's head says, the client who pushed last at the end."""
        settled = np.zeros((len(self._clients), WINDOW), np.bool_)
        for row, known in zip(settled, self._clients.values(), strict=True):
            row[: max(0, known.floor - known.highest + WINDOW)] = True
            row[[each - known.highest + WINDOW - 1 for each in known.above]] = True
        return {
            "client": np.array(list(self._clients), np.uint64),
            "floor": np.array([known.floor for known in self._clients.values()], np.int64),
            "highest": np.array([known.highest for known in self._clients.values()], np.int64),
            "above": np.packbits(settled, axis=1, bitorder="little"),
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add what arrays() gave. Of a client known here already, all that either side has applied
        counts as applied.

        That is exact for one partition's own ledgers. When a checkpoint is restored into another
        number of partitions, those of several come together in one, and its numbers mean nothing
        any more: but workers of that many partitions are others, too.
        """
        settled = np.unpackbits(arrays["above"], axis=1, bitorder="little").astype(np.bool_)
        for row, client, floor, highest in zip(
            settled, arrays["client"], arrays["floor"], arrays["highest"], strict=True
        ):
            known = self._clients.get(int(client))
            if known is None:
                known = self._add(int(client), None)
            known.above.update((int(highest) + _BITS[row]).tolist())
            known.floor, known.highest = (
                max(known.floor, int(floor)),
                max(known.highest, int(highest)),
            )
            known.above = {each for each in known.above if each > known.floor}
            self._settle(known)
