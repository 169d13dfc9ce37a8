"""The lanes of tcp and unix connections that are not all there yet. No I/O in this file.

    event                                                  what becomes of the connection
    lane 0 of 1                                            whole at once
    lane 0 of n > 1, with a token that nobody has          half-made
    lane k of n with the token of a half-made one, opened  one lane more; whole with the last
      by the same peer: identity and incarnation, and
      the same n; no lane k there yet
    any other lane                                         that lane is refused; a half-made one
                                                           stays as it is
    not whole in time                                      given up, with all its lanes

Each lane has proved the secret by itself before it comes here. So a half-made connection is a peer
that may connect, and is bounded as such, by limits.connections_max, and in time by
limits.handshake_s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shard.errors import RemoteProtocolError
from shard.transport.handshake import Lane
from shard.transport.identity import PeerIdentity

Item = TypeVar("Item")  # what stands for a lane: its socket


@dataclass
class _HalfMade(Generic[Item]):
    who: tuple[PeerIdentity, int]
    count: int
    lanes: dict[int, Item] = field(default_factory=dict)


class HalfMade(Generic[Item]):
    """The connections of one listener of which some lanes have arrived and others have not. join()
    adds a lane and says when its connection is whole.

    most: how many connections may be half made at a time; a further one is refused with
    RemoteProtocolError.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[bytes, _HalfMade[Item]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, lane: Lane, who: tuple[PeerIdentity, int], item: Item) -> list[Item] | None:
        """All lanes of its connection, in order, when this was the last; else None: it waits.
        Raises RemoteProtocolError.
        """
        if lane.count == 1:
            return [item]
        found = self._waiting.get(lane.token)
        if lane.number == 0:
            if found is not None:
                raise RemoteProtocolError("it opens a connection with the token of another one")
            if len(self._waiting) >= self._most:
                raise RemoteProtocolError(
                    f"{len(self._waiting)} connections are half made already, "
                    f"at most {self._most} allowed"
                )
            self._waiting[lane.token] = _HalfMade(who, lane.count, {0: item})
            return None
        if found is None:
            raise RemoteProtocolError(
                f"lane {lane.number} of a connection that is not known here: the peer never opened "
                "it, or it was given up since"
            )
        if found.who != who:
            raise RemoteProtocolError(
                f"lane {lane.number} of a connection that another peer has opened"
            )
        if found.count != lane.count or lane.number in found.lanes:
            raise RemoteProtocolError(
                f"lane {lane.number} of {lane.count} does not fit its connection of {found.count}"
            )
        found.lanes[lane.number] = item
        if len(found.lanes) < found.count:
            return None
        del self._waiting[lane.token]
        return [found.lanes[number] for number in range(found.count)]

    def give_up(self, token: bytes) -> list[Item]:
        """The lanes that have come of one that is not whole; it is forgotten. Empty when it is
        whole, or was never there.
        """
        found = self._waiting.pop(token, None)
        return list(found.lanes.values()) if found is not None else []

    def give_up_all(self) -> list[Item]:
        """As give_up(), of all."""
        return [item for token in list(self._waiting) for item in self.give_up(token)]
