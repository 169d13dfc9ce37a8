"""Messages of a verbs connection made ready to leave, and what the peer has of ours for them:
arrays of the slab as they are, others as a copy there.

    a block is  registered  its segment, with each port: once, and for all peers
                lent        on the books of Lendings, under the number in its descriptor
                copied      the same, and counted until it comes back: what a peer that does not
                            read makes us hold is bounded
                inline      its bytes go with the message: it is short, or the slab has no room for
                            a copy, or no more memory may be locked
                staged      it is a DeviceBlock, whose memory a port cannot register: copied into
                            the host's memory first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shard.errors import BackpressureError, LocalProtocolError, ShmFull
from shard.memory.arena import BLOCK_BYTES_MIN, Holder
from shard.memory.device_memory import DeviceBlock, bytes_of, staged_block
from shard.memory.leases import Lendings
from shard.memory.limits import Limits
from shard.memory.slab import Slab
from shard.transport import BEGINNING_BYTES, Buffer
from shard.transport.frame import check_blocks
from shard.transport.records import (
    DESCRIPTOR_BYTES,
    MESSAGE,
    PREFIX,
    PREFIX_BYTES,
    pack_descriptor,
    pack_prefix,
)
from shard.transport.verbs_device import NoVerbs
from shard.transport.verbs_domain import VerbsDomain
from shard.transport.verbs_records import DEVICE_REGIONS_MAX, EVERYWHERE, LENT_BODY


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message ready to be sent, with what to undo if it never is, and the segments that the peer
    has to know for it.
    """

    payload: bytes
    tag: int
    leases: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    body: bytes = b""  # how it begins, where it is lent, and so not in the payload

    @property
    def beginning(self) -> bytes:
        """Of the body; b"": it is none of the user's."""
        if self.tag == MESSAGE:
            count, _ = PREFIX.unpack_from(self.payload)
            return self.payload[PREFIX_BYTES + DESCRIPTOR_BYTES * count :]
        return self.payload if self.tag in (0, EVERYWHERE) else self.body


class _Lent:
    """What is lent for one message while it is made ready."""

    def __init__(self) -> None:
        self.leases: list[int] = []
        self.segments: list[int] = []
        self.copied_bytes = 0


