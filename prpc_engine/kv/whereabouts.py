"""Where an elastic service's partitions are, for one worker: asked of the master when something was lost, and not else.

A partition whose history has grown has lost what was acknowledged since a checkpoint; one whose new primary begins with less
than this worker has seen (session.py) has lost what its replica lacked. That becomes an EpochChanged, which the worker's next
verb raises, once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from prpc_engine.errors import RpcError
from prpc_engine.kv.lane import Address, Client, Lane
from prpc_engine.kv.placement import NOBODY, Placed
from prpc_engine.kv.session import EpochChanged, Session
from prpc_engine.kv.tree import PlacementNode
from shard import Future

logger = logging.getLogger("prpc")
LOSS_TIMEOUT_S = 2.0  # for a server to say what it has of us


def address_of(index: int, placed: Placed) -> Address:
    """Where requests to that partition go."""
    return Address(placed.primary, (index, placed.epoch))


class Whereabouts:
    """See the file's head. Owned by one worker, whose session it tells; locate() is called by its mending, and by its saves."""

    def __init__(self, node: PlacementNode, client: Client, name: str, identity: int, session: Session, timeout_s: float) -> None:
        self._node, self._client, self._name, self._identity = node, client, name, identity
        self._session = session
        self._looking = threading.Lock()  # one at a time: a loss is told once, and an older placement is not learned last
        self._placed = list(node.wait(timeout_s).partitions)

    def addresses(self) -> list[Address]:
        """Of all partitions, as known here."""
        return [address_of(index, placed) for index, placed in enumerate(self._placed)]

    def locate(self, lanes: Sequence[Lane]) -> None:
        """Ask the master, and tell the lanes. Raises what the master client does."""
        with self._looking:
            self._locate(lanes)

    def _locate(self, lanes: Sequence[Lane]) -> None:
        found = self._node.read()
        if found is None:
            return
        asked: list[tuple[Lane, Placed, Future]] = []
        for lane in lanes:
            placed, before = found[0].partitions[lane.partition], self._placed[lane.partition]
            if placed.primary == NOBODY or placed.loading or placed.epoch == before.epoch:
                continue  # requests stay where they are until somebody else serves it
            try:
                asked.append((lane, placed, self._ask(lane, placed, placed.history != before.history)))
            except RpcError as error:
                logger.debug("%s cannot be asked now: %s", lane, str(error))
        for lane, placed, answer in asked:
            try:
                self._learn(lane, placed, answer.result())
            except RpcError as error:  # the new primary does not know yet that it is one: the next time it does
                logger.debug("%s is not served yet: %s", lane, str(error))

    def _ask(self, lane: Lane, placed: Placed, is_lost: bool) -> Future:
        """What a partition's new primary has of us, or began with."""
        server_id, arguments = address_of(lane.partition, placed)
        if is_lost:
            return self._client.submit_to(server_id, "applied_of", *arguments, self._identity, timeout_s=LOSS_TIMEOUT_S)
        return self._client.submit_to(server_id, "began", *arguments, timeout_s=LOSS_TIMEOUT_S)

    def _learn(self, lane: Lane, placed: Placed, answer: Any) -> None:
        if placed.history != self._placed[lane.partition].history:
            self._session.begin_again(lane.partition)  # first: who is told reads no row of before any more
            self._session.news.append(self._loss(lane, placed, answer))
        else:
            gone_back = self._session.began(lane.partition, answer)
            if gone_back is not None:
                self._session.news.append(gone_back)
        lane.address = address_of(lane.partition, placed)
        self._placed[lane.partition] = placed

    def _loss(self, lane: Lane, placed: Placed, kept: int) -> EpochChanged:
        """kept: the number of this worker's newest push that is in."""
        lost = lane.answered_above(kept)
        since = f"the checkpoint of step {placed.step}" if placed.step >= 0 else "the beginning, as there is no checkpoint"
        return EpochChanged(
            f"partition {lane.partition} of {self._name!r} was lost with its server and is back as of {since}: up to {lost} "
            f"pushes of this worker which it had acknowledged are gone; train on from there, or restore all tables",
            lane.partition,
            placed.step,
            lost,
        )
