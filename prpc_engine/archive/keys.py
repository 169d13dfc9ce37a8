"""Dicts and sets of what a peer sent are built in time linear in its bytes, whatever their keys. No
I/O in this file.

Keys of one hash are compared with each other, all pairs of them, and hashes of numbers, and of
tuples of numbers, can be chosen: 32,000 tuples of -1 and -2, which have one hash, took 12 s. Texts
and bytes have secret hashes. What is done:

    what carries them       what is done
    extension types         the keys are there before the container is: more equal pairs than
                            PAIRS_PER_KEY a key are refused
    MessagePack's own maps  of MAP_KEYS_MAX keys or more: extension types and arrays are no keys,
                            and encode() never writes such; below that, all pairs are few. Numbers
                            are at most 17 (ints) or 34 (floats) of one hash

msgspec builds maps before anybody can look. So a body is looked through first, for what may be the
header of such a map; a body that has none of these bytes, as nearly all, costs that search alone,
one with some is walked along its structure.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from prpc_engine.archive.wire import CLASS, FROZENSET, MAP, PICKLE, SET, TUPLE, ArchiveError

# Of one hash: tuples of small numbers meet in groups of 2 ** length, as of -1 and -2, in honest
# dicts too (points of a grid).
PAIRS_PER_KEY = 32
# so many of one hash are 64 comparisons a key, 2 us: ten times what msgspec takes for one
MAP_KEYS_MAX = 128
# Messages of so many bytes may go straight to msgspec: at most some hundred keys.
PLAIN_BYTES_MAX = 512

# a large map, or anything else: what is there besides headers may have these bytes, too
_LARGE_MAP = re.compile(rb"[\xde\xdf]")
_ENTRY_BYTES_MIN = 3  # of one that collides: an array or extension type of one byte, and a value
# extension types whose payload is one value of any kind
NESTING = frozenset({TUPLE, SET, FROZENSET, MAP, CLASS, PICKLE})
_ONE, _TWO, _FOUR = (
    struct.Struct(">B").unpack_from,
    struct.Struct(">H").unpack_from,
    struct.Struct(">I").unpack_from,
)


def check_pairs(keys: Sequence[Any]) -> None:
    """Raises ArchiveError for keys that would be compared with each other too often, and TypeError
    without a hash.
    """
    hashes = list(map(hash, keys))
    if len(set(hashes)) == len(hashes):
        return
    pairs = sum(count * (count - 1) // 2 for count in Counter(hashes).values() if count > 1)
    if pairs > PAIRS_PER_KEY * len(keys):
        raise ArchiveError(
            f"{pairs} pairs of {len(keys)} keys have the same hash, "
            f"at most {PAIRS_PER_KEY} a key are allowed"
        )


def check_maps(body: memoryview | bytes) -> None:
    """Raises ArchiveError for a body with a map that could take longer than it is long."""
    for found in _LARGE_MAP.finditer(body):
        at = found.start()
        count = int.from_bytes(body[at + 1 : at + (3 if body[at] == 0xDE else 5)], "big")
        if MAP_KEYS_MAX <= count <= (len(body) - at) // _ENTRY_BYTES_MIN:
            walk(body)
            return


def _sizes() -> list[int]:
    """By the first byte of a value: its bytes, where these are always as many; else 0."""
    sizes = [1] * 0x80 + [0] * 0x20 + list(range(1, 0x21)) + [0] * 0x20 + [1] * 0x20
    sizes[0xC0] = sizes[0xC2] = sizes[0xC3] = 1
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]
    return sizes


_SIZES = _sizes()
# First byte of what has its length next: how to read that, and how many bytes it is.
_LENGTHS = {
    0xC4: (_ONE, 1),
    0xC5: (_TWO, 2),
    0xC6: (_FOUR, 4),
    0xD9: (_ONE, 1),
    0xDA: (_TWO, 2),
    0xDB: (_FOUR, 4),
}
_COUNTS = {0xDC: (_TWO, 2, 1), 0xDD: (_FOUR, 4, 1), 0xDE: (_TWO, 2, 2), 0xDF: (_FOUR, 4, 2)}
_EXTENSIONS = {0xC7: (_ONE, 1), 0xC8: (_TWO, 2), 0xC9: (_FOUR, 4)}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_NO_KEYS = frozenset({*range(0x80, 0xA0), *_COUNTS, *_EXTENSIONS, *_FIXED_EXTENSIONS})


def walk(body: memoryview | bytes) -> None:
    """Look at each value in turn; `left` of those that the innermost container still has, of a
    large map an even number before each key."""
    sizes = _SIZES
    at, left, is_large = 0, 1, False
    # of the containers around: what is left, whether large; where it must end, or 0
    outer: list[tuple[int, bool, int]] = []
    try:
        while True:
            while not left:
                if not outer:
                    return
                left, is_large, end = outer.pop()
                if end and at != end:
                    raise ArchiveError(
                        f"an extension type that ends at byte {end} holds a value that ends at {at}"
                    )
            first = body[at]
            if is_large and not left & 1 and first in _NO_KEYS:
                raise ArchiveError("a large map has an array or an extension type as a key")
            left -= 1
            if sizes[first]:
                at += sizes[first]
            elif first in _LENGTHS:
                read, width = _LENGTHS[first]
                at += 1 + width + read(body, at + 1)[0]
            elif first < 0xA0 or first in _COUNTS:  # arrays and maps
                if first < 0xA0:
                    count, width, each = first & 0x0F, 0, 2 if first < 0x90 else 1
                else:
                    read, width, each = _COUNTS[first]
                    count = read(body, at + 1)[0]
                at += 1 + width
                outer.append((left, is_large, 0))
                left, is_large = count * each, each == 2 and count >= MAP_KEYS_MAX
            else:
                width = 0
                size = _FIXED_EXTENSIONS.get(first, 0)
                if not size:
                    read, width = _EXTENSIONS[first]
                    size = read(body, at + 1)[0]
                code = body[at + 1 + width]
                at += 2 + width
                if code in NESTING:
                    outer.append((left, is_large, at + size))
                    left, is_large = 1, False
                else:
                    at += size
    except (IndexError, KeyError, struct.error) as error:
        raise ArchiveError(
            f"the message is cut short, or no MessagePack, at byte {at} of {len(body)}"
        ) from error
