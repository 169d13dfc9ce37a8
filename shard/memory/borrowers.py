"""Who may read blocks of a slab, as the slab sees them: the books of a connection, peers that read
on after its end. And watchers, which the slab tells of each segment that it gives back.
"""

from __future__ import annotations

from typing import Protocol

from shard.memory.arena import Block
from shard.memory.lease_table import Lease


class Reader(Protocol):
    """Somebody who may read our blocks although the connection they were lent over has ended."""

    def hung_up(self, timeout_s: float) -> bool:
        """Whether it stopped, or did so within `timeout_s` seconds."""


class Watcher(Protocol):
    """Somebody who did something to segments of the slab that ends with them."""

    def segment_dropped(self) -> None:
        """A segment went back to the kernel. Never waits, for the slab's lock is held."""


class Books(Protocol):
    """The leases that one peer has on our blocks. Any thread may call."""

    def __len__(self) -> int:
        """How many."""

    def leases(self) -> list[Lease]:
        """A snapshot, oldest first."""

    def tell_drops(self) -> None:
        """A segment went back to the kernel: the peer need not keep it mapped. Never waits, for the
        slab's lock is held.
        """

    def strike_all(self) -> list[Block]:
        """End all leases; their blocks, once for each, whose users the caller counts down."""
