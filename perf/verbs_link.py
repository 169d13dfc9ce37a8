"""A connection of the verbs transport with both ends in this process, turned by the code that
measures it: what the transport adds to the verbs that it posts (verbs_pair.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shard
from prpc_engine import NodeConfig
from prpc_engine.node.ways import verbs_options
from shard import Reactor, Slab, VerbsOptions, VerbsTransport, control_loop

CONNECT_S = 60.0
# A message without blocks is sent as a body; of more bytes, as an array of the slab, which the
# other end reads.
BODY_BYTES_MAX = 4096


def options() -> VerbsOptions:
    """Which devices, as PRPC_VERBS_DEVICE and `[transport]` name them for a node. Raises
    ConfigError.
    """
    return verbs_options(NodeConfig.load().transport)


class VerbsLink:
    """A context manager. move() sends so many bytes from the near end to the far one, and returns
    when they have been delivered. Raises UnreachableError, NoVerbs.
    """

    def __init__(self, nbytes: int) -> None:
        self._reactor = Reactor(time.monotonic)
        self._slabs = (Slab(), Slab())
        node = shard.Node(secret=b"", incarnation=1, limits=shard.DEFAULT_LIMITS)
        near, far = (VerbsTransport(node, slab, options()) for slab in self._slabs)
        accepted: list[Any] = []
        self._listener = far.listen("verbs://127.0.0.1:0", self._reactor, accepted.append)
        connecting = control_loop().spawn(near.connect(self._listener.address, CONNECT_S))
        while not (connecting.done() and accepted):
            if not self._reactor.poll(time.monotonic()):
                self._reactor.park(0.001)
            if connecting.done() and connecting.exception() is not None:
                break
        self._near, self._far = connecting.result(), accepted[0]
        self._near.attach(self._reactor)
        self._far.on_message = self._take
        self._body = bytes(nbytes - 1) + b"\x07" if nbytes <= BODY_BYTES_MAX else b""
        self._blocks: list[NDArray[np.uint8]] = []
        if not self._body:
            self._blocks = [self._slabs[0].empty(nbytes, np.uint8)]
            self._blocks[0][:] = 7
        self._count = 0
        self.last = 0  # byte that came

    def _take(self, body: memoryview, blocks: Sequence[NDArray[np.uint8]] = ()) -> None:
        self._count += 1
        self.last = int(blocks[0][-1]) if blocks else body[-1]

    def move(self) -> None:
        """One message."""
        wanted = self._count + 1
        self._near.send(self._body, self._blocks)
        poll = self._far.poll
        while self._count < wanted:
            poll()
        self._near.poll()  # what the far end gave back

    def __enter__(self) -> VerbsLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._near.close()
        self._far.close()
        self._blocks.clear()
        self._reactor.close()
        for slab in self._slabs:
            slab.close()
