"""Several RDMA ports for one connection: messages go over the first, arrays are read over all.

    VerbsDevices  the ports of this process that its connections use, opened when first needed
    VerbsRails    a queue with slots on one port, and a rail on each further one
    VerbsRail     a queue pair for reads alone

    a rail is  offered   by the end that connects: one on each port of its, after the first
               paired    by the end that accepts, with one of its own ports; or a hole: the numbers
                         of rails, which both ends use, go by the offer
               proven    once a read of no bytes came back over it: arrays are read over it from
                         then on, as fast as its reads complete
               lost      before that: a line in the log, and the connection goes on without it
               failed    after that: the connection ends, as its queue pair's failure ends it

Which port for which: of each rail in turn, and of the first queue pair before them, that of the
free ports of the same kind of link whose GID has the most leading bits in common with it, of equal
ones the first. Two GIDs of one subnet have more in common than two of different ones, however long
its prefix is; on a network without subnets, or with routers, all pairs are as good.

The end that connects waits until a read of no bytes has come back over the first queue pair. Where
none does, it tries again with a rail in its place that is proven by then, and names the port that
this was connected to; where one end does not find the other's host, with the next port in turn.

Each rail has its own completion queue. It is looked at while something is in flight there, so a
rail costs nothing where messages alone are exchanged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from shard.errors import RemoteProtocolError
from shard.memory.slab import Slab
from shard.transport.verbs_device import ALL, NoVerbs, verbs_rails
from shard.transport.verbs_domain import READS, VerbsDomain, VerbsOptions
from shard.transport.verbs_introduction import FarEnd, FarPair, FirstPair, gid_mark
from shard.transport.verbs_iwarp import IwarpQueue
from shard.transport.verbs_queue import (
    READ,
    SUCCESS,
    VerbsFailed,
    VerbsQueue,
    VerbsReader,
    failure_text,
)

logger = logging.getLogger("shard")
_NO_PAIR = FarPair()


def paired(far: Sequence[FarPair], near: Sequence[FarPair], partner: int = 0) -> list[int | None]:
    """For each queue pair of the peer's which of `near` it is paired with, each at most once; None:
    with none. Of both only the link and the GID are looked at, and of the peer's its number.
    `partner`: as of a FarEnd, for the first.
    """
    free = list(range(len(near)))
    found: list[int | None] = []

    def fits(one: FarPair, at: int) -> tuple[bool, int]:
        is_partner = not found and gid_mark(near[at].gid) == partner
        return is_partner, _bits_in_common(one.gid, near[at].gid)

    for one in far:
        fitting = [at for at in free if one.number and near[at].link == one.link]
        best = max(fitting, key=partial(fits, one), default=None)
        if best is not None:
            free.remove(best)
        found.append(best)
    return found


def _bits_in_common(one: bytes, other: bytes) -> int:
    """At the beginnings of two GIDs."""
    differ = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return 8 * len(one) - differ.bit_length()


class VerbsRail(VerbsReader):
    """A queue pair for reads alone. It gives no read away until it is proven."""

    def __init__(self, domain: VerbsDomain, number: int) -> None:
        super().__init__(domain, number)
        self.in_flight = 0  # requests that were posted and not found complete
        self.is_lost = False  # it carries nothing in this connection
        self.is_begun = False  # proving it is
        self._peer = ""
        self._kept: list[int] | None = []  # numbers of its reads; None: it is proven

    def prove(self, peer: str) -> None:
        """Have it carry reads from when one of no bytes has come back. `peer`: for the log."""
        self._peer, self.is_begun = peer, True
        self._kept, self.free = self.free, []
        try:
            self.flush()
        except VerbsFailed as error:
            self.lose(str(error))
        else:
            self.in_flight = 1

    @property
    def is_proven(self) -> bool:
        return self._kept is None

    def lose(self, why: str) -> None:
        """It carries nothing."""
        self.free, self.in_flight, self.is_lost = [], 0, True
        logger.warning("arrays of %s are read without a rail: %s", self._peer or "a peer", why)

    def read(
        self, number: int, address: int, lkey: int, far_address: int, rkey: int, nbytes: int
    ) -> None:
        super().read(number, address, lkey, far_address, rkey, nbytes)
        self.in_flight += 1

    def poll(self, count: int) -> list[Any]:
        found = super().poll(count)
        if not found:
            return found
        self.in_flight -= len(found)
        if self._kept is None:
            return found
        if found[0].status == SUCCESS:
            self.free, self._kept = self._kept, None
        else:
            self.lose(str(self.failed(failure_text(found[0].status))))
        return []


class VerbsRails(VerbsQueue):
    """A queue with slots on the first of some ports, and a rail on each other one. A rail that
    cannot be made is left out, with a line in the log. Raises NoVerbs, for the first port.

    domains: None for a rail that has no port.
    """

    def __init__(
        self,
        first: VerbsDomain,
        others: Sequence[VerbsDomain | None],
        slot_bytes: int,
        partner: int = 0,
    ) -> None:
        self._rails: list[VerbsRail] = []
        super().__init__(first, slot_bytes, partner)
        for number, domain in enumerate(others, 1):
            if domain is not None:
                try:
                    self._rails.append(VerbsRail(domain, number))
                except NoVerbs as error:
                    logger.warning("a connection is made without a rail: %s", error)
        self.width = 1 + len(others)

    @property
    def readers(self) -> tuple[VerbsReader, ...]:
        return (self, *self._rails)

    def near_end(self) -> FarEnd:
        rails = [_NO_PAIR] * (self.width - 1)
        for rail in self._rails:
            rails[rail.number - 1] = rail.near_pair()
        return FarEnd(**{**vars(super().near_end()), "rails": tuple(rails)})

    def search(self, far: FarEnd) -> None:
        super().search(far)
        for rail, pair in zip(self._rails, self._pairs(far), strict=True):
            if pair.number:
                rail.search_pair(pair)

    def _pairs(self, far: FarEnd) -> list[FarPair]:
        """Of each rail the peer's queue pair."""
        told = (*far.rails, *[_NO_PAIR] * self.width)
        return [told[rail.number - 1] for rail in self._rails]

    def is_found(self) -> bool:
        """The same of all; a rail whose host is not found is left out."""
        found = super().is_found()
        for rail in self._rails:
            try:
                found = rail.is_found() and found
            except NoVerbs as error:
                rail.lose(str(error))
        return found

    def pause_s(self) -> float:
        return max(super().pause_s(), *(rail.pause_s() for rail in self._rails))

    def connect(self, far: FarEnd) -> None:
        """To that end, with the rails that it has a pair for. Raises NoVerbs,
        RemoteProtocolError.
        """
        if len(far.rails) >= self.width:
            raise RemoteProtocolError(
                f"the peer has {len(far.rails)} rails for {self.width - 1} of this side"
            )
        super().connect(far)
        self.width = 1 + len(far.rails)
        each, self._rails = list(zip(self._rails, self._pairs(far), strict=True)), []
        for rail, pair in each:
            if rail.is_lost or not pair.number:
                rail.close()
                continue
            self._rails.append(rail)
            try:
                rail.connect_pair(pair)
            except NoVerbs as error:
                rail.lose(str(error))

    def prove(self, peer: str) -> None:
        super().prove(peer)
        self.begin(peer)

    def others(self, far: FarEnd) -> list[FirstPair]:
        """With the rails that are proven; where none could be, with each."""
        if not any(rail.is_begun for rail in self._rails):
            return [FirstPair(str(rail.domain.port), 0) for rail in self._rails if not rail.is_lost]
        return [
            FirstPair(str(rail.domain.port), gid_mark(pair.gid))
            for rail, pair in zip(self._rails, self._pairs(far), strict=True)
            if rail.is_proven
        ]

    def begin(self, peer: str) -> None:
        for rail in self._rails:
            if not rail.is_lost and not rail.is_begun:
                rail.prove(peer)

    def end_of(self, done: Any) -> VerbsFailed:
        number = (done.wr_id - READ) // READS if done.wr_id & READ else 0
        for rail in self._rails:
            if rail.number == number:
                return rail.failed(failure_text(done.status))
        return super().end_of(done)

    def poll(self, count: int) -> list[Any]:
        """Of the slots' port, and then of the others: up to so many of each."""
        found = super().poll(count)
        for rail in self._rails:
            if rail.in_flight:
                found += rail.poll(count)
        return found

    def arm(self) -> None:
        super().arm()
        for rail in self._rails:
            if not rail.is_lost:
                rail.arm()

    def close(self) -> None:
        for rail in self._rails:
            rail.close()
        super().close()


