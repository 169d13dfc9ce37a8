"""A message made smaller: its body and each of its blocks by itself, in zlib, zstd or lz4.

    block 0       the body, compressed
    blocks 1...   the blocks, each compressed where that saves something and otherwise as it was

What replaces the body is the extension type COMPRESSED: [algorithm, body size, [size, or -1 for one
left as it was, ...]]. The compressed body is a block, so that a reader without blocks
(Decoder.decode_plain) never meets one that it could expand.

Against messages that are small and expand to much: sizes are compared with the limits before
anything is reserved, each message's with expanded_bytes_max, and with expanded_total_bytes_max what
is held of all messages of the process. Data are expanded into memory of the announced size, once,
and no algorithm is ever let go on past it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.expanded import expanded
from prpc_engine.archive.wire import COMPRESSED, ArchiveError
from prpc_engine.errors import ConfigError
from shard import Limits, is_device

Block = NDArray[np.uint8]
Fill = Callable[[memoryview, memoryview], bool]
ZLIB, ZSTD, LZ4 = 1, 2, 3
ALGORITHMS = {"zlib": ZLIB, "zstd": ZSTD, "lz4": LZ4}
COMPRESS_BYTES_MIN = 4096  # smaller messages take longer to compress than to send
ZLIB_LEVEL = 1  # the fastest: what links are made of today is quicker than any higher one
ZSTD_LEVEL = 1
# what all levels but the "ultra" ones use; a peer could ask for 2 GiB
ZSTD_WINDOW_BYTES_MAX = 8 << 20
# asked for all at once, lz4 and zlib reserve all at once, whatever comes then
_CHUNK_BYTES = 1 << 20
_INPUT_BYTES = 1 << 16  # what zlib cannot take at once it copies at each call

_encode = msgspec.msgpack.encode


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    algorithm: int
    body_bytes: int
    blocks_bytes: list[int]


_decode_header = msgspec.msgpack.Decoder(_Header).decode


def compressor_of(name: str) -> Callable[[bytes | memoryview], bytes]:
    """What makes bytes of that algorithm. Raises ConfigError for one that is unknown or whose
    package is not installed.
    """
    if name == "zlib":
        return lambda data: zlib.compress(data, ZLIB_LEVEL)
    try:
        if name == "zstd":
            import zstandard

            # one for all would need a lock
            return lambda data: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
        if name == "lz4":
            import lz4.frame

            return lambda data: lz4.frame.compress(data)
    except ImportError as error:
        raise ConfigError(
            f"compression={name!r} needs a package: pip install 'prpc-engine[{name}]', "
            "or take 'zlib'"
        ) from error
    raise ConfigError(f"compression={name!r}: allowed are {', '.join(ALGORITHMS)}, or None")


def compress(
    name: str,
    compressor: Callable[[bytes | memoryview], bytes],
    limits: Limits,
    body: bytes,
    blocks: Sequence[Block],
) -> tuple[bytes, Sequence[Block]]:
    """The message made smaller, or as it was when that saves nothing, is not worth the while, or a
    peer with these limits would not expand it."""
    size = len(body) + sum(block.nbytes for block in blocks)
    if size < COMPRESS_BYTES_MIN or size - len(body) > limits.expanded_bytes_max:
        return body, blocks
    smaller = [np.frombuffer(compressor(body), np.uint8)]
    sizes = []
    for block in blocks:
        packed = compressor(block.data) if block.nbytes and not is_device(block) else b""
        saves = 0 < len(packed) < block.nbytes
        smaller.append(np.frombuffer(packed, np.uint8) if saves else block)
        sizes.append(block.nbytes if saves else -1)
    if sum(block.nbytes for block in smaller) >= size:
        return body, blocks
    return _encode(
        msgspec.msgpack.Ext(COMPRESSED, _encode((ALGORITHMS[name], len(body), sizes)))
    ), smaller


def expand(
    payload: memoryview, blocks: Sequence[Block], limits: Limits
) -> tuple[memoryview, list[Block]]:
    """Body and blocks as compress() was given them. Raises ArchiveError."""
    header = _decode_header(payload)
    sizes = header.blocks_bytes
    if len(blocks) != len(sizes) + 1:
        raise ArchiveError(
            f"compressed message of {len(sizes)} blocks and a body in {len(blocks)} blocks"
        )
    if not 0 <= header.body_bytes <= limits.body_bytes_max:
        raise ArchiveError(
            f"compressed body of {header.body_bytes} bytes, at most {limits.body_bytes_max} allowed"
        )
    whole = sum(max(size, 0) for size in sizes)
    if min(sizes, default=0) < -1 or whole > limits.expanded_bytes_max:
        raise ArchiveError(
            f"compressed blocks of {whole} bytes, at most {limits.expanded_bytes_max} allowed "
            "(limit expanded_bytes_max)"
        )
    fill = _filler_of(header.algorithm)
    packed = [
        blocks[0],
        *(block for block, size in zip(blocks[1:], sizes, strict=True) if size >= 0),
    ]
    filled = expanded.reserve(
        [header.body_bytes, *(size for size in sizes if size >= 0)], limits.expanded_total_bytes_max
    )
    for block, target in zip(packed, filled, strict=True):
        _expand(fill, block, target)
    rest = iter(filled[1:])
    return filled[0].data, [
        block if size < 0 else next(rest) for block, size in zip(blocks[1:], sizes, strict=True)
    ]


def _expand(fill: Fill, block: Block, target: Block) -> None:
    """One block into the memory that was reserved for it, which is not written again."""
    try:
        is_whole = fill(block.data, target.data)
    except Exception as error:  # each package has errors of its own
        raise ArchiveError(
            f"{block.nbytes} compressed bytes cannot be expanded: {type(error).__name__}: {error}"
        ) from error
    if not is_whole:
        raise ArchiveError(
            f"{block.nbytes} compressed bytes are not the {target.nbytes} that they were said to be"
        )
    target.flags.writeable = False


def _filler_of(algorithm: int) -> Fill:
    """What writes data into the memory given; False when they are more or fewer bytes. A chunk
    besides, at most.
    """
    try:
        if algorithm == ZLIB:
            return lambda data, target: _join(_zlib_parts(data), target)
        if algorithm == ZSTD:
            import zstandard

            context: Any = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
            return lambda data, target: _read(context.stream_reader(data), target)
        if algorithm == LZ4:
            import lz4.frame

            return lambda data, target: _join(
                _lz4_parts(lz4.frame.LZ4FrameDecompressor(), data), target
            )
    except ImportError as error:
        name = next(name for name, number in ALGORITHMS.items() if number == algorithm)
        raise ArchiveError(
            f"the message is compressed with {name}, which is not installed here: "
            f"pip install 'prpc-engine[{name}]'"
        ) from error
    raise ArchiveError(f"compressed with unknown algorithm {algorithm}")


def _join(parts: Iterable[bytes], target: memoryview) -> bool:
    at = 0
    for part in parts:
        if len(part) > len(target) - at:
            return False
        target[at : at + len(part)] = part
        at += len(part)
    return at == len(target)


def _read(reader: Any, target: memoryview) -> bool:
    at = 0
    while at < len(target):
        count = reader.readinto(target[at:])
        if not count:
            return False
        at += count
    return not reader.read(1)


def _zlib_parts(data: memoryview) -> Iterator[bytes]:
    stream = zlib.decompressobj()
    for start in range(0, len(data), _INPUT_BYTES):
        piece: memoryview | bytes = data[start : start + _INPUT_BYTES]
        while piece and not stream.eof:
            yield stream.decompress(piece, _CHUNK_BYTES)
            piece = stream.unconsumed_tail
    while not stream.eof and (part := stream.decompress(b"", _CHUNK_BYTES)):
        yield part


def _lz4_parts(decompressor: Any, data: memoryview) -> Iterator[bytes]:
    # what it cannot take at once it copies at each call
    for start in range(0, len(data), _CHUNK_BYTES):
        piece: memoryview | bytes = data[start : start + _CHUNK_BYTES]
        while not decompressor.eof:
            yield decompressor.decompress(piece, _CHUNK_BYTES)
            if decompressor.needs_input:
                break
            piece = b""