class VerbsLoans:
    """What one peer has of ours, and the messages that lend it. Owned by its connection; any thread
    may call.

    payload_max: of one slot of the peer's, in bytes.
    """

    def __init__(
        self,
        slab: Slab,
        domains: tuple[VerbsDomain, ...],
        peer: str,
        limits: Limits,
        payload_max: int,
    ) -> None:
        self.lendings = Lendings(slab, peer)
        self._slab, self._domains, self._peer = slab, domains, peer
        self._limits, self._payload_max = limits, payload_max
        self._holder = Holder(limits.slab_share_max)
        self._copies: dict[int, int] = {}  # lease -> bytes that were copied for it
        self._devices: set[int] = set()  # the numbers of their memory that the peer was told
        self._devices_max = DEVICE_REGIONS_MAX

    def prepare(self, body: Buffer, blocks: Sequence[NDArray[Any]]) -> tuple[Outgoing, int]:
        """The message, independent of the caller's memory, and the bytes that it holds. Raises
        LocalProtocolError over a limit, BackpressureError.
        """
        body_bytes, limits = len(body), self._limits
        if body_bytes > limits.body_bytes_max:
            raise LocalProtocolError(
                f"message body of {body_bytes} bytes, at most {limits.body_bytes_max} allowed"
            )
        if not blocks and body_bytes <= self._payload_max:
            return Outgoing(bytes(body), 0), body_bytes
        check_blocks([bytes_of(block) for block in blocks], limits, LocalProtocolError)
        lent = _Lent()
        try:
            return self._with_blocks(body, blocks, lent)
        except BaseException:
            self.undo(lent.leases)
            raise

    def _with_blocks(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], lent: _Lent
    ) -> tuple[Outgoing, int]:
        count, body_bytes = len(blocks), len(body)
        budget = self._payload_max - PREFIX_BYTES - DESCRIPTOR_BYTES * (count + 1)
        body_place = b""
        if body_bytes > max(budget, BLOCK_BYTES_MIN):
            body_place = self._lend(np.frombuffer(body, np.uint8), lent)
        at = PREFIX_BYTES + DESCRIPTOR_BYTES * (count + bool(body_place))
        if not body_place:
            budget -= body_bytes
            at += body_bytes
        parts: list[Buffer] = [pack_prefix(count, body_bytes)]
        inline: list[Buffer] = []
        for block in blocks:
            place = b""
            if type(block) is DeviceBlock:
                place = self._lend_device(block, lent)
                if not place:
                    block = staged_block(block)
            nbytes = block.nbytes
            if not place and nbytes > max(budget, 0) and nbytes >= BLOCK_BYTES_MIN:
                place = self._lend(block, lent)
            if not place:
                place = pack_descriptor(nbytes, at, 0, 0, 0)
                inline.append(block.tobytes())
                at += nbytes
                budget -= nbytes
            parts.append(place)
        parts.append(body_place or body)
        payload = b"".join(parts + inline)
        ready = Outgoing(
            payload,
            LENT_BODY if body_place else MESSAGE,
            tuple(lent.leases),
            tuple(lent.segments),
            bytes(body[:BEGINNING_BYTES]) if body_place else b"",
        )
        return ready, len(payload) + lent.copied_bytes

    def _lend(self, array: NDArray[Any], lent: _Lent) -> bytes:
        """The descriptor of the array's block, entered in `lent`; b"": it has to go inline."""
        nbytes = array.nbytes
        found = self._slab.block_of(array)
        try:
            if found is not None:
                block, offset = found
                for domain in self._domains:
                    domain.region(block.segment)
                lease = self.lendings.lend(block, nbytes)
            else:
                if not lent.copied_bytes:  # one message of any size may wait
                    self._hold_back(nbytes)
                block = self._slab.allocate(nbytes, self._holder)
                offset = block.offset
                try:
                    for domain in self._domains:
                        domain.region(block.segment)
                    np.copyto(np.frombuffer(self._slab.memory(block, nbytes), np.uint8), array)
                except BaseException:
                    self._slab.release(block)
                    raise
                lease = self.lendings.pass_on(block, nbytes)
                self._copies[lease] = nbytes
                lent.copied_bytes += nbytes
        except ShmFull:
            return b""
        except NoVerbs as error:
            self._domains[0].tell_once("arrays go through slots, by two copies more", error)
            return b""
        lent.leases.append(lease)
        if block.segment not in lent.segments:
            lent.segments.append(block.segment)
        return pack_descriptor(nbytes, offset, lease, block.segment, 0)

    def _lend_device(self, block: DeviceBlock, lent: _Lent) -> bytes:
        """The same of a block in memory of a device, which the peer may have read into its own;
        b"": it has to be staged.
        """
        number, nbytes = block.memory.number, block.nbytes_there
        found = self._slab.block_of(block)
        is_new = number not in self._devices
        if found is None or (is_new and len(self._devices) >= self._devices_max):
            return b""
        for domain in self._domains:
            try:
                domain.region(number)
            except NoVerbs as error:
                domain.tell_once("tensors are staged in the host's memory", error)
                return b""
        lease = self.lendings.lend(found[0], nbytes)
        self._devices.add(number)
        lent.leases.append(lease)
        if number not in lent.segments:
            lent.segments.append(number)
        return pack_descriptor(nbytes, 0, lease, number, block.number + 1)

    def _hold_back(self, nbytes: int) -> None:
        """Raise BackpressureError when a copy of so many bytes more would pass the bound. One that
        passes it alone may wait beside what does not reach it.
        """
        unread, bytes_max = sum(self._copies.copy().values()), self._limits.outbox_bytes_max
        if unread >= bytes_max or nbytes <= bytes_max < unread + nbytes:
            raise BackpressureError(
                f"arrays of {unread} bytes already wait for {self._peer}, at most {bytes_max} may "
                "(limit outbox_bytes_max, or slab_share_max of the slab): it reads too slowly"
            )

    def take_back(self, lease: int) -> None:
        """The peer returned it. Raises RemoteProtocolError for one that it does not hold."""
        self.lendings.take_back(lease)
        self._copies.pop(lease, None)

    def undo(self, leases: Sequence[int]) -> None:
        """Their message is not going to be sent."""
        for lease in leases:
            self.lendings.undo(lease)
            self._copies.pop(lease, None)
