"""Lazy: the very object to a receiver in this process, its encoding to any other; and then it
belongs to the receiver.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from prpc_engine.archive import Archive, Lazy, encode, encode_arguments, handovers_in
from prpc_engine.archive.wire import HANDOVER, ArchiveError
from prpc_engine.errors import BadArguments
from tests.prpc_engine.archives import arrive, same


class Model:
    """What could not be sent to another process."""


@pytest.fixture
def here() -> Archive:
    """Of a connection whose other end is in this process."""
    return Archive(in_process=True)


def test_a_lazy_is_encoded_as_its_value_wherever_it_stands() -> None:
    array = np.arange(1000)
    assert encode(Lazy([1, (2,)]))[0] == encode([1, (2,)])[0]
    assert same(arrive(*encode_arguments((Lazy(array), {"k": Lazy("x")}))), [array, {"k": "x"}])
    _, (block,) = encode(Lazy(array))
    assert np.shares_memory(block, array)


def test_a_message_that_was_not_sent_can_be_encoded_again(here: Archive) -> None:
    lazy = Lazy([1, 2])
    here.encode(lazy)
    assert encode(lazy) == encode(lazy) == encode([1, 2])
    assert lazy.value == [1, 2]


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_in_this_process_the_very_object_arrives_and_the_lazy_is_empty(
    compression: str | None,
) -> None:
    here = Archive(in_process=True, compression=compression)
    model = Model()
    lazy = Lazy(model)
    text = "so long that it is compressed" * 1000
    body, blocks = here.encode_arguments((text, {"k": [(1 << 100, lazy)]}))
    (_, received) = here.decode(body, blocks)
    assert received["k"][0][1] is model
    assert repr(lazy) == "Lazy(handed over)"
    for use in (lambda: here.encode(lazy), lambda: encode(lazy), lazy.take, lambda: lazy.value):
        with pytest.raises(BadArguments, match=r"Lazy (that )?was handed over already"):
            use()


def test_all_else_in_the_message_is_encoded(here: Archive) -> None:
    array, listed = np.arange(3), [1, (2, {3})]
    received = arrive_here(here, array, listed, Lazy(array))
    assert same(received[:2], [array, listed])
    assert not np.shares_memory(received[0], array)
    assert received[1] is not listed
    assert received[2] is array


def arrive_here(here: Archive, *values: Any) -> Any:
    """As the transport in this process hands a message over."""
    body, blocks = here.encode_arguments(values)
    handed = handovers_in(blocks)
    own = [
        block if any(block is one for one in handed) else np.frombuffer(block.tobytes(), np.uint8)
        for block in blocks
    ]
    return here.decode(body, own)


def test_arguments_that_cannot_be_sent_leave_every_lazy_as_it_was(here: Archive) -> None:
    lazy, taken = Lazy([1]), Lazy([2])
    taken.take()
    for other in (Model(), taken):
        with pytest.raises(BadArguments):
            here.encode_arguments((lazy, other))
        assert lazy.value == [1]


def test_a_message_that_cannot_be_read_leaves_every_lazy_as_it_was(here: Archive) -> None:
    lazy, other = Lazy(Model()), Lazy(Model())
    before = lazy.value
    body, blocks = here.encode([lazy, other, np.arange(3)])
    with pytest.raises(ArchiveError, match="buffer is too small"):
        here.decode(body, [*blocks[:2], np.empty(0, np.uint8)])
    assert lazy.value is before
    assert here.decode(body, blocks)[0] is before


def test_a_lazy_that_stands_twice_in_a_message_is_refused_and_keeps_its_value(
    here: Archive,
) -> None:
    lazy = Lazy(Model())
    with pytest.raises(ArchiveError, match="handed over already"):
        here.decode(*here.encode([lazy, lazy]))
    assert not lazy.is_handed_over


def test_of_two_messages_with_one_lazy_the_first_to_arrive_has_it(here: Archive) -> None:
    model = Model()
    lazy = Lazy(model)
    first, second = here.encode(lazy), here.encode(lazy)
    assert here.decode(*second) is model
    with pytest.raises(ArchiveError, match="handed over already"):
        here.decode(*first)
    assert lazy.is_handed_over


def test_what_was_taken_can_be_given_back_once(here: Archive) -> None:
    model = Model()
    lazy = Lazy(model)
    body, blocks = here.encode(lazy)
    (handover,) = handovers_in(blocks)
    handover.give_back()
    assert here.decode(body, blocks) is model
    handover.give_back()
    assert lazy.take() is model
    handover.give_back()
    assert lazy.is_handed_over


def test_a_message_that_is_dropped_leaves_nothing_behind(here: Archive) -> None:
    model = Model()
    gone = weakref.ref(model)
    message = here.encode(Lazy(model))
    del model
    gc.collect()
    assert gone() is not None
    del message
    gc.collect()
    assert gone() is None


def test_no_other_process_can_name_an_object_of_ours(here: Archive) -> None:
    lazy = Lazy(Model())
    _, blocks = here.encode(lazy)
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(HANDOVER, b"\0"))
    for archive in (here, Archive(), Archive(allow_pickle=True)):
        with pytest.raises(ArchiveError, match="named by another process"):
            arrive(body, blocks, archive)
        with pytest.raises(ArchiveError, match="block 0 of 0"):
            archive.decode_plain(body)
    assert not lazy.is_handed_over


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_message_encoded_for_here_can_still_go_to_another_process(
    compression: str | None,
) -> None:
    here, there = (
        Archive(in_process=True, compression=compression),
        Archive(compression=compression),
    )
    lazy = Lazy([np.asfortranarray(np.ones((100, 100))), (1, {2})])
    values = ("text" * 5000, [1 << 100, lazy])
    message = here.encode_arguments(values)
    for _ in range(2):
        body, blocks = there.for_peer(*message)
        assert not handovers_in(blocks)
        assert same(arrive(body, blocks, there), [values[0], [1 << 100, lazy.value]])
    assert here.for_peer(*message) == message
    assert here.decode(*message)[1][1][0].flags.f_contiguous
    with pytest.raises(BadArguments, match="handed over already"):
        there.for_peer(*message)


def test_what_another_process_cannot_get_is_named_when_the_message_goes_there(
    here: Archive,
) -> None:
    lazy = Lazy(Model())
    message = here.encode_arguments((1, [lazy]))
    with pytest.raises(
        BadArguments, match=r"argument 1\[0\] is of type .*Model, which cannot be sent"
    ):
        Archive().for_peer(*message)
    assert here.decode(*message)[1][0].__class__ is Model


def test_what_a_lazy_holds_is_named_when_it_cannot_be_sent() -> None:
    with pytest.raises(
        BadArguments, match=r"argument 1\[0\] is of type .*Model, which cannot be sent"
    ):
        encode_arguments((1, Lazy([Model()])))
