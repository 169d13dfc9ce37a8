"""Arguments for several servers at once: encoded once, and each large array copied once, to where
it can be lent to every reader of this host.

    an array of the arguments        what is sent to each server
    of our slab                      the same memory, lent: what is written to it is seen, as ever
    any other, large                 one copy in the slab, lent to each over shared memory, and sent
                                     from there over tcp; without room there, one copy in our memory
    small ones alone                 nothing is shared: a call for each costs less

The copy is freed with the last lease on it. So it costs one copy and N times what a call by
reference does, in place of N copies, and the caller may change its arrays at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import handovers_in
from shard import ShmFull, Slab

# Below that arrays travel within the message (shm_connection.INLINE_BYTES_MAX), or nearly so.
SHARED_BYTES_MIN = 32 << 10


class SharedMessage(NamedTuple):
    """The body and blocks of a request. The blocks change no more, unless they are of empty()."""

    body: bytes
    blocks: Sequence[NDArray[np.uint8]]


Encode = Callable[[tuple[Any, ...]], tuple[bytes, Sequence[NDArray[np.uint8]]]]


def owned_message(
    encode: Encode, slab: Slab, arguments: tuple[Any, ...], may_lend: bool
) -> SharedMessage:
    """The message, whatever is in it. Raises BadArguments, also for what is handed over (Lazy),
    which only one can have.
    """
    body, blocks = encode(arguments)
    return SharedMessage(body, [owned_block(block, slab, may_lend) for block in blocks])


def shared_message(
    encode: Encode,
    slab: Slab,
    arguments: tuple[Any, ...],
    may_lend: bool,
) -> SharedMessage | None:
    """The message for all; None: no array is so large that it pays, or one is handed over (Lazy),
    which only one can have. `may_lend`: some of them are reached over shared memory. Raises
    BadArguments.
    """
    if not arguments:
        return None
    body, blocks = encode(arguments)
    if sum(block.nbytes for block in blocks) < SHARED_BYTES_MIN or handovers_in(blocks):
        return None
    return SharedMessage(body, [owned_block(block, slab, may_lend) for block in blocks])


def owned_block(block: NDArray[np.uint8], slab: Slab, may_lend: bool) -> NDArray[np.uint8]:
    """The block where it is of the slab, else a copy: there if it may be lent and there is room."""
    if slab.block_of(block) is not None:
        return block
    if may_lend and block.nbytes >= SHARED_BYTES_MIN:
        try:
            copy = slab.empty(block.nbytes, np.uint8)
        except ShmFull:
            return block.copy()
        np.copyto(copy, block)
        return copy
    return block.copy()
