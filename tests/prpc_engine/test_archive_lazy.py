"""Lazy: the very object to a server in this process, its encoding to any other; and then it belongs to the receiver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prpc_engine.archive import Archive, Lazy, encode, encode_arguments
from prpc_engine.errors import BadArguments
from tests.prpc_engine.archives import arrive, same


class Model:
    """What could not be sent to another process."""


def test_a_lazy_is_encoded_as_its_value_wherever_it_stands() -> None:
    array = np.arange(1000)
    assert encode(Lazy([1, (2,)]))[0] == encode([1, (2,)])[0]
    assert same(arrive(*encode_arguments((Lazy(array), {"k": Lazy("x")}))), [array, {"k": "x"}])
    _, (block,) = encode(Lazy(array))
    assert np.shares_memory(block, array)


def test_a_call_that_was_not_sent_can_be_encoded_again() -> None:
    lazy = Lazy([1, 2])
    assert encode(lazy) == encode(lazy)
    assert lazy.value == [1, 2]


def test_a_server_in_this_process_gets_the_very_object_and_the_lazy_is_empty() -> None:
    model = Model()
    lazy = Lazy(model)
    (received,) = Archive().hand_over((lazy,))
    assert received is model
    assert repr(lazy) == "Lazy(handed over)"
    for use in (lambda: Archive().hand_over((lazy,)), lambda: encode(lazy), lazy.take, lambda: lazy.value):
        with pytest.raises(BadArguments, match=r"Lazy (that )?was handed over already"):
            use()


def test_all_else_reaches_a_server_in_this_process_as_if_it_came_from_another() -> None:
    array, listed, text = np.arange(3), [1, (2, {3})], "text"
    received: list[Any] = Archive().hand_over((array, listed, text, Lazy(array)))
    assert same(received[:2], [array, listed])
    assert not np.shares_memory(received[0], array)
    assert not received[0].flags.writeable
    assert received[1] is not listed
    assert received[2] is text
    assert received[3] is array


def test_arguments_that_cannot_be_sent_leave_every_lazy_as_it_was() -> None:
    lazy, taken = Lazy([1]), Lazy([2])
    taken.take()
    for other in (Model(), taken):
        with pytest.raises(BadArguments):
            Archive().hand_over((lazy, other))
        assert lazy.value == [1]


def test_what_a_lazy_holds_is_named_when_it_cannot_be_sent() -> None:
    with pytest.raises(BadArguments, match=r"argument 1\[0\] is of type .*Model, which cannot be sent"):
        encode_arguments((1, Lazy([Model()])))
