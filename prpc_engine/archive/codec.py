"""Both directions under one set of agreements: an `Archive` per connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prpc_engine.archive.compression import compress, compressor_of
from prpc_engine.archive.decoder import Decoder
from prpc_engine.archive.encoder import Block, Encoder, Message
from prpc_engine.archive.lazy import handovers_in
from prpc_engine.archive.wire import ArchiveError
from prpc_engine.errors import BadArguments
from shard import DEFAULT_LIMITS, Limits


class Archive:
    """Encodes and decodes. The encoding half may be used by any thread, the decoding half by one at
    a time.

    `allow_pickle`: send any object to a peer, and run what it pickled: only for authenticated peers
    who agreed to the same. `compression`: None, "zlib", "zstd" or "lz4", of what is sent; what
    comes may be any of them that is installed. `in_process`: the peer is in this process, and gets
    the very object of a Lazy; for_peer() when it turns out that it is not. Raises ConfigError for a
    compression that is not there.
    """

    def __init__(
        self,
        *,
        allow_pickle: bool = False,
        compression: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
        in_process: bool = False,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.compression = compression
        self.in_process = in_process
        self._limits = limits
        encoder = Encoder(allow_pickle=allow_pickle, in_process=in_process)
        decoder = Decoder(allow_pickle=allow_pickle, limits=limits)
        # The bound methods themselves: one call less for each message.
        self.encode: Callable[[Any], Message] = encoder.encode
        self.encode_arguments: Callable[[tuple[Any, ...]], Message] = encoder.encode_arguments
        if compression is not None:
            compressor = compressor_of(compression)
            self.encode = lambda value: compress(
                compression, compressor, limits, *encoder.encode(value)
            )
            self.encode_arguments = lambda values: compress(
                compression, compressor, limits, *encoder.encode_arguments(values)
            )
        self.decode = decoder.decode
        self.decode_plain = decoder.decode_plain

    def for_peer(self, body: bytes, blocks: Sequence[Block]) -> Message:
        """Arguments that were encoded with `in_process`, as this peer can read them: where it is
        another process, what their Lazies hold is encoded now. Raises BadArguments."""
        if self.in_process or not handovers_in(blocks):
            return body, blocks
        decoder = Decoder(allow_pickle=self.allow_pickle, limits=self._limits, peeks=True)
        try:
            return self.encode_arguments(tuple(decoder.decode(body, blocks)))
        except ArchiveError as error:
            raise BadArguments(
                f"the arguments cannot be encoded for another process: {error}"
            ) from error
