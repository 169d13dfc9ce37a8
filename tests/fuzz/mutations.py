"""Hostile inputs made of good ones: seeded, so that every run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

INPUT_BYTES_MAX = 16 << 10  # longer ones find nothing that shorter ones do not, and take longer
MUTATIONS_MAX = 6  # of one input: more of them and nothing of the format is left
# Lengths and counts at which code changes its mind: limits, signs, widths, and what overflows when
# it is added to.
BOUNDARIES = [
    0,
    1,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    1023,
    1024,
    4096,
    16384,
    32767,
    65535,
    65536,
]
BOUNDARIES += [
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 50,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
# How MessagePack begins what is long, nested or an extension: the most that few bytes can ask for.
MARKERS = [bytes([byte]) for byte in (0x80, 0x8F, 0x90, 0x9F, *range(0xC0, 0xE0), 0xFF)]
MARKERS += [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x02",
]
MARKERS += [bytes((0xC7, 3, code)) for code in range(16)]


class Mutator:
    """Never ends. `corpus` is what it begins with."""

    def __init__(self, corpus: Sequence[bytes], seed: int) -> None:
        self._corpus = corpus
        self._random = random.Random(seed)
        self._kinds: list[Callable[[bytearray], None]] = [
            self._flip,
            self._set,
            self._number,
            self._marker,
            self._insert,
            self._delete,
            self._repeat,
            self._splice,
            self._truncate,
        ]

    def next(self) -> bytes:
        """One more input."""
        data = bytearray(self._random.choice(self._corpus))
        for _ in range(self._random.randrange(MUTATIONS_MAX + 1)):
            self._random.choice(self._kinds)(data)
        return bytes(data[:INPUT_BYTES_MAX])

    def _at(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] = self._random.randrange(256)

    def _number(self, data: bytearray) -> None:
        width = self._random.choice((1, 2, 4, 8))
        value = self._random.choice(BOUNDARIES) & ((1 << 8 * width) - 1)
        at = self._at(data)
        data[at : at + width] = value.to_bytes(width, self._random.choice(("little", "big")))

    def _marker(self, data: bytearray) -> None:
        marker, at = self._random.choice(MARKERS), self._at(data)
        data[at : at + self._random.choice((0, len(marker)))] = marker

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self._random.randbytes(self._random.randrange(1, 17))

    def _delete(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self._random.randrange(1, 17)]

    def _repeat(self, data: bytearray) -> None:
        at = self._at(data)
        part = bytes(data[at : at + self._random.randrange(1, 9)])
        data[at:at] = part * self._random.choice((1, 2, 8, 70, 300))

    def _splice(self, data: bytearray) -> None:
        other = self._random.choice(self._corpus)
        at = self._at(data)
        data[at:] = other[self._random.randrange(len(other) + 1) :]

    def _truncate(self, data: bytearray) -> None:
        del data[self._at(data) :]
