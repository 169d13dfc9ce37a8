"""What a push or pull and its answer look like on the way: one text of bytes, with the arrays in it
where they are small.

    request    offset  size  field
                    0     4  app id
                    4     4  sender         node id
                    8     4  customer id
                   12     4  cmd
                   16     8  timestamp      the customer's
                   24     4  priority
                   28     1  flags          PUSH, PULL, HAS_LENS, IS_INLINE
                   29     1  type of vals   numpy's number of it
                   30     2  0
                   32     4  keys
                   36     4  vals
                   40   ...  inline: keys uint64; vals, unless they are beside the head; lens int32

    answer          0     1  flags          HAS_LENS
                    1     1  type of vals
                    2     2  0
                    4     4  keys
                    8   ...  vals, lens int32

What is larger than INLINE_BYTES_MAX goes as arrays beside the head:

    keys and lens  with vals  request                   answer to a pull
    small          small      (head,)                   bytes
    small          larger     (head, vals)              of one key: vals; else (number of keys,
                                                        vals, lens)
    larger         larger     (head, keys, vals, lens)  the same

A push is answered with None. Wrapping two small arrays takes 5 us on both sides together, and
packing them here 1.2 us. It also copies them, so that the caller may change them.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from prpc_engine.errors import BadArguments
from prpc_engine.pslite.pairs import NO_VALS, KVPairs, Lens, Vals

PUSH, PULL, HAS_LENS, IS_INLINE = 1, 2, 4, 8
FORGOTTEN = -1  # for an answer that was to come later: this server does not know it
# of all arrays together: a push of 4 KiB takes 14 us with its arrays in the head, and 27 beside it
INLINE_BYTES_MAX = 8192
HEAD = struct.Struct("<iiiiqiBBHII")
ANSWER = struct.Struct("<BBHI")
HEAD_BYTES, ANSWER_BYTES = HEAD.size, ANSWER.size
# the tables above; arrays of 8-byte items stay aligned
assert (HEAD_BYTES, ANSWER_BYTES) == (40, 8)
# Truth values are not among them: beside the head the archive looks at their bytes, which numpy
# takes on trust.
_TYPES: dict[int, np.dtype[Any]] = {
    np.dtype(char).num: np.dtype(char) for char in "bBhHiIlLqQefdgFDG"
}
_KEY, _LEN = np.dtype(np.uint64), np.dtype(np.int32)
_pack, _unpack = HEAD.pack, HEAD.unpack_from
_pack_answer, _unpack_answer = ANSWER.pack, ANSWER.unpack_from
_from_bytes = np.frombuffer  # a third faster than np.ndarray(), and read-only as bytes are


class Head(NamedTuple):
    """The numbers at the front of a ps-lite request on the wire, in this order."""

    app_id: int
    sender: int
    customer_id: int
    cmd: int
    timestamp: int
    priority: int
    flags: int
    dtype: int
    zero: int
    n_keys: int
    n_vals: int


def pack(
    app_id: int, sender: int, customer_id: int, cmd: int, timestamp: int, flags: int, pairs: KVPairs
) -> tuple[tuple[Any, ...], int]:
    """The arguments of one request, and the bytes of its arrays. Raises BadArguments for numbers
    that do not fit.
    """
    keys, vals, lens = pairs.keys, pairs.vals, pairs.lens
    key_bytes = keys.nbytes  # and of lens
    if lens is not None:
        flags |= HAS_LENS
        key_bytes += lens.nbytes
    nbytes = key_bytes + vals.nbytes
    dtype = vals.dtype
    number = dtype.num
    try:
        if nbytes <= INLINE_BYTES_MAX and number in _TYPES and dtype.isnative:
            head = _pack(
                app_id, sender, customer_id, cmd, timestamp, pairs.priority,
                flags | IS_INLINE, number, 0, len(keys), len(vals),
            )  # fmt: skip
            if lens is None:
                return (head + keys.tobytes() + vals.tobytes(),), nbytes
            return (head + keys.tobytes() + vals.tobytes() + lens.tobytes(),), nbytes
        if key_bytes <= INLINE_BYTES_MAX:
            flags |= IS_INLINE
        head = _pack(
            app_id,
            sender,
            customer_id,
            cmd,
            timestamp,
            pairs.priority,
            flags,
            0,
            0,
            len(keys),
            len(vals),
        )
    except struct.error as error:
        raise BadArguments(
            f"cmd {cmd!r}, priority {pairs.priority!r} or app id {app_id!r} is no number of 32 bits"
        ) from error
    if not flags & IS_INLINE:
        return (head, keys, vals if flags & PUSH else None, lens), nbytes
    if lens is None:
        return (head + keys.tobytes(), vals), nbytes
    return (head + keys.tobytes() + lens.tobytes(), vals), nbytes


def read_head(head: bytes) -> tuple[int, ...]:
    """The fields of Head, as a plain tuple. Raises BadArguments."""
    if type(head) is not bytes or len(head) < HEAD_BYTES:
        raise BadArguments(f"a request without its head of {HEAD_BYTES} bytes")
    return _unpack(head)


def read_pairs(head: bytes, fields: tuple[int, ...], arrays: tuple[Any, ...]) -> KVPairs:
    """The pairs of a request. Raises BadArguments for what was not made by pack()."""
    _, _, _, _, _, priority, flags, number, _, n_keys, n_vals = fields
    if not flags & IS_INLINE:
        keys, vals, lens = arrays
        return KVPairs(keys, NO_VALS if vals is None else vals, lens, priority)
    lens = None
    try:
        keys = _from_bytes(head, _KEY, n_keys, HEAD_BYTES)
        if not flags & PUSH:
            return KVPairs(keys, NO_VALS, lens, priority)
        at = HEAD_BYTES + 8 * n_keys
        if arrays:
            (vals,) = arrays
        else:
            vals = _from_bytes(head, _TYPES[number], n_vals, at)
            at += vals.nbytes
        if flags & HAS_LENS:
            lens = _from_bytes(head, _LEN, n_keys, at)
    except (ValueError, KeyError) as error:
        raise BadArguments(
            f"a request of {len(head)} bytes that is to hold {n_keys} keys and {n_vals} vals"
        ) from error
    return KVPairs(keys, vals, lens, priority)


def pack_answer(
    n_keys: int, vals: Vals, lens: Lens | None
) -> bytes | Vals | tuple[int, Vals, Lens | None]:
    """The answer to a pull."""
    dtype = vals.dtype
    number = dtype.num
    if vals.nbytes <= INLINE_BYTES_MAX and number in _TYPES and dtype.isnative:
        if lens is None:
            return _pack_answer(0, number, 0, n_keys) + vals.tobytes()
        return _pack_answer(HAS_LENS, number, 0, n_keys) + vals.tobytes() + lens.tobytes()
    if n_keys == 1 and lens is None and vals.ndim == 1:
        return vals
    return n_keys, vals, lens


def read_answer(answer: Any) -> tuple[int, Vals, Lens | None]:
    """Keys, values and lengths. Raises BadArguments for what was not made by pack_answer()."""
    if type(answer) is not bytes:
        if isinstance(answer, np.ndarray):
            return 1, answer, None
        n_keys, vals, lens = answer
        return n_keys, vals, lens
    try:
        flags, number, _, n_keys = _unpack_answer(answer)
        dtype = _TYPES[number]
        nbytes = len(answer) - ANSWER_BYTES - (4 * n_keys if flags & HAS_LENS else 0)
        vals = _from_bytes(answer, dtype, nbytes // dtype.itemsize, ANSWER_BYTES)
        return (
            n_keys,
            vals,
            _from_bytes(answer, _LEN, n_keys, ANSWER_BYTES + nbytes) if flags & HAS_LENS else None,
        )
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise BadArguments(f"a malformed answer of {len(answer)} bytes") from error
