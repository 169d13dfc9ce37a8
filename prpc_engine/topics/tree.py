"""From whom a reader on another host gets an item: from the publisher, or from a reader that has
it. No I/O and no clock here.

    a host's copy  event                              what follows
    none           a reader there is to get the item  ON ITS WAY, that one is the carrier: from the
                                                      publisher, or with more than FANOUT hosts from
                                                      whoever has it and sends it to the fewest
                   FANOUT copies leave each who has   it waits
                   it
    ON ITS WAY     another one there is to get it     it waits
                   the carrier has confirmed it       HELD: who waits fetches it from there
                   the carrier was lost, left, asks   none: one that waits is the next carrier
                   again, or took longer than
                   patience_s()
    HELD           another one there is to get it     it fetches it from the carrier
                   a fetch failed; the carrier was    none
                   lost, or left
                   all who share it have it, and in   none: the carrier is told to let go of it
                   mode "latest" there is a newer one

    who holds what                    until
    publisher  each item, by reader   the reader has confirmed it (backlog.py), wherever it got it
    carrier    its host's copy        it is told to let go of it, holds more than HELD_BYTES_MAX,
                                      its publisher has gone, or its own end
    reader     memory of the carrier  its last array on it is dropped, also after the carrier's end

What stands here is what the publisher believes, and nothing rests on it: a reader whose fetch fails
for whatever reason says so by asking without its place, and is sent the item itself. A host is
where processes of one user share memory (its boot id and network namespace); of nodes that share
none, an address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shard import BETWEEN_HOSTS

# Below that it is sent to each. A reference costs a small message over the network, a fetch over
# shared memory and the wait for the carrier's word: some 0.3 ms, in which 10 Gbit/s bring 375 KB.
TREE_BYTES_MIN = 256 << 10
# Copies of an item that leave one process at a time. With one, a host that stands still would hold
# up all; more share the card of that host.
FANOUT = 2
# How long a carrier may take: a busy machine may need seconds to connect to it, and a network below
# 20 MB/s is slower than what a job could do with.
PATIENCE_S, BYTES_PER_S_MIN = 5.0, 20e6
# Of items that a carrier holds beside what its application has; it always holds the last one.
HELD_BYTES_MAX = 256 << 20
APART_MAX = 4096  # hosts that are remembered: then all are forgotten


class Key(NamedTuple):
    """What is sent of an item: of weights what has changed since version `base`, or with 0 all."""

    version: int
    base: int


class Way(NamedTuple):
    """How a reader gets an item: from a reader at `place`, by its id, or with none from the
    publisher; `holds`: it is the carrier of its host then.
    """

    holds: bool
    place: str = ""
    holder: int = 0


class OnItsWay(NamedTuple):
    """It is on its way to that host: another look when a copy has arrived, or at that time."""

    until_s: float


SENT = Way(False)


def patience_s(nbytes: int) -> float:
    """Seconds in which so many bytes have to arrive."""
    return PATIENCE_S + nbytes / BYTES_PER_S_MIN


def host_of(addresses: Sequence[str]) -> str:
    """Which host a node is on that is reached there; "" for a node that nobody reaches."""
    by_scheme = {one.partition("://")[0]: one for one in addresses}
    for scheme in ("shm", "unix"):
        if scheme in by_scheme:  # scheme://host/uid/token
            return by_scheme[scheme].partition("://")[2].rpartition("/")[0]
    for scheme in BETWEEN_HOSTS:
        if scheme in by_scheme:  # scheme://host:port
            return by_scheme[scheme].partition("://")[2].rpartition(":")[0]
    return ""


@dataclass(eq=False)
class _Copy:
    """Of an item, on one host. source: the one that it is fetched from; None: of the publisher."""

    key: Key
    host: _Host
    carrier: _Member
    due_s: float
    source: _Copy | None
    is_held: bool = False
    fetches: int = 0  # of other hosts, under way


@dataclass(eq=False)
class _Host:
    name: str
    members: dict[int, _Member] = field(default_factory=dict)
    copies: dict[Key, _Copy] = field(default_factory=dict)


@dataclass(eq=False)
class _Member:
    """A reader that others can reach."""

    reader_id: int
    place: str
    host: _Host
    carries: dict[Key, _Copy] = field(default_factory=dict)
    referred: _Copy | None = None  # where it was last told to fetch from


class ReaderTree:
    """Readers of one publisher on other hosts. Its owner holds the lock.

    keeps_newest  who joins gets the newest item: a host keeps it, though all there have it
    """

    def __init__(self, keeps_newest: bool) -> None:
        self._keeps_newest = keeps_newest
        self._members: dict[int, _Member] = {}
        self._hosts: dict[str, _Host] = {}
        self._leaving: dict[Key, int] = {}  # copies on their way from the publisher
        self._apart: set[str] = set()  # hosts that did not reach another host

    def __contains__(self, reader_id: int) -> bool:
        return reader_id in self._members

    def join(self, reader_id: int, place: str) -> None:
        """A reader asks that others reach at these addresses, divided by spaces. Again: does
        nothing, but at another place.
        """
        member = self._members.get(reader_id)
        if member is not None:
            if member.place == place:
                return
            self.leave(reader_id)
        name = host_of(place.split())
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(name)
        self._members[reader_id] = host.members[reader_id] = _Member(reader_id, place, host)

    def leave(self, reader_id: int) -> bool:
        """It has gone, or is lost: nobody fetches from it. Whether it was there."""
        member = self._members.pop(reader_id, None)
        if member is None:
            return False
        for copy in list(member.carries.values()):
            self._drop(copy)
        host = member.host
        del host.members[reader_id]
        if not host.members:
            del self._hosts[host.name]
        return True

    def failed(self, reader_id: int) -> bool:
        """It could not fetch what it was told to, and asks for it itself; as leave()."""
        member = self._members.get(reader_id)
        if member is None:
            return False
        copy = member.referred
        if copy is not None:
            if copy.host is not member.host:
                if len(self._apart) >= APART_MAX:
                    self._apart.clear()
                self._apart.add(member.host.name)
            self._drop(copy)
        return self.leave(reader_id)

    def carries(self, reader_id: int) -> bool:
        """Whether it has something for others, or is sent it."""
        member = self._members.get(reader_id)
        return member is not None and bool(member.carries)

    def way(
        self, reader_id: int, key: Key, nbytes: int, answer_nbytes: int, now: float
    ) -> Way | OnItsWay:
        """How a reader gets an item of so many bytes, in an answer of so many; with a Way it is
        answered so.
        """
        member = self._members.get(reader_id)
        if member is None or nbytes < TREE_BYTES_MIN:
            return SENT
        host = member.host
        copy = host.copies.get(key)
        if copy is not None and (copy.carrier is member or not (copy.is_held or now < copy.due_s)):
            self._drop(copy)  # its answer was lost; or its carrier is too slow
            copy = None
        if copy is None:
            if len(host.members) == 1 and not self._keeps_newest and len(self._hosts) <= FANOUT:
                return SENT  # nobody would fetch it
            return self._carry(member, key, max(nbytes, answer_nbytes), now)
        if not copy.is_held:
            return OnItsWay(copy.due_s)
        member.referred = copy
        return Way(False, copy.carrier.place, copy.carrier.reader_id)

    def _carry(self, member: _Member, key: Key, nbytes: int, now: float) -> Way | OnItsWay:
        """A copy for its host."""
        leaving = self._leaving.get(key, 0)
        source = None
        if len(self._hosts) > FANOUT and member.host.name not in self._apart:
            others = [one for host in self._hosts.values() if (one := host.copies.get(key))]
            source = min(
                (one for one in others if one.is_held and one.fetches <= min(leaving, FANOUT - 1)),
                key=lambda one: one.fetches,
                default=None,
            )
            due = [one.due_s for one in others if not one.is_held and now < one.due_s]
            if source is None and leaving >= FANOUT and due:
                return OnItsWay(min(due))
        copy = _Copy(key, member.host, member, now + patience_s(nbytes), source)
        member.host.copies[key] = member.carries[key] = copy
        if source is None:
            self._leaving[key] = self._leaving.get(key, 0) + 1
            return Way(True)
        source.fetches += 1
        member.referred = source
        return Way(True, source.carrier.place, source.carrier.reader_id)

    def arrived(self, reader_id: int, version: int) -> bool:
        """It has all up to that version; whether others may fetch more from it now."""
        member = self._members.get(reader_id)
        if member is None:
            return False
        if member.referred is not None and member.referred.key.version <= version:
            member.referred = None
        is_news = False
        for copy in member.carries.values():
            if not copy.is_held and copy.key.version <= version:
                copy.is_held = is_news = True
                self._ended(copy)
        return is_news

    def asks(self, reader_id: int, confirmed: int) -> bool:
        """It asks for what comes after that version: what it was sent beside that was lost. As
        arrived().
        """
        is_news = self.arrived(reader_id, confirmed)
        member = self._members.get(reader_id)
        lost = [] if member is None else [one for one in member.carries.values() if not one.is_held]
        for copy in lost:
            self._drop(copy)
        return is_news or bool(lost)

    def sharing(self, reader_id: int) -> Iterator[int]:
        """Readers that may fetch from this one, and itself."""
        member = self._members[reader_id]
        yield from self._members if len(self._hosts) > FANOUT else member.host.members

    def let_go(self, reader_id: int, below: int) -> bool:
        """Of what it holds of versions below that; whether there was any."""
        member = self._members.get(reader_id)
        if member is None:
            return False
        old = [one for one in member.carries.values() if one.is_held and one.key.version < below]
        for copy in old:
            self._drop(copy)
        return bool(old)

    def _ended(self, copy: _Copy) -> None:
        """It is on its way no longer."""
        if copy.source is not None:
            copy.source.fetches -= 1
            return
        left = self._leaving[copy.key] - 1
        if left:
            self._leaving[copy.key] = left
        else:
            del self._leaving[copy.key]

    def _drop(self, copy: _Copy) -> None:
        """Again: does nothing."""
        if copy.host.copies.get(copy.key) is not copy:
            return
        if not copy.is_held:
            self._ended(copy)
        del copy.host.copies[copy.key], copy.carrier.carries[copy.key]
