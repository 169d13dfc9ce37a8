"""What lies in a slot of a verbs connection. No I/O in this file.

    slot    offset  size  field
                 0     4  taken    slots that the sender of this has taken, modulo 2^32: they may be
                                   filled again
                 4     4  tag
                 8   ...  payload

    tag         payload
    0           the body of a message without blocks
    MESSAGE     as in a ring (records.py): u32 blocks, u32 body bytes, a descriptor of 32 bytes
                each, body, inline bytes
    LENT_BODY   the same with one descriptor more, in the place of the body
    RETURN      u64 lease numbers that the sender gives back
    PART        the beginning of a payload that is longer than a slot; the slot after it has more,
                and the last of them the tag
    EVERYWHERE  as 0, behind all that was sent before, whatever its size
    REGION      u64 segment, u64 address, u64 bytes, and for each rail u64 rkey: of the sender's
                slab, or from DEVICE_NUMBERS on of its devices' memory, from now on. The first rail
                is the slots' own; a hole between them has key 0
    DROPPED     u64 segment: no longer
    CREDIT      nothing: `taken` is what it is for

    descriptor  u64 bytes, u64 offset, u64 lease, u32 segment, u32 1 + the receiver's device that
                they are for, 0: the host; lease 0: the bytes stand in this payload at that offset,
                else in that segment

The socket over which both met has one message more: GOODBYE, u64 slots that were sent in all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from shard.transport import Buffer

PART, EVERYWHERE, REGION, DROPPED, CREDIT, LENT_BODY = 16, 17, 18, 19, 20, 21
HEADER = struct.Struct("<II")
HEADER_BYTES = HEADER.size
REGION_NOTE, DROPPED_NOTE = struct.Struct("<QQQ"), struct.Struct("<Q")
GOODBYE = struct.Struct("<Q")
assert (HEADER_BYTES, REGION_NOTE.size, DROPPED_NOTE.size, GOODBYE.size) == (8, 24, 8, 8)
COUNT_MAX = (1 << 32) - 1
DEVICE_REGIONS_MAX = 256  # of a peer's devices; those of its slab are bounded by segments_max
pack_header, unpack_header = HEADER.pack, HEADER.unpack_from


def pack_region(number: int, address: int, nbytes: int, keys: Sequence[int]) -> bytes:
    """The payload of REGION."""
    return REGION_NOTE.pack(number, address, nbytes) + struct.pack(f"<{len(keys)}Q", *keys)


def unpack_region(payload: Buffer, count: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Segment, address, bytes, and so many keys. Raises struct.error for another length."""
    number, address, nbytes, *keys = struct.unpack(f"<3Q{count}Q", payload)
    return number, address, nbytes, tuple(keys)
