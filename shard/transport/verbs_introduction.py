"""What two ends of a verbs connection tell each other before they connect their queue pairs;
verbs.py has the steps.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from shard.errors import RemoteProtocolError
from shard.transport.verbs_device import RAILS_MAX

INTRODUCTION_VERSION = 4
# In the place of IBV_LINK_LAYER: a port of iWARP tells that of Ethernet, as one of RoCE does.
IWARP_LINK = 16
TOKEN_BYTES = 16
SLOTS_MIN, SLOT_BYTES_MIN = 16, 256
MTU_LEAST, MTU_MOST = 1, 5  # IBV_MTU_256 and IBV_MTU_4096


@dataclass(frozen=True)
class FarPair:
    """What one end tells the other of a queue pair, before either is connected.

        offset  size  field
             0     1  link        IBV_LINK_LAYER of its port, or IWARP_LINK: both have to be the
                                  same
             1     1  mtu         IBV_MTU, 1 to 5; the less of the two is used. Anything else is
                                  refused: the kernel of soft RoCE panics at 0
             2     2  lid         of InfiniBand; of iWARP, from the end that accepts, the port at
                                  which rdma_cm listens
             4     2  reads       that it answers at a time
             6     4  number      of the queue pair; 0: there is none
            10     4  psn         of its first packet, 24 bits, random
            14    16  gid         of iWARP the address of IP, as RoCE v2 maps it

    All little-endian.
    """

    link: int = 0
    mtu: int = 0
    lid: int = 0
    reads: int = 0
    number: int = 0
    psn: int = 0
    gid: bytes = bytes(16)

    def pack_pair(self) -> bytes:
        """As the table says."""
        return _FAR_PAIR.pack(
            self.link, self.mtu, self.lid, self.reads, self.number, self.psn, self.gid
        )


@dataclass(frozen=True)
class FarEnd(FarPair):
    """What one end tells the other of itself.

        offset  size  field
             0     2  release     INTRODUCTION_VERSION
             2    30  queue pair  with slots: a FarPair
            32     4  slots
            36     4  slot_bytes
            40     2  rails       how many FarPairs follow; FAULT: a text does; IWARP: the last
                                  three rows do
            42     4  partner     gid_mark() of the port that the queue pair with slots is to be
                                  connected to; 0: of that which fits it best
            46   210  rails       queue pairs on further devices, for reads alone
                      fault       why it has no queue pair, UTF-8
            46    16  token       of iWARP, from the end that accepts: random bytes that rdma_cm is
                                  to carry from the end that connects (verbs_iwarp.py)
            62     8  shown       of iWARP: the address of some bytes that the peer may read
            70     4  key         of them

    What is left of 256 bytes is zeros. The answer has a pair for each of the one that it answers,
    in the same order.
    """

    slots: int = 0
    slot_bytes: int = 0
    fault: str = ""
    partner: int = 0
    rails: tuple[FarPair, ...] = ()
    token: bytes = bytes(TOKEN_BYTES)
    shown_address: int = 0
    shown_key: int = 0

    @property
    def place(self) -> str:
        """Of iWARP, where it listens."""
        return f"{mapped_address(self.gid)} port {self.lid}"

    def pack(self) -> bytes:
        """As the table says."""
        if self.fault:
            count, more = _FAULT, self.fault.encode()[:_MORE_BYTES]
        elif self.link == IWARP_LINK:
            count = _IWARP
            more = _OF_IWARP.pack(self.token, self.shown_address, self.shown_key)
        else:
            count, more = len(self.rails), b"".join(one.pack_pair() for one in self.rails)
        head = self.pack_pair()
        return _FAR_END.pack(
            INTRODUCTION_VERSION, head, self.slots, self.slot_bytes, count, self.partner, more
        )

    @classmethod
    def unpack(cls, data: bytes) -> FarEnd:
        """Of FAR_END_BYTES. Raises RemoteProtocolError for what no end can be."""
        release, head, slots, slot_bytes, count, partner, more = _FAR_END.unpack(data)
        if release != INTRODUCTION_VERSION:
            raise RemoteProtocolError(
                f"a queue pair introduced in version {release}, {INTRODUCTION_VERSION} expected: "
                "install the same release at both sides"
            )
        if count == _FAULT:
            return cls(fault=more.rstrip(b"\0").decode(errors="replace") or "it does not say why")
        token, shown_address, shown_key = bytes(TOKEN_BYTES), 0, 0
        if count == _IWARP:
            count = 0
            token, shown_address, shown_key = _OF_IWARP.unpack_from(more)
        if count >= RAILS_MAX:
            raise RemoteProtocolError(
                f"introduced with {count + 1} rails, at most {RAILS_MAX} may be"
            )
        each = _FAR_PAIR.iter_unpack(more[: count * _FAR_PAIR.size])
        end = cls(
            **vars(FarPair(*_FAR_PAIR.unpack(head))),
            slots=slots,
            slot_bytes=slot_bytes,
            partner=partner,
            rails=tuple(FarPair(*fields) for fields in each),
            token=token,
            shown_address=shown_address,
            shown_key=shown_key,
        )
        answers = min([end.reads, *(one.reads for one in end.rails if one.number)])
        if not (end.slots >= SLOTS_MIN and end.slot_bytes >= SLOT_BYTES_MIN and answers > 0):
            raise RemoteProtocolError(
                f"introduced with {end.slots} slots of {end.slot_bytes} bytes, and {answers} reads "
                f"at a time: at least {SLOTS_MIN} of {SLOT_BYTES_MIN}, and one, are needed"
            )
        for pair in (end, *(one for one in end.rails if one.number)):
            if not MTU_LEAST <= pair.mtu <= MTU_MOST:
                raise RemoteProtocolError(
                    f"introduced with a queue pair of MTU {pair.mtu}, {MTU_LEAST} to {MTU_MOST} "
                    "(IBV_MTU) expected"
                )
        return end


_FAR_PAIR = struct.Struct("<BBHHII16s")
_MORE_BYTES, _FAULT, _IWARP = 210, 0xFFFF, 0xFFFE
_OF_IWARP = struct.Struct(f"<{TOKEN_BYTES}sQI")
_FAR_END = struct.Struct(f"<H{_FAR_PAIR.size}sIIHI{_MORE_BYTES}s")
FAR_END_BYTES = _FAR_END.size
assert FAR_END_BYTES == 256  # the table above; in all versions, for another one to be read
assert (RAILS_MAX - 1) * _FAR_PAIR.size <= _MORE_BYTES


def mapped_address(gid: bytes) -> IPv4Address | IPv6Address:
    """What a GID of RoCE v2, or what stands for one of iWARP, maps."""
    address = IPv6Address(gid)
    return address.ipv4_mapped or address


def gid_mark(gid: bytes) -> int:
    """What stands for a GID where there is no room for it; never 0."""
    return zlib.crc32(gid) or 1


@dataclass(frozen=True)
class FirstPair:
    """Which port's queue pair gets the slots; and the gid_mark() of the port to connect it to, 0:
    of that which fits it best.
    """

    near: str
    partner: int
