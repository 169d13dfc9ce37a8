"""A queue pair of iWARP with slots: RDMA over tcp (RFC 5040 to 5044), which the kernel's rdma_cm
connects.

    connector                                     acceptor
    far end, over tcp, at its turn -------------> makes a queue pair, and listens with an rdma_cm of
                                                  its own at its device's address and a free port
           <------------------------------------- far end: that port, and a random token
    rdma_cm: resolves the address to a device,
    and the route; asks for the connection,
    with the token -----------------------------> the token is right: accepts with its queue pair,
                                                  and listens no longer
                                                  it is another one: rejects, and listens on
           <------------------------------------- established
    reads 8 bytes (prove) ----------------------> the first that is sent after the connection is
                                                  made, as MPA has it: of the end that connects
    READY, over tcp ----------------------------> has accepted: the connection is made

Everything else is as with other devices (verbs.py), except:

    read targets        are registered with REMOTE_WRITE. On the wire the answer to a read is a
                        write to the tag that the request names (RFC 5040, 5.2), and devices check
                        it as one. So arrays are never read into the slab, but into buffers of this
                        connection (the pieces of verbs_queue.py), and copied. The tags of these
                        buffers are in each request: an attacker who controls the peer's kernel or
                        device, or the network, can write to them, and to those of other
                        connections whose tags (32 bits) it guesses; to no other memory
    a read of no bytes  is one of 8 bytes, from a page that the peer shows: a busy siw (Linux 6.1)
                        answers one of none with bytes of another read, which ends the connection
    a network that      is detected by such a read every limits.peer_silent_s, as tcp retransmits
     is cut             for some 15 minutes (verbs_pulse.py)
    the peer's end      ends this queue pair, too, and flushes what is posted. So a connection looks
                        for the reason in its tcp socket (verbs_connection.py)
    devices             a connection uses one; rails are not implemented

The connector's part runs in a thread (run_blocking), because siw waits for the peer's tcp in the
middle of it. When it fails, or is given up, that thread gives everything back: to give back a queue
pair that is being connected takes until the peer answers or the kernel's time is over.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import threading
import time
from enum import Enum

from shard.transport.rdma_cm import CmEvent, CmEventKind, ConnectionManager
from shard.transport.verbs_device import NoVerbs
from shard.transport.verbs_domain import READS, VerbsDomain
from shard.transport.verbs_introduction import TOKEN_BYTES, FarEnd, mapped_address
from shard.transport.verbs_queue import VerbsQueue

# Requests that the reactor has not looked at yet: a stranger's is rejected in its next turn.
BACKLOG = 8
EVENTS_PER_TURN = 16  # a stranger can make any number of requests
RESOLVE_MS = 2000  # of an address, and of a route: both are known, or asked for in one round trip
GIVE_UP_LOOK_S = 0.1  # how often the connecting thread looks whether it was given up

_FAILED = {
    CmEventKind.ADDRESS_ERROR: "no device reaches it",
    CmEventKind.ROUTE_ERROR: "there is no route to it",
    CmEventKind.CONNECT_ERROR: "its device answered wrongly, or hung up",
    CmEventKind.UNREACHABLE: "it does not answer",
    CmEventKind.REJECTED: "it rejected the connection: nobody listens there, or for another one",
    CmEventKind.DISCONNECTED: "it hung up",
    CmEventKind.DEVICE_REMOVED: "this side's device was removed",
}


class CmAnswer(Enum):
    """What the end that accepts does about an event."""

    ACCEPT = "this is the peer"
    REJECT = "a stranger, or too late"
    CONNECTED = "the peer knows"
    FAIL = "there will be no connection"


def answer_to(event: CmEvent, token: bytes, has_accepted: bool) -> CmAnswer:
    """`token`: that of the peer; `has_accepted`: it came already."""
    if event.kind is CmEventKind.CONNECT_REQUEST:
        is_peer = secrets.compare_digest(event.data[:TOKEN_BYTES], token)
        return CmAnswer.ACCEPT if is_peer and not has_accepted else CmAnswer.REJECT
    return CmAnswer.CONNECTED if event.kind is CmEventKind.ESTABLISHED else CmAnswer.FAIL


def told(event: CmEvent) -> str:
    """What an event that was not wanted means."""
    return _FAILED.get(event.kind, f"rdma_cm says {event.kind.name}")


class IwarpQueue(VerbsQueue):
    """A queue pair of iWARP with slots. Its owner at the accepting end calls connect(), which
    listens, and step() whenever fileno_of_meeting() is readable; at the connecting end connect(),
    which only checks, and then meet() in a thread. Raises NoVerbs.
    """

    def __init__(self, domain: VerbsDomain, slot_bytes: int, is_accepting: bool) -> None:
        self._manager: ConnectionManager | None = None
        self._listening = 0  # the identifier of rdma_cm
        self._has_accepted = False
        self._port, self._token = 0, bytes(TOKEN_BYTES)
        self._is_connected = False
        self._is_accepting = is_accepting
        self._reads_max = 0  # in flight at a time, of both sides
        # guards the next two: one thread connects, and another one may give that up
        self._meeting = threading.Lock()
        self._is_meeting = self._is_given_up = False
        super().__init__(domain, slot_bytes)

    def near_end(self) -> FarEnd:
        told = {
            "lid": self._port,
            "token": self._token,
            "shown_address": self._shown_address,
            "shown_key": self._shown_key,
        }
        return FarEnd(**{**vars(super().near_end()), **told})

    def connect(self, far: FarEnd) -> None:
        """Check that end; the accepting end listens for it. Raises NoVerbs."""
        self.check_link(far)
        self._flush.set_wr_rdma(far.shown_key, far.shown_address)
        self._reads_max = min(READS, self.domain.reads, far.reads)
        if not self._is_accepting:
            return
        try:
            manager = self._manager = ConnectionManager()
            self._listening = manager.create()
            manager.bind(self._listening, mapped_address(self.domain.gid))
            self._port = manager.listen(self._listening, BACKLOG)
        except OSError as error:
            raise NoVerbs(
                f"{self.domain.port} cannot listen at {self.domain.port.address}: {error}"
            ) from error
        self._token = secrets.token_bytes(TOKEN_BYTES)

    # -- the end that accepts ----------------------------------------------------------------------

    def fileno_of_meeting(self) -> int | None:
        """The descriptor of rdma_cm, which this queue owns; None: there is none."""
        return self._manager.fileno() if self._manager is not None else None

    def step(self) -> None:
        """Look at what has come. Raises NoVerbs where the device fails."""
        manager = self._manager
        assert manager is not None
        try:
            for _ in range(EVENTS_PER_TURN):
                event = manager.event()
                if event is None:
                    return
                self._look_at(manager, event)
        except OSError as error:
            raise NoVerbs(f"{self.domain.port} accepts no connection: {error}") from error

    def _look_at(self, manager: ConnectionManager, event: CmEvent) -> None:
        answer = answer_to(event, self._token, self._has_accepted)
        if answer is CmAnswer.ACCEPT:
            self._accept(manager, event.identifier)
        elif answer is CmAnswer.REJECT:
            with contextlib.suppress(OSError):  # a stranger may be gone by now
                manager.reject(event.identifier)
            manager.destroy(event.identifier)
        elif answer is CmAnswer.CONNECTED:
            self._is_connected = True
        else:
            raise NoVerbs(f"{self.domain.port}: the connection fails: {told(event)}")

    def _accept(self, manager: ConnectionManager, identifier: int) -> None:
        domain = self.domain
        manager.accept(identifier, self._pair.qp_num, domain.reads, self._reads_max)
        self._has_accepted = True
        manager.destroy(self._listening)
        self.free = list(range(self.first, self.first + self._reads_max))

    def is_connected(self) -> bool:
        if self._is_accepting and not self._is_connected and self._manager is not None:
            self.step()
        return self._is_connected

    # -- the end that connects ---------------------------------------------------------------------

    def meet(self, far: FarEnd, deadline: float) -> None:
        """Connect to that end, which listens. Blocks: call it in a thread that may wait, past the
        deadline (of time.monotonic()) where the kernel does. Raises NoVerbs once everything is
        given back.
        """
        with self._meeting:
            if self._is_given_up:
                raise NoVerbs(f"{self.domain.port}: given up")
            self._is_meeting = True
        is_made = False
        try:
            self._meet(far, deadline)
            is_made = True
        finally:
            with self._meeting:
                is_over = self._is_given_up or not is_made
                self._is_given_up = self._is_meeting = is_over  # else close() gives back, too
            if is_over:
                self._give_back()

    def _meet(self, far: FarEnd, deadline: float) -> None:
        domain, place = self.domain, far.place
        try:
            manager = self._manager = ConnectionManager()
            identifier = manager.create()
            own, peer = mapped_address(domain.gid), mapped_address(far.gid)
            manager.resolve_address(identifier, own, peer, far.lid, RESOLVE_MS)
            self._await(manager, CmEventKind.ADDRESS_RESOLVED, place, deadline)
            manager.resolve_route(identifier, RESOLVE_MS)
            self._await(manager, CmEventKind.ROUTE_RESOLVED, place, deadline)
            number = self._pair.qp_num
            manager.connect(identifier, number, domain.reads, self._reads_max, far.token)
            self._await(manager, CmEventKind.ESTABLISHED, place, deadline)
        except OSError as error:
            raise NoVerbs(f"no way from {domain.port} to {place}: {error}") from error
        self.free = list(range(self.first, self.first + self._reads_max))
        self._is_connected = True

    def _await(
        self, manager: ConnectionManager, wanted: CmEventKind, place: str, deadline: float
    ) -> None:
        """Raises NoVerbs where something else comes, or nothing in time."""
        poller = select.poll()
        poller.register(manager.fileno(), select.POLLIN)
        while (event := manager.event()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._is_given_up:
                raise NoVerbs(f"no way from {self.domain.port} to {place}: it does not answer")
            poller.poll(min(left_s, GIVE_UP_LOOK_S) * 1000)
        if event.kind is not wanted:
            raise NoVerbs(f"no way from {self.domain.port} to {place}: {told(event)}")

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        if self.is_parents:
            return
        with self._meeting:
            self._is_given_up = True
            if self._is_meeting:
                return  # meet() does it, or has done so
        self._give_back()

    def _give_back(self) -> None:
        """The queue pair last: both may wait for a peer that does not answer a request (siw: 10 s),
        and pyverbs would wait with the interpreter's lock.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(OSError):  # a device that was removed
                manager.close()
        super().close()
