"""Where an elastic service's partitions are, for one worker: asked of the master when something was
lost, and not else.

    the partition's                       this worker is told  requests that its server has refused
    history has grown                     EpochChanged, of     are sent to the new one: with no
                                          the partition        effect twice
    new primary, or one that this worker  the same             the same
      has missed, began with less than
      it has seen (session.py)
    state was restored by another worker  EpochChanged, once   raise that, and are not done, if
                                          a restore            they were asked before the worker
                                                               was told: what they push was worked
                                                               out with rows of before the restore

Where no request raises it, the worker's next verb does, once. A restore that
this worker makes itself is newer than all of that: what was found before it is not raised any more.

Looks are coroutines of the control loop, one after the other: a loss is told once, and an older
placement is not learned last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from prpc_engine.errors import DeadlineExceeded, RpcError
from prpc_engine.kv.client.partition_client import PartitionAddress, PartitionClient, next_order
from prpc_engine.kv.client.session import EpochChanged, Session
from prpc_engine.kv.schema.placement import NOBODY, Placed
from prpc_engine.kv.schema.services import TableClient
from prpc_engine.kv.schema.tree import PlacementNode
from shard import Future

logger = logging.getLogger("prpc")
LOSS_TIMEOUT_S = 2.0  # for a server to say what it has of us


def address_of(index: int, placed: Placed) -> PartitionAddress:
    """Where requests to that partition go."""
    return PartitionAddress(placed.primary, (index, placed.epoch))


class Locator:
    """A locator asks the master where an elastic service's partitions are, and points lanes there.

    Owned by one worker, whose session it tells when state went back; locate() is awaited by its
    recovery, and by its saves. identity: of the worker's incarnation. timeout_s: how
    many seconds to wait for a placement; DeadlineExceeded when there is none by then. What a worker
    is told: the table at the file's head.
    """

    def __init__(
        self,
        node: PlacementNode,
        client: TableClient,
        name: str,
        identity: int,
        session: Session,
        timeout_s: float,
    ) -> None:
        self._node, self._client, self._name, self._identity = node, client, name, identity
        self._session = session
        self._look: Future | None = None  # the one under way; in the control loop
        try:
            self._placed = list(node.wait(timeout_s).partitions)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"the tables of {name!r} have no placement after {timeout_s:g} s, though servers "
                f"{list(client.server_ids)} are there: where those are ElasticServers, wait for as "
                "many as their servers= says, or allow a larger timeout_s; where they are "
                "TableServers, leave out elastic=True"
            ) from error
        # whether the worker has anything that can go back
        self.has_tables: Callable[[], object] = lambda: True
        # Of the restores that this worker knows of: the first request after it was told; 0: it has
        # nothing of before.
        self._restores = dict.fromkeys((placed.restored for placed in self._placed), 0)
        self._own: set[str] = set()  # restores of this worker that no look has found yet

    def addresses(self) -> list[PartitionAddress]:
        """Of all partitions, as known here."""
        return [address_of(index, placed) for index, placed in enumerate(self._placed)]

    def restoring(self, load_id: str) -> None:
        """This worker restores a checkpoint itself, by that id."""
        self._restores[load_id] = 0
        self._own.add(load_id)

    async def locate(self, lanes: Sequence[PartitionClient]) -> None:
        """Ask the master, and tell the lanes. Raises what the master client does. In the control
        loop.
        """
        while self._look is not None:
            await self._look
        self._look = look = Future()
        try:
            await self._locate(lanes)
        finally:
            self._look = None
            look.set_result(None)

    async def _locate(self, lanes: Sequence[PartitionClient]) -> None:
        told_before = tuple(self._session.news)
        found = await self._node.read()
        if found is None:
            return
        asked: list[tuple[PartitionClient, Placed, Future]] = []
        for lane in lanes:
            placed, before = found[0].partitions[lane.partition], self._placed[lane.partition]
            if placed.primary == NOBODY or placed.loading or placed.epoch == before.epoch:
                continue  # requests stay where they are until somebody else serves it
            try:
                asked.append((lane, placed, self._ask(lane, placed, before)))
            except RpcError as error:
                logger.debug("%s cannot be asked now: %s", lane, str(error))
        restored: list[tuple[PartitionClient, Placed]] = []
        for lane, placed, answer in asked:
            try:
                if self._learn(lane, placed, await answer):
                    restored.append((lane, placed))
            except RpcError as error:
                # the new primary does not know yet that it is one: the next time it does
                logger.debug("%s is not served yet: %s", lane, str(error))
        own = self._own.intersection(placed.restored for _, placed in restored)
        if own:
            self._own -= own
            self._session.withdraw(told_before)
        self._tell_of_restores(restored)

    def _ask(self, lane: PartitionClient, placed: Placed, before: Placed) -> Future:
        """What a partition's new primary has of us; or the least that it, or one that we have
        missed since `before`, began with.
        """
        server_id, arguments = address_of(lane.partition, placed)
        if placed.history != before.history:
            return self._client.submit_to(
                server_id, "applied_of", *arguments, self._identity, timeout_s=LOSS_TIMEOUT_S
            )
        return self._client.submit_to(
            server_id, "began", *arguments, before.epoch, timeout_s=LOSS_TIMEOUT_S
        )

    def _learn(self, lane: PartitionClient, placed: Placed, answer: Any) -> bool:
        """Whether a checkpoint was restored that it did not have."""
        before = self._placed[lane.partition]
        is_restored = False
        if placed.history != before.history:
            # first: who is told reads no row of before any more
            self._session.begin_again(lane.partition)
            self._session.news.append(self._loss(lane, placed, answer))
        elif placed.restored and placed.restored != before.restored:
            self._session.begin_again(lane.partition)
            is_restored = True
        else:
            gone_back = self._session.began(lane.partition, answer)
            if gone_back is not None:
                self._session.news.append(gone_back)
        lane.address = address_of(lane.partition, placed)
        self._placed[lane.partition] = placed
        return is_restored

    def _tell_of_restores(self, restored: Sequence[tuple[PartitionClient, Placed]]) -> None:
        news = {
            placed.restored: placed.step
            for _, placed in restored
            if placed.restored not in self._restores
        }
        for restore in news:
            self._restores[restore] = next_order()
        for lane, placed in restored:
            if lane.refuse(self._restores[placed.restored], self._restore(placed.step)):
                news.pop(placed.restored, None)
        if self.has_tables():
            self._session.news.extend(map(self._restore, news.values()))

    def _restore(self, step: int) -> EpochChanged:
        return EpochChanged(
            f"the tables of {self._name!r} were restored from the checkpoint of step {step}, "
            "by another worker: what this verb "
            "asked for was not done everywhere, and acknowledged pushes since then are gone; "
            "train on from there",
            -1,
            step,
            -1,
        )

    def _loss(self, lane: PartitionClient, placed: Placed, kept: int) -> EpochChanged:
        """kept: the number of this worker's newest push that is in."""
        lost = lane.answered_above(kept)
        since = (
            f"the checkpoint of step {placed.step}"
            if placed.step >= 0
            else "the beginning, as there is no checkpoint"
        )
        return EpochChanged(
            f"partition {lane.partition} of {self._name!r} was lost with its server and is back "
            f"as of {since}: up to {lost} "
            "pushes of this worker which it had acknowledged are gone; train on from there, "
            "or restore all tables",
            lane.partition,
            placed.step,
            lost,
        )
