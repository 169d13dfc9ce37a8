"""Which pushes a partition has applied: so that one which comes again, over another connection or
from another process, is not applied again. No I/O and no clock.

A push is known by its client, one incarnation of a worker, and by its number there: 1, 2, 3, ... of
each partition. idempotency_window.py has what is kept of each client, and what NEW, SEEN (applied)
and FORGOTTEN are; here is who the clients are, and how a ledger goes into files and to replicas.

A worker keeps its pushes that have no answer within WINDOW numbers of its newest, so what it sends
again is never FORGOTTEN. Clients are bounded by CLIENTS_MAX: the one that has pushed least recently
is forgotten as a whole, and what it sends after that counts as NEW.

As arrays, for checkpoints and replicas: client uint64[n], floor int64[n], highest int64[n], and
above uint8[n, WINDOW / 8], whose bit i, lowest first, says that highest - WINDOW + 1 + i is
settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prpc_engine.idempotency_window import IdempotencyWindow, SeenNumbers

# pushes of one client under way at one partition: at 25 us each a tenth of a second of them
WINDOW = 4096
# each some 300 bytes here, and half a KiB in a checkpoint; more workers than a job has, restarts
# and all
CLIENTS_MAX = 4096
_BITS = np.arange(1 - WINDOW, 1)  # what bit i stands for, beside the highest


class LedgerNode(NamedTuple):
    """The node that a client is part of: its number, and its name for texts."""

    number: int
    name: str


class _Client(SeenNumbers[None]):
    """`node`: who pushed the first of them, of those that this ledger has noted itself."""

    __slots__ = ("node",)

    def __init__(self, node: LedgerNode | None, floor: int = 0, highest: int = 0) -> None:
        super().__init__(floor)
        self.highest = highest
        self.node = node


def nobody() -> None:
    """Whoever pushes is not known here: of a replica, which the primary tells."""


class Ledger(IdempotencyWindow[int, None]):
    """A ledger knows which pushes a partition has applied, so that none is applied twice.

    Owned by one partition, which asks find() before it applies a push, and calls note() after.
    clients_max: how many clients it remembers. pusher: says who pushes, and is asked once for each
    client; None from it: not known.
    """

    def __init__(
        self, clients_max: int = CLIENTS_MAX, pusher: Callable[[], LedgerNode | None] = nobody
    ) -> None:
        super().__init__(clients_max, WINDOW)
        self.pusher = pusher

    def _begun(self, sender: int) -> _Client:
        return _Client(self.pusher())

    def highest(self, client: int) -> int:
        """The greatest number applied of that client; 0: none."""
        known = self.of(client)
        return known.highest if known is not None else 0

    def pushes(self) -> Iterator[tuple[int, LedgerNode | None, int]]:
        """Of each client: its number, its node if that is known, and how many pushes it has had
        applied.
        """
        for client, known in self.senders():
            assert isinstance(known, _Client)
            yield client, known.node, known.highest

    # -- as arrays ---------------------------------------------------------------------------------

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything, as the file's head says, the client who pushed last at the end."""
        clients = [known for _, known in self.senders()]
        settled = np.zeros((len(clients), WINDOW), np.bool_)
        for row, known in zip(settled, clients, strict=True):
            row[: max(0, known.floor - known.highest + WINDOW)] = True
            row[[each - known.highest + WINDOW - 1 for each in known.kept]] = True
        return {
            "client": np.array([client for client, _ in self.senders()], np.uint64),
            "floor": np.array([known.floor for known in clients], np.int64),
            "highest": np.array([known.highest for known in clients], np.int64),
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
            numbers = _Client(None, int(floor), int(highest))
            numbers.kept = dict.fromkeys((int(highest) + _BITS[row]).tolist())
            self.merge(int(client), numbers)
