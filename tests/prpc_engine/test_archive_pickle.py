"""Pickles travel between two sides that both said so, and are never read by one that did not."""

from __future__ import annotations

import collections
import fractions
import os
import pickle
import subprocess
import sys
import zoneinfo
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prpc_engine.archive import Archive, ArchiveError, Decoder, Encoder, PickleRefused
from prpc_engine.archive.wire import BYTES_INLINE_MAX, PICKLE, TUPLE
from prpc_engine.errors import BadArguments, Rejected
from tests.prpc_engine.archives import ONE_OF_EACH, arrive, same

TRUSTING = Archive(allow_pickle=True)


class Node:
    """An object with an array in it, and a way back to itself."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.myself = self


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Unpicklable:
    """Says no in its own way."""

    def __reduce__(self) -> Any:
        raise LookupError("not me")


@pytest.mark.parametrize(
    "value",
    [
        fractions.Fraction(1, 3),
        collections.OrderedDict(a=[1]),
        collections.Counter("aab"),
        zoneinfo.ZoneInfo("UTC"),
        Path("/some/where"),
        ValueError("text"),
        len,
        Node,
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_object_comes_back_where_both_sides_agreed(value: Any) -> None:
    for wrapped in (value, [1, value], {"k": (value, value)}):
        back = arrive(*TRUSTING.encode(wrapped), TRUSTING)
        assert type(back) is type(wrapped)
        assert repr(back) == repr(wrapped)


def test_what_needs_no_pickle_is_none() -> None:
    for value in ONE_OF_EACH:
        assert TRUSTING.encode(value)[0] == Archive().encode(value)[0]
        assert same(arrive(*TRUSTING.encode(value)), value)


def test_arrays_inside_of_objects_are_blocks_of_their_own_memory() -> None:
    node = Node(np.arange(10_000))
    body, blocks = TRUSTING.encode([node, np.zeros(3)])
    assert any(np.shares_memory(block, node.weights) for block in blocks)
    assert len(body) < 1000
    back, zeros = arrive(body, blocks, TRUSTING)
    assert back.myself is back
    assert back.weights.tolist() == node.weights.tolist()
    assert zeros.tolist() == [0, 0, 0]


def test_arrays_of_objects_with_gaps_and_large_pickles_travel() -> None:
    strided = Node(np.arange(10)[::2])
    large = collections.deque(["x" * 100] * BYTES_INLINE_MAX)
    objects = np.array([None, "a", 1 << 80], object)
    back = arrive(*TRUSTING.encode((strided, large, objects)), TRUSTING)
    assert back[0].weights.tolist() == [0, 2, 4, 6, 8]
    assert back[1] == large
    assert back[2].tolist() == objects.tolist()


def test_a_pickle_is_refused_without_consent_and_nothing_of_it_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "touched")
    body, blocks = TRUSTING.encode([Touches(path)])
    for decoder in (Decoder(), Archive()):
        with pytest.raises(
            PickleRefused, match="this side does not read: it takes allow_pickle=True on both sides"
        ) as caught:
            arrive(body, blocks, decoder)
        assert isinstance(caught.value, Rejected)
        assert isinstance(caught.value, ArchiveError)
    nested = msgspec.msgpack.encode(msgspec.msgpack.Ext(TUPLE, body))
    with pytest.raises(PickleRefused):
        Decoder().decode_plain(nested)
    assert not os.path.exists(path)
    arrive(body, blocks, TRUSTING)
    assert os.path.exists(path)


def test_without_consent_nothing_is_pickled() -> None:
    with pytest.raises(BadArguments, match="allow_pickle=True on both sides"):
        Encoder().encode(fractions.Fraction(1, 3))


def test_what_cannot_be_pickled_is_refused_with_its_place_and_the_reason() -> None:
    with pytest.raises(
        BadArguments,
        match=r"the value\[1\] cannot be sent: it cannot be pickled: LookupError: not me",
    ):
        TRUSTING.encode([1, Unpicklable()])


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"N", b"cnot_a_module\nname\n.", pickle.dumps(1)[:-1], b"\x80\x05\x97."],
    ids=repr,
)
def test_a_broken_pickle_is_an_archive_error(data: bytes) -> None:
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(PICKLE, msgspec.msgpack.encode((data, []))))
    with pytest.raises(ArchiveError):
        TRUSTING.decode(body, [])


SENDER = """
import sys
from prpc_engine.archive import Archive

class Mine:
    def __init__(self, value): self.value = value
    def doubled(self): return 2 * self.value

factor = 5
body, blocks = Archive(allow_pickle=True).encode([lambda x: factor * x, Mine(4)])
assert not blocks
sys.stdout.buffer.write(body)
"""


def test_lambdas_and_what_main_defines_reach_another_process_with_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    sent = subprocess.run(
        [sys.executable, "-c", SENDER], capture_output=True, check=True, timeout=60
    )
    function, mine = TRUSTING.decode(sent.stdout, [])
    assert function(3) == 15
    assert mine.doubled() == 8


@pytest.fixture
def without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.usefixtures("without_cloudpickle")
def test_a_lambda_without_cloudpickle_is_refused_with_what_to_install() -> None:
    with pytest.raises(
        BadArguments, match=r"need cloudpickle: pip install 'prpc-engine\[cloudpickle\]'"
    ):
        TRUSTING.encode(lambda: None)


@pytest.mark.usefixtures("without_cloudpickle")
def test_memory_is_blocks_without_cloudpickle_too() -> None:
    large = [np.arange(10_000).astype("M8[s]"), np.arange(20_000)[::2], bytes(80_000)]
    body, blocks = TRUSTING.encode([Node(large), fractions.Fraction(1, 3)])
    assert len(body) < 2000
    assert sum(block.nbytes for block in blocks) == 3 * 80_000
    node, third = arrive(body, blocks, TRUSTING)
    assert node.myself is node
    assert same(node.weights, [large[0], large[1].copy(), large[2]])
    assert third == fractions.Fraction(1, 3)
