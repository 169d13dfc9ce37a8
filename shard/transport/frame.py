"""Frames on a byte stream: no socket, no clock, no reactor in this file.

    offset  size  field         meaning
         0     4  body          bytes of body
         4     2  blocks        number of blocks
         6     2  version       FRAME_VERSION; anything else is refused
         8   8*n  block bytes   length of each block
         .   ...  body          the typed part of the message, opaque here
         .   ...  blocks        one after the other, without padding

All integers little-endian. Lengths are checked against `Limits` before anything is allocated for
them.

The decoder says where the next bytes belong, so that the socket receives a large block in the very
memory that its reader will see:

    destination() -> where to receive
    next_frame(n) -> n bytes are there: a frame, or None
    next_frame()  -> one more

Most reads bring one whole small message without blocks, and nothing else. For those there is a
short way beside it, while `more` is False: receive n bytes into `front`; if n >= HEADER_BYTES and
first_word[0] == PLAIN + n, then front[HEADER_BYTES:n] is the body of such a frame, and the decoder
need not hear of it. If not, next_frame(n) goes on.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shard.errors import LocalProtocolError, RemoteProtocolError, ShardError
from shard.memory.limits import Limits
from shard.memory.unheld import SINK, Unheld, no_memory

FRAME_VERSION = 1
HEADER = struct.Struct("<IHH")
assert HEADER.size == 8  # the table above

# of a decoder of small frames: a batch of them, and bodies up to that size
STAGING_BYTES = 256 << 10
# Of one where frames are large: a header and the body ...
STAGING_BYTES_BULK = 32 << 10
# ... of which it asks for so much first: a header and most bodies. What else comes with them is
# copied once more into its block.
FRONT_BYTES_BULK = 512
# less free space at its end is made more by moving what is staged to its front
STAGING_ROOM_MIN = 4096
HEADER_BYTES = HEADER.size
# With n added, the header of a frame of n bytes without blocks, as one word. It stands in memory
# like that where the least byte comes first; elsewhere no word is ever equal to it, and every frame
# goes the long way.
PLAIN = (FRAME_VERSION << 48 if sys.byteorder == "little" else -1 << 63) - HEADER_BYTES
# The headers of small bodies without blocks, ready made: packing one takes 0.04 us more of a call's
# 7, and all of them 21 KB.
SMALL_HEADERS = [HEADER.pack(body_bytes, 0, FRAME_VERSION) for body_bytes in range(512)]
_unpack_header = HEADER.unpack_from
_NO_BLOCKS: tuple[()] = ()

# (body, blocks): the body may be a view that is good only until the decoder is used again; blocks
# are the receiver's own.
Frame = tuple[memoryview, list[NDArray[np.uint8]] | tuple[()]]


def encode_header(body_bytes: int, block_bytes: Sequence[int], limits: Limits) -> bytes:
    """All that goes before the body. Raises LocalProtocolError for what the peer would refuse."""
    if body_bytes > limits.body_bytes_max:
        raise LocalProtocolError(
            f"message body of {body_bytes} bytes, at most {limits.body_bytes_max} allowed"
        )
    if not block_bytes:
        return HEADER.pack(body_bytes, 0, FRAME_VERSION)
    check_blocks(block_bytes, limits, LocalProtocolError)
    return HEADER.pack(body_bytes, len(block_bytes), FRAME_VERSION) + struct.pack(
        f"<{len(block_bytes)}Q", *block_bytes
    )


def body_offset(frame: memoryview) -> int:
    """Where the body begins in a frame that encode_header() began."""
    _, block_count, _ = _unpack_header(frame)
    return HEADER_BYTES + 8 * int(block_count)


def check_blocks(
    block_bytes: Sequence[int],
    limits: Limits,
    error: type[LocalProtocolError] | type[RemoteProtocolError],
) -> None:
    """Raise `error` when the blocks of a message are too many or too large."""
    if len(block_bytes) > limits.blocks_max:
        raise error(f"message of {len(block_bytes)} arrays, at most {limits.blocks_max} allowed")
    total = sum(block_bytes)
    if total > limits.blocks_bytes_max:
        raise error(
            f"message with {total} bytes of arrays, at most {limits.blocks_bytes_max} allowed"
        )


class FrameDecoder:
    """A frame decoder makes frames of a socket's bytes, and says where the next ones belong.

    Owned by one socket's lane, in its reactor's thread. `allocate(n)` makes the memory for a block
    of n bytes; MemoryError from it puts Unheld in the blocks' place. is_bulk: it stages less, as
    for a lane of large messages. next_frame() raises RemoteProtocolError, and ShardError where
    there is no memory for a body. Frames, and the short way for small ones: the file's head.
    """

    def __init__(
        self, limits: Limits, allocate: Callable[[int], NDArray[np.uint8]], is_bulk: bool = False
    ) -> None:
        # whether more is here than was given out: behind the last frame, or the beginning of one
        self.more = False
        self._limits = limits
        self._body_bytes_max = limits.body_bytes_max
        self._allocate = allocate
        # The header with the lengths of all blocks must fit. numpy leaves the memory as the system
        # gives it, where a bytearray writes zeros: pages that no message reaches are never there,
        # and an idle connection costs one or two of them.
        self._staging_bytes = max(
            STAGING_BYTES_BULK if is_bulk else STAGING_BYTES, HEADER_BYTES + 8 * limits.blocks_max
        )
        self._staging = np.empty(self._staging_bytes, np.uint8).data
        # No frame that is larger than allowed has room in it, so nothing else looks at the limit on
        # the short way.
        self.front = self._staging[
            : min(
                FRONT_BYTES_BULK if is_bulk else STAGING_BYTES, HEADER_BYTES + limits.body_bytes_max
            )
        ]
        self.first_word = self._staging[:HEADER_BYTES].cast("Q")
        self._start = self._end = 0  # staged and not yet consumed
        self._body: memoryview | None = None  # of the frame whose blocks are being received
        self._block_bytes: list[int] = []  # of blocks still to come, the next one last
        self._blocks: list[NDArray[np.uint8]] = []
        # the part of the current body or block that is still missing
        self._filling: memoryview | None = None
        # in the place of the blocks, when there was no memory for one of them ...
        self._unheld: Unheld | None = None
        self._unheld_bytes = 0  # ... and so much of them is still to be dropped

    def destination(self) -> memoryview:
        """Where the next received bytes belong; never empty."""
        if self._filling is not None:
            return self._filling
        if not self._end:
            return self.front
        if self._end == self._staging_bytes or (
            self._start and self._staging_bytes - self._end < STAGING_ROOM_MIN
        ):
            rest = bytes(self._staging[self._start : self._end])
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._staging[self._end :]

    def next_frame(self, received: int = 0) -> Frame | None:
        """`received` more bytes stand at destination(); the next whole frame, or None until there
        are more.

        Raises RemoteProtocolError, and ShardError when there is no memory for a body. A frame whose
        blocks find none has Unheld in their place."""
        if self._filling is None:
            self._end += received
        else:
            self._filling = self._filling[received:] if received < len(self._filling) else None
        if self._body is None:
            start = self._start
            available = self._end - start
            if available < HEADER_BYTES:
                self.more = available > 0
                return None
            body_bytes, block_count, version = _unpack_header(self._staging, start)
            if version != FRAME_VERSION:
                raise RemoteProtocolError(
                    f"frame version {version}, {FRAME_VERSION} expected: not a prpc peer, "
                    "or another release"
                )
            if not block_count and HEADER_BYTES + body_bytes <= available:
                if body_bytes > self._body_bytes_max:
                    raise self._too_large(body_bytes)
                self._start = end = start + HEADER_BYTES + body_bytes
                self.more = end != self._end
                if not self.more:  # as _settle(), without the call
                    self._start = self._end = 0
                return self._staging[start + HEADER_BYTES : end], _NO_BLOCKS
            self.more = True
            if not self._begin_large(body_bytes, block_count, available):
                return None
        return self._continue_large() if self._filling is None else None

    def let_go(self) -> None:
        """No more will come: whoever keeps the decoder keeps no block of a frame that was cut."""
        self._body, self._blocks, self._block_bytes = None, [], []
        self._filling = self._unheld = None
        self._unheld_bytes = 0

    def _settle(self) -> None:
        """A frame was taken out of the staging."""
        self.more = self._start != self._end
        if not self.more:
            self._start = self._end = 0

    def _too_large(self, body_bytes: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"frame body of {body_bytes} bytes, at most {self._limits.body_bytes_max} allowed"
        )

    def _begin_large(self, body_bytes: int, block_count: int, available: int) -> bool:
        """Take header and what is here of the body out of the staging; False until the header is
        whole.
        """
        if body_bytes > self._limits.body_bytes_max:
            raise self._too_large(body_bytes)
        if block_count > self._limits.blocks_max:
            raise RemoteProtocolError(
                f"frame of {block_count} blocks, at most {self._limits.blocks_max} allowed"
            )
        header_bytes = HEADER_BYTES + 8 * block_count
        if available < header_bytes or (
            not block_count and header_bytes + body_bytes <= self._staging_bytes
        ):
            return False  # a small frame whose rest is still to come waits in the staging
        block_bytes = list(
            struct.unpack_from(f"<{block_count}Q", self._staging, self._start + HEADER_BYTES)
        )
        check_blocks(block_bytes, self._limits, RemoteProtocolError)
        self._block_bytes = block_bytes[::-1]
        self._blocks = []
        self._start += header_bytes
        try:
            # no page of it is there before bytes come; a bytearray writes zeros
            self._body = np.empty(body_bytes, np.uint8).data
        except MemoryError:
            raise ShardError(
                f"this process has no memory for a message body of {body_bytes} bytes: "
                "see `ulimit -v`"
            ) from None
        self._fill(self._body)
        return True

    def _fill(self, target: memoryview) -> None:
        """Move what is staged into `target`, and receive the rest of it in place."""
        count = min(len(target), self._end - self._start)
        target[:count] = self._staging[self._start : self._start + count]
        self._start += count
        self._filling = target[count:] if count < len(target) else None

    def _continue_large(self) -> Frame | None:
        while self._filling is None:
            if self._unheld_bytes:
                target = SINK[: self._unheld_bytes]
                self._unheld_bytes -= len(target)
                self._fill(target)
                continue
            if not self._block_bytes:
                assert self._body is not None
                frame = (self._body, self._blocks if self._unheld is None else self._unheld)
                self._settle()
                # the receiver's own: not kept from being used again by us
                self._body, self._blocks = None, []
                self._unheld = None
                return frame
            size = self._block_bytes.pop()
            try:
                block = self._allocate(size)
            except MemoryError:
                self._unheld = Unheld(
                    len(self._blocks) + 1 + len(self._block_bytes), no_memory(size)
                )
                self._unheld_bytes = size + sum(self._block_bytes)
                self._blocks, self._block_bytes = [], []
                continue
            self._blocks.append(block)
            self._fill(block.data)
        return None
