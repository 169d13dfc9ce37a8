"""A message made smaller: its body and each of its blocks by itself, in zlib, zstd or lz4.

    block 0       the body, compressed
    blocks 1...   the blocks, each compressed where that saves something and otherwise as it was

What replaces the body is the extension type COMPRESSED: [algorithm, body size, [size, or -1 for one left as it was, ...]]. The
compressed body is a block, so that a reader without blocks (Decoder.decode_plain) never meets one that it could expand.

Against a message that is small and expands without end: sizes are compared with the limits before anything is expanded, and no
algorithm is ever let go on past the size that was announced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.wire import COMPRESSED, ArchiveError
from prpc_engine.errors import ConfigError
from shard import Limits

Block = NDArray[np.uint8]
ZLIB, ZSTD, LZ4 = 1, 2, 3
ALGORITHMS = {"zlib": ZLIB, "zstd": ZSTD, "lz4": LZ4}
COMPRESS_BYTES_MIN = 4096  # smaller messages take longer to compress than to send
ZLIB_LEVEL = 1  # the fastest: what links are made of today is quicker than any higher one
ZSTD_LEVEL = 1
ZSTD_WINDOW_BYTES_MAX = 8 << 20  # what all levels but the "ultra" ones use; a peer could ask for 2 GiB
_CHUNK_BYTES = 1 << 20  # asked for all at once, zstd and lz4 reserve all at once, whatever comes then

_encode = msgspec.msgpack.encode


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    algorithm: int
    body_bytes: int
    blocks_bytes: list[int]


_decode_header = msgspec.msgpack.Decoder(_Header).decode


def compressor_of(name: str) -> Callable[[bytes | memoryview], bytes]:
    """What makes bytes of that algorithm. Raises ConfigError for one that is unknown or whose package is not installed."""
    if name == "zlib":
        return lambda data: zlib.compress(data, ZLIB_LEVEL)
    try:
        if name == "zstd":
            import zstandard

            return lambda data: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)  # one for all would need a lock
        if name == "lz4":
            import lz4.frame

            return lambda data: lz4.frame.compress(data)
    except ImportError as error:
        raise ConfigError(f"compression={name!r} needs a package: pip install 'prpc-engine[{name}]', or take 'zlib'") from error
    raise ConfigError(f"compression={name!r}: allowed are {', '.join(ALGORITHMS)}, or None")


def compress(
    name: str, compressor: Callable[[bytes | memoryview], bytes], body: bytes, blocks: Sequence[Block]
) -> tuple[bytes, Sequence[Block]]:
    """The message made smaller, or as it was when that saves nothing or is not worth the while."""
    size = len(body) + sum(block.nbytes for block in blocks)
    if size < COMPRESS_BYTES_MIN:
        return body, blocks
    smaller = [np.frombuffer(compressor(body), np.uint8)]
    sizes = []
    for block in blocks:
        packed = compressor(block.data) if block.nbytes else b""
        saves = 0 < len(packed) < block.nbytes
        smaller.append(np.frombuffer(packed, np.uint8) if saves else block)
        sizes.append(block.nbytes if saves else -1)
    if sum(block.nbytes for block in smaller) >= size:
        return body, blocks
    return _encode(msgspec.msgpack.Ext(COMPRESSED, _encode((ALGORITHMS[name], len(body), sizes)))), smaller


def expand(payload: memoryview, blocks: Sequence[Block], limits: Limits) -> tuple[memoryview, list[Block]]:
    """Body and blocks as compress() was given them. Raises ArchiveError."""
    header = _decode_header(payload)
    sizes = header.blocks_bytes
    if len(blocks) != len(sizes) + 1:
        raise ArchiveError(f"compressed message of {len(sizes)} blocks and a body in {len(blocks)} blocks")
    if not 0 <= header.body_bytes <= limits.body_bytes_max:
        raise ArchiveError(f"compressed body of {header.body_bytes} bytes, at most {limits.body_bytes_max} allowed")
    whole = sum(max(size, 0) for size in sizes)
    if min(sizes, default=0) < -1 or whole > limits.blocks_bytes_max:
        raise ArchiveError(f"compressed blocks of {whole} bytes, at most {limits.blocks_bytes_max} allowed")
    expander = _expander_of(header.algorithm)
    body = _expanded(expander, blocks[0], header.body_bytes)
    return body.data, [
        block if size < 0 else _expanded(expander, block, size) for block, size in zip(blocks[1:], sizes, strict=True)
    ]


def _expanded(expander: Callable[[memoryview, int], bytes], block: Block, size: int) -> Block:
    try:
        data = expander(block.data, size)
    except Exception as error:  # each package has errors of its own
        raise ArchiveError(f"{block.nbytes} compressed bytes cannot be expanded: {type(error).__name__}: {error}") from error
    if len(data) != size:
        raise ArchiveError(f"{block.nbytes} compressed bytes are not the {size} that they were said to be")
    return np.frombuffer(data, np.uint8)


def _expander_of(algorithm: int) -> Callable[[memoryview, int], bytes]:
    """A function of data and their size that gives at most a chunk more."""
    try:
        if algorithm == ZLIB:
            return lambda data, size: zlib.decompressobj().decompress(data, size + 1)
        if algorithm == ZSTD:
            import zstandard

            context: Any = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
            return lambda data, size: _joined(_zstd_parts(context.stream_reader(data)), size)
        if algorithm == LZ4:
            import lz4.frame

            return lambda data, size: _joined(_lz4_parts(lz4.frame.LZ4FrameDecompressor(), data), size)
    except ImportError as error:
        name = next(name for name, number in ALGORITHMS.items() if number == algorithm)
        raise ArchiveError(
            f"the message is compressed with {name}, which is not installed here: pip install 'prpc-engine[{name}]'"
        ) from error
    raise ArchiveError(f"compressed with unknown algorithm {algorithm}")


def _joined(parts: Iterable[bytes], size: int) -> bytes:
    """The parts until they come to more than the size."""
    taken = []
    for part in parts:
        taken.append(part)
        size -= len(part)
        if size < 0:
            break
    return b"".join(taken)


def _zstd_parts(reader: Any) -> Iterator[bytes]:
    return iter(lambda: reader.read(_CHUNK_BYTES), b"")


def _lz4_parts(decompressor: Any, data: memoryview) -> Iterator[bytes]:
    for start in range(0, len(data), _CHUNK_BYTES):  # what it cannot take at once it copies at each call
        piece: memoryview | bytes = data[start : start + _CHUNK_BYTES]
        while not decompressor.eof:
            yield decompressor.decompress(piece, _CHUNK_BYTES)
            if decompressor.needs_input:
                break
            piece = b""
