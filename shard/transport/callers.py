"""Who a peer is over several connections: an acceptor gives each connector a name, which only that
connector can use again.

    connector                                            acceptor
    knows no key for this acceptor: claims name 0        derives a key from the exchange, and a name
                                                         from the key
    the same, once it is accepted: derives the same key  keeps the key by its name
    has a key: claims its name, proves the key           knows the key, and it fits: the peer has
                                                         that name; else: as with name 0, and the
                                                         connector is told (ANEW)

The key is an HMAC of both hellos, whose nonces only the two ends of that connection have seen (and
who can read an unencrypted network). It is never sent; a proof of it covers both new hellos. So no
other member of the job can take or forge a peer's name, though all hold one secret, and none can
claim it beforehand. What an acceptor states about itself stays its own word: who was sent to the
wrong address has a stranger at its end.

Bounded: what was used longest ago is forgotten. A connector that is forgotten gets a new name, and
is told. No I/O in this file.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import OrderedDict
from dataclasses import dataclass

# Of each role: as many connections as a listener may have (Limits.connections_max), twice, at some
# 200 bytes each.
CALLERS_MAX = 1 << 15
NAME_BYTES = 8


@dataclass(frozen=True)
class CallerKey:
    """The key that a node shares with one acceptor since their first handshake, and the name that
    the acceptor knows it by. Later handshakes prove the key, so that no other member of the job
    can take the name.
    """

    name: int
    key: bytes

    @classmethod
    def derive(cls, secret: bytes, transcript: bytes) -> CallerKey:
        """The key of a first contact; both ends come to the same."""
        key = hmac.digest(secret, b"caller" + transcript, hashlib.sha256)
        name = int.from_bytes(hmac.digest(key, b"name", hashlib.sha256)[:NAME_BYTES], "little")
        return cls(name >> 1 | 1, key)  # never 0, and fits where signed numbers are kept

    def proof(self, transcript: bytes) -> bytes:
        """Shows possession to the acceptor of this very exchange."""
        return hmac.digest(self.key, b"again" + transcript, hashlib.sha256)


class Callers:
    """What one node remembers of its keys, in both roles. Safe from any thread: it connects in
    the control loop, and accepts in its reactor.
    """

    def __init__(self, most: int = CALLERS_MAX) -> None:
        self._most = most
        # by name; the one used last is the last
        self._accepted: OrderedDict[int, CallerKey] = OrderedDict()
        self._own: OrderedDict[int, CallerKey] = OrderedDict()  # by the acceptor's incarnation
        self._guard = threading.Lock()  # of both: handshakes of several transports and loops

    def recognize(self, name: int, proof: bytes, transcript: bytes) -> bool:
        """Whether the peer has that name here."""
        with self._guard:
            known = self._accepted.get(name)
            if known is None:
                return False
            self._accepted.move_to_end(name)
        return hmac.compare_digest(proof, known.proof(transcript))

    def admit(self, caller: CallerKey) -> None:
        """A peer that is new here."""
        with self._guard:
            self._keep(self._accepted, caller.name, caller)

    def own_key(self, acceptor: int) -> CallerKey | None:
        """What this side is known by at that acceptor."""
        with self._guard:
            return self._own.get(acceptor)

    def keep_own(self, acceptor: int, caller: CallerKey, replaced: CallerKey | None) -> None:
        """A first contact, or one where the key `replaced` was not known any more. Of two at a time
        the first one's key stays.
        """
        with self._guard:
            if self._own.get(acceptor) is replaced:
                self._keep(self._own, acceptor, caller)

    def _keep(self, table: OrderedDict[int, CallerKey], number: int, caller: CallerKey) -> None:
        table[number] = caller
        table.move_to_end(number)
        if len(table) > self._most:
            table.popitem(last=False)
