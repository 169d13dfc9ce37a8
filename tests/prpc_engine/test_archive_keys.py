"""Decoding does work by the length of what came, whatever keys a peer has chosen: shown by counting
comparisons.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.archive import PLAIN_BYTES_MAX, ArchiveError, Decoder, encode, register
from prpc_engine.archive import keys as keys_module
from prpc_engine.archive.keys import MAP_KEYS_MAX, PAIRS_PER_KEY, check_maps, check_pairs
from prpc_engine.archive.wire import COMPLEX, FROZENSET, MAP, SET, TUPLE
from tests.prpc_engine.archives import ONE_OF_EACH, values

MODULUS = (1 << 61) - 1  # Python's hash of a number is its remainder
MANY = 4096


@dataclass(frozen=True, eq=False)
class Counting:
    """Equal to nothing, of one hash; counts how often it is looked at."""

    number: int
    comparisons = 0

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        Counting.comparisons += 1
        return self is other


register(Counting, name="test_archive_keys.Counting")


@pytest.fixture(autouse=True)
def no_comparisons() -> None:
    Counting.comparisons = 0


def ext(code: int, *items: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(items)))


def native_map(keys: Sequence[bytes]) -> bytes:
    """A map of MessagePack's own, whatever its keys."""
    return b"\xdf" + len(keys).to_bytes(4, "big") + b"".join(key + b"\x01" for key in keys)


def packed(keys: Sequence[Any]) -> list[bytes]:
    return [bytes(encode(key)[0]) for key in keys]


