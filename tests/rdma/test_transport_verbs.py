"""verbs keeps the contract of all transports, over a real device."""

from __future__ import annotations

from shard import Node, Slab, Transport
from shard.transport.verbs import VerbsTransport
from tests.transport_contract import TransportContract


class TestVerbs(TransportContract):
    address = "verbs://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return VerbsTransport(node, slab)
