"""Records of a ring between two processes that lend each other arrays. No I/O in this file.

record   tag 0                          a message without blocks: the payload is the body
         tag MESSAGE                    u32 blocks, u32 body bytes, then a descriptor of 32 bytes
                                        each, body, inline bytes
         tag RETURN                     u64 lease numbers that the sender gives back
         tag RETURN_FIRST               u64 lease number that the sender gives back, then the body
                                        of a message without blocks
descriptor  u64 bytes, u64 offset, u64 lease, u32 segment, u32 zero
            lease 0: the bytes stand in this record at that offset, or with segment SPILLED they
            came over the socket of spill.py; else in that segment of the sender's slab
"""

from __future__ import annotations

import struct

import msgspec

from shard.transport.spill import Spilled

MESSAGE, RETURN, RETURN_FIRST = 1, 2, 3
PREFIX = struct.Struct("<II")
DESCRIPTOR = struct.Struct("<QQQII")
ONE_BLOCK = struct.Struct("<IIQQQII")  # how a message with one block begins: both of them
PREFIX_BYTES, DESCRIPTOR_BYTES = PREFIX.size, DESCRIPTOR.size
assert (PREFIX_BYTES, DESCRIPTOR_BYTES, ONE_BLOCK.size) == (8, 32, 40)  # the table above
LEASE = struct.Struct("<Q")
LEASE_BYTES = LEASE.size
pack_prefix, pack_descriptor, unpack_descriptor, pack_lease = (
    PREFIX.pack,
    DESCRIPTOR.pack,
    DESCRIPTOR.unpack_from,
    LEASE.pack,
)
pack_one_block, unpack_one_block = ONE_BLOCK.pack, ONE_BLOCK.unpack_from


# made in C, at a third of what a NamedTuple takes
class Record(msgspec.Struct, frozen=True, gc=False):
    """A message ready to be written into a ring as one record, with what to undo if it is never
    written: the leases of lent blocks and the bytes copied for the peer.
    """

    payload: bytes
    tag: int
    leases: tuple[int, ...]
    beginning: bytes = b""  # of a body that is lent, and so is not in the payload
    copied: int = 0  # bytes in the slab or in `spilled` that were copied for the peer
    spilled: Spilled | None = None  # what has to be in its socket before
