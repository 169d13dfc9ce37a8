"""Where an elastic service's partitions are, for one worker: asked of the master when something was lost, and not else.

A partition whose history has grown has lost what was acknowledged since a checkpoint; one whose new primary begins with less
than this worker has seen (session.py) has lost what its replica lacked. That becomes an EpochChanged, which the worker's next
verb raises, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from prpc_engine.kv.lane import Address, Client, Lane
from prpc_engine.kv.placement import NOBODY, Placed
from prpc_engine.kv.session import EpochChanged, Session
from prpc_engine.kv.tree import PlacementNode

LOSS_TIMEOUT_S = 2.0  # for a server to say what it has of us


def address_of(index: int, placed: Placed) -> Address:
    """Where requests to that partition go."""
    return Address(placed.primary, (index, placed.epoch), placed.epoch)


class Whereabouts:
    """See the file's head. Owned by one worker, whose session it tells; locate() is called by its mending."""

    def __init__(self, node: PlacementNode, client: Client, name: str, identity: int, session: Session, timeout_s: float) -> None:
        self._node, self._client, self._name, self._identity = node, client, name, identity
        self._session = session
        self._placed = list(node.wait(timeout_s).partitions)
        self.news: deque[EpochChanged] = deque()  # to be raised

    def addresses(self) -> list[Address]:
        """Of all partitions, as known here."""
        return [address_of(index, placed) for index, placed in enumerate(self._placed)]

    def locate(self, lanes: Sequence[Lane]) -> None:
        """Ask the master, and tell the lanes. Raises what the master client does."""
        found = self._node.read()
        if found is None:
            return
        for lane in lanes:
            placed, before = found[0].partitions[lane.partition], self._placed[lane.partition]
            if placed.primary == NOBODY or placed.loading:
                continue  # requests stay where they are until somebody serves it
            lane.address = address_of(lane.partition, placed)
            if placed.history != before.history:
                self.news.append(self._loss(lane, placed))
                self._session.begin_again(lane.partition)
            elif placed.epoch != before.epoch:
                gone_back = self._session.began(lane.partition, self._ask(lane, "began"))
                if gone_back is not None:
                    self.news.append(gone_back)
            self._placed[lane.partition] = placed

    def _ask(self, lane: Lane, method: str, *arguments: Any) -> Any:
        """What a partition's primary has of us."""
        address = lane.address
        return self._client.submit_to(
            address.server_id, method, *address.arguments, *arguments, timeout_s=LOSS_TIMEOUT_S
        ).result()

    def _loss(self, lane: Lane, placed: Placed) -> EpochChanged:
        last, unanswered = lane.sequence, lane.unanswered_above
        kept: int = self._ask(lane, "applied_of", self._identity)
        lost = max(0, last - kept - unanswered(kept))
        since = f"the checkpoint of step {placed.step}" if placed.step >= 0 else "the beginning, as there is no checkpoint"
        return EpochChanged(
            f"partition {lane.partition} of {self._name!r} was lost with its server and is back as of {since}: up to {lost} "
            f"pushes of this worker which it had acknowledged are gone; train on from there, or restore all tables",
            lane.partition,
            placed.step,
            lost,
        )
