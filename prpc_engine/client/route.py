"""The way to one server: its entry at the master, the peer once connected, and the calls that wait
for the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from prpc_engine.client.call_figures import CallFigures
from prpc_engine.master.registry import ServerEntry
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.send_queue import SendQueue


class Route:
    """Leads to one server: what the master says of it, its peer once connected, and the calls that
    wait for that.

    entry     what the master says of the server
    is_local  whether it is on this host
    owner     the Directory that made it; None: it stands for a server that is not known here
    figures   of its client: calls that fail count there; None: nobody counts them

    `queue` is what waits for it, and its state; `peer` is set while that is up, so calls keep their
    order. Both change under the guard of the dispatcher's pending requests.
    """

    __slots__ = (
        "addresses",
        "figures",
        "is_local",
        "marks",
        "owner",
        "peer",
        "queue",
        "rank",
        "server_id",
        "target",
        "text",
    )

    def __init__(
        self,
        entry: ServerEntry,
        is_local: bool,
        owner: object = None,
        figures: CallFigures | None = None,
    ) -> None:
        self.figures = figures  # of its client: calls that fail count there
        # the Directory that made it: by it a client knows its own calls in the table of a peer
        self.owner = owner
        self.server_id = entry.server_id
        self.rank = entry.rank
        self.is_local = is_local
        self.target = entry.target
        self.addresses = entry.addresses
        self.marks = entry.marks
        self.peer: Peer | None = None
        self.queue: SendQueue[Call] = SendQueue()
        self.text = f"server {entry.server_id} of {entry.service!r} (rank {entry.rank})"

    @property
    def in_flight(self) -> Sized:
        """Calls that wait for the node it lives on, or for a connection to it."""
        peer = self.peer  # looked at once: whoever finds it lost sets it to None, in any thread
        return peer.calls.in_flight if peer is not None else self.queue

    @property
    def is_connected(self) -> bool:
        """Whether a call may leave at once."""
        peer = self.peer
        return peer is not None and not peer.lost

    def __str__(self) -> str:
        return self.text


class Sought(Route):
    """Stands for a server that is not known here. After a look at the master find() says which it
    is, or raises NoServer.
    """

    __slots__ = ("find",)

    def __init__(
        self, service: str, text: str, find: Callable[[], Route], figures: CallFigures | None = None
    ) -> None:
        # no call is sent over it
        super().__init__(ServerEntry(service, -1, 0, -1, ()), False, figures=figures)
        self.text = text
        self.find = find
