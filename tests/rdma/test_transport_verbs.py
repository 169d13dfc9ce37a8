"""verbs keeps the contract of all transports, over a real device, and over two."""

from __future__ import annotations

import pytest

from shard import Node, Slab, Transport, VerbsOptions
from shard.transport.verbs import VerbsTransport
from tests.transport_contract import TransportContract


class TestVerbs(TransportContract):
    address = "verbs://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return VerbsTransport(node, slab)


@pytest.mark.slow  # at night: what is particular to two is in test_rails.py
class TestVerbsOverTwoDevices(TransportContract):
    address = "verbs://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return VerbsTransport(node, slab, VerbsOptions(device="rxe0,rxe1"))
