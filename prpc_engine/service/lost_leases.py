"""Calls to a process whose lease at the master has ended end then, not at their deadlines.

A process keeps its lease by heartbeats of its control loop, whatever its handlers do. So one whose
lease has ended is dead, stopped (SIGSTOP, a debugger, a frozen container) or cut off from the
master; its kernel may still answer for its sockets. A server that is listed no longer is the sign:

    the process of the server        what it means                        its connection
    answers a PING                   it closed that server, or lost its   stays
                                     session and opens another one
    answers none within ANSWER_S,    a handler keeps its reactor          stays
     and the master lists it
    answers none, and the master     it is dead, stopped or cut off       ends with PeerLostError
     does not
    the same, and the master cannot  nothing                              stays
     be asked
"""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from prpc_engine import errors
from prpc_engine.client.route import Route
from prpc_engine.master.registry import Member
from prpc_engine.master.session import MasterSession
from prpc_engine.node.node import Node
from prpc_engine.node.node_info import ABOUT_ROUTE, PING
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from shard import PeerLostError, control_loop, sleep

# For a process that is there to answer, on a busy machine: half of what its heartbeats have.
ANSWER_S = 1.0
ASK_AGAIN_S = 0.1  # while messages to it find no room
MASTER_S = 5.0  # for the master to say who is a member
# Where nodes, and shards of nodes, stand in the master's tree.
MEMBERS_PATHS = "/_node_", "/_shard_"
_PING = method_key(PING)

logger = logging.getLogger("prpc")


class LostLeases:
    """Ends the connections of this node to processes that have lost their lease at the master.

    Owned by an RpcService. server_gone() is called in the node's reactor; what follows is a
    coroutine of the control loop, one for each connection at a time.
    """

    def __init__(self, node: Node, session: MasterSession) -> None:
        self._node = node
        self._session = session
        self._asked: set[Peer] = set()  # whom a coroutine sees to; in the reactor

    def server_gone(self, route: Route) -> None:
        """The master does not list that server any more."""
        peer = route.peer
        if peer is None or peer.lost or peer in self._asked:
            return
        self._asked.add(peer)
        try:
            looked = control_loop().spawn(self._look(peer, route))
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, for the loop
            self._asked.discard(peer)
            logger.warning("whether %s is alive could not be asked: %s", route, error)
            return
        looked.when_done(lambda _: self._node.reactor.call_soon(partial(self._asked.discard, peer)))

    async def _look(self, peer: Peer, route: Route) -> None:
        if await self._answers(peer):
            return
        try:
            is_member = await self._is_member(route.addresses)
        except errors.RpcError as error:
            logger.debug("whether %s is a member could not be asked: %s", route, error)
            return
        if not is_member:
            lost = PeerLostError(
                f"the lease of {peer.connection.peer} at the master has ended, and it answers "
                "nothing: its process is stopped, or cut off from the network"
            )
            self._node.reactor.call_soon(partial(peer.connection.close, lost))

    async def _answers(self, peer: Peer) -> bool:
        """Whether it answers, or needs no more looks as the connection is over."""
        reactor = self._node.reactor
        give_up_at = reactor.clock() + ANSWER_S
        while not peer.lost and (left_s := give_up_at - reactor.clock()) > 0.0:
            try:
                await peer.request(ABOUT_ROUTE, PING, _PING, (), left_s, True)
            except errors.Backpressure:  # it reads nothing just now
                await sleep(min(ASK_AGAIN_S, left_s))
            except errors.DeadlineExceeded:
                break
            except errors.RpcError:  # over, or refused by a process that is there
                return True
            else:
                return True
        return peer.lost

    async def _is_member(self, addresses: tuple[str, ...]) -> bool:
        for path in MEMBERS_PATHS:
            for _, value, _ in await self._session.submit("tree_look", path, timeout_s=MASTER_S):
                if value and msgspec.json.decode(value, type=Member).addresses == addresses:
                    return True
        return False
