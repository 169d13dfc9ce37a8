"""Writes the good inputs that hostile ones are made of: python -m tests.fuzz.make_corpus

Run it when a format changes; what a run of the fuzzer has found stays in the folder beside them, as
found-*.bin.
"""

from __future__ import annotations

import datetime
import decimal
import struct
import uuid
from pathlib import Path

import numpy as np

from prpc_engine.archive import encode
from tests.fuzz.targets import LIMITS, TO_ACCEPTOR, TO_CONNECTOR

FOLDER = Path(__file__).parent / "corpus"


def frames() -> dict[str, bytes]:
    """The first byte is how they are cut: 0 for not at all."""
    plain = struct.pack("<IHH", 5, 0, 1) + b"hello"
    blocks = struct.pack("<IHHQQ", 5, 2, 1, 3, 0) + b"helloabc"
    large = struct.pack("<IHHQ", 2, 1, 1, 5000) + b"ab" + bytes(5000)
    return {
        "plain": b"\0" + plain,
        "bytewise": b"\1" + plain + blocks,
        "blocks": b"\0" + blocks * 3,
        "large": b"\x40" + large + plain,
        "empty": b"\0" + struct.pack("<IHH", 0, 0, 1),
        "body-of-the-most": b"\0" + struct.pack("<IHH", LIMITS.body_bytes_max, 0, 1),
        "blocks-of-the-most": b"\0" + struct.pack("<IHHQ", 0, 1, 1, LIMITS.blocks_bytes_max),
        "many-blocks": b"\0" + struct.pack("<IHH16Q", 1, 16, 1, *range(16)) + bytes(121),
    }


def handshakes() -> dict[str, bytes]:
    """The first byte is whom it goes to: 1 for the acceptor."""
    return {
        "to-acceptor": b"\1" + TO_ACCEPTOR,
        "to-connector": b"\0" + TO_CONNECTOR,
        "reflected": b"\0" + TO_ACCEPTOR,
    }


def archives() -> dict[str, bytes]:
    """The first byte is the number of blocks, then their sizes, the body, and the blocks."""
    values = {
        "scalars": [None, True, 1, -(1 << 40), 1.5, "text", b"bytes", 1 << 100, 1 + 2j],
        "nested": {"a": [1, (2, {"b": ()})], "c": [[[[]]]]},
        "keys": {(1, 2): {3}, frozenset({4}): None},
        "times": [
            datetime.datetime(2024, 2, 29, 1, 2, 3),
            datetime.timedelta(1),
            decimal.Decimal("1.50"),
            uuid.UUID(int=7),
        ],
        "array": np.arange(12, dtype=np.float32).reshape(3, 4),
        "arrays": {
            "x": np.arange(5),
            "f": np.asfortranarray(np.eye(3)),
            "e": np.zeros((0, 3), np.uint8),
        },
        "numpy": [
            np.float64(1.5),
            np.datetime64("2024-01-01"),
            np.array(["ab", "c"]),
            np.bool_(True),
        ],
        "slice": [slice(1, None, 2), range(5)],
    }
    found = {}
    for name, value in values.items():
        body, blocks = encode(value)
        sizes = bytes(block.nbytes for block in blocks)
        found[name] = (
            bytes([len(blocks)])
            + sizes
            + bytes(body)
            + b"".join(block.tobytes() for block in reversed(blocks))
        )
    return found


def main() -> None:
    for folder, inputs in {
        "frame": frames(),
        "handshake": handshakes(),
        "archive": archives(),
    }.items():
        (FOLDER / folder).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (FOLDER / folder / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
