"""Which functions a lane sends once, which with each call, and how much of them both ends keep."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from shard import BULK, ShardGroup, in_class
from shard.group.functions import (
    FUNCTIONS_BYTES_MAX,
    ReceivedFunctions,
    SentFunctions,
)
from shard.group.payload import pickle_function
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S


def ask(group: ShardGroup, index: int, function: Callable[..., Any], *args: Any) -> Any:
    return group.submit_to(index, function, *args).result(PATIENCE_S)


def test_state_in_defaults_and_attributes_is_taken_along_as_it_stands_at_each_call(
    group: ShardGroup,
) -> None:
    held = {"n": 1}
    by_default = lambda held=held: held["n"]  # noqa: E731

    def by_keyword(*, held: dict[str, int] = held) -> int:
        return held["n"]

    get = held.get  # a method of a built-in object
    for number in (1, 2, 3):
        held["n"] = number
        assert [ask(group, 0, by_default), ask(group, 0, by_keyword), ask(group, 0, get, "n")] == [
            number
        ] * 3


def test_a_function_by_value_that_is_given_state_or_code_is_sent_again(group: ShardGroup) -> None:
    one = eval("lambda value=0: value")
    one.__defaults__ = None
    assert ask(group, 0, one, 5) == 5
    one.__defaults__ = (7,)
    assert ask(group, 0, one) == 7
    one.__defaults__ = None
    one.__code__ = eval("lambda value: value * 2").__code__
    assert ask(group, 0, one, 5) == 10
    assert ask(group, 0, in_class(BULK)(one), 6) == 12


def test_a_class_that_no_other_process_can_import_takes_its_state_along(group: ShardGroup) -> None:
    class Local:
        factor = 2

        def __new__(cls, value: int) -> int:  # type: ignore[misc]
            return value * cls.factor

    assert ask(group, 0, Local, 3) == 6
    Local.factor = 4
    assert ask(group, 0, Local, 3) == 12


def test_functions_with_state_are_kept_on_neither_side(group: ShardGroup) -> None:
    for number in range(20):
        kept = functions.Kept()
        function = lambda kept=kept, number=number: type(kept).__name__ + str(number)  # noqa: E731
        assert ask(group, 0, function) == f"Kept{number}"
    del kept, function
    gc.collect()
    assert len(functions.Kept.alive) == 0
    assert ask(group, 0, functions.count_kept) == 0


def test_the_functions_that_a_lane_remembers_are_bounded_in_bytes_on_both_sides(
    group: ShardGroup,
) -> None:
    text = "x" * 40_000
    made = [eval(f"lambda: len({text!r}) + {number}") for number in range(600)]
    assert [ask(group, 0, one) for one in made] == [40_000 + number for number in range(600)]
    sent, received = SentFunctions(), ReceivedFunctions()
    for number, function in enumerate(made):
        pickled = pickle_function(function)
        assert sent.make_room(pickled)
        sent.keep(function, number)
        received.keep(number, function, len(pickled))
        assert 0 < sent.nbytes <= FUNCTIONS_BYTES_MAX
    assert FUNCTIONS_BYTES_MAX < received.nbytes <= 2 * FUNCTIONS_BYTES_MAX
    assert ask(group, 0, made[0]) == 40_000
    too_large = eval(f"lambda: len({text * 2!r})")
    assert ask(group, 0, too_large) == 80_000
    assert not sent.make_room(pickle_function(too_large))


def test_what_the_sender_counts_on_is_at_the_receiver_however_often_two_threads_send_it(
    seed: int,
) -> None:
    """Two that send one function at once have it twice over there, and in one place here."""
    chance = random.Random(seed)
    sent, received = SentFunctions(functions_max=4), ReceivedFunctions(functions_max=4)
    pool = [eval(f"lambda: {number}") for number in range(6)] + [len, functions.index]
    numbers = itertools.count()
    for _ in range(500):
        function = chance.choice(pool)
        known = sent.numbers.get(function, sent.find(function))
        if known is not None:
            assert received[known] is function
            continue
        # of two threads the second may be told of a table that the first has just begun anew
        for _ in range(chance.choice([1, 2])):
            number = next(numbers)
            assert sent.make_room(b"pickled")
            received.keep(number, function, len(b"pickled"))
            sent.keep(function, number)
        assert len(sent) <= 4


def test_what_cannot_be_called_is_refused_by_name(group: ShardGroup) -> None:
    for thing in (5, "index", [], None):
        with pytest.raises(
            TypeError, match="cannot be called: a function to run in another shard is expected"
        ):
            group.submit_to(0, thing)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cannot be called"):
            group.at_start(thing)  # type: ignore[arg-type]
