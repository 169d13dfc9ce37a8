"""Which functions a lane sends once, which with each call, and how much of them both ends keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shard import BULK, ShardGroup, in_class
from shard.group import functions as sent_functions
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
    ask(group, 0, functions.index)
    lane = group._lanes[0]
    before = len(lane._sent.numbers)
    counted = ask(group, 0, functions.count_functions)
    for number in range(20):
        batch = bytes(1 << 20)
        assert (
            ask(group, 0, lambda batch=batch, number=number: len(batch) + number)
            == len(batch) + number
        )
    assert len(lane._sent.numbers) + len(lane._sent._by_value) <= before + 2, (
        "call_pickled and count_functions"
    )
    assert ask(group, 0, functions.count_functions) <= counted + 1


def test_the_functions_that_a_lane_remembers_are_bounded_in_bytes_on_both_sides(
    group: ShardGroup,
) -> None:
    text = "x" * 40_000
    made = [eval(f"lambda: len({text!r}) + {number}") for number in range(600)]
    assert [ask(group, 0, one) for one in made] == [40_000 + number for number in range(600)]
    sent = group._lanes[0]._sent
    assert 0 < sent._bytes <= sent_functions.FUNCTIONS_BYTES_MAX
    assert ask(group, 0, functions.bytes_of_functions) <= 2 * sent_functions.FUNCTIONS_BYTES_MAX
    assert ask(group, 0, made[0]) == 40_000
    too_large = eval(f"lambda: len({text * 2!r})")
    assert ask(group, 0, too_large) == 80_000
    assert too_large not in sent._by_value


def test_what_cannot_be_called_is_refused_by_name(group: ShardGroup) -> None:
    for thing in (5, "index", [], None):
        with pytest.raises(
            TypeError, match="cannot be called: a function to run in another shard is expected"
        ):
            group.submit_to(0, thing)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cannot be called"):
            group.at_start(thing)  # type: ignore[arg-type]
