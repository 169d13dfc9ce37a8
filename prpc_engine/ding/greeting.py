"""What two nodes of a DI-engine job tell each other: the values of their messages. No I/O.

    message    arguments                  answer        when
    where      (none)                     addresses     a node was dialled: how else it is reached
    hello      a NodeGreeting             NodeGreeting  over each new connection
    event      number, topic, payload     (none)        see outlet.py and inlet.py
    taken      count                      (none)        as recv() hands events out
    interest   version, settled, topics   None          the topics of the other node have changed
    goodbye    (none)                     None          it stops: everything before has arrived

A node is known by the incarnation that the handshake gives: each start of a process has another.
All topics are told each time, with a version that grows: a message that comes late changes nothing,
whatever way it took.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prpc_engine.errors import RpcError

TARGET = 5  # below what a master gives to servers
WHERE, HELLO, EVENT, TAKEN = "where", "hello", "event", "taken"
INTEREST, GOODBYE = "interest", "goodbye"
PROTOCOL = 1  # raised with each change that the other side would misread


class Interest(msgspec.Struct, frozen=True, array_like=True):
    """Which topics a node has subscribed to.

    version     grows with each change
    is_settled  False while the node starts: it takes everything, as its program has not yet
                subscribed to all that it will
    """

    version: int
    is_settled: bool
    topics: frozenset[bytes]

    def wants(self, topic: bytes) -> bool:
        """Whether an event of that topic is to be sent there."""
        return not self.is_settled or topic in self.topics


class NodeGreeting(msgspec.Struct, frozen=True, array_like=True):
    """Who a node is, and how far it has got with the one that it greets.

    received  the number of the last event that came from that one; 0: none has
    taken     how many of those were handed out by recv()
    """

    protocol: int
    name: str
    listen_to: str
    received: int
    taken: int
    interest: Interest


def told(value: msgspec.Struct) -> Any:
    """A value as it travels."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def read_greeting(values: object, who: str) -> NodeGreeting:
    """Raises RpcError for what is none of this release."""
    try:
        greeting = msgspec.convert(values, NodeGreeting, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise RpcError(f"{who} greets, but not as a node of DI-engine does: {error}") from error
    if greeting.protocol != PROTOCOL:
        raise RpcError(
            f"{who} speaks version {greeting.protocol} of this protocol, and {PROTOCOL} is spoken "
            "here: install one release of prpc-engine everywhere"
        )
    return greeting


def read_interest(version: int, is_settled: bool, topics: list[bytes]) -> Interest:
    """Of the arguments of `interest`. Raises RpcError."""
    try:
        return msgspec.convert([version, is_settled, topics], Interest, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise RpcError(f"topics were told, but not as a node of DI-engine does: {error}") from error