def signs(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((-1, -2), repeat=length)


COLLIDING: dict[str, list[Any]] = {
    "ints in tuples": [
        (n % 16 * MODULUS, *rest)
        for n in range(16)
        for rest in itertools.product((0, MODULUS), repeat=8)
    ],
    "small ints in tuples": list(signs(12)),
    "tuples in tuples": [((one,), *rest) for one, *rest in signs(12)],
    "floats and ints in tuples": list(
        itertools.product((1, 2.0**61, 2.0**122, 2.0**183), repeat=6)
    ),
    "texts with ints": [("text", *one) for one in signs(12)],
    "bytes with ints": [(b"bytes", *one) for one in signs(12)],
    "long ints": [n * MODULUS for n in range(MANY)],
    "complex numbers": [
        complex(2.0 ** (61 * n), 2.0 ** (61 * m)) for n in range(-16, 16) for m in range(-16, 16)
    ],
    "frozensets": [frozenset({one}) for one in signs(12)],
}


@pytest.mark.parametrize("name", COLLIDING)
@pytest.mark.parametrize("code", [MAP, SET, FROZENSET])
def test_keys_of_few_hashes_are_refused_before_they_are_compared(name: str, code: int) -> None:
    keys = COLLIDING[name]
    groups = Counter(map(hash, keys))
    assert sum(n * (n - 1) // 2 for n in groups.values()) > PAIRS_PER_KEY * len(keys), (
        "or it is no attack"
    )
    flat = [part for key in packed(keys) for part in ((key, b"\x01") if code == MAP else (key,))]
    payload = b"\xdd" + len(flat).to_bytes(4, "big") + b"".join(flat)
    body = b"\xc9" + len(payload).to_bytes(4, "big") + bytes([code]) + payload
    with pytest.raises(
        ArchiveError, match=f"keys have the same hash, at most {PAIRS_PER_KEY} a key are allowed"
    ):
        Decoder().decode(body, [])


@pytest.mark.parametrize("code", [MAP, SET, FROZENSET])
def test_not_one_comparison_is_made_of_many_keys_of_one_hash(code: int) -> None:
    items = [bytes(encode(Counting(number))[0]) for number in range(MANY)]
    flat = [part for item in items for part in ((item, b"\x01") if code == MAP else (item,))]
    payload = b"\xdd" + len(flat).to_bytes(4, "big") + b"".join(flat)
    with pytest.raises(ArchiveError, match="same hash"):
        Decoder().decode(b"\xc9" + len(payload).to_bytes(4, "big") + bytes([code]) + payload, [])
    assert Counting.comparisons == 0


WRAPS = {
    "by itself": lambda body: body,
    "in a list": lambda body: b"\x91" + body,
    "as a value": lambda body: b"\x81\xa1k" + body,
    "behind others": lambda body: b"\x95\xc0\x07\xa3abc\xcb\xde\xde\xde\xde\xdf\xdf\xdf\xdf" + body,
    "in a tuple": lambda body: (
        b"\xc9" + (len(body) + 1).to_bytes(4, "big") + bytes([TUPLE]) + b"\x91" + body
    ),
    "behind bytes that look like a header": lambda body: b"\x92\xc4\x04\xdf\xdf\xdf\xde" + body,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("plain", [False, True])
def test_a_large_map_with_other_keys_than_texts_and_numbers_is_refused_before_it_is_built(
    wrap: str, plain: bool
) -> None:
    keys: list[Any] = (
        [[-1 - (n >> bit & 1) for bit in range(12)] for n in range(MANY)]
        if plain
        else [Counting(n) for n in range(MANY)]
    )
    body = WRAPS[wrap](native_map(packed(keys)))
    with pytest.raises(
        ArchiveError, match="a large map has an array or an extension type as a key"
    ):
        Decoder().decode(body, [])
    assert Counting.comparisons == 0


def test_of_small_maps_all_pairs_are_few() -> None:
    """Below the bound, and below the length from which messages are looked at: a constant number
    for each key.
    """
    one = native_map(packed([Counting(number) for number in range(MAP_KEYS_MAX - 1)]))
    Decoder().decode(b"\xdc\x00\x40" + one * 64, [])
    assert Counting.comparisons <= 64 * MAP_KEYS_MAX * MAP_KEYS_MAX // 2
    assert PLAIN_BYTES_MAX // 4 <= MAP_KEYS_MAX


@pytest.mark.parametrize("kind", ["ints", "floats", "both"])
def test_numbers_as_keys_of_maps_meet_in_small_groups_only(kind: str) -> None:
    ints = [
        n + k * MODULUS
        for n in range(64)
        for k in range(-4, 8)
        if -(1 << 63) <= n + k * MODULUS < 1 << 64
    ]
    floats = [n * 2.0 ** (61 * k) for n in range(1, 64, 2) for k in range(-16, 16)]
    keys: dict[Hashable, int] = dict.fromkeys(
        [*(ints if kind != "floats" else ()), *(floats if kind != "ints" else ())], 1
    )
    assert max(Counter(map(hash, keys)).values()) <= 17 + 34
    body, blocks = encode(dict(keys))
    assert Decoder().decode(body, blocks) == keys


def test_honest_dicts_with_keys_that_meet_are_taken() -> None:
    grid = {(x, y, z): x for x in range(-9, 9) for y in range(-9, 9) for z in range(-9, 9)}
    texts = {f"layer.{number}.weight": number for number in range(5 * MAP_KEYS_MAX)}
    for value in (
        grid,
        set(grid),
        texts,
        [texts, grid],
        {"a": texts},
        dict.fromkeys(range(10_000)),
    ):
        body, blocks = encode(value)
        assert Decoder().decode(body, blocks) == value


@given(values)
def test_whatever_is_encoded_passes_thewalk(value: Any) -> None:
    body, _ = encode(value)
    keys_module.walk(body)


@pytest.mark.parametrize("value", ONE_OF_EACH, ids=lambda value: type(value).__name__)
def test_one_of_each_passes_thewalk(value: Any) -> None:
    keys_module.walk(encode(value)[0])


@given(st.binary(max_size=200))
def test_a_walk_ends_whatever_it_walks_over(data: bytes) -> None:
    for body in (data, native_map([data])):
        with contextlib.suppress(ArchiveError):
            keys_module.walk(body)


def test_an_extension_type_that_is_longer_than_its_value_hides_no_map() -> None:
    hidden = native_map(packed([[n] for n in range(MANY)]))
    body = b"\xc9" + (len(hidden) + 1).to_bytes(4, "big") + bytes([TUPLE]) + b"\xc0" + hidden
    with pytest.raises(ArchiveError, match="holds a value that ends at"):
        check_maps(body)


def test_a_header_whose_first_byte_stands_in_what_looks_like_another_is_seen() -> None:
    body = b"\x92\xc4\x01\xdf" + native_map(packed([[n] for n in range(MANY)]))
    with pytest.raises(ArchiveError, match="a large map"):
        check_maps(body)


def test_complex_numbers_are_no_nesting() -> None:
    assert COMPLEX not in keys_module.NESTING
    check_pairs([])