class VerbsDevices:
    """The ports that the options name, each open from its first use on. Thread-safe."""

    def __init__(self, slab: Slab, options: VerbsOptions) -> None:
        self._slab, self._options = slab, options
        self._open: dict[str, VerbsDomain] = {}
        self._told: set[str] = set()  # why some are not used
        # of `_open`: one connects and another accepts, and each port is to be opened once
        self._opening = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether any was usable so far."""
        return bool(self._open)

    def usable(self) -> list[VerbsDomain]:
        """Those that work now, at least one, in the order in which they are named. One that does
        not is told in the log, once until it works again. Raises NoVerbs.
        """
        with self._opening:
            wanted = self._options.device
            if wanted is None or not _may_be_several(wanted):
                working = [domain for domain in self._open.values() if domain.is_active()]
                if working:
                    return working[:1]
            ports, left_out = verbs_rails(wanted, gid_index=self._options.gid_index)
            found = []
            for port in ports:
                name = str(port)
                if name in self._open and not self._open[name].is_active():
                    del self._open[name]  # the device was taken away and came back
                try:
                    if name not in self._open:
                        self._open[name] = VerbsDomain(self._slab, self._options, port)
                    found.append(self._open[name])
                except NoVerbs as error:
                    left_out.append(str(error))
            if not found:
                raise NoVerbs("; ".join(left_out))
            for text in left_out:
                if text not in self._told:
                    logger.warning("verbs goes on without a port: %s", text)
            self._told = set(left_out)
            return found

    def queue(self, slot_bytes: int, first: FirstPair | None = None) -> VerbsQueue:
        """For a connection that this end begins: on the first port that works, or that of `first`,
        with a rail on each other one. Raises NoVerbs.
        """
        domains = self.usable()
        if domains[0].is_iwarp:
            return IwarpQueue(domains[0], slot_bytes, is_accepting=False)
        if len(domains) == 1:
            return VerbsQueue(domains[0], slot_bytes)
        if first is None:
            return VerbsRails(domains[0], domains[1:], slot_bytes)
        domains.sort(key=lambda one: str(one.port) != first.near)
        return VerbsRails(domains[0], domains[1:], slot_bytes, first.partner)

    def queue_for(self, slot_bytes: int, far: FarEnd) -> VerbsQueue:
        """For a peer that introduced itself so, to be connected to it. Raises NoVerbs."""
        domains = self.usable()
        near = [FarPair(link=one.link, gid=one.gid) for one in domains]
        first, *others = paired([far, *far.rails], near, far.partner)
        slots_at = domains[first or 0]  # without any of the same link connect() says so
        if slots_at.is_iwarp:
            return IwarpQueue(slots_at, slot_bytes, is_accepting=True)
        rails = [None if at is None else domains[at] for at in others]
        if any(rails):
            return VerbsRails(slots_at, rails, slot_bytes)
        return VerbsQueue(slots_at, slot_bytes)


def _may_be_several(wanted: str) -> bool:
    return wanted.strip() == ALL or "," in wanted
