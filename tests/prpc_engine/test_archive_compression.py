"""A message that was made smaller is the same message, and none expands past what was announced and
allowed.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from prpc_engine.archive import Archive, ArchiveError, Decoder, encode
from prpc_engine.archive.compression import ALGORITHMS, COMPRESS_BYTES_MIN, ZLIB, compressor_of
from prpc_engine.archive.expanded import expanded
from prpc_engine.archive.wire import COMPRESSED
from prpc_engine.errors import ConfigError
from shard import DEFAULT_LIMITS
from tests.prpc_engine.archives import arrive, same, values
from tests.prpc_engine.test_archive_hostile import reserving_at_most

PACKAGES = {"zlib": "zlib", "zstd": "zstandard", "lz4": "lz4"}


@pytest.fixture(params=list(ALGORITHMS))
def name(request: pytest.FixtureRequest) -> str:
    """Each algorithm that is installed."""
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


def test_a_large_message_becomes_smaller_and_comes_back(name: str) -> None:
    value = {
        "text": "word " * 10_000,
        "array": np.zeros((100, 100)),
        "noise": np.random.default_rng(0).bytes(50_000),
        "none": np.empty(0),
    }
    archive = Archive(compression=name)
    plain, compressed = encode(value), archive.encode(value)
    assert size_of(compressed) < size_of(plain) / 2
    assert same(arrive(*compressed), value)
    assert same(arrive(*archive.encode_arguments((value, 1))), [value, 1])


def size_of(message: Any) -> int:
    body, blocks = message
    return len(body) + sum(block.nbytes for block in blocks)


def test_a_small_message_and_one_that_would_not_shrink_go_as_they_are(name: str) -> None:
    archive = Archive(compression=name)
    noise = np.random.default_rng(0).integers(0, 256, COMPRESS_BYTES_MIN * 4, np.uint8)
    for value in (5, b"x" * 1000, noise):
        body, blocks = archive.encode(value)
        expected, own = encode(value)
        assert body == expected
        assert [block.ctypes.data for block in blocks] == [block.ctypes.data for block in own]


@given(values)
def test_any_value_comes_back_compressed(value: Any) -> None:
    padded = [value, "x" * COMPRESS_BYTES_MIN]
    body, blocks = Archive(compression="zlib").encode(padded)
    assert blocks
    assert same(arrive(body, blocks), padded)


# -- bombs -----------------------------------------------------------------------------------------


def message(
    algorithm: int, body_bytes: int, blocks_bytes: list[int], *blocks: bytes
) -> tuple[bytes, list[NDArray[np.uint8]]]:
    header = msgspec.msgpack.encode((algorithm, body_bytes, blocks_bytes))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(COMPRESSED, header)), [
        np.frombuffer(block, np.uint8) for block in blocks
    ]


def test_a_message_that_expands_past_what_it_said_is_stopped_there(name: str) -> None:
    compress: Callable[[Any], bytes] = compressor_of(name)
    bomb = compress(bytes(64 << 20))
    assert len(bomb) < 400_000
    with (
        reserving_at_most(8 << 20),
        pytest.raises(ArchiveError, match="are not the 1000 that they were said to be"),
    ):
        Decoder().decode(*message(ALGORITHMS[name], 1000, [], bomb))
    none = compress(b"\xc0")
    with (
        reserving_at_most(8 << 20),
        pytest.raises(ArchiveError, match="are not the 1000 that they were said to be"),
    ):
        Decoder().decode(*message(ALGORITHMS[name], 1, [1000], none, bomb))
    assert Decoder().decode(*message(ALGORITHMS[name], 1, [64 << 20], none, bomb)) is None


def test_one_that_says_more_than_it_holds_is_refused_and_nothing_of_it_is_held(name: str) -> None:
    small = compressor_of(name)(b"\xc0" * 10)
    before = expanded.nbytes
    for size in (11, 32 << 20):
        with reserving_at_most(size + (4 << 20)), pytest.raises(ArchiveError):
            Decoder().decode(*message(ALGORITHMS[name], size, [], small))
    gc.collect()
    assert expanded.nbytes == before


def test_an_expanded_message_is_in_memory_once(name: str) -> None:
    compress = compressor_of(name)
    body, block = compress(b"\xc0"), compress(bytes(128 << 20))
    with reserving_at_most((128 << 20) + (8 << 20)):
        Decoder().decode(*message(ALGORITHMS[name], 1, [128 << 20], body, block))


def test_a_small_message_that_says_a_gibibyte_is_refused_by_default(name: str) -> None:
    none = compressor_of(name)(b"\xc0")
    with reserving_at_most(4 << 20), pytest.raises(ArchiveError, match="limit expanded_bytes_max"):
        Decoder().decode(*message(ALGORITHMS[name], 1, [1 << 30], none, none))
    assert DEFAULT_LIMITS.expanded_bytes_max <= DEFAULT_LIMITS.expanded_total_bytes_max < 16 << 30
    assert DEFAULT_LIMITS.blocks_bytes_max < 16 << 30


def test_what_a_peer_would_not_expand_goes_as_it_is(name: str) -> None:
    limits = dataclasses.replace(DEFAULT_LIMITS, expanded_bytes_max=50_000)
    for size, is_smaller in ((50_000, True), (50_001, False)):
        body, blocks = Archive(compression=name, limits=limits).encode(np.zeros(size, np.uint8))
        assert (blocks[-1].nbytes < size) == is_smaller
        assert Decoder(limits=limits).decode(body, blocks).nbytes == size


def test_what_all_messages_have_expanded_to_is_bounded_while_it_is_held(name: str) -> None:
    limits = dataclasses.replace(DEFAULT_LIMITS, expanded_total_bytes_max=expanded.nbytes + 250_000)
    value = [np.zeros(100_000, np.uint8), "x" * COMPRESS_BYTES_MIN]
    sent = Archive(compression=name).encode(value)
    decoders = [Decoder(limits=limits) for _ in range(3)]  # of three connections
    held = [decoder.decode(*sent)[0][10:20] for decoder in decoders[:2]]
    with pytest.raises(
        ArchiveError,
        match=r"beside 2.* that are held of others, at most .*expanded_total_bytes_max",
    ):
        decoders[2].decode(*sent)
    del held[0]
    gc.collect()
    assert decoders[2].decode(*sent)[0].nbytes == 100_000


def test_sizes_are_held_against_the_limits_before_anything_is_expanded(name: str) -> None:
    limits = dataclasses.replace(DEFAULT_LIMITS, body_bytes_max=1000, expanded_bytes_max=5000)
    compress = compressor_of(name)
    body, block = compress(b"\xc0"), compress(bytes(3000))
    decoder = Decoder(limits=limits)
    with pytest.raises(ArchiveError, match="compressed body of 1001 bytes, at most 1000 allowed"):
        decoder.decode(*message(ALGORITHMS[name], 1001, [], compress(b"\xc0" * 1001)))
    with pytest.raises(
        ArchiveError,
        match=r"compressed blocks of 6000 bytes, at most 5000 allowed .limit expanded_bytes_max",
    ):
        decoder.decode(*message(ALGORITHMS[name], 1, [3000, 3000], body, block, block))
    assert decoder.decode(*message(ALGORITHMS[name], 1, [3000], body, block)) is None


def test_one_compressed_message_in_another_or_two_in_one_are_refused() -> None:
    inner, _ = message(ZLIB, 1, [], zlib.compress(b"\xc0"))
    with pytest.raises(ArchiveError, match="inside of another"):
        Decoder().decode(
            *message(ZLIB, len(inner), [-1], zlib.compress(inner), zlib.compress(b"\xc0"))
        )
    body, blocks = message(ZLIB, 1, [], zlib.compress(b"\xc0"))
    with pytest.raises(ArchiveError, match="inside of another"):
        Decoder().decode(b"\x92" + body * 2, blocks)


def test_broken_streams_are_refused(name: str) -> None:
    good = compressor_of(name)(b"\xc0" * 1000)
    for broken in (b"", good[:-4], good[4:], b"\0" * 50, bytes(reversed(good))):
        with pytest.raises(ArchiveError):
            Decoder().decode(*message(ALGORITHMS[name], 1000, [], broken))


# -- what is not there -----------------------------------------------------------------------------


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match="compression='brotli': allowed are zlib, zstd, lz4, or None"
    ):
        Archive(compression="brotli")
    with pytest.raises(ArchiveError, match="unknown algorithm 77"):
        Decoder().decode(*message(77, 1, [], b"x"))


@pytest.mark.parametrize("absent", ["zstd", "lz4"])
def test_a_missing_package_is_named_on_either_side(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (PACKAGES[absent], "lz4.frame"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError,
        match=rf"compression='{absent}' needs a package: pip install 'prpc-engine\[{absent}\]', "
        rf"or take 'zlib'",
    ):
        Archive(compression=absent)
    with pytest.raises(
        ArchiveError,
        match=rf"compressed with {absent}, which is not installed here: "
        rf"pip install 'prpc-engine\[{absent}\]'",
    ):
        Decoder().decode(*message(ALGORITHMS[absent], 1, [], b"x"))
