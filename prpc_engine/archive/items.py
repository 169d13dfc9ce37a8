"""array.array: its type code and its memory, and back.

Written as [type code, byte order, bytes]. Type codes of characters are refused: not every number
is one, and what reads such an array trusts that it is.
"""

from __future__ import annotations

import array
import sys
from typing import Any

from prpc_engine.archive.wire import BYTES_INLINE_MAX

ITEM_CODES = frozenset("bBhHiIlLqQfd")


def pack_items(value: array.array[Any]) -> list[Any]:
    """What the table says: long ones' memory where it lies. Raises ValueError."""
    if value.typecode not in ITEM_CODES:
        raise ValueError(
            f"its items are characters (type code {value.typecode!r}): send value.tounicode()"
        )
    data: bytes | memoryview = (
        memoryview(value).cast("B")
        if len(value) * value.itemsize > BYTES_INLINE_MAX
        else value.tobytes()
    )
    return [value.typecode, sys.byteorder, data]


def unpack_items(fields: Any) -> array.array[Any]:
    """The array. Raises ValueError and TypeError for what pack_items() never wrote."""
    typecode, order, data = fields
    if type(data) is not bytes:  # an array's block could be named often, and is copied here
        raise ValueError(f"its items are a {type(data).__name__}, and not bytes")
    return items_of(typecode, order, data)


def items_of(typecode: Any, order: Any, data: Any) -> array.array[Any]:
    """An array.array with a copy of the data. Raises ValueError."""
    if typecode not in ITEM_CODES or order not in ("little", "big"):
        raise ValueError(f"type code {str(typecode)[:40]!r} and byte order {str(order)[:40]!r}")
    made: array.array[Any] = array.array(typecode)
    made.frombytes(data)
    if order != sys.byteorder:
        made.byteswap()
    return made
