"""Both directions under one set of agreements: an `Archive` per connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prpc_engine.archive.compression import compress, compressor_of
from prpc_engine.archive.decoder import Decoder
from prpc_engine.archive.encoder import Encoder, Message
from prpc_engine.archive.lazy import Lazy
from shard import DEFAULT_LIMITS, Limits

# What nobody can change: it may be the same object for sender and receiver.
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes})


class Archive:
    """Encodes and decodes. The encoding half may be used by any thread, the decoding half by one at a time.

    `allow_pickle`: send any object to a peer, and run what it pickled: only for authenticated peers who agreed to the same.
    `compression`: None, "zlib", "zstd" or "lz4", of what is sent; what comes may be any of them that is installed.
    Raises ConfigError for a compression that is not there.
    """

    def __init__(self, *, allow_pickle: bool = False, compression: str | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.allow_pickle = allow_pickle
        self.compression = compression
        encoder = Encoder(allow_pickle=allow_pickle)
        decoder = Decoder(allow_pickle=allow_pickle, limits=limits)
        # The bound methods themselves: one call less for each message.
        self.encode: Callable[[Any], Message] = encoder.encode
        self.encode_arguments: Callable[[tuple[Any, ...]], Message] = encoder.encode_arguments
        if compression is not None:
            compressor = compressor_of(compression)
            self.encode = lambda value: compress(compression, compressor, *encoder.encode(value))
            self.encode_arguments = lambda values: compress(compression, compressor, *encoder.encode_arguments(values))
        self.decode = decoder.decode
        self.decode_plain = decoder.decode_plain

    def hand_over(self, values: tuple[Any, ...]) -> list[Any]:
        """What a server in this process gets instead of a message: of a Lazy the very object, of everything else what it would
        get from another process. Raises BadArguments for what could not be sent, before any Lazy has given its value up."""
        copies = [value if type(value) in _IMMUTABLE or type(value) is Lazy else self._copy(value) for value in values]
        for value in values:
            if type(value) is Lazy:
                _ = value.value  # raises when it is gone
        return [value.take() if type(value) is Lazy else value for value in copies]

    def _copy(self, value: Any) -> Any:
        body, blocks = self.encode(value)
        own = [np.frombuffer(block.tobytes(), np.uint8) for block in blocks]
        return self.decode(body, own)
